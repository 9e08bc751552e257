"""One `observe` in a child process that may hang or die."""
