"""Releases of torch beside the one that the tests pin: `make test-torch` runs them all."""
