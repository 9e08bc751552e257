"""Runs rank 0 of a crowd: the program itself, but for what its checks observe."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nccl_doctor.gather.progress import Progress
from nccl_doctor.gather.rank import Participant
from nccl_doctor.gather.run import prepare
from nccl_doctor.model.check import Check, Context, Skip, Untested
from nccl_doctor.model.cluster import AFTER_LOSS, ALONE, Facts, OutcomeStatus
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import Round
from nccl_doctor.model.options import Options
from nccl_doctor.model.report import ParticipantResult, Report
from nccl_doctor.registry import installed, load
from nccl_doctor.report.output import leave
from nccl_doctor.toolkit.frames import with_room_for_frames
from nccl_doctor.toolkit.garbage import collected_rarely
from nccl_doctor.toolkit.load_torch import import_torch
from tests.lab.crowd import PORT, Plan
from tests.lab.crowd.answers import Answers, Seats
from tests.lab.crowd.record import Record
from tests.lab.crowd.tally import bytes_of, children, cpu_of, peak_of

_NO_ANSWER = re.compile(r"no answer within (\d+) s")


def options_of(plan: Plan) -> Options:
    """Options of all participants."""
    join_s = plan.join_s if plan.silent else 300.0
    # The ranks that are played share a few processors: none is to miss the end of a round.
    return Options(
        backend="gloo", timeout_s=1200.0, join_timeout_s=join_s, collective_timeout_s=100.0
    )


class Notes(Progress):
    """Progress that notes when each step began, and the time of the processor until then."""

    def __init__(self, deadline: float) -> None:
        super().__init__(shown=False, deadline=deadline)
        self.steps: list[tuple[float, float, str]] = []

    def say(self, doing: str, *args: Any, **named: Any) -> None:
        """Say what runs now, and note when it began."""
        if not self.steps or self.steps[-1][2] != doing:
            self.steps.append((time.monotonic(), time.process_time(), doing))
        super().say(doing, *args, **named)


def recorded(check: Check, facts: Facts, answers: Answers) -> Check:
    """The same check, which observes what was recorded."""

    def observe(self: Check, ctx: Context) -> Mapping[str, Any]:
        outcome = facts.get(check.name, {}).get(ALONE)
        if ctx.round not in (ALONE, AFTER_LOSS):
            round_ = Round(ctx.round, (ctx.group,), ctx.left(), ctx.params)
            outcome = answers.of(check.name, round_, ctx.seat, 0, facts)
        if outcome is None or outcome.status is OutcomeStatus.SKIPPED:
            raise Skip(outcome.reason if outcome else "not recorded")
        if outcome.status is OutcomeStatus.HUNG:
            ctx.breadcrumb(outcome.last_step)
            time.sleep(ctx.left() + 60)  # past its deadline
        if outcome.status is not OutcomeStatus.OK:
            raise Untested(outcome.reason, outcome.facts)
        return outcome.facts

    kind = type(check)
    own = {"observe": observe, "__module__": kind.__module__, "__doc__": kind.__doc__}
    made = type(kind.__name__, (kind,), own)
    return made()  # type: ignore[no-any-return]


class Printed(io.TextIOWrapper):
    """Standard output, which notes when the verdict is there: the rest is writing."""

    def __init__(self, path: str, notes: Notes) -> None:
        super().__init__(io.BufferedWriter(io.FileIO(path, "w")), encoding="utf-8")
        self._notes = notes

    def flush(self) -> None:
        """Write what is there."""
        super().flush()
        self._notes.say("writing the report")


def waited_s(report: Report, plan: Plan) -> float:
    """Seconds in which rank 0 waited for who did not come or answer: its time limits, no work."""
    waits = set()
    for rank in report.cluster.ranks:
        for check, rounds in rank.facts.items():
            for name, outcome in rounds.items():
                if found := _NO_ANSWER.match(outcome.reason):
                    waits.add((check, name, float(found[1])))
    return sum(each[2] for each in waits) + (plan.join_s if plan.silent else 0.0)


def main() -> None:
    """Run rank 0, and write what it said and used."""
    path, recording, out = sys.argv[1:]
    plan = Plan.read(path)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as in the program
    import_torch()
    record = Record(plan, Path(recording))
    facts = record.facts(0)
    answers = Answers(plan, record, Seats(plan))
    checks = load()
    registry = replace(
        checks, checks=tuple(recorded(each, facts, answers) for each in checks.checks)
    )
    os.environ.update(env := record.env(0))
    Path(f"{out}.ready").touch()
    plan.wait_for_the_gun()
    began = time.monotonic()
    run = prepare(options_of(plan), record.launch(0), env, began, registry, logs=False)
    notes = Notes(run.deadline)
    run = replace(run, config=replace(run.config, progress=notes))
    result: dict[str, Any] = {}

    def write(said: ParticipantResult) -> int:
        report = said.report
        assert report is not None
        with Printed(f"{out}.txt", notes) as stream, contextlib.redirect_stdout(stream):
            options = replace(run.options, outputs={"json": f"{out}.report.gz"})
            leave(said, record.launch(0), options, installed)
        notes.say("leaving")
        result["verdict"] = report.verdict
        result["summary"] = report.summary
        result["roots"] = [
            {"code": each.code, "severity": each.level.value, "where": encode(each.where)}
            for each in report.root_causes
        ]
        result["labels"] = [host.label for host in report.cluster.hosts]
        result["silent"] = [
            rank.rank
            for rank in report.cluster.present
            if any(
                outcome.status is OutcomeStatus.SILENT
                for rounds in rank.facts.values()
                for outcome in rounds.values()
            )
        ]
        result["waited_s"] = waited_s(report, plan)
        result["peak"] = peak_of()
        result["cpu_s"] = cpu_of()
        if store := children().get("ncd:store_serve"):
            result["store_peak"], result["store_cpu_s"] = peak_of(store), cpu_of(store)
        return said.code

    participant = Participant(run, write)
    with collected_rarely():  # as in the program
        with_room_for_frames(participant.run)
    result["left_s"], result["left_cpu_s"] = time.monotonic() - began, time.process_time()
    result["sent"], result["received"] = bytes_of(PORT)
    result["steps"] = [(round(at - began, 3), round(cpu, 3), what) for at, cpu, what in notes.steps]
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
