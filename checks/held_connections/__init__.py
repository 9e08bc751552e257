"""Do connections between the hosts survive a silence as long as --hold-idle says?

What it checks
--------------
Only with `--hold-idle SECONDS`, after all other tests. On each address that NCCL (bootstrap, and
data over sockets) or gloo would choose, every host connects to every other one (of more than 17
hosts, to those 1, 2, 4, 8, … places further on), and nobody sends anything. After SECONDS, and on
more connections after a half and a quarter of it, one side speaks and the other one answers; on
some the side that called speaks first, on others the side that was called. Where no answer comes
within 4 s, or the connection was cut, a new one is made at once. The finding is that the new one
works and the old one does not.

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
Only a silence of that length is tested: one that passes says nothing about a longer one, so give
the longest pause of the job, and a --timeout that is 90 s longer at least; where the other tests
leave too little time, the check is unknown and says how much is missing. It is held once, on new
ephemeral ports. Where data goes over InfiniBand or RoCE, only the bootstrap of NCCL and the
stores use such connections: it is a warning then. With two hosts alone, a fault of a host cannot be
told from one of the link, unless the kernel of one forgets after such a time (check
`idle_connections`). A connection is not counted if no new one works either.

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
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Kind,
    Layer,
    Round,
    Severity,
    Skip,
    Turn,
    Untested,
    Where,
    host_labels,
)
from nccl_doctor.toolkit.hosts import link_names
from nccl_doctor.toolkit.nccl.survey import given_answer, other_answers, survey
from nccl_doctor.toolkit.peers.echo import Door, scoped
from nccl_doctor.toolkit.peers.matrix import job_roles

from .rules import SURENESS, Loss, losses, read_connections, seconds

LOST = Kind(
    code="idle-connection-lost",
    layer=Layer.PORT,
    title="Connections are lost while nobody sends anything",
    why="Something between the hosts forgets silent connections: a job that pauses that long hangs "
    "in its next collective. NCCL and gloo send no keep-alive packets.",
    fix="raise the idle time-out of the security group, firewall or load balancer between these "
    "hosts",
    later=True,
)

HOLD = "hold"
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
    """Facts that `observe` returns; `peers`: seat, as text → what became of each connection."""

    idle_s: float
    nccl_data: str
    peers: dict[str, list[dict[str, Any]]]
    not_bound: dict[str, str]


class HeldConnections(Check):
    """Holds silent connections between the hosts, where the user asks for it."""

    name = "held_connections"
    layer = Layer.SPEED
    cost = "minutes"
    kinds = (LOST,)
    together = True
    turn = Turn.LAST  # a long silence is not to take the time of other tests
    needs = (Layer.NAME, Layer.ROUTE, Layer.PORT, Layer.RANKS)
    reads = ("idle_connections", "interfaces")

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round of all hosts."""
        idle_s = cluster.job.hold_idle_s
        if idle_s is None:
            raise Skip("--hold-idle SECONDS was not given: give the longest pause of the job")
        if max(cluster.nnodes, len(cluster.hosts)) < 2:
            raise Skip("only one host: no peers")
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        seats = tuple(rank.seat for rank in first if rank is not None)
        if not seats:
            return ()
        deadline_s = _LISTEN_S + _needed(idle_s) + 10
        given = {"idle_s": idle_s, "nccl": other_answers(cluster)}
        return [Round(HOLD, (seats,), deadline_s, given, may_shrink=True)]

    def observe(self, ctx: Context) -> HoldFacts:
        """Hold connections to the others, and answer theirs.

        Raises:
            Untested: no other host took part, or there is too little time.
        """
        from .talk import CALLER, LISTENER, Listener, hold

        idle_s = float(ctx.params["idle_s"])
        if ctx.peers is None or len(ctx.group) < 2:
            raise Untested("no other host signed in")
        ctx.breadcrumb("choosing interfaces as NCCL and gloo do")
        answer = given_answer(ctx)
        choice = survey(ctx.env, resolve_timeout_s=1.0, root=ctx.root, ask=lambda: answer)
        wanted = job_roles(ctx.backend, choice["nccl_data"] == "sockets")
        of_job = [each for each in choice["listen"] if wanted & set(each["roles"])]
        failed: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            listeners, posted = [], []
            for each in (of_job or choice["listen"])[:_MOST_ADDRESSES]:
                try:
                    one = Listener(scoped(each["address"], each["interface"]))
                except OSError as error:
                    failed[each["address"]] = error.strerror or str(error)
                    continue
                stack.callback(one.close)
                listeners.append(one)
                posted.append({"interface": each["interface"], **one.door.to_json()})
            ctx.peers.post("listen", posted)
            ctx.breadcrumb("waiting for the listeners of the other hosts")
            theirs = ctx.peers.collect("listen", min(_LISTEN_S, ctx.left()))
            entries = [(seat, each) for seat in partners(ctx) for each in theirs.get(seat, ())]
            if not any(doors for seat, doors in theirs.items() if seat != ctx.seat):
                raise Untested(f"no other host was listening within {_LISTEN_S:g} s")
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
            doors = [Door(e["address"], e["port"], e["token"], e["answer"]) for _, e in entries]
            made = hold(listeners, doors, plan)
        peers: dict[str, list[dict[str, Any]]] = {}
        for (seat, entry), results in zip(entries, made, strict=True):
            place = {name: entry[name] for name in ("address", "interface")}
            peers.setdefault(str(seat), []).extend({**place, **r.to_json()} for r in results)
        tested = [r.outcome != "untested" for results in made for r in results]
        if tested and not any(tested):
            reasons = sorted({r.detail for results in made for r in results})
            raise Untested("; ".join(reasons[:3]))
        return {
            "idle_s": idle_s,
            "nccl_data": choice["nccl_data"],
            "peers": peers,
            "not_bound": failed,
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each host that loses connections, and one for other links."""
        reports = list(cluster.facts(self.name, HOLD))
        labels = host_labels(cluster)
        sockets = "nccl" not in cluster.backend or any(
            facts.get("nccl_data") == "sockets" for _, facts in reports
        )
        forgets = _forgetful(cluster)
        for loss in losses(read_connections(reports)):
            yield _finding(loss, labels, forgets, Severity.FAIL if sockets else Severity.WARN)


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


def _fix(loss: Loss, forgetful: Sequence[str]) -> str:
    if forgetful:
        return (
            f"on {', '.join(sorted(forgetful))}: "
            "sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=432000"
        )
    keep_s = max(1, int(min(_LONGEST_KEPT_S, loss.after_s / 2)))
    return (
        f"raise the idle time-out of what stands between these hosts far above "
        f"{seconds(loss.after_s)}: on EC2, aws ec2 modify-network-interface-attribute "
        "--network-interface-id <eni> --connection-tracking-specification "
        "TcpEstablishedTimeout=432000; on a Linux firewall, sysctl -w "
        "net.netfilter.nf_conntrack_tcp_timeout_established=432000; where it cannot be raised, "
        f"export LD_PRELOAD=libkeepalive.so.0 KEEPIDLE={keep_s} KEEPINTVL={keep_s} for the job "
        "(net.ipv4.tcp_keepalive_time alone does nothing: NCCL and gloo do not set SO_KEEPALIVE)"
    )
