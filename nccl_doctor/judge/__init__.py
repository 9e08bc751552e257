"""Judges all facts: findings, their causes, one verdict. Pure.

No I/O, no clock, no environment: it runs again on a saved report and gives the same answer.

`checks` asks the checks; `causes` folds what they found and finds out what explains what, by
`place`; `account` counts who was due to observe, and `status` says what became of each check;
`sentence` says it in one line; `conclusion` puts the report together. `merge_clusters` and
`merge_reports` make one cluster and one report of several; `history` compares with earlier runs.
"""
