"""What this host is made of: control groups, clocks, GPUs."""
