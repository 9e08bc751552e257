"""Rounds as the coordinator holds them: what stops one, its answers, and the look after a loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from nccl_doctor.gather.agent.batches import BATCH_MAX, Agents, answers_in, answers_key
from nccl_doctor.gather.context import Run
from nccl_doctor.gather.ends import Deaths, Heartbeats
from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.messages import Claimant
from nccl_doctor.gather.progress import rows_of_round
from nccl_doctor.gather.refusals import kind_of
from nccl_doctor.gather.store import ControlStore, StoreTimeout
from nccl_doctor.judge.checks import Judged, judge_all
from nccl_doctor.launch import identity
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import AFTER_LOSS, Cluster, Host, Outcome, OutcomeStatus, Rank
from nccl_doctor.model.codec import Node
from nccl_doctor.model.findings import Effect, Finding, Round, Severity
from nccl_doctor.model.report import outcome_from_json
from nccl_doctor.observe import probe

ANSWER_MAX = 4 << 20
"""Largest answer of one participant in one round, in bytes of JSON."""
STRANGERS_S = 5.0
"""Time in all to wait for answers in whose place a stranger has put what has no seal."""
_ASK_S = 1.0
"""Time after which it is looked whether those of a late agent answer by themselves."""
_MANY, _READ_S = 256, 0.3
"""Late agents from which on batches are read while others are still to come, and the time between
two such looks: to read them takes as long as to wait for them.
"""
_FEW = 8
"""Most late agents of which that is asked before the end of the round: it is a look for each of
their ranks."""


class _OpenRound:
    """Answers of one round: which are awaited, by which keys, and which have come."""

    def __init__(self, number: int, seats: Collection[int], agents: Agents) -> None:
        self.number, self.seats = number, seats
        self.own = {seat: f"evidence/{number}/{seat}" for seat in seats}
        """Key of an answer that stands alone."""
        self.of_agent: dict[int, list[int]] = {}
        """First seat of an agent → its seats in this round."""
        for seat in seats:
            if (first := agents.of(seat)) is not None:
                self.of_agent.setdefault(first, []).append(seat)
        self.late = set(self.of_agent)
        """Agents whose batch has not come, by their first seats."""
        self._by_batch = {seat for members in self.of_agent.values() for seat in members}
        self.here: dict[int, Outcome] = {}
        self.alone: set[int] = set()
        """Seats whose own answer is there, to be read in the end."""

    def has(self, seat: int) -> bool:
        """True if a seat has answered."""
        return seat in self.here or seat in self.alone

    def keys(self, is_gone: Callable[[int], bool]) -> set[str]:
        """Keys of what is still to come, without those who will say nothing more."""
        left = [seat for seat in self.seats if not self.has(seat) and not is_gone(seat)]
        alone = {self.own[seat] for seat in left if seat not in self._by_batch}
        here = set(left)
        return alone | {
            answers_key(self.number, first)
            for first in self.late
            if not here.isdisjoint(self.of_agent[first])
        }

    def singles(self, firsts: Iterable[int]) -> set[str]:
        """Keys of those of some agents, if they answer by themselves."""
        return {self.own[seat] for first in firsts for seat in self.of_agent[first]}

    def note(self, there: Set[str]) -> set[int]:
        """Take keys that have come. Returns: the agents with a batch among them."""
        self.alone |= {seat for seat, key in self.own.items() if key in there}
        come = {first for first in self.late if answers_key(self.number, first) in there}
        self.late -= come
        return come

    def enter(self, first: int, outcomes: Mapping[int, Outcome]) -> None:
        """Take what a batch holds; a seat that it leaves out answers by itself."""
        self.here.update(outcomes)
        self._by_batch -= {seat for seat in self.of_agent[first] if seat not in outcomes}


class Answers:
    """Waits for the answers of others, without those who were killed or are quiet."""

    def __init__(
        self,
        run: Run,
        box: ControlStore,
        evidence: EvidenceLog,
        deaths: Deaths,
        heartbeats: Heartbeats,
    ) -> None:
        self._run, self._box, self._evidence = run, box, evidence
        self._deaths, self._heartbeats = deaths, heartbeats
        self.agents = Agents()
        self._met: Mapping[int, int] = {}
        self._strangers_s = 0.0
        self._is_near = identity.is_this_host(box.host)

    def of(
        self,
        number: int,
        seats: Collection[int],
        patience_s: float,
        look: Callable[[], bool],
        met: Mapping[int, int],
    ) -> dict[int, Outcome]:
        """Outcomes of these seats in a round, of those that answer in time.

        `look` is asked several times a second whether there is news of somebody's end. `met` is the
        lowest seat of the group of each: it stands in their outcomes, whatever these say of it.
        """
        self._met = met
        until = time.monotonic() + patience_s
        progress, named = self._run.progress, not self._run.options.redact
        round_ = _OpenRound(number, seats, self.agents)
        progress.people(
            lambda: rows_of_round(
                self._evidence, {seat: round_.has(seat) for seat in seats}, named=named
            )
        )

        def is_gone(seat: int) -> bool:
            return seat in self._heartbeats.seats or self._deaths.of(seat) is not None

        while (keys := round_.keys(is_gone)) and (left_s := until - time.monotonic()) > 0:
            ask_s = _ASK_S if len(round_.late) < _MANY else _READ_S
            patience_s = min(left_s, ask_s) if round_.late else left_s
            self._take(round_, self._box.wait(keys, patience_s, progress.tick, look))
            if 0 < len(round_.late) <= _FEW:
                self._take(round_, self._box.wait(round_.singles(round_.late), 0.0))
        if rest := {key for seat, key in round_.own.items() if not round_.has(seat)}:
            self._take(round_, self._box.wait(rest, 0.0))
        for first in round_.late:
            self.agents.remove(first)
        return round_.here | self._read(round_.own, round_.alone - round_.here.keys())

    def _take(self, round_: _OpenRound, there: Set[str]) -> None:
        """Take what has come: batches are opened, of single answers it is only noted."""
        keys = {answers_key(round_.number, first): first for first in round_.note(there)}
        many = self._box.many(keys) if keys and self._is_near else {}
        for key, first in keys.items():
            seats = round_.of_agent[first]
            try:
                batch = self._batch(key, many.get(key), BATCH_MAX)
                answers = answers_in(batch, first, seats, self.agents.known)
            except (ValueError, StoreTimeout) as error:
                round_.enter(first, self._refused(key, error, seats))
            else:
                found = {seat: self._outcome(key, seat, data) for seat, data in answers.items()}
                round_.enter(first, found)

    def _read(self, own: dict[int, str], seats: Iterable[int]) -> dict[int, Outcome]:
        """Outcomes of those that have answered by themselves."""
        keys = {own[seat]: seat for seat in seats}
        many = self._box.many(keys) if keys and self._is_near else {}
        found: dict[int, Outcome] = {}
        for key, seat in keys.items():
            try:
                data = self._batch(key, many.get(key), ANSWER_MAX)
            except (ValueError, StoreTimeout) as error:
                found.update(self._refused(key, error, [seat]))
            else:
                found[seat] = self._outcome(key, seat, data)
        return found

    def _batch(self, key: str, data: bytes | None, largest: int) -> Any:
        """A batch; `data` is what was read of it already. With a key, that of a stranger may be
        replaced soon.
        """
        began, is_sealed = time.monotonic(), self._run.config.key is not None
        try:
            if data is None:
                return self._box.get(key, 0.0, largest=largest)
            return self._box.opened(key, data, largest)
        except BadMessage:
            if not is_sealed or self._strangers_s > STRANGERS_S:
                raise
        try:
            return self._box.get(key, STRANGERS_S / 2, largest=largest)
        finally:
            self._strangers_s += time.monotonic() - began

    def _outcome(self, key: str, seat: int, data: Any) -> Outcome:
        try:
            if isinstance(data, dict):
                data["group"] = self._met.get(seat)
            return outcome_from_json(Node(f"seat {seat}: evidence", data))
        except ValueError as error:
            return self._refused(key, error, [seat])[seat]

    def _refused(self, key: str, error: Exception, seats: Iterable[int]) -> dict[int, Outcome]:
        """Outcomes where a batch cannot be taken: untested; or silent, if it was taken away."""
        if isinstance(error, StoreTimeout):
            silent = Outcome(OutcomeStatus.SILENT, reason="its answer is gone from the store")
            return dict.fromkeys(seats, silent)
        assert isinstance(error, ValueError)
        found = {}
        for seat in seats:
            if self._run.config.key and isinstance(error, BadMessage):  # it is nobody's of the run
                self._evidence.refusals.unsealed(key, kind_of(error), str(error), Claimant())
            else:
                self._evidence.refusals.answer(key, error, self._evidence.place(seat))
            found[seat] = Outcome(OutcomeStatus.UNTESTED, reason="its answer was refused")
        return found


# Known failures that stop a group of a round before it is held.
#
# Judging takes longer than many a round: what no new fact can have changed is not judged again.


_OWN = "nccl_doctor.checks."


class Blockers:
    """Failures so far, of the checks of a run."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = checks
        self._judged: dict[str, tuple[Hashable, list[Finding], bool]] = {}

    def blockers_of(
        self, check: Check, cluster: Cluster, state: Callable[[Iterable[str]], Hashable]
    ) -> list[Finding]:
        """Known failures of the layers that a check needs.

        `state` of some checks changes with every fact of them, and with every sign-in.
        """
        if not check.needs:
            return []
        findings: list[Finding] = []
        for other in self._checks:
            if any(kind.layer in check.needs for kind in other.kinds):
                findings += self._findings_of(other, cluster, state)
        return blockers_among(check, findings)

    def _findings_of(
        self, check: Check, cluster: Cluster, state: Callable[[Iterable[str]], Hashable]
    ) -> list[Finding]:
        now = state((check.name, *check.reads))
        known = self._judged.get(check.name)
        if known is None or known[0] != now or not is_own(check):
            findings, broken = judge_all(cluster, [check])
            known = self._judged[check.name] = (now, findings, not broken)
        return known[1]

    def known(self, state: Callable[[Iterable[str]], Hashable]) -> Judged:
        """Findings in the facts so far, by check: of the checks of the program that have judged
        these very facts.
        """
        own = {check.name: check for check in self._checks if is_own(check)}
        return {
            name: findings
            for name, (now, findings, is_whole) in self._judged.items()
            if is_whole and name in own and now == state((name, *own[name].reads))
        }


def is_own(check: Check) -> bool:
    """True if a check is one of the program: what a plug-in reads, no test has compared with what
    it says that it reads.
    """
    return type(check).__module__.startswith(_OWN)


def blockers_among(check: Check, findings: Iterable[Finding]) -> list[Finding]:
    """Known failures of the layers that a check needs, of these findings."""
    return [
        finding
        for finding in findings
        if finding.level is Severity.FAIL
        and finding.kind.layer in check.needs
        and not finding.has(Effect.JOB_ONLY)  # it breaks the job, not what is tried here
        and finding.check != check.name  # a variant that hangs does not stop the next one
    ]


def touches(finding: Finding, members: Sequence[Rank], round_: Round) -> bool:
    """True if a failure stops a group of a round: a link that it needs, or a bad member."""
    hosts = {rank.host.name for rank in members}
    where = finding.where
    if where.links and round_.pairs is not None:
        name = {rank.seat: rank.host.name for rank in members}
        needed = {frozenset((name.get(a), name.get(b))) for a, b in round_.pairs}
        return any(frozenset(link) in needed for link in where.links)
    if where.links:
        return any(a in hosts and b in hosts and len(hosts) > 1 for a, b in where.links)
    if where.ranks:
        return bool(set(where.ranks) & {rank.rank for rank in members})
    if where.hosts:
        return bool(set(where.hosts) & hosts)
    return not where.nodes


# A second look after a loss or a hang: what changed on this host, who of the job still answers.
#
# A cut cable is seen at both of its ends, and means something else there: who takes the look,
# whom to call and for how long is decided here; what is looked at is up to the checks that look
# again.


LOOK_S = 4.0
CALLS_S = 2.5
"""Least time to call others; with less, this host looks at itself alone."""
QUICK_S = 0.6
"""For that, where the time is over: out of what is kept for the report."""
WITNESSES = 4
"""Hosts that are told to everybody, and that look again: enough to tell a host from a link."""
_MOST_LOST = 8


def checks_that_look_again(run: Run) -> list[Check]:
    """The checks of this run that look again."""
    level = run.options.level.order
    return [
        check
        for check in run.registry.checks
        if check.looks_again and not check.together and check.level.order <= level
    ]


def look_after_loss(run: Run, hosts: Mapping[str, Sequence[str]]) -> dict[str, Outcome]:
    """Check → what it saw, on a participant that has lost the others.

    Args:
        run: of this participant.
        hosts: name → addresses of hosts of the job, as far as they are known.
    """
    deadline = time.monotonic() + min(LOOK_S, max(QUICK_S, run.left()))
    called = dict(hosts) if run.left() > CALLS_S else {}
    context = replace(run.context(), round=AFTER_LOSS, params={"hosts": called})
    checks = checks_that_look_again(run)
    jobs = [probe.job_of(check, context, deadline) for check in checks]
    run.progress.say("looking again after a loss", until=time.monotonic() + LOOK_S)
    ends = probe.run(jobs, run.progress.tick)
    return {check.name: end for check, end in zip(checks, ends, strict=True)}


def call_after_loss(
    cluster: Cluster, silent: set[int], own_seat: int, hung: Set[int] = frozenset()
) -> Round | None:
    """Round in which seats look again, each alone but at the same time; None if no seat was lost,
    and none hung.

    Args:
        cluster: what the coordinator has.
        silent: seats that stopped responding.
        own_seat: the coordinator's.
        hung: seats that hung in a round: the path between two of their hosts may be gone.
    """
    stuck = [h for h in cluster.present_hosts if any(r.seat in hung for r in cluster.ranks_on(h))]
    if len(cluster.hosts) < 2 or not (silent or cluster.absent or len(stuck) > 1):
        return None
    left: dict[int, int] = {}
    lost: list[Host] = []
    in_doubt: list[Host] = []
    """Hosts with a silent rank: the others were not asked since, and may be lost as well."""
    for host in cluster.present_hosts:
        seats = [rank.seat for rank in cluster.ranks_on(host)]
        answering = [seat for seat in seats if seat not in silent]
        if own_seat in seats:
            left[host.id] = own_seat
        elif answering:
            left[host.id] = answering[0]
            in_doubt += [host] if len(answering) < len(seats) else []
        else:
            lost.append(host)
    if not (lost or in_doubt) and len(stuck) > 1:
        some = stuck[:_MOST_LOST]
        hosts = {host.label: list(host.addresses) for host in some}
        groups = tuple((left[host.id],) for host in some)
        return Round(AFTER_LOSS, groups, LOOK_S, {"hosts": hosts}, may_shrink=True)
    if not (lost or in_doubt):
        return Round(AFTER_LOSS, ((own_seat,),), LOOK_S, {"hosts": {}}, may_shrink=True)
    doubtful = {host.id for host in in_doubt}
    in_order = sorted(left, key=lambda i: (left[i] != own_seat, i not in doubtful))[:WITNESSES]
    witnesses = [h for h in cluster.present_hosts if h.id in in_order and h.id not in doubtful]
    called = [*[*lost, *in_doubt][:_MOST_LOST], *witnesses]
    hosts = {host.label: list(host.addresses) for host in called}
    groups = tuple((left[number],) for number in in_order)
    return Round(AFTER_LOSS, groups, LOOK_S, {"hosts": hosts}, may_shrink=True)
