"""Which host, link or rank is behind a group that hangs: tests in parallel rounds."""
