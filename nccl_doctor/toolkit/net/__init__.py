"""Interfaces, addresses, names and ports of this host."""
