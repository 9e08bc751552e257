"""Interfaces of this host, its names and ports, and one TCP connection attempt."""
