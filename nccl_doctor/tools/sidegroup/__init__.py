"""A side group with a process of another world, as RLHF trainers form it to send weights."""
