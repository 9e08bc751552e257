"""Who this process is in the job, what started it, and how the ranks of a host are started."""
