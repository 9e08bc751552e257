"""Time-outs of the start of a job: who waits for what, and how long."""
