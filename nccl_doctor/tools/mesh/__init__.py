"""Device meshes: their groups, the hosts they span, and which of them hangs."""
