"""Process groups: form them, use them, and blame the members that stop them."""
