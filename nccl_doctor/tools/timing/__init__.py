"""Short timed exchanges between hosts: who measures when, one connection, and what is slow."""
