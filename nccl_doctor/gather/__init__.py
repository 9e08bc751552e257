"""Gathers everybody's facts on rank 0: the store, who joins, rounds, the run of one participant."""
