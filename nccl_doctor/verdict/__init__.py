"""From everybody's facts to one verdict: judge, fold, explain, and never say more than was seen.

Pure: no I/O, no clock, no environment. It runs again on a saved report and gives the same answer.

`judging` asks the checks; `causes` folds what they found and finds out what explains what, by
`place`; `account` counts who was due to observe, and `status` says what became of each check;
`sentence` says it in one line; `conclusion` puts the report together.
"""

from nccl_doctor.verdict.conclusion import conclude, judge_again
from nccl_doctor.verdict.judging import judge_all

__all__ = ["conclude", "judge_again", "judge_all"]
