"""Changes between runs: one run compared with another, or with earlier runs.

History is reports and nothing else. Checks say what is worth comparing (`Check.figures`), so this
room knows no check: `sheet` collects the figures of one run, `usual` says what earlier runs let one
expect, `past` which reports count, `compare` makes findings of it, `difference` lists what two
reports do not share.
"""

from nccl_doctor.judge.history.compare import Comparison, compare, judge_beside
from nccl_doctor.judge.history.difference import Difference, difference
from nccl_doctor.judge.history.past import Past

__all__ = [
    "Comparison",
    "Difference",
    "Past",
    "compare",
    "difference",
    "judge_beside",
]
