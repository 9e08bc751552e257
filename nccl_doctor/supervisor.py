"""One participant of a run: examine oneself and the road, sign in, take part, leave together.

The participant that is rank 0 also becomes the coordinator once it has signed in. Nothing here
blocks without a deadline, initialises CUDA, or joins a collective: that is for probe children.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nccl_doctor import doorkeeper, identity, kinds, probe
from nccl_doctor.api import Check, Context
from nccl_doctor.guardian import LAST_WORDS_S, Guardian
from nccl_doctor.launch import Launch
from nccl_doctor.ledger import Ledger
from nccl_doctor.mailbox import Mailbox, MailboxLost, MailboxTimeout, RoundPeers
from nccl_doctor.model import (
    ALONE,
    Finding,
    Kind,
    Layer,
    Outcome,
    Round,
    Scope,
    Severity,
    Where,
)
from nccl_doctor.options import Options
from nccl_doctor.progress import Progress
from nccl_doctor.redact import allowed
from nccl_doctor.registry import Registry
from nccl_doctor.report.model import Report
from nccl_doctor.verdict import conclude, judge_all

PROTOCOL = "nccl-doctor/1"
SETTLE_S = 5.0
"""Time for a participant beyond a deadline to examine a stuck child, kill it and post the word."""
SHORT_ROAD_S = 3.0
"""A road that the checks found broken gets one more try of this length, not the whole time."""
RESERVE_S = 2.0
"""Kept of the run's time for judging and writing the report."""

_ROAD = (Layer.LAUNCH, Layer.NAME, Layer.ROUTE, Layer.PORT, Layer.STORE)


@dataclass
class Run:
    """What every part of one participant's run needs to know; times are `time.monotonic()`."""

    options: Options
    launch: Launch
    environ: Mapping[str, str]
    registry: Registry
    backend: str
    started: float
    deadline: float
    command: str
    started_at: str
    progress: Progress
    door: doorkeeper.Door = field(default_factory=lambda: doorkeeper.Door("other"))
    nonce: str = ""
    seat: int = 0

    def left(self) -> float:
        """Seconds until the report has to be written."""
        return max(0.0, self.deadline - RESERVE_S - time.monotonic())

    def context(self) -> Context:
        """What an `observe` of this participant is given, before it is told of any round."""
        return Context(
            launch=self.launch,
            env=self.environ,
            backend=self.backend,
            level=self.options.level,
            join_timeout_s=self.options.join_timeout_s,
            collective_timeout_s=self.options.collective_timeout_s,
            door=self.door.facts,
        )

    def describe(self) -> dict[str, Any]:
        """What the cluster itself does not know of the run."""
        return {
            "id": self.nonce or secrets.token_hex(8),
            "started": self.started_at,
            "duration_s": round(time.monotonic() - self.started, 3),
            "launcher": self.launch.launcher,
            "command": self.command,
            "options": self.options.to_json(),
        }

    def judge(self, ledger: Ledger, *, complete: bool, extra: Sequence[Finding] = ()) -> Report:
        """A report from what a ledger holds."""
        cluster = ledger.cluster(self.options, self.backend, complete=complete)
        above = {
            check.name: f"needs --level {check.level.value}"
            for check in self.registry.checks
            if check.level.order > self.options.level.order
        }
        return conclude(
            cluster,
            self.registry.checks,
            run=self.describe(),
            problems=[*self.registry.problems, *extra],
            skipped=above,
            wanted=self.registry.wanted,
            strict=self.options.strict,
        )


@dataclass(frozen=True)
class Departure:
    """How a participant leaves: with whose report (None: the coordinator has it), and what code.

    `finish` tells the others, and must be called once the report is written.
    """

    code: int
    report: Report | None = None
    is_own_view: bool = False
    finish: Callable[[int], None] = field(default=lambda code: None)


class Supervisor:
    """The run of one participant; `depart` is the only method to call, once."""

    def __init__(self, run: Run, write: Callable[[Departure], int]) -> None:
        """`write` prints and saves a departure's report and returns its exit code."""
        self._run = run
        self._write = write
        self._scopes = {check.name: check.scope for check in run.registry.checks}
        self._ledger = Ledger(run.launch, self._scopes)
        self._letter: dict[str, Any] = {}
        self._guardian = Guardian(run.deadline, self._last_words)

    def run(self) -> int:
        """Take part in the run, to its end; never later than the run's deadline.

        Returns: the exit code, the same for every participant that the coordinator could reach.
        """
        departure = self._depart()
        if not self._guardian.stand_down():
            time.sleep(LAST_WORDS_S)  # the guardian is writing, and ends the process
        code = self._write(departure)
        with contextlib.suppress(MailboxLost):  # the report is written; nobody is left to be told
            departure.finish(code)
        self._run.door.close()
        probe.kill_living()
        return code

    def _depart(self) -> Departure:
        run = self._run
        if self._serves():
            run.door = doorkeeper.serve(run.launch.master_port or 0)
        elif run.launch.agent_store:
            run.door = doorkeeper.Door("agent")
        try:
            return self._take_part()
        except MailboxLost as error:
            return self._own_view(kinds.STORE_LOST, f"the store broke off: {error}")

    def _take_part(self) -> Departure:
        run = self._run
        self._examine_alone()
        if not run.launch.is_complete():
            return self._own_view(None, "")
        try:
            box = self._connect()
        except MailboxLost as error:
            address = f"{run.launch.master_addr}:{run.launch.master_port}"
            return self._own_view(
                kinds.COORDINATOR_LOST, f"could not sign in at {address}: {error}"
            )
        run.seat = box.add("seats", 1) - 1
        box.put(f"seat/{run.seat}", self._letter)
        if run.launch.rank == 0 and box.add("coordinators", 1) == 1:
            from nccl_doctor.coordinator import Coordinator

            self._ledger = Ledger(run.launch, self._scopes)
            return Coordinator(run, box, self._ledger).conduct()
        return self._follow(box)

    def _serves(self) -> bool:
        launch = self._run.launch
        return launch.rank == 0 and launch.master_port is not None and not launch.agent_store

    # -- alone ---------------------------------------------------------------------------------

    def _examine_alone(self) -> None:
        """Observe all that needs no peer, at once, and write the letter of sign-in."""
        run = self._run
        speaks_for_host = run.launch.local_rank in (0, None)
        checks = [
            check
            for check in run.registry.checks
            if not check.together
            and check.level.order <= run.options.level.order
            and (speaks_for_host or check.scope is Scope.RANK)
        ]
        jobs = []
        for check in checks:
            context = run.context()
            deadline = time.monotonic() + min(check.deadline(context), run.left())
            jobs.append(observing(check, context, deadline))
        run.progress.say(f"examining this host: {', '.join(check.name for check in checks)}")
        outcomes = probe.run(jobs, run.progress.tick)
        self._letter = {
            "token": secrets.token_hex(8),
            "pid": os.getpid(),
            "launch": run.launch.to_json(),
            "env": allowed(run.environ),
            "device": "cuda" if identity.num_gpus(run.environ) else "cpu",
            "host": {
                "name": identity.host_name(),
                "key": identity.host_key(),
                "addresses": list(identity.host_addresses()),
            },
            "facts": {
                check.name: {ALONE: outcome.to_json()}
                for check, outcome in zip(checks, outcomes, strict=True)
            },
        }
        self._ledger.sign_in(run.seat, self._letter, 0.0)

    def _connect(self) -> Mailbox:
        run = self._run
        patience = run.options.join_timeout_s - (time.monotonic() - run.started)
        cluster = self._ledger.cluster(run.options, run.backend, complete=False)
        own, _ = judge_all(cluster, run.registry.checks)
        if any(f.level is Severity.FAIL and f.kind.layer in _ROAD for f in own):
            patience = min(patience, SHORT_ROAD_S)
        patience = min(max(patience, SHORT_ROAD_S), run.left())
        doorkeeper.bound_resolver()
        run.progress.say(f"signing in at {run.launch.master_addr}:{run.launch.master_port}")
        # Rank 0 reaches the store that it serves even where MASTER_ADDR is another machine: the
        # others cannot, and it is the one to say so.
        mine = run.door.server == "self" and not run.door.error
        host = "127.0.0.1" if mine else str(run.launch.master_addr)
        attempt = f"{run.launch.run_id or 'run'}/{run.launch.restart_count}"
        return Mailbox(
            host, run.launch.master_port or 0, timeout_s=patience, prefix=f"{PROTOCOL}/{attempt}/"
        )

    # -- following the coordinator --------------------------------------------------------------

    def _follow(self, box: Mailbox) -> Departure:
        run = self._run
        run.progress.say("signed in; waiting for the coordinator")
        patience = min(run.options.join_timeout_s + 3 * SETTLE_S, run.left())
        try:
            roster = box.get("roster", patience, run.progress.tick)
        except MailboxTimeout:
            return self._own_view(
                kinds.COORDINATOR_LOST,
                f"signed in, but rank 0 opened no roll call within {patience:.0f} s",
                Where(ranks=(0,)),
            )
        if roster["tokens"].get(str(run.seat)) != self._letter["token"]:
            return self._own_view(
                kinds.COORDINATOR_LOST,
                "the store at MASTER_ADDR:MASTER_PORT belongs to another run, or to this run "
                "after its roll call was closed",
            )
        run.nonce, run.backend = roster["nonce"], roster["backend"]
        number = 0
        patience = roster["next_s"]
        while True:
            try:
                order = box.get(f"order/{number}", min(patience, run.left()), run.progress.tick)
            except MailboxTimeout:
                return self._own_view(
                    kinds.COORDINATOR_LOST,
                    f"rank 0 fell silent for {patience:.0f} s",
                    Where(ranks=(0,)),
                )
            if "finish" in order:
                box.put(f"bye/{run.seat}", True)
                return Departure(int(order["finish"]))
            check = self._check(order["check"])
            round_ = round_from(order)
            if check is not None and any(run.seat in group for group in round_.groups):
                outcome = hold(run, box, check, round_)
                self._ledger.record(0, check.name, round_.name, outcome)
                box.put(f"evidence/{number}/{run.seat}", outcome.to_json())
            patience = order["next_s"]
            number += 1

    def _check(self, name: str) -> Check | None:
        return next((check for check in self._run.registry.checks if check.name == name), None)

    # -- leaving alone --------------------------------------------------------------------------

    def _own_view(self, kind: Kind | None, message: str, where: Where | None = None) -> Departure:
        """Judge one's own facts: the coordinator was not reached, or was lost."""
        here = Where(hosts=(socket.gethostname(),)) if where is None else where
        extra = [Finding(kind, message, here)] if kind else []
        report = self._run.judge(self._ledger, complete=False, extra=extra)
        code = report.exit_code if self._run.launch.is_complete() else 2
        return Departure(code, report, is_own_view=True)

    def _last_words(self, reason: str) -> int:
        """What is known so far, as a report: the guardian ends this process."""
        coordinates = bool(self._run.nonce) and self._run.launch.rank == 0
        stopped = Finding(kinds.RUN_INTERRUPTED, f"{reason} while {self._run.progress.doing}")
        report = self._run.judge(self._ledger, complete=coordinates, extra=[stopped])
        departure = Departure(max(report.exit_code, 1), report, is_own_view=not coordinates)
        return self._write(departure)


def observing(check: Check, context: Context, deadline: float) -> probe.Job:
    """The job of one `observe`."""

    def work(breadcrumb: Any) -> Mapping[str, Any]:
        return check.observe(replace(context, breadcrumb=breadcrumb, deadline=deadline))

    return probe.Job(check.name, work, deadline)


def round_from(order: Mapping[str, Any]) -> Round:
    """The round that an order is about."""
    groups = tuple(tuple(group) for group in order["groups"])
    return Round(order["round"], groups, order["deadline_s"], order["params"])


def hold(run: Run, box: Mailbox, check: Check, round_: Round) -> Outcome:
    """Take part in one round, in a child, and return how it ended."""
    group = next(group for group in round_.groups if run.seat in group)
    name = f"{PROTOCOL}/{run.nonce}/{check.name}/{round_.name}/{min(group)}/"
    context = replace(
        run.context(),
        round=round_.name,
        group=group,
        seat=run.seat,
        params=round_.params,
        peers=RoundPeers(box.host, box.port, name, group, run.seat),
    )
    run.progress.say(f"{check.name}: {round_.name} ({len(group)} together)")
    deadline = time.monotonic() + min(round_.deadline_s, run.left())
    return probe.run([observing(check, context, deadline)], run.progress.tick)[0]
