"""Whether the default group is bound to a device, by whom, and what that does to further groups."""
