"""`nccl-doctor env`: the facts of this host alone, with no process group and no store."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from nccl_doctor import probe
from nccl_doctor.examine import Run, examine_alone
from nccl_doctor.ifchoice import survey
from nccl_doctor.launch import detect
from nccl_doctor.ledger import Ledger
from nccl_doctor.model import ALONE, Outcome, Scope
from nccl_doctor.options import Options
from nccl_doctor.record import Report
from nccl_doctor.run import prepare

JOIN_S = 3.0
"""No job has to come up here: knocking at a master that does not answer is given up soon."""

SURVEY = "interface-choice"
"""Name of facts that no check asks for, so that no check's name looks like it."""
_SURVEY_S = 2.0


def examine_here(options: Options) -> Report:
    """Observe whatever needs no peer, and judge it as one host's own view."""
    options = replace(options, join_timeout_s=min(options.join_timeout_s, JOIN_S))
    environ = dict(os.environ)
    run = prepare(options, detect(environ), environ, time.monotonic())
    scopes = {check.name: check.scope for check in run.registry.checks}
    ledger = Ledger(run.launch, {**scopes, SURVEY: Scope.HOST})
    ledger.sign_in(0, examine_alone(run), 0.0)
    ledger.record(0, SURVEY, ALONE, _survey(run))
    return run.judge(ledger, complete=False, alone=True)


def _survey(run: Run) -> Outcome:
    """What NCCL and gloo would choose here. Checks ask for it only where there are peers to call,
    and whoever looks at one host wants to know it too.
    """
    deadline = time.monotonic() + min(_SURVEY_S, run.left())
    return probe.run([probe.Job(SURVEY, lambda breadcrumb: survey(run.environ), deadline)])[0]
