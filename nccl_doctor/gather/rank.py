"""Run of one participant: examine this host and its network path, sign in, take part, exit
together.

The participant that is rank 0 also becomes the coordinator once it has signed in. Nothing here
blocks without a deadline, initialises CUDA, or joins a collective: that is for probe children.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from nccl_doctor.gather import ends
from nccl_doctor.gather.agent.client import AgentClient
from nccl_doctor.gather.agent.connection import AgentLost
from nccl_doctor.gather.connect import connect, open_store
from nccl_doctor.gather.context import Run
from nccl_doctor.gather.coordinator import GOODBYE_S, Coordinator
from nccl_doctor.gather.ends import death_of, seal_of
from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.examine import SETTLE_S, examine_alone
from nccl_doctor.gather.first_look import look_first
from nccl_doctor.gather.follow import CannotFollow, Follower, OpenedAgain, misread
from nccl_doctor.gather.messages import Finish, SignIn, introduce
from nccl_doctor.gather.opening import (
    RivalCheck,
    alone_as,
    another_coordinates,
    claim,
    open_run,
    opened,
    opened_again,
    prefix_of,
)
from nccl_doctor.gather.progress import Phase
from nccl_doctor.gather.report import make_report, stopped
from nccl_doctor.gather.rounds import look_after_loss
from nccl_doctor.gather.seats import claims, take_seat
from nccl_doctor.gather.store import ControlStore, StoreLost, StoreTimeout
from nccl_doctor.gather.told import findings_of
from nccl_doctor.gather.views import HostReports
from nccl_doctor.judge.checks import error_words, judge_all
from nccl_doctor.model import kinds
from nccl_doctor.model.cluster import AFTER_LOSS, Cluster
from nccl_doctor.model.findings import Effect, Finding, Kind, Layer, Severity, Where
from nccl_doctor.model.launch import OWN
from nccl_doctor.model.report import ParticipantResult
from nccl_doctor.system import forks, helpers, supervisor
from nccl_doctor.system.shortage import Shortage, shortage_of
from nccl_doctor.system.terminal import complain
from nccl_doctor.system.watchdog import LAST_WORDS_S, Watchdog
from nccl_doctor.toolkit.gpu.awake import keep_awake
from nccl_doctor.toolkit.host import host_name
from nccl_doctor.toolkit.hosts import road_to_master
from nccl_doctor.toolkit.load_torch import import_torch, torch_error

MOST_MISSING = 5000
"""Ranks that did not sign in and that the watchdog's report may list: it has no time for more."""
LAST_REPORT_S = 0.8
"""Part of the run's time for the watchdog to write the last report."""

_ROAD = (Layer.LAUNCH, Layer.NAME, Layer.ROUTE, Layer.PORT, Layer.STORE)


class Participant:
    """The run of one participant; `run` is the only method to call, once."""

    def __init__(self, run: Run, write: Callable[[ParticipantResult], int]) -> None:
        """`write` prints and saves a result and returns its exit code."""
        self._run = run
        self._write = write
        self._scopes = {check.name: check.scope for check in run.registry.checks}
        self._evidence = EvidenceLog(run.launch, self._scopes, run.environ)
        self._token = ""
        self._is_second = False
        self._box: ControlStore | None = None
        self._coordinator: Coordinator | None = None
        self._agent = AgentClient(run)
        self._views = HostReports(
            run.options.output_dir if self._speaks_in_folder() else None,
            run.options.join_timeout_s,
            run.config.redaction,
            age_s=time.monotonic() - run.config.started,
        )
        self._lost: list[Finding] = []
        """The finding that the coordinator was not reached, or lost, once that is known."""
        self._watchdog = Watchdog(
            run.config.deadline - LAST_REPORT_S,
            self._last_words,
            first=self._close_evidence,
            more=run.config.more,
            tick=run.pauses.tick,
        )
        helpers.reserve()

    def run(self) -> int:
        """Take part in the run, to its end; never later than the run's deadline.

        Returns: the exit code, the same for every participant that the coordinator could reach.
        """
        run = self._run
        uses_gpus = run.backend == "nccl" and run.launch.local_rank in (0, None)
        awake = keep_awake() if uses_gpus else None
        result, code = self._examined()
        with contextlib.suppress(StoreLost):  # the report is written; nobody is left to be told
            result.finish(code)
        run.door.close()
        if run.options.hands_over and run.door.server == "other" and self._box is not None:
            # The job would else meet our store in place of its own, and lose it.
            self._box.outlive(GOODBYE_S)
        self._agent.end()
        if awake is not None:
            forks.stop_service(awake)  # reaped: after exec it would be a zombie of the job
        forks.kill_living()
        return code

    def _examined(self) -> tuple[ParticipantResult, int]:
        """Take part to the verdict, and write the report. Returns: the result, the exit code."""
        run = self._run
        result = self._depart()
        if not self._watchdog.stand_down():
            time.sleep(LAST_WORDS_S)  # the watchdog is writing, and ends the process
        helpers.release()
        # First, as the report says with which code this process leaves.
        if not self._leave_last_view(result) and run.options.exit_profile == "native":
            result = _not_saved(result)
        try:
            code = self._write(result)
        except Exception as error:  # the last step: nothing is left that could say it
            complain(f"the report could not be written: {error_words(error)}")
            code = max(result.code, 3)
        supervisor.written(code)
        return result, code

    def _depart(self) -> ParticipantResult:
        run = self._run
        try:
            # Who forked this process, by the own launcher, has looked.
            said = look_first(run) if run.launch.launcher != OWN else []
            who = introduce(run.launch, run.environ, run.options.backend)
            self._evidence.sign_in(run.seat, replace(who, facts=run.first_facts), 0.0)
            for line in said:  # only now: whatever stops the run, its report has it
                run.progress.tell(line)
            run.progress.say("importing torch", Phase.START)
            with run.joining.phase("torch_s"):
                import_torch()
            if torch_error() and self._is_to_sign_in():
                run.config = replace(run.config, registry=run.registry.with_vital())
                self._scopes |= {check.name: check.scope for check in run.registry.checks}
            return self._take_part(open_store(run), who)
        except StoreLost as error:
            return self._own_view(
                kinds.STORE_LOST,
                f"the connection to the store broke: {error}",
                self._road(),
            )
        except Exception as error:  # a mistake, of ours or of a plug-in, must not cost the report
            scarce = shortage_of(error)
            words = scarce.words if scarce else f"nccl-doctor itself failed: {error_words(error)}"
            fix = scarce.fix if scarce else "report it, with the JSON report of this run"
            return self._as_far_as_known(words, fix=fix)

    def _take_part(self, scarce: Shortage | None, who: SignIn) -> ParticipantResult:
        run = self._run
        who = replace(who, alone=alone_as(run.launch, run.environ, who.host_key))
        self._token = who.token
        self._agent.start()
        self._leave_view()
        with run.joining.phase("examined_s"):
            facts = examine_alone(run)
        who = replace(who, facts=facts)
        self._evidence.sign_in(run.seat, who, 0.0)
        self._leave_view()
        if scarce is not None:
            return self._as_far_as_known(scarce.words, fix=scarce.fix)
        if not self._is_to_sign_in():
            return self._own_view(None, "")
        if error := torch_error():
            rank = run.launch.rank
            here = None if rank is None else Where(ranks=(rank,))
            words = f"could not sign in without torch: {error}"
            return self._own_view(kinds.COORDINATOR_LOST, words, here)
        try:
            meeting, self._is_second = connect(run, self._token, self._broken_road())
        except StoreLost as error:
            address = f"{run.launch.master_addr}:{run.launch.master_port}"
            return self._own_view(
                kinds.COORDINATOR_LOST, f"could not sign in at {address}: {error}", self._road()
            )
        self._box = meeting
        master = str(run.launch.master_addr)
        run.hosts = {master: [master]}
        if run.launch.rank == 0:
            rivals = RivalCheck(meeting, run.launch, self._token)
            others = claim(meeting)
            self._is_second = (self._is_second or others) and another_coordinates(
                meeting, self._token, run.launch, run.left(), run.progress.tick
            )
            if not self._is_second:
                run.nonce = self._views.run_id = secrets.token_hex(8)
                open_run(meeting, run.nonce)
                box = self._sign_in(meeting, run.nonce, who)
                self._coordinator = Coordinator(run, box, self._evidence, self._views, rivals)
                return self._coordinator.conduct()
        return self._follow(meeting, who)

    def _follow(self, meeting: ControlStore, who: SignIn) -> ParticipantResult:
        """Take part in the run that rank 0 opens, and in the next one if that was an earlier
        start's.
        """
        run = self._run
        meeting.crowd = run.launch.world_size or 0
        while True:
            patience = min(run.options.join_timeout_s + 3 * SETTLE_S, run.left())
            until = time.monotonic() + patience
            run.progress.say("waiting for rank 0 to open the sign-in", Phase.SIGN_IN, until)
            try:
                with run.joining.phase("opened_s"):
                    run_id = opened(meeting, patience, run.progress.tick, claims(meeting, who))
            except StoreTimeout:
                return self._own_view(
                    kinds.COORDINATOR_LOST,
                    f"reached the store, but rank 0 did not open the sign-in within "
                    f"{patience:.0f} s",
                    Where(ranks=(0,)),
                )
            except BadMessage as error:
                return self._left_alone(misread(error))
            box = self._sign_in(meeting, run_id, who)
            follower = Follower(run, box, self._token, self._evidence, self._views)
            # A store that rank 0 serves itself ends with it: no run is opened there after another.
            if run.launch.agent_store:
                follower.watch(partial(opened_again, meeting, run_id))
            try:
                end = follower.follow()
            except OpenedAgain:
                continue
            except CannotFollow as lost:
                return self._left_alone(lost)
            if self._is_second:
                return self._ended_by_another(end)
            if run.launch.node_rank and end.words:
                run.progress.end(end.words)
            return ParticipantResult(end.code)

    def _sign_in(self, meeting: ControlStore, run_id: str, who: SignIn) -> ControlStore:
        """Take a seat in a run. Returns the store, for messages of that run."""
        run, key = self._run, self._run.config.key
        who = replace(who, joining=dict(run.joining.seconds))
        self._box = box = meeting.beside(prefix_of(run_id), seal_of(key, run_id))
        if not self._goes_with_coordinator():
            supervisor.signed_in(
                death=death_of(os.getpid(), run.launch.rank, ""),
                meeting=(box.host, box.port),
                run=run_id,
                secret=key.secret.hex() if key else "",
                lasts=key is not None and key.lasts,
            )
        try:
            box, run.seat = self._agent.sign_in(box, run_id, who.to_json())
            self._box = box
        except AgentLost:
            with run.joining.phase("seat_s"):
                run.seat = take_seat(box, run.launch)
            who = replace(who, joining=dict(run.joining.seconds))
            box.put(f"seat/{run.seat}", who.to_json())
        # From here on facts name participants by their seats: this one must not stand at another's.
        self._evidence = EvidenceLog(run.launch, self._scopes, run.environ)
        self._evidence.sign_in(run.seat, who, 0.0)
        return box

    def _goes_with_coordinator(self) -> bool:
        """True if the coordinator ends with the process that the user started."""
        launch = self._run.launch
        return launch.rank == 0 or (launch.launcher == OWN and launch.node_rank == 0)

    def _is_to_sign_in(self) -> bool:
        return self._run.launch.is_complete() or self._speaks_for_host()

    def _speaks_for_host(self) -> bool:
        """True if this is the first process of a host that has yet to be given its place."""
        return self._run.launch.launcher == OWN and self._run.launch.local_rank == 0

    # -- leaving alone --------------------------------------------------------------------------

    def _ended_by_another(self, end: Finish) -> ParticipantResult:
        """Result of a rank 0 where another process coordinated: never success, for that may have
        been none of this job. What that one found of this host is the cause.
        """
        told = findings_of(end, self._run.registry, host_name())
        words = "another process that says it is rank 0 coordinated this run, and ended it"
        cause = told[0].code if told else None
        here = Where(hosts=(host_name(),))
        lost = Finding(kinds.COORDINATOR_LOST, words, here, explained_by=cause)
        report = make_report(self._run, self._evidence, complete=False, extra=[*told, lost])
        return ParticipantResult(end.code or 3, report, aside=True)

    def _left_alone(self, lost: CannotFollow) -> ParticipantResult:
        return self._own_view(lost.kind, lost.words, self._road() if lost.on_road else lost.where)

    def _own_view(
        self, kind: Kind | None, message: str, where: Where | None = None
    ) -> ParticipantResult:
        """Judge one's own facts: the coordinator was not reached, or was lost."""
        here = Where(hosts=(host_name(),)) if where is None else where
        self._lost = [Finding(kind, message, here)] if kind else []
        if self._lost and self._run.launch.local_rank in (0, None):
            for check, outcome in look_after_loss(self._run, self._run.hosts).items():
                self._evidence.record(self._run.seat, check, AFTER_LOSS, outcome)
        road = self._broken_road()
        cause = road.code if road else None
        extra = [found.replaced(explained_by=cause) for found in self._lost]
        report = make_report(self._run, self._evidence, complete=False, extra=extra)
        if self._speaks_in_folder():  # at once: rank 0 waits for it
            self._views.write(self._run.launch.node_rank, report, last=True)
        return ParticipantResult(report.exit_code, report, aside=self._is_aside())

    def _leave_view(self) -> None:
        """Leave what is known so far in the folder that the hosts share, if there is one."""
        if self._speaks_in_folder():
            report = make_report(self._run, self._evidence, complete=False)
            self._views.write(self._run.launch.node_rank, report)  # said once, when it leaves

    def _leave_last_view(self, result: ParticipantResult) -> bool:
        """Leave there what stays; returns whether this participant has answered for itself.

        One that follows leaves with the code of all, whether its partial report is there or not.
        """
        if not self._speaks_in_folder():
            return True
        run = self._run
        report = result.report or make_report(run, self._evidence, complete=False)
        problem = self._views.leave(run.launch.node_rank, report, heard=not result.aside)
        if problem:
            complain(problem)
        return not problem or result.report is None

    def _speaks_in_folder(self) -> bool:
        run = self._run
        return run.options.output_dir is not None and run.launch.local_rank in (0, None)

    def _own_cluster(self) -> Cluster:
        """Cluster as this participant alone knows it."""
        return self._evidence.cluster(self._run.options, self._run.backend, complete=False)

    def _road(self) -> Where:
        """Link to the store: a host that has lost it cannot tell the one end from the other."""
        cluster = self._own_cluster()
        return road_to_master(cluster, cluster.hosts[0])

    def _broken_road(self) -> Finding | None:
        """The lowest failure that this participant has seen between itself and the master."""
        checks = [each for each in self._run.registry.checks if any(map(_is_on_road, each.kinds))]
        findings, _ = judge_all(self._own_cluster(), checks)
        found = [
            finding
            for finding in findings
            if finding.level is Severity.FAIL and _is_on_road(finding.kind)
        ]
        return min(found, key=lambda f: f.kind.layer.order, default=None)

    def _is_aside(self) -> bool:
        return self._run.launch.rank not in (0, None) or self._is_second

    def _close_evidence(self) -> None:
        if self._watchdog.interrupted and self._coordinator is not None:
            self._run.door.outlast()  # the others are told by it
        self._evidence.close()

    def _last_words(self, reason: str) -> int:
        """Write a report of the facts so far: the watchdog ends this process."""
        helpers.release()
        by = reason.removeprefix("received ") if self._watchdog.interrupted else ""
        why = stopped(self._run, self._evidence, by)
        code = self._write(self._as_far_as_known(why.message, why.fix))
        if by and self._coordinator is not None:
            with contextlib.suppress(StoreLost):
                self._coordinator.stop(by)
        elif by and self._box is not None and self._run.launch.rank != 0:
            ends.tell_left(self._box, self._run.seat, by)
        return code

    def _as_far_as_known(self, words: str, fix: str = "") -> ParticipantResult:
        """Report of the facts so far; as rank 0, of all that have signed in."""
        # Before the end of the sign-in, a rank that is not here is not absent.
        coordinates = self._run.joined and not self._is_second
        if coordinates and len(self._evidence.missing()) > MOST_MISSING:
            coordinates = False
            words += (
                "; the ranks that did not sign in are too many to list in the time that is left"
            )
        by = self._lost[0].code if self._lost else None
        extra = [*self._lost, Finding(kinds.RUN_INTERRUPTED, words, fix=fix, explained_by=by)]
        report = make_report(self._run, self._evidence, complete=coordinates, extra=extra)
        return ParticipantResult(max(report.exit_code, 1), report, aside=self._is_aside())


def _is_on_road(kind: Kind) -> bool:
    return kind.layer in _ROAD or Effect.CUTS_OFF in kind.effects


def _not_saved(result: ParticipantResult) -> ParticipantResult:
    code, report = max(result.code, 3), result.report
    if report is not None and report.exit_code == 0:
        report = replace(report, exit_code=code)
    return replace(result, code=code, report=report)
