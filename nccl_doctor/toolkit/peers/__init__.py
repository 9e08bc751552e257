"""Calls between hosts, every ordered pair."""
