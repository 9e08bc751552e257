"""Packet filter rules: read them, and say what they stop."""
