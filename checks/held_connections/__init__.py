"""Do silent connections between the hosts survive the run, or as long as --hold-idle says?

What it checks
--------------
Only with `--level full` or `--hold-idle SECONDS`. On each address that NCCL (bootstrap, and data
over sockets) or gloo would choose, every host connects to every other one (of more than 17 hosts,
to those 1, 2, 4, 8, … places further on), and nobody sends anything.

* `--level full`: they connect before all other tests in which hosts work together, and speak after
  them. So the silence is as long as these tests take, and the run no longer for it. The facts say
  how long it was (`idle_s`).
* `--hold-idle SECONDS`, at any level: instead, after all other tests, for SECONDS, and on more
  connections for a half and a quarter of it.

Then one side speaks and the other one answers; on some connections the side that called speaks
first, on others the side that was called. Where no answer comes within 4 s, or the connection was
cut, a new one is made at once. The finding is that the new one works and the old one does not.

Why it matters
--------------
Security groups, stateful firewalls, NAT and load balancers forget a connection that is silent for
too long, and then drop its packets or answer them with a reset. A job that pauses (a checkpoint, an
evaluation, a slow loader, rank 0 that loads alone) then hangs in its next collective, or ends with
`Connection timed out` or `Connection reset by peer`. NCCL, gloo and torch's TCPStore do not ask for
TCP keep-alive (SO_KEEPALIVE), so net.ipv4.tcp_keepalive_time alone changes nothing for them.

How to fix
----------
Raise the idle time-out of what stands between the hosts above the longest pause of the job:

* EC2 security groups: 350 s by default on instances with Nitro v6, five days on older ones; `aws
  ec2 modify-network-interface-attribute --network-interface-id <eni>
  --connection-tracking-specification TcpEstablishedTimeout=432000`. NAT gateways and VPC endpoints
  have 350 s that cannot be changed: keep the job's traffic off them.
* Google Cloud: its firewall forgets after 10 minutes, which cannot be changed: rules that allow
  ingress between the hosts of the job, on all tcp ports, in both directions.
* Azure: load balancers have 4 minutes by default, Azure Firewall 4 or 5: route the job around them.
* Linux: `sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=432000` on the firewall.

Where that is not possible, turn keep-alive on for all sockets of the job, with libkeepalive (a
package of Debian and Ubuntu): `export LD_PRELOAD=libkeepalive.so.0 KEEPIDLE=60 KEEPINTVL=60`.

When it is wrong
----------------
Only a silence of that length is tested: one that passes says nothing about a longer one. A run of
two minutes proves nothing about a security group that forgets after 350 s: give --hold-idle the
longest pause of the job, and a --timeout that is 90 s longer at least; where the other tests leave
too little time, the check is unknown and says how much is missing. With --level full alone it is a
warning, as nobody said that the job pauses that long. It is held once, on new ephemeral ports.
Where data goes over InfiniBand or RoCE, only the bootstrap of NCCL and the stores use such
connections: it is a warning then. With two hosts alone, a fault of a host cannot be told from one
of the link, unless the kernel of one forgets after such a time (check `idle_connections`). A
connection is not counted if no new one works either.

References
----------
AWS: EC2 user guide, security group connection tracking; Best Practices for TCP Connection
Management on EC2. Google Cloud: Compute Engine, troubleshooting (idle connections). Microsoft:
Azure Firewall, TCP session behavior. NVIDIA/nccl issue 1619, and src of 2.30.7 (no SO_KEEPALIVE);
tcp(7).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from nccl_doctor.api import (
    BEFORE,
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    Level,
    Round,
    Severity,
    Skip,
    Step,
    Turn,
    Untested,
    Where,
    export,
    host_labels,
    shell,
)
from nccl_doctor.toolkit.hosts import link_names
from nccl_doctor.toolkit.nccl.survey import given_answer, other_answers, survey
from nccl_doctor.toolkit.peers.echo import scoped
from nccl_doctor.toolkit.peers.matrix import job_roles

from .rules import SURENESS, Loss, losses, read_connections, seconds

if TYPE_CHECKING:  # they import asyncio, which a judge does not need
    from .listeners import Listener
    from .talk import Held

LOST = Kind(
    code="idle-connection-lost",
    layer=Layer.PORT,
    title="Connections are lost while nobody sends anything",
    why="Something between the hosts forgets silent connections: a job that pauses that long hangs "
    "in its next collective. NCCL and gloo send no keep-alive packets.",
    fix="raise the idle time-out of the security group, firewall or load balancer between these "
    "hosts",
    effects=(Effect.JOB_ONLY,),
)

HOLD = "hold"
THROUGH = "through"
"""Round at the end of the run, for connections that were opened before it."""
_LISTEN_S = 10.0
_START_S, _AFTER_S = 8.0, 18.0
"""Seconds for the start and for the answers of `talk`, which is imported where it is used."""
_RESERVE_S = 2.0
_SHORTEST_S = 1.0
_ALL_PARTNERS = 17
"""Hosts, up to which each one connects to all others."""
_MOST_ADDRESSES = 4
"""Addresses of one host that are tried."""
_LONGEST_KEPT_S = 60.0


class HoldFacts(TypedDict):
    """Facts that `observe` returns; `peers`: seat, as text → what became of each connection.

    `note` says what a silence of that length does not show.
    """

    idle_s: float
    nccl_data: str
    peers: dict[str, list[dict[str, Any]]]
    not_bound: dict[str, str]
    note: str


class HeldConnections(Check):
    """Holds silent connections between the hosts: through the run, or as long as the user says."""

    name = "held_connections"
    layer = Layer.SPEED
    cost = "minutes"
    kinds = (LOST,)
    together = True
    turn = Turn.LAST  # a long silence is not to take the time of other tests
    needs = (Layer.NAME, Layer.ROUTE, Layer.PORT, Layer.RANKS)
    keeps_sockets = True
    reads = ("idle_connections", "interfaces")

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round of all hosts, or one before and one after all others."""
        idle_s = cluster.job.hold_idle_s
        if idle_s is None and cluster.level is not Level.FULL:
            raise Skip(
                "--hold-idle SECONDS was not given: give the longest pause of the job; with "
                "--level full, connections are held as long as the run lasts"
            )
        if max(cluster.nnodes, len(cluster.hosts)) < 2:
            raise Skip("only one host: no peers")
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        seats = tuple(rank.seat for rank in first if rank is not None)
        if not seats:
            return ()
        given = {"nccl": other_answers(cluster)}
        if idle_s is None:
            begin_s, ask_s = _LISTEN_S + _START_S + 5, _LISTEN_S + 2 * _AFTER_S
            return [
                Round(BEFORE, (seats,), begin_s, given, may_shrink=True),
                Round(THROUGH, (seats,), ask_s, may_shrink=True),
            ]
        deadline_s = _LISTEN_S + _needed(idle_s) + 10
        return [Round(HOLD, (seats,), deadline_s, {"idle_s": idle_s, **given}, may_shrink=True)]

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Hold connections to the others, and answer theirs; in round `BEFORE`, only `opened`.

        Raises:
            Untested: no other host took part, or there is too little time.
        """
        if ctx.peers is None or len(ctx.group) < 2:
            raise Untested("no other host signed in")
        if ctx.round == THROUGH:
            from .through import ask_all

            idle_s, also, told = ask_all(ctx)
            return _facts(idle_s, also, told)
        with contextlib.ExitStack() as stack:
            if ctx.round == BEFORE:
                return self._begin(ctx, stack)
            return self._hold(ctx, stack)

    def _begin(self, ctx: Context, stack: contextlib.ExitStack) -> dict[str, Any]:
        from .through import begin_all

        if ctx.handoff is None:
            raise Untested("no file could be opened for connections")
        listeners, entries, also = _meet(ctx, stack)
        ctx.breadcrumb("connecting to the other hosts", addresses=len(entries))
        return {"opened": begin_all(ctx.handoff, listeners, entries, also)}

    def _hold(self, ctx: Context, stack: contextlib.ExitStack) -> HoldFacts:
        from .listeners import CALLER, LISTENER
        from .talk import hold
        from .through import door_of

        idle_s = float(ctx.params["idle_s"])
        listeners, entries, also = _meet(ctx, stack)
        short_s = _needed(idle_s) + _RESERVE_S - ctx.left()
        if short_s > 0:
            more = math.ceil(short_s / 10) * 10
            raise Untested(
                f"a silence of {idle_s:g} s takes {_needed(idle_s):.0f} s, and the run has "
                f"{ctx.left():.0f} s left for it: give a --timeout that is {more} s longer"
            )
        shorter = [idle_s / part for part in (2, 4) if idle_s / part >= _SHORTEST_S]
        plan = [(CALLER, idle_s), (LISTENER, idle_s), *((CALLER, each) for each in shorter)]
        ctx.breadcrumb(f"holding silent connections for {idle_s:g} s", addresses=len(entries))
        made = hold(listeners, [door_of(entry) for _, entry in entries], plan)
        told = zip(entries, made, strict=True)
        return _facts(idle_s, also, [(s, e, each) for (s, e), results in told for each in results])

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each host that loses connections, and one for other links."""
        reports = [*cluster.facts(self.name, HOLD), *cluster.facts(self.name, THROUGH)]
        asked = cluster.job.hold_idle_s is not None
        labels = host_labels(cluster)
        sockets = "nccl" not in cluster.backend or any(
            facts.get("nccl_data") == "sockets" for _, facts in reports
        )
        forgets = _forgetful(cluster)
        severity = Severity.FAIL if sockets and asked else Severity.WARN
        for loss in losses(read_connections(reports)):
            yield _finding(loss, labels, forgets, severity)


def _meet(
    ctx: Context, stack: contextlib.ExitStack
) -> tuple[list[Listener], list[tuple[int, Mapping[str, Any]]], dict[str, Any]]:
    """Listen, and learn where the others do.

    Returns: own listeners, which end with the stack; seat and entry of each listener to call; facts
        about the choice.

    Raises:
        Untested: no other host was there.
    """
    from .listeners import Listener

    assert ctx.peers is not None
    ctx.breadcrumb("choosing interfaces as NCCL and gloo do")
    answer = given_answer(ctx)
    choice = survey(ctx.env, resolve_timeout_s=1.0, root=ctx.root, ask=lambda: answer)
    wanted = job_roles(ctx.backend, choice["nccl_data"] == "sockets")
    of_job = [each for each in choice["listen"] if wanted & set(each["roles"])]
    failed: dict[str, str] = {}
    listeners, posted = [], []
    for each in (of_job or choice["listen"])[:_MOST_ADDRESSES]:
        try:
            one = Listener.at(scoped(each["address"], each["interface"]))
        except OSError as error:
            failed[each["address"]] = error.strerror or str(error)
            continue
        stack.callback(one.close)
        listeners.append(one)
        posted.append({"interface": each["interface"], **one.door.to_json()})
    ctx.peers.post("listen", posted)
    ctx.breadcrumb("waiting for the listeners of the other hosts")
    theirs = ctx.peers.collect("listen", min(_LISTEN_S, ctx.left()))
    if not any(doors for seat, doors in theirs.items() if seat != ctx.seat):
        raise Untested(f"no other host was listening within {_LISTEN_S:g} s")
    entries = [(seat, each) for seat in partners(ctx) for each in theirs.get(seat, ())]
    return listeners, entries, {"nccl_data": choice["nccl_data"], "not_bound": failed}


def _facts(
    idle_s: float, also: Mapping[str, Any], told: Sequence[tuple[int, Mapping[str, Any], Held]]
) -> HoldFacts:
    """Facts about connections with the seat and the entry that were called.

    Raises:
        Untested: none of them was ever there.
    """
    if told and all(each.outcome == "untested" for *_, each in told):
        raise Untested("; ".join(sorted({each.detail for *_, each in told})[:3]))
    peers: dict[str, list[dict[str, Any]]] = {}
    for seat, entry, each in told:
        place = {name: entry[name] for name in ("address", "interface")}
        peers.setdefault(str(seat), []).append({**place, **each.to_json()})
    return {
        "idle_s": idle_s,
        "nccl_data": also["nccl_data"],
        "peers": peers,
        "not_bound": also["not_bound"],
        "note": f"silent for {idle_s:g} s: nothing is known of a longer silence, and so nothing of "
        "a security group that forgets later (EC2: after 350 s by default)",
    }


def _needed(idle_s: float) -> float:
    """Seconds that it takes to hold connections as long, at most."""
    return _START_S + idle_s + _AFTER_S


def partners(ctx: Context) -> list[int]:
    """Seats that this host connects to: all others, or some in each distance."""
    count, own = len(ctx.group), ctx.position
    if count <= _ALL_PARTNERS:
        steps = list(range(1, count))
    else:
        steps = [1 << power for power in range((count - 1).bit_length())]
    return [ctx.group[(own + step) % count] for step in steps]


def _forgetful(cluster: Cluster) -> dict[int, float]:
    """Seat → seconds after which the kernel of its host forgets a silent connection."""
    return {
        rank.seat: float(facts["established_s"])
        for rank, facts in cluster.facts("idle_connections")
    }


def _finding(
    loss: Loss, labels: Mapping[int, str], forgets: Mapping[int, float], severity: Severity
) -> Finding:
    ends = {seat for pair in loss.pairs for seat in pair}
    guilty = {
        seat: forgets[seat] for seat in sorted(ends) if forgets.get(seat, math.inf) <= loss.after_s
    }
    guilty = {seat: s for seat, s in guilty.items() if not loss.seats or seat in loss.seats}
    explains = bool(guilty) and all(set(pair) & set(guilty) for pair in loss.pairs)
    seats = loss.seats or (tuple(guilty) if explains else ())
    confidence = loss.confidence
    message = f"{loss.words} ({len(loss.pairs)} ordered pairs)"
    if explains:
        settings = ", ".join(sorted({f"{value:.0f}" for value in guilty.values()}))
        message += f"; nf_conntrack_tcp_timeout_established={settings} there"
        confidence = max(confidence, Confidence.LIKELY, key=SURENESS.index)
    return Finding(
        LOST,
        message,
        Where(
            hosts=tuple(sorted(labels[seat] for seat in seats)),
            links=link_names(labels, loss.pairs),
        ),
        {
            "connections": [
                {"from": labels[a], "to": labels[b], **record} for (a, b), record in loss.lost[:5]
            ]
        },
        fix=_fix(loss, tuple(labels[seat] for seat in guilty) if explains else ()),
        severity=severity,
        confidence=confidence,
    )


_REMEMBER = shell("sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=432000")


def _fix(loss: Loss, forgetful: Sequence[str]) -> str:
    if forgetful:
        return Fix(Step(_REMEMBER, tuple(sorted(forgetful))))
    keep_s = max(1, int(min(_LONGEST_KEPT_S, loss.after_s / 2)))
    on_ec2 = shell(
        "# aws ec2 modify-network-interface-attribute --network-interface-id DEVICE "
        "--connection-tracking-specification TcpEstablishedTimeout=432000"
    )
    keep = export(LD_PRELOAD="libkeepalive.so.0", KEEPIDLE=str(keep_s), KEEPINTVL=str(keep_s))
    why = "where it cannot be raised (net.ipv4.tcp_keepalive_time alone does nothing)"
    return Fix(
        text="raise the idle time-out of what stands between these hosts far above "
        f"{seconds(loss.after_s)}",
        alternatives=[
            Fix(Step(on_ec2, note="EC2; DEVICE is the eni", persists=True)),
            Fix(Step(shell("# {}", _REMEMBER), note="on a Linux firewall between them")),
            Fix(replace(keep, note=why)),
        ],
    )
