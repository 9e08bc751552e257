"""`nccl-doctor env`: the facts of this host alone, with no process group and no store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from nccl_doctor.gather.board import Phase
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.examine import examine_alone
from nccl_doctor.gather.make_report import make_report
from nccl_doctor.gather.run import prepare
from nccl_doctor.gather.sign_in import introduce
from nccl_doctor.gather.watchdog import LAST_WORDS_S, Watchdog
from nccl_doctor.judge.checks import in_words
from nccl_doctor.launch.detect import detect
from nccl_doctor.model.findings import Finding, Where
from nccl_doctor.model.kinds import RUN_INTERRUPTED
from nccl_doctor.model.options import Options
from nccl_doctor.model.report import Report
from nccl_doctor.toolkit import guardian
from nccl_doctor.toolkit.load_torch import import_torch

JOIN_S = 3.0
"""Join time-out: no job starts here, so a master that does not answer is given up soon."""
TIMEOUT_S = 60.0
"""Time limit: a few seconds are normal; with a stuck driver or file system each probe may need its
whole deadline.
"""


def examine_here(options: Options, give_up: Callable[[str], int]) -> Report:
    """Observe everything that needs no other host, and judge it as the report of one host.

    Ends the process if it is interrupted or takes longer than `TIMEOUT_S`: `give_up` says why there
    is no report, and returns the exit code.
    """
    options = replace(options, timeout_s=TIMEOUT_S, join_timeout_s=JOIN_S)
    environ = dict(os.environ)
    started = guardian.began()
    guardian.set_deadline(started + TIMEOUT_S)
    run = prepare(options, detect(environ), environ, started)
    watchdog = Watchdog(
        run.config.deadline, lambda why: give_up(f"{why} while {run.progress.doing}")
    )
    run.progress.say("importing torch", Phase.START)
    import_torch()
    scopes = {check.name: check.scope for check in run.registry.checks}
    evidence = EvidenceLog(run.launch, scopes, environ)
    who = introduce(run.launch, environ, options.backend)
    evidence.sign_in(0, who, 0.0)
    broke = []
    try:
        evidence.sign_in(0, replace(who, facts=examine_alone(run)), 0.0)
    except Exception as error:  # a mistake, of ours or of a plug-in, must not cost the report
        words = f"nccl-doctor itself failed: {in_words(error)}"
        broke.append(Finding(RUN_INTERRUPTED, words, Where(hosts=(who.host_name,))))
    run.progress.say("judging", Phase.VERDICT)
    report = make_report(run, evidence, complete=False, alone=True, extra=broke)
    if not watchdog.stand_down():
        time.sleep(LAST_WORDS_S)  # the watchdog is speaking, and ends the process
    run.progress.close()
    return report
