"""Place of this process in the job, what started it, and the start of the ranks of a host."""
