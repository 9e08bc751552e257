"""Messages that one process has received, and the cluster that it makes of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nccl_doctor.gather.messages import SignIn
from nccl_doctor.gather.refusals import Refusals
from nccl_doctor.launch.ranks import names_of_nodes, placed
from nccl_doctor.model.cluster import Cluster, Facts, Host, Outcome, OutcomeStatus, Rank
from nccl_doctor.model.findings import Finding, Scope, Where, numbered
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.model.layout import Layout
from nccl_doctor.model.options import Options
from nccl_doctor.system.masking import masked_job

# Facts of the participants of a run: of their hosts, and their own. They grow, round by round.


_Growing = dict[str, Mapping[str, Outcome]]


class _Seat:
    """Facts of one participant. `last` is the last outcome with steps that did not end well, else
    the last.
    """

    __slots__ = ("last", "of_host", "of_rank")

    def __init__(self) -> None:
        self.of_host: dict[str, dict[str, Outcome]] = {}
        self.of_rank: dict[str, dict[str, Outcome]] = {}
        self.last: Outcome | None = None

    def pass_by(self, outcome: Outcome) -> None:
        """Note the steps of the next outcome."""
        good = OutcomeStatus.OK
        if outcome.breadcrumbs and (
            self.last is None or self.last.status is good or outcome.status is not good
        ):
            self.last = outcome


class FactsOfSeats:
    """Facts by seat. What is given out grows with them: there are ten thousand ranks and dozens of
    rounds, and each round would else need all of it anew.
    """

    def __init__(self, scopes: Mapping[str, Scope]) -> None:
        self._scopes = scopes
        self._seats: dict[int, _Seat] = {}
        self._of_hosts: dict[Hashable, _Growing] = {}
        self._seats_of: dict[Hashable, tuple[int, ...]] = {}
        self._host_of: dict[int, Hashable] = {}
        self._changed: set[Hashable] = set()

    def take(self, seat: int, facts: Facts) -> None:
        """Take the facts of a sign-in."""
        for check, rounds in facts.items():
            for name, outcome in rounds.items():
                self.record(seat, check, name, outcome)

    def record(self, seat: int, check: str, round_name: str, outcome: Outcome) -> None:
        """Take one outcome."""
        here = self._seats.setdefault(seat, _Seat())
        of_host = self._scopes.get(check) is Scope.HOST
        (here.of_host if of_host else here.of_rank).setdefault(check, {})[round_name] = outcome
        here.pass_by(outcome)
        if of_host and (host := self._host_of.get(seat)) is not None:
            self._changed.add(host)

    def forget(self, seat: int) -> None:
        """Forget a participant."""
        self._seats.pop(seat, None)

    def of_rank(self, seat: int) -> Facts:
        """Facts of a participant alone, which grow."""
        return self._seats.setdefault(seat, _Seat()).of_rank

    def of_hosts(self, hosts: Mapping[Hashable, Iterable[int]]) -> Mapping[Hashable, Facts]:
        """Facts of each host, which grow with each call of `grow`, by the seats of its ranks: where
        two say something of the same, the later one of them is heard.
        """
        self._of_hosts = {host: {} for host in hosts}
        self._seats_of = {host: tuple(seats) for host, seats in hosts.items()}
        self._host_of = {seat: host for host, seats in self._seats_of.items() for seat in seats}
        self._changed = set(hosts)
        self.grow()
        return self._of_hosts

    def grow(self) -> None:
        """Let the facts of the hosts have what was recorded since."""
        changed, self._changed = self._changed, set()
        for host in changed:
            speaking = [
                self._seats[seat].of_host
                for seat in self._seats_of[host]
                if seat in self._seats and self._seats[seat].of_host
            ]
            self._of_hosts[host].update(speaking[0] if len(speaking) == 1 else _merged(speaking))

    def last_step(self, seat: int) -> str | None:
        """Last step of a participant; None if it announced none."""
        here = self._seats.get(seat)
        return here.last.last_step if here is not None and here.last is not None else None


def _merged(said: Iterable[Mapping[str, Mapping[str, Outcome]]]) -> _Growing:
    merged: dict[str, Any] = {}
    for facts in said:
        for check, rounds in facts.items():
            merged.setdefault(check, {}).update(rounds)
    return merged


_NEVER = 1 << 62


@dataclass(frozen=True, eq=False)
class _SignedIn:
    """Hosts and ranks as they are after the sign-in, and its state then. Their facts grow."""

    state: Hashable
    hosts: tuple[Host, ...]
    ranks: tuple[Rank, ...]
    here: int
    """Number of hosts that are here."""


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
        self._facts = FactsOfSeats(scopes)
        self._host_came_s: dict[Hashable, float] = {}
        self._starts: dict[tuple[str, int | None], int] = {}
        """Number of restarts before a rank of a host signed in, the lowest one."""
        self._changes: Counter[str] = Counter()
        """Outcomes that were recorded for each check; and, below no name, all other changes."""
        self._places: _SignedIn | None = None
        self._made: tuple[int, Hashable, Cluster] | None = None
        self._new: set[str] = set()
        """Checks of which outcomes were recorded since a cluster was made."""

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
        del self._signed_in_s[seat]
        self._facts.forget(seat)
        gone = self._signed_in.pop(seat)
        self._starts.pop((gone.host_key, gone.launch.rank), None)
        self._host_came_s.pop(gone.host, None)
        self._by_token.pop(gone.token, None)
        return gone

    def sign_in(self, seat: int, who: SignIn, after_s: float) -> None:
        """Record the sign-in of a participant, which came `after_s` seconds or later after signing
        in began.

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
        self._changes[""] += 1
        if who.alone:
            self._alone[who.alone] = seat
        self._by_token[who.token] = seat
        self._signed_in[seat] = replace(who, facts={})  # which are kept below
        self._signed_in_s[seat] = after_s
        self._host_came_s.setdefault(who.host, after_s)
        start = who.host_key, launch.rank
        self._starts[start] = min(launch.restart_count, self._starts.get(start, _NEVER))
        self._facts.take(seat, who.facts)

    def lay_out(self, layout: Layout, waited_s: float | None = None) -> None:
        """Take the places that the hosts were given, and with them the ranks that are expected.

        `waited_s` is how long the hosts were waited for, if not for the join time-out.
        """
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
            self._facts.record(seat, check, round_name, outcome)
            self._changes[check] += 1
            self._new.add(check)

    def state(self, checks: Iterable[str]) -> Hashable:
        """Something that changes with every fact of these checks, and with every sign-in."""
        return (
            self._changes[""],
            self.refusals.all_told,
            *(self._changes[each] for each in checks),
        )

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
        missing = bool(self.missing())
        return self.refusals.findings(self.ranks_here(), hosts, missing=missing)

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

    def cluster(
        self,
        options: Options,
        backend: str,
        *,
        complete: bool = True,
        run_id: str = "",
        steps: bool = True,
    ) -> Cluster:
        """Everything so far, as `judge` sees it: the same object, until there is more. The facts
        of its hosts and ranks grow with what comes later.

        With `complete` False nobody else is expected: one participant's partial report. Without
        `steps` it does not say what each rank did last, which only a report shows.
        """
        places = self._placed(complete=complete)
        self._facts.grow()
        count, about = self._changes.total(), (places, id(options), backend, run_id, steps)
        if self._made is not None and self._made[:2] == (count, about):
            return self._made[2]
        if self._made is not None and self._made[1] == about and not steps:
            cluster = self._made[2].with_more(self._new)
        else:
            ranks = places.ranks
            if steps:
                ranks = tuple(
                    replace(rank, last_breadcrumb=self._facts.last_step(rank.seat))
                    for rank in ranks
                )
            cluster = Cluster(
                world_size=self._launch.world_size or sum(rank.reported for rank in ranks),
                nnodes=self._nnodes(places.here),
                backend=backend,
                level=options.level,
                hosts=places.hosts,
                ranks=ranks,
                join_timeout_s=options.join_timeout_s if self._waited_s is None else self._waited_s,
                collective_timeout_s=options.collective_timeout_s,
                complete=complete,
                expected=options.expected,
                job=masked_job(options.job),
                run_id=run_id,
            )
        self._made, self._new = (count, about, cluster), set()
        return cluster

    def _placed(self, *, complete: bool) -> _SignedIn:
        """Hosts and ranks, those that are absent too if it is `complete`; the same objects until
        somebody else signs in.
        """
        state = (self._changes[""], self.refusals.all_told, complete)
        if self._places is not None and self._places.state == state:
            return self._places
        seats_of: dict[Hashable, list[int]] = {}
        for seat, who in sorted(self._signed_in.items(), key=_by_local_rank):
            seats_of.setdefault(who.host, []).append(seat)
        facts_of = self._facts.of_hosts(seats_of)
        hosts: dict[Hashable, Host] = {}
        ranks: list[Rank] = []
        for seat, who in sorted(self._signed_in.items(), key=_by_rank):
            if who.host not in hosts:
                hosts[who.host] = Host(
                    id=len(hosts),
                    name=who.host_name,
                    node_rank=who.launch.node_rank,
                    reported=True,
                    addresses=who.addresses,
                    facts=facts_of[who.host],
                    joined=complete and seat not in self._late,
                    key=_digest(who.host_key),
                )
            ranks.append(self._rank(seat, who, hosts[who.host]))
        absent_hosts: tuple[Host, ...] = ()
        if complete:
            absent_hosts, absent = self._absent(tuple(hosts.values()))
            ranks += absent
        self._places = _SignedIn(state, (*hosts.values(), *absent_hosts), tuple(ranks), len(hosts))
        return self._places

    def _nnodes(self, here: int) -> int:
        """Number of hosts of the job; `here`: that have reported.

        Once all ranks are here it is counted, unless a variable gives it: what follows from the
        ranks of one host is wrong where hosts have different numbers of them.
        """
        if self._launch.given("nnodes") is None and not self.missing():
            return here
        return self._launch.nnodes or here

    def _rank(self, seat: int, who: SignIn, host: Host) -> Rank:
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
            joining=who.joining,
            facts=self._facts.of_rank(seat),
        )

    def _absent(self, hosts: tuple[Host, ...]) -> tuple[tuple[Host, ...], list[Rank]]:
        """Expected ranks that did not sign in, and the hosts where they would run."""
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
    """Digest of a host key: it differs between hosts, and hides the values in the key. Behind a dot
    that of the same without the name, which containers with one network have in common.
    """
    _, _, network = key.partition("|")
    parts = (key, network) if network else (key,)
    return ".".join(hashlib.sha256(each.encode()).hexdigest()[:16] for each in parts)


def _by_rank(item: tuple[int, SignIn]) -> tuple[int, int]:
    seat, who = item
    return (-1 if who.launch.rank is None else who.launch.rank), seat


def _by_local_rank(item: tuple[int, SignIn]) -> tuple[int, int]:
    """Higher local ranks first, so that the rank that speaks for a host overwrites the others."""
    seat, who = item
    return -(who.launch.local_rank or 0), -seat
