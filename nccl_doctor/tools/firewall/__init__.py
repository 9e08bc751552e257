"""Packet filters: the rules of this host, what they do to a packet, and whom that explains."""
