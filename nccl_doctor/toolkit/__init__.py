"""Functions that two or more checks share, by subject."""
