"""Gathers all facts on rank 0: the store, joining, rounds, the run of one participant."""
