"""`nccl-doctor env`: the facts of this host alone, with no process group and no store."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from nccl_doctor.examine import examine_alone
from nccl_doctor.launch import detect
from nccl_doctor.ledger import Ledger
from nccl_doctor.options import Options
from nccl_doctor.record import Report
from nccl_doctor.run import prepare

JOIN_S = 3.0
"""No job has to come up here: knocking at a master that does not answer is given up soon."""


def examine_here(options: Options) -> Report:
    """Observe whatever needs no peer, and judge it as one host's own view."""
    options = replace(options, join_timeout_s=min(options.join_timeout_s, JOIN_S))
    environ = dict(os.environ)
    run = prepare(options, detect(environ), environ, time.monotonic())
    ledger = Ledger(run.launch, {check.name: check.scope for check in run.registry.checks})
    ledger.sign_in(0, examine_alone(run), 0.0)
    return run.judge(ledger, complete=False, alone=True)
