"""Messages that one process has received, and the cluster that it makes of them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from nccl_doctor.gather.refusals import Refusals
from nccl_doctor.gather.sign_in import SignIn
from nccl_doctor.launch.expected_hosts import names_of_nodes
from nccl_doctor.launch.host_launch import placed
from nccl_doctor.model.cluster import Cluster, Facts, Host, Outcome, OutcomeStatus, Rank
from nccl_doctor.model.findings import Finding, Scope, Where, numbered
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.model.layout import Layout
from nccl_doctor.model.options import Options

_NEVER = 1 << 62
_HOST = Scope.HOST


@dataclass
class _Parted:
    """Facts of one participant: of its host, and its own. A cluster keeps these objects, so they
    are not changed. `last` is the last outcome with steps that did not end well, else the last.
    """

    of_host: Facts = field(default_factory=dict)
    of_rank: Facts = field(default_factory=dict)
    last: Outcome | None = None

    def add(self, check: str, rounds: Mapping[str, Outcome], scope: Scope | None) -> None:
        """Take a check, if it is new; to `rounds` more may be added later."""
        if scope is _HOST:
            if check not in self.of_host:
                self.of_host = {**self.of_host, check: rounds}
        elif check not in self.of_rank:
            self.of_rank = {**self.of_rank, check: rounds}

    def pass_by(self, outcome: Outcome) -> None:
        """Note the steps of the next outcome."""
        good = OutcomeStatus.OK
        if outcome.breadcrumbs and (
            self.last is None or self.last.status is good or outcome.status is not good
        ):
            self.last = outcome


class EvidenceLog:
    """Participants that signed in and what each observed, by seat. The coordinator has all; a
    participant that lost it has its own only.
    """

    def __init__(
        self, launch: Launch, scopes: Mapping[str, Scope], environ: Mapping[str, str]
    ) -> None:
        """`launch` is the owner's own: its world size and node count are the ones expected.
        `environ` is the owner's too: a scheduler may tell there what hosts are called.
        """
        self._launch = launch
        self._scopes = scopes
        self._environ = environ
        self._signed_in: dict[int, SignIn] = {}
        self._signed_in_s: dict[int, float] = {}
        self._alone: dict[str, int] = {}
        self._by_token: dict[str, int] = {}
        self._layout: Layout | None = None
        self._waited_s: float | None = None
        self._late: set[int] = set()
        self.refusals = Refusals()
        self._closed = False
        self._facts: dict[int, dict[str, dict[str, Outcome]]] = defaultdict(dict)
        self._vacant: tuple[int, tuple[Host, ...], list[Rank]] | None = None
        self._host_came_s: dict[Hashable, float] = {}
        self._starts: dict[tuple[str, int | None], int] = {}
        """Number of restarts before a rank of a host signed in, the lowest one."""
        self._changes: Counter[str] = Counter()
        """Outcomes that were recorded for each check; and, below no name, all other changes."""
        self._made: tuple[Hashable, Cluster] | None = None
        self._parted: dict[int, _Parted] = {}

    @property
    def seats(self) -> tuple[int, ...]:
        """Seats that have signed in, in time."""
        return tuple(seat for seat in self._signed_in if seat not in self._late)

    def knows(self, seat: int) -> bool:
        """True if the sign-in of a seat was received, in time or late."""
        return seat in self._signed_in

    def has_been(self, who: SignIn) -> bool:
        """True if this is a rank that was here before its agent restarted it: it cannot take up
        what the other began, and waits for the next run. No second claim of the rank, either.
        """
        launch = who.launch
        earlier = self._starts.get((who.host_key, launch.rank), launch.restart_count)
        return launch.agent_store and earlier < launch.restart_count

    def seat_of(self, token: str) -> int | None:
        """The seat at which the process with this token has signed in, if it has."""
        return self._by_token.get(token)

    def give_way(self, who: SignIn) -> tuple[int, SignIn] | None:
        """Forget one that was killed, and whose place a later start of it takes; returns its seat,
        and its sign-in.

        Each was the only living process of its host with this claim: the earlier one is gone.
        """
        seat = self._alone.get(who.alone) if who.alone else None
        return None if seat is None else (seat, self.forget(seat))

    def forget(self, seat: int) -> SignIn:
        """Forget a participant; returns its sign-in."""
        self._changes[""] += 1
        self._parted.pop(seat, None)
        del self._signed_in_s[seat]
        self._facts.pop(seat, None)
        gone = self._signed_in.pop(seat)
        self._starts.pop((gone.host_key, gone.launch.rank), None)
        self._host_came_s.pop(gone.host, None)
        self._by_token.pop(gone.token, None)
        return gone

    def sign_in(self, seat: int, who: SignIn, after_s: float) -> None:
        """Record the sign-in of a participant, `after_s` seconds after signing in began.

        A rank that its host forked once it had its place came when its host came. A host that comes
        when all places have been given does not join: its facts are its partial report.
        """
        launch = who.launch
        if launch.launcher == OWN and launch.local_rank:
            after_s = min(after_s, self._host_came_s.get(who.host, after_s))
        elif launch.launcher == OWN and self._layout is not None:
            self._late.add(seat)
            if launch.node_rank is not None and launch.node_rank < len(self._layout.nodes):
                who = replace(who, launch=placed(launch, self._layout.nodes[launch.node_rank]))
            elif self._layout.nodes[0].nnodes:  # one more of an elastic job: no other number
                who = replace(who, launch=replace(launch, nnodes=self._layout.nodes[0].nnodes))
        if self._closed:
            who = replace(who, facts={})
        self._vacant = None
        self._changes[""] += 1
        if who.alone:
            self._alone[who.alone] = seat
        self._by_token[who.token] = seat
        self._signed_in[seat] = who
        self._signed_in_s[seat] = after_s
        self._host_came_s.setdefault(who.host, after_s)
        start = who.host_key, launch.rank
        self._starts[start] = min(launch.restart_count, self._starts.get(start, _NEVER))
        self._parted.pop(seat, None)
        for check, rounds in who.facts.items():
            self._facts[seat].setdefault(check, {}).update(rounds)

    def lay_out(self, layout: Layout, waited_s: float | None = None) -> None:
        """Take the places that the hosts were given, and with them the ranks that are expected.

        `waited_s` is how long the hosts were waited for, if not for the join time-out.
        """
        self._vacant = None
        self._changes[""] += 1
        self._layout = layout
        self._waited_s = waited_s
        for seat, place in layout.seats.items():
            who = self._signed_in[seat]
            self._signed_in[seat] = who = replace(who, launch=placed(who.launch, place))
            self._host_came_s.setdefault(who.host, self._signed_in_s[seat])
        nnodes = layout.nodes[0].nnodes or self._launch.nnodes
        self._launch = replace(self._launch, world_size=layout.world_size, nnodes=nnodes)

    def close(self) -> None:
        """Take no more outcomes: what is killed from now on is killed by this process."""
        self._closed = True

    def record(self, seat: int, check: str, round_name: str, outcome: Outcome) -> None:
        """Take one outcome."""
        if not self._closed:
            rounds = self._facts[seat].setdefault(check, {})
            rounds[round_name] = outcome
            self._changes[check] += 1
            if parts := self._parted.get(seat):
                parts.add(check, rounds, self._scopes.get(check))
                parts.pass_by(outcome)

    def state(self, checks: Iterable[str]) -> Hashable:
        """Something that changes with every fact of these checks, and with every sign-in."""
        return (self._changes[""], self.refusals.count, *(self._changes[each] for each in checks))

    def who(self, seat: int) -> SignIn | None:
        """The sign-in of a seat, if it was received."""
        return self._signed_in.get(seat)

    def token(self, seat: int) -> str:
        """Random value by which a participant recognises its own sign-in."""
        return self._signed_in[seat].token

    def launches(self) -> Mapping[int, Launch]:
        """Launch record of each participant, by seat."""
        return {seat: self._signed_in[seat].launch for seat in self.seats}

    def backends(self) -> list[tuple[str, str | None]]:
        """Backend option of each participant, and the device that it would use."""
        here = (self._signed_in[seat] for seat in self.seats)
        return [(who.backend, who.device) for who in here]

    def ranks_here(self) -> set[int]:
        """Distinct ranks that have signed in."""
        claimed = (who.launch.rank for who in self._signed_in.values())
        return {rank for rank in claimed if rank is not None}

    def problems(self) -> Iterator[Finding]:
        """Findings on messages that were not taken."""
        hosts = {who.host_name for who in self._signed_in.values()}
        return self.refusals.findings(self.ranks_here(), hosts)

    def place(self, seat: int) -> Where:
        """Host and rank of a participant that signed in."""
        who = self._signed_in[seat]
        ranks = () if who.launch.rank is None else (who.launch.rank,)
        return Where(hosts=(who.host_name,), ranks=ranks)

    def some_hosts(self, most: int) -> dict[str, list[str]]:
        """Name → addresses of the hosts that signed in first."""
        found: dict[str, list[str]] = {}
        for who in self._signed_in.values():
            if len(found) == most:
                break
            found.setdefault(who.host_name, list(who.addresses))
        return found

    def missing(self) -> list[int]:
        """Expected ranks that have not."""
        return sorted(set(range(self._launch.world_size or 0)) - self.ranks_here())

    def not_here(self) -> str:
        """Words for those who have not signed in: `node 1`, `ranks 2–3`; empty if all have."""
        launches = self.launches().values()
        here = {launch.node_rank for launch in launches}
        if self._launch.launcher == OWN and self._layout is None:
            nnodes = self._launch.nnodes or 1
            nodes = sorted(set(range(nnodes)) - here)
            if None in here:  # a host without a number may be any of them
                return f"{nnodes - len(launches)} of {nnodes} hosts"
            return numbered("node", nodes) if nodes else ""
        away: set[int] = set()
        single = []
        for rank in self.missing():
            node, _ = self._home_of(rank)
            if node is None or node in here:
                single.append(rank)
            else:
                away.add(node)
        words = [numbered("node", sorted(away))] if away else []
        if single and not (away and self._launch.launcher == OWN):  # its hosts start theirs later
            words.append(numbered("rank", single))
        return ", ".join(words)

    def cluster(self, options: Options, backend: str, *, complete: bool = True) -> Cluster:
        """Everything so far, as `judge` sees it: the same object, until there is more.

        With `complete` False nobody else is expected: one participant's partial report.
        """
        now = (self._changes.total(), self.refusals.count, id(options), backend, complete)
        if self._made is None or self._made[0] != now:
            self._made = (now, self._make(options, backend, complete=complete))
        return self._made[1]

    def _make(self, options: Options, backend: str, *, complete: bool) -> Cluster:
        hosts: dict[Hashable, Host] = {}
        facts_of: dict[Hashable, dict[str, dict[str, Outcome]]] = defaultdict(dict)
        place = {seat: who.host for seat, who in self._signed_in.items()}
        for seat, _ in sorted(self._signed_in.items(), key=_by_local_rank):
            for check, rounds in self._facts_in_parts(seat).of_host.items():
                facts_of[place[seat]].setdefault(check, {}).update(rounds)
        in_order = sorted(self._signed_in.items(), key=_by_rank)
        for seat, who in in_order:
            if place[seat] not in hosts:
                hosts[place[seat]] = Host(
                    id=len(hosts),
                    name=who.host_name,
                    node_rank=who.launch.node_rank,
                    reported=True,
                    addresses=who.addresses,
                    facts=facts_of[place[seat]],
                    joined=complete and seat not in self._late,
                    key=_digest(who.host_key),
                )
        ranks = [self._rank(seat, who, hosts[place[seat]]) for seat, who in in_order]
        absent_hosts: tuple[Host, ...] = ()
        if complete:
            absent_hosts, absent = self._absent(tuple(hosts.values()))
            ranks += absent
        return Cluster(
            world_size=self._launch.world_size or len(ranks),
            nnodes=self._nnodes(len(hosts)),
            backend=backend,
            level=options.level,
            hosts=(*hosts.values(), *absent_hosts),
            ranks=tuple(ranks),
            join_timeout_s=options.join_timeout_s if self._waited_s is None else self._waited_s,
            collective_timeout_s=options.collective_timeout_s,
            complete=complete,
            expected=options.expected,
            job=options.job,
        )

    def _nnodes(self, here: int) -> int:
        """Number of hosts of the job; `here`: that have reported.

        Once all ranks are here it is counted, unless a variable gives it: what follows from the
        ranks of one host is wrong where hosts have different numbers of them.
        """
        if self._launch.given("nnodes") is None and not self.missing():
            return here
        return self._launch.nnodes or here

    def _rank(self, seat: int, who: SignIn, host: Host) -> Rank:
        parts = self._facts_in_parts(seat)
        return Rank(
            seat=seat,
            rank=who.launch.rank,
            local_rank=who.launch.local_rank,
            host=host,
            reported=True,
            launch=who.launch,
            env=who.env,
            device=who.device,
            backend=who.backend,
            pid=who.pid,
            signed_in_s=round(self._signed_in_s[seat], 3),
            last_breadcrumb=parts.last.last_step if parts.last else None,
            joining=who.joining,
            facts=parts.of_rank,
        )

    def _facts_in_parts(self, seat: int) -> _Parted:
        """Facts of a participant, of its host and its own: sorted once, not for each cluster."""
        if seat not in self._parted:
            facts, scopes = self._facts[seat], self._scopes
            self._parted[seat] = parts = _Parted(
                {check: rounds for check, rounds in facts.items() if scopes.get(check) is _HOST},
                {
                    check: rounds
                    for check, rounds in facts.items()
                    if scopes.get(check) is not _HOST
                },
            )
            for rounds in facts.values():
                for outcome in rounds.values():
                    parts.pass_by(outcome)
        return self._parted[seat]

    def _absent(self, hosts: tuple[Host, ...]) -> tuple[tuple[Host, ...], list[Rank]]:
        """Expected ranks that did not sign in, and the hosts where they would run.

        They are made once for each state of the sign-in: a job may expect 131,072.
        """
        refused = self.refusals.count
        if self._vacant is None or self._vacant[0] != refused:
            self._vacant = (refused, *self._make_absent(hosts))
        _, made, ranks = self._vacant
        known = {host.id: host for host in hosts}
        return made, [
            replace(rank, host=known[rank.host.id]) if rank.host.id in known else rank
            for rank in ranks
        ]

    def _make_absent(self, hosts: tuple[Host, ...]) -> tuple[tuple[Host, ...], list[Rank]]:
        made: dict[int | None, Host] = {}
        known = {host.node_rank: host for host in hosts if host.node_rank is not None}
        names = names_of_nodes(
            self._environ,
            self._launch.nnodes or 1,
            self._launch.master_addr or "",
            ((host.node_rank, host.name or "") for host in hosts),
        )
        ranks = []
        seat = max(self._signed_in, default=-1)
        for rank in self.missing():
            node, local = self._home_of(rank)
            host = known.get(node) if node is not None else None
            if host is None:
                name = None if node is None else names.get(node)
                host = made.setdefault(node, Host(len(hosts) + len(made), name, node, False))
            seat += 1
            refused = self.refusals.code_of(rank, node)
            ranks.append(Rank(seat, rank, local, host, reported=False, refused=refused))
        return tuple(made.values()), ranks

    def _home_of(self, rank: int) -> tuple[int | None, int | None]:
        """(node rank, local rank) of a rank; None where unknown."""
        if self._layout is not None:
            return self._layout.home_of(rank)
        per_node = self._launch.local_world_size
        return divmod(rank, per_node) if per_node else (None, None)


def _digest(key: str) -> str:
    """Digest of a host key: it differs between hosts, and hides the values in the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _by_rank(item: tuple[int, SignIn]) -> tuple[int, int]:
    seat, who = item
    return (-1 if who.launch.rank is None else who.launch.rank), seat


def _by_local_rank(item: tuple[int, SignIn]) -> tuple[int, int]:
    """Higher local ranks first, so that the rank that speaks for a host overwrites the others."""
    seat, who = item
    return -(who.launch.local_rank or 0), -seat
