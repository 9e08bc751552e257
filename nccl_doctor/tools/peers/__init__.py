"""Calls between every ordered pair of hosts: made, answered and sorted by fault."""
