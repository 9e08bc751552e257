"""Processes, deadlines, files, limits, secrets and terminals: what the program itself stands on."""
