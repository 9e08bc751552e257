"""Coordinator on rank 0: sign-in, rounds, gathering, verdict, and the end of the run.

A star over the store: it posts orders, the participants post evidence. It waits for all or for the
deadline, and goes on without those that stopped responding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain, repeat, takewhile

from nccl_doctor.gather.connect import first_seal
from nccl_doctor.gather.context import Run, StartTime
from nccl_doctor.gather.ends import (
    QUIET_S,
    Deaths,
    Heartbeats,
    Stop,
    another_connection,
    departures,
)
from nccl_doctor.gather.envelope import Budget
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.examine import SETTLE_S, hold, over_key
from nccl_doctor.gather.join import Join
from nccl_doctor.gather.messages import Finish, Order, Postings
from nccl_doctor.gather.opening import RivalCheck
from nccl_doctor.gather.progress import Phase, phase_of
from nccl_doctor.gather.report import make_report, stood_still, stopped
from nccl_doctor.gather.rounds import (
    LOOK_S,
    Answers,
    Blockers,
    call_after_loss,
    checks_that_look_again,
    look_after_loss,
    touches,
)
from nccl_doctor.gather.seats import size_of
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.gather.told import reasons_of
from nccl_doctor.gather.views import HostReports, not_heard
from nccl_doctor.gather.visitors import note_visitors
from nccl_doctor.launch import identity
from nccl_doctor.model.check import Check, Skip
from nccl_doctor.model.cluster import AFTER_LOSS, BEFORE, Cluster, Outcome, OutcomeStatus
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import Finding, Round, Turn, Where
from nccl_doctor.model.kinds import RUN_INTERRUPTED
from nccl_doctor.model.report import ParticipantResult, Report
from nccl_doctor.system.pauses import Pauses, in_words
from nccl_doctor.toolkit.host import host_name

VIEWS_S, LEAST_VIEWS_S = 2.5, 1.0
"""Time after the sign-in in which partial reports of absent hosts come, which give up when it ends;
and the least time to wait for them, after everything else."""
GOODBYE_S = 3.0
GOODBYE_OF_A_RANK_S = 3e-4
"""Time that the store stays up for participants that have not yet read the verdict, and for each of
them."""
_SLACK_S = 3.0
"""Time between a round and a second look, on hosts that are busy."""
_WHOLE = 0.9
"""Share of the time of a round with which it is as good as whole."""
TOGETHER_MAX, OF_A_RANK_MAX = 4 << 20, 256 << 10
"""Bytes of JSON that messages may take together without a key, and of them for each rank: more than
twice what a host of eight GPUs says of itself."""
NO_TIME = "no time was left; give a longer --timeout"


class Coordinator:
    """Conducts one run; the participant in it that is rank 0 takes part as any other."""

    def __init__(
        self,
        run: Run,
        box: ControlStore,
        evidence: EvidenceLog,
        views: HostReports,
        rivals: RivalCheck,
    ) -> None:
        self._run = run
        self._views = views
        self._box = box
        self._evidence = evidence
        level = run.options.level.order
        self._checks = [c for c in run.registry.checks if c.together and c.level.order <= level]
        self._number = 0
        self._groups: Sequence[Sequence[int]] = ()
        self._silent: set[int] = set()
        self._held: dict[str, set[str]] = {}
        self._hung: set[int] = set()
        self._failed = False
        self._has_looked = False
        self._deaths = Deaths(box, evidence)
        self._rivals = rivals
        self._blockers = Blockers(run.registry.checks)
        self._posted = Postings(box, is_near=identity.is_this_host(box.host))
        self._heartbeats = Heartbeats(box, evidence)
        self._answers = Answers(run, box, evidence, self._deaths, self._heartbeats)
        self._told_dead: set[int] = set()
        self._late: set[int] = set()
        self._starts = StartTime(run)

    def conduct(self) -> ParticipantResult:
        """Hold the whole run, from the sign-in to the verdict.

        Raises:
            StoreLost: the store broke off.
        """
        run = self._run
        if not run.config.key:
            self._box.budget = Budget(TOGETHER_MAX + OF_A_RANK_MAX * size_of(run.launch))
        roll = Join(
            run,
            self._box,
            self._evidence,
            self._deaths,
            self._rivals,
            posted=self._posted,
            agents=self._answers.agents,
        )
        roll.call()
        if roll.cut_short:
            self._note_visitors()
            report = make_report(
                run, self._evidence, complete=False, extra=[stopped(run, self._evidence)]
            )
            return self._result(report)
        # Where the sign-in was over earlier, nobody gives up now: those who did have left theirs.
        at_last = time.monotonic() >= roll.until
        views_until = time.monotonic() + (VIEWS_S if at_last else LEAST_VIEWS_S)
        run.joined = True
        self._heartbeats.look()  # who is killed in the first moments has no connection later
        self._starts.signed_in(self._cluster())
        for check in self._checks:
            if check.turn is Turn.LAST:
                self._observe_together(check, before=True)
        for check in self._checks:
            self._observe_together(check)
        for check in self._checks if self._failed else ():  # a reason to look once more, for some
            self._observe_together(check)
        self._late = roll.latecomers()
        for seat in self._late:
            self._box.put(f"late/{seat}", True)
        self._silent |= self._late
        self._look_again()
        run.progress.people(tuple)
        run.progress.say("judging", Phase.VERDICT)
        patience_s = max(LEAST_VIEWS_S, views_until - time.monotonic())
        views = self._views.of(
            not_heard(self._cluster()),
            patience_s,
            max(patience_s, min(roll.until + VIEWS_S - time.monotonic(), run.left())),
        )
        self._note_visitors()
        report = make_report(
            run,
            self._evidence,
            # Who did not come may have given up waiting for this process.
            complete=not roll.stood_still_s,
            views=views,
            extra=[*self._departed(), *stood_still(self._evidence, roll.stood_still_s)],
            known=self._blockers.known(self._evidence.state),
        )
        return self._result(report)

    # -- rounds ---------------------------------------------------------------------------------

    def _observe_together(self, check: Check, *, before: bool = False) -> None:
        """Hold the rounds of a check: of one that looks back `before`, or else the others."""
        early = {BEFORE} if check.turn is Turn.LAST else set[str]()
        held = self._held.setdefault(check.name, set())
        while rounds := [
            r for r in self._planned(check) if r.name not in held and (r.name in early) is before
        ]:
            for round_ in rounds:
                held.add(round_.name)
                self._hold(check, round_)
                if self._hung and not self._has_looked:
                    # At once: where a path is cut, no other round comes to an end on it.
                    self._has_looked = True
                    self._look_again(self._hung)
                    for earlier in takewhile(lambda each: each is not check, self._checks):
                        self._observe_together(earlier)

    def _planned(self, check: Check) -> Sequence[Round]:
        if not self._run.left():
            return ()  # what is due and was not held, the verdict calls unknown
        try:
            return tuple(check.plan(self._cluster()))
        except Skip:
            return ()
        except Exception:  # a plug-in's mistake costs its own answer; the verdict will name it
            return ()

    def _cluster(self) -> Cluster:
        """Everything so far; the same object until there is more."""
        run = self._run
        return self._evidence.cluster(run.options, run.backend, run_id=run.nonce, steps=False)

    def _hold(self, check: Check, round_: Round) -> None:
        """Hold one round: order it, take part, wait for all evidence, note the silent ranks."""
        run, box = self._run, self._box
        self._deaths.look()  # who was killed before takes no part
        self._groups = groups = tuple(self._unblocked(check, round_))
        if not groups:
            return
        self._starts.make_room(check, round_, round_.deadline_s + SETTLE_S + LOOK_S)
        deadline_s = min(round_.deadline_s, longest_round(run.left()))
        if deadline_s <= 0:
            for group in groups:
                self._note_untested(group, group, check, round_, NO_TIME)
            return
        wait_s, wanted_s = deadline_s + SETTLE_S, round_.deadline_s
        round_ = Round(round_.name, groups, deadline_s, round_.params, by_seat=round_.by_seat)
        next_s = wait_s + 2 * SETTLE_S + run.between_orders()
        order = Order(check.name, round_, next_s, more_s=run.more_s)
        started, mark = time.monotonic(), Pauses.now()
        self._heartbeats.begin(check, round_)
        self._posted.order(self._number, order)
        members = [seat for group in groups for seat in group]
        met = dict(chain.from_iterable(zip(group, repeat(min(group))) for group in groups))
        # Recorded with those of the others: in a run that is stopped now, a peer that was stopped a
        # moment earlier must not be blamed for it.
        own = None
        look = partial(self._look_out, groups)
        if run.seat in met:
            own = hold(run, box, check, round_, number=self._number, tick=look)
        others = [seat for seat in members if seat != run.seat]
        until = started + wait_s
        doing = f"{check.name}: {round_.name}, waiting for the others"
        run.progress.say(doing, phase_of(check.layer), until)
        patience = max(0.0, until - time.monotonic())
        answers = self._answers.of(self._number, others, patience, look, met)
        self._starts.note(check, replace(round_, deadline_s=wanted_s), time.monotonic() - started)
        if own is not None:
            own = self._in_its_time(run.seat, own, wanted_s, deadline_s)
            self._record(run.seat, check, round_, own, met[run.seat])
        for seat in others:
            stood_s = run.pauses.since(mark)
            if stood_s and seat not in answers:
                words = f"no answer, but rank 0 itself {in_words(stood_s)}"
                outcome = self._death_of(seat) or Outcome(OutcomeStatus.UNTESTED, reason=words)
            elif seat in answers:
                outcome = self._in_its_time(seat, answers[seat], wanted_s, deadline_s)
            else:
                self._silent.add(seat)
                words = f"no answer within {wait_s:.0f} s of the order"
                if seat in self._heartbeats.seats:
                    words = f"nothing came from its host for {QUIET_S:.0f} s"
                outcome = self._death_of(seat) or Outcome(OutcomeStatus.SILENT, reason=words)
            self._record(seat, check, round_, outcome, met[seat])
        self._number += 1

    def _in_its_time(self, seat: int, outcome: Outcome, wanted_s: float, given_s: float) -> Outcome:
        """The outcome; one that hung is none of a hang if its time was cut, but reason enough to
        look for who answers.
        """
        if outcome.status is OutcomeStatus.HUNG:
            self._hung.add(seat)
        limit_s = self._run.options.timeout_s + self._run.more_s
        return hung_within(outcome, wanted_s, given_s, limit_s)

    def _look_out(self, groups: Sequence[Sequence[int]]) -> bool:
        """Answer rivals, and tell the groups that have lost a member. Returns: whether any has."""
        self._rivals.answer()
        silent = self._heartbeats.look()
        if not self._deaths.look():
            return silent
        lost = [group for group in groups if any(self._deaths.of(seat) for seat in group)]
        for group in lost:
            self._box.put(over_key(self._number, group), True)
        return silent or bool(lost)

    def _death_of(self, seat: int) -> Outcome | None:
        """Outcome of a participant that was killed, in the round in which that is first seen."""
        name = self._deaths.of(seat)
        if name is None or seat in self._told_dead:
            return None
        self._told_dead.add(seat)
        words = "its parent process saw it being killed"
        return Outcome(OutcomeStatus.SILENT, reason=words, signal=name)

    def _record(self, seat: int, check: Check, round_: Round, outcome: Outcome, group: int) -> None:
        self._failed = self._failed or outcome.status is not OutcomeStatus.OK
        if outcome.group != group:
            outcome = replace(outcome, group=group)
        self._evidence.record(seat, check.name, round_.name, outcome)

    def _note_untested(
        self, group: Sequence[int], out: Iterable[int], check: Check, round_: Round, reason: str
    ) -> None:
        first = min(group)
        untested = Outcome(OutcomeStatus.UNTESTED, reason=reason, group=first)
        for seat in sorted(out):
            self._record(seat, check, round_, self._death_of(seat) or untested, first)

    def _unblocked(self, check: Check, round_: Round) -> Iterator[tuple[int, ...]]:
        """Groups that no known failure would stop; the others are noted, not run into a time-out.

        Silence blocks as well: a group with a participant that no longer answers cannot meet.
        """
        cluster = self._cluster()
        blockers = self._blockers.blockers_of(check, cluster, self._evidence.state)
        ranks = {rank.seat: rank for rank in cluster.present} if blockers else {}
        killed = {seat for seat in self._evidence.seats if self._deaths.of(seat)}
        self._silent |= killed
        for group in round_.groups:
            silent = self._silent & set(group)
            members = [ranks[seat] for seat in group if seat in ranks]
            blocker = next((f for f in blockers if touches(f, members, round_)), None)
            shut = blocker is not None or (silent and not round_.may_shrink)
            out = set(group) if shut else silent
            lost = "rank-killed" if silent & killed else "rank-silent"
            reason = f"blocked by {blocker.code if blocker else lost}"
            self._note_untested(group, out, check, round_, reason)
            if left := tuple(seat for seat in group if seat not in out):
                yield left

    def _look_again(self, hung: Set[int] = frozenset()) -> None:
        """Let the hosts that are left, or that hung, look for answers of the others; without the
        time for that, this one alone.
        """
        run = self._run
        round_ = call_after_loss(self._cluster(), self._silent, run.seat, hung)
        if round_ is None:
            return
        if run.left() > round_.deadline_s + SETTLE_S:
            for check in checks_that_look_again(run):
                self._hold(check, round_)
            return
        for name, outcome in look_after_loss(run, round_.params["hosts"]).items():
            self._evidence.record(run.seat, name, AFTER_LOSS, outcome)

    def _note_visitors(self) -> None:
        if self._run.config.key:
            note_visitors(self._box, first_seal(self._run), self._evidence)

    # -- the end --------------------------------------------------------------------------------

    def _departed(self) -> Iterator[Finding]:
        """Findings on participants that a signal ended before the run did."""
        for departure in departures(self._box, len(self._evidence.seats)):
            who = self._evidence.who(departure.seat)
            if who is not None and departure.seat != self._run.seat:
                self._silent.add(departure.seat)
                rank = who.launch.rank
                yield Finding(
                    RUN_INTERRUPTED,
                    f"received {departure.signal} and left before the end",
                    Where(ranks=() if rank is None else (rank,)),
                )

    def _result(self, report: Report) -> ParticipantResult:
        def finish(code: int) -> None:
            redacts = self._run.options.redact
            name, reasons = ("", ()) if redacts else (host_name(), reasons_of(report))
            self._send_home(Finish(code, report.verdict, len(report.root_causes), name, reasons))

        return ParticipantResult(report.exit_code, report, finish=finish)

    def stop(self, signal_name: str) -> None:
        """Tell everybody that a signal ends rank 0, and wait a moment until they have read it; from
        another thread, while this run is wherever it is.

        Raises:
            StoreLost: the store is gone.
        """
        box, number = another_connection(self._box), self._number
        self._posted.stop(box, number, encode(Stop(signal_name)))
        for group in self._groups:
            box.put(over_key(number, group), True)
        # Some may have taken a seat that this run has not read yet.
        taken = range(min(box.add("seats", 0), self._run.launch.world_size or 0))
        seats = {*self._evidence.seats, *taken} - self._silent - {self._run.seat}
        box.wait({f"bye/{self._agent_of(seat)}" for seat in seats}, GOODBYE_S)

    def _send_home(self, end: Finish) -> None:
        """Tell everybody the end, and keep the store up until they have read it."""
        box = self._box
        self._posted.finish(self._number, end)
        # Who was refused, or came too late, reads that in the roster.
        everybody = {*self._evidence.seats, *self._evidence.refusals.seats}
        away = (self._silent - self._late) | {self._run.seat}
        byes = {f"bye/{self._agent_of(seat)}" for seat in everybody - away}
        if byes:
            box.wait(byes, GOODBYE_S + GOODBYE_OF_A_RANK_S * len(byes))
        seats = {f"seat/{self._agent_of(seat)}" for seat in everybody}
        late = [f"late/{seat}" for seat in self._late]
        names = ("seats", "departures", "deaths")
        box.forget([*names, *self._posted.keys, *seats, *byes, *late])
        self._rivals.close()

    def _agent_of(self, seat: int) -> int:
        """The seat that says goodbye for a seat."""
        first = self._answers.agents.of(seat)
        return seat if first is None else first


def longest_round(left_s: float) -> float:
    """Seconds that a round may take, of those that are left.

    Where somebody is waited for in vain, there is still to be time to look again, together after a
    long round; and to tell the others the end before their own time is over: they may have started
    earlier.
    """
    most = left_s - SETTLE_S
    together_s = LOOK_S + SETTLE_S + _SLACK_S if most > 4 * LOOK_S else LOOK_S
    return max(most - together_s, min(most, LOOK_S))


def hung_within(outcome: Outcome, wanted_s: float, given_s: float, timeout_s: float) -> Outcome:
    """The outcome; one that hung in a round with less time than planned is untested, and has as its
    reason the time limit of the run with which it would have had it. A stopped process needs none.
    """
    is_stopped = outcome.state in ("t", "T")
    if outcome.status is not OutcomeStatus.HUNG or is_stopped or given_s >= _WHOLE * wanted_s:
        return outcome
    enough_s = math.ceil((timeout_s + wanted_s - given_s) / 10) * 10
    step = outcome.breadcrumbs[-1].get("step", "") if outcome.breadcrumbs else ""
    words = f"not done{f' with {step}' if step else ''} after {given_s:.0f} s: the run had no more "
    words += f"left for it, and not {wanted_s:.0f} s: give --timeout {enough_s} or more"
    return replace(outcome, status=OutcomeStatus.UNTESTED, reason=words)
