"""Findings about a job that died or hangs, from what it left: consoles, dumps and stacks."""
