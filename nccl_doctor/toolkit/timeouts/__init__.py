"""Time-outs of the start of a job, and what they are compared with."""
