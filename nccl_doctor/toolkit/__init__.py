"""What two or more checks share, by subject."""
