"""The topology of a job, read from the line that starts it: `torchrun …`, `accelerate launch …`,
`deepspeed …`.

A launcher reads its own flags up to the training script; so does this package, with the same rules
(abbreviations, both spellings, variables that stand for flags, configuration files). It imports no
launcher and starts nothing.
"""
