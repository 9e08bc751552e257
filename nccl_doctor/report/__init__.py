"""Renderers: pure functions from a report to text, one small file per format."""
