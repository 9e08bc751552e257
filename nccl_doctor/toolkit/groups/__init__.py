"""Process groups: form them, use them, and say who kept them from working."""
