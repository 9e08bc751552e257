"""Records that everybody speaks: who was launched, what was observed, what was found. Pure data."""
