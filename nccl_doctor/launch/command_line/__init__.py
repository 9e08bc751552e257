"""The topology of a job, read from the line that starts it: `torchrun …`, `accelerate launch …`,
`deepspeed …`.

A launcher reads its own flags up to the training script; so does this package, with the same rules
(abbreviations, both spellings, variables that stand for flags, configuration files). It imports no
launcher and starts nothing.
"""

from nccl_doctor.launch.command_line.job_line import JobLine, JobLineError
from nccl_doctor.launch.command_line.program import which
from nccl_doctor.launch.command_line.reader import read
from nccl_doctor.launch.command_line.torchrun import read_variables

__all__ = ["JobLine", "JobLineError", "read", "read_variables", "which"]
