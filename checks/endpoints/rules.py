"""Endpoints of the job's services: ports that cannot be had, calls that failed. Pure."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Step,
    Where,
    host_labels,
    look,
    shell,
)
from nccl_doctor.toolkit.advice import end_processes
from nccl_doctor.toolkit.firewall.netfilter import by_rule
from nccl_doctor.toolkit.firewall.portrules import fits, how_to_let_pass
from nccl_doctor.toolkit.hosts import link_names
from nccl_doctor.toolkit.net.endpoints import read_endpoint
from nccl_doctor.toolkit.net.ports import reserve_port
from nccl_doctor.toolkit.peers.matrix import unread_s
from nccl_doctor.toolkit.shared_kinds import HOST_ANSWERS_LATE

IN_USE = Kind(
    code="endpoint-in-use",
    layer=Layer.PORT,
    title="The port of a service of the job is in use on its host",
    why="The service ends with `Address already in use` when the job starts.",
    fix="end the process that holds it, or give the service another port",
    severity=Severity.WARN,
    effects=(Effect.JOB_ONLY,),
)
PRIVILEGED = Kind(
    code="endpoint-privileged",
    layer=Layer.PORT,
    title="This user may not bind the port of a service of the job",
    why="Ports below ip_unprivileged_port_start (1024) are for root: the service ends with "
    "`Permission denied`.",
    fix="give the service a port from 1024 to 32767",
    effects=(Effect.JOB_ONLY,),
)
EPHEMERAL = Kind(
    code="endpoint-ephemeral",
    layer=Layer.PORT,
    title="The port of a service is in the range from which the kernel assigns ports to clients",
    why="An outgoing connection may hold it at the moment when the service starts.",
    fix="give the service a port below the range, or reserve its port",
    severity=Severity.WARN,
    effects=(Effect.JOB_ONLY,),
)
BLOCKED = Kind(
    code="endpoint-blocked",
    layer=Layer.PORT,
    title="Hosts of the job cannot reach the port of a service on its host",
    why="A firewall, a security group or a network policy lets other ports pass, and not this one: "
    "the other hosts wait for the service until they give up.",
    fix="open the port on its host for the hosts of the job",
    effects=(Effect.JOB_ONLY,),
)
UNREACHABLE = Kind(
    code="endpoint-unreachable",
    layer=Layer.PORT,
    title="A service outside of the job cannot be reached",
    why="The job needs it, and waits for it or stops.",
    fix="check name, address and port; open the way to it for this host",
    effects=(Effect.JOB_ONLY,),
)

_SAMPLES = 2
"""Callers of one endpoint whose rules are read."""
_MOST_WORDS = 3
_WORDS = {
    "dropped": "no answer",
    "refused": "connection refused",
    "rejected": "rejected by a firewall",
    "unreachable": "network is unreachable",
    "no-neighbour": "no host answers for the address on the local network",
    "turned-back": "a router on the way answers that it cannot deliver",
    "intercepted": "something else answers there",
}
Facts = Mapping[str, Any]


class _Rule(NamedTuple):
    """A rule that stops calls: the hosts that have it, the end of a message, and what to type."""

    seats: tuple[int, ...] = ()
    words: str = ""
    fix: str = ""


class Endpoints:
    """Everything that is known of the endpoints, by their text."""

    def __init__(self, cluster: Cluster, check: str, reach: str, rules: str = "") -> None:
        """Read the facts of the rounds."""
        self._labels = host_labels(cluster)
        self._nnodes = cluster.nnodes
        self._seen: dict[str, dict[int, Facts]] = {}
        for rank, facts in cluster.facts(check, reach):
            for one in facts.get("endpoints", ()):
                self._seen.setdefault(one["endpoint"], {})[rank.seat] = one
        self._rules = {
            (rank.seat, endpoint): read
            for rank, facts in (cluster.facts(check, rules) if rules else ())
            for endpoint, read in facts.get("rules", {}).items()
        }

    def looks(self) -> list[dict[str, Any]]:
        """Rules to be read: at the host of an endpoint, and at some of those that failed."""
        found = []
        for endpoint, seen in self._seen.items():
            failed = _failed(seen)
            for seat in sorted(failed)[:_SAMPLES]:
                one = failed[seat]
                look = {"endpoint": endpoint, "address": one["address"], "port": one["port"]}
                found.append({**look, "seat": seat, "in": False})
            if failed and (owner := _owner(seen)) is not None:
                one = failed[min(failed)]
                look = {"endpoint": endpoint, "address": one["address"], "port": one["port"]}
                found.append({**look, "seat": owner, "in": True})
        return found

    def ports(self) -> Iterator[Finding]:
        """Findings on ports that a service could not have."""
        for endpoint, seen in self._seen.items():
            for seat, one in seen.items():
                if one["mine"]:
                    yield from _port(endpoint, one, Where(hosts=(self._labels[seat],)))

    def calls(self) -> Iterator[Finding]:
        """Findings on calls that failed."""
        for endpoint, seen in self._seen.items():
            failed, owner = _failed(seen), _owner(seen)
            if owner is not None:
                tried = sum("outcome" in one for one in seen.values()) - len(_read_late(seen))
                yield from self._inside(endpoint, owner, tried, failed)
            elif not any(one.get("planned") is not None for one in seen.values()):
                yield from self._nowhere(endpoint, seen)
                yield from self._outside(endpoint, seen, failed)

    def read_late(self) -> Iterator[Finding]:
        """Findings on hosts of endpoints that had what was said, and read it too late."""
        for endpoint, seen in self._seen.items():
            late, owner = _read_late(seen), _owner(seen)
            tried = sum("outcome" in one for one in seen.values())
            if late and owner is not None:
                yield Finding(
                    HOST_ANSWERS_LATE,
                    f"{endpoint}: on new connections, data lay unread for up to "
                    f"{max(late.values()):.1f} s: {len(late)} of {tried} calls could not be judged",
                    Where(hosts=(self._labels[owner],)),
                    {"longest, s": {self._labels[seat]: waited for seat, waited in late.items()}},
                    confidence=Confidence.CERTAIN,
                )

    def _nowhere(self, endpoint: str, seen: Mapping[int, Facts]) -> Iterator[Finding]:
        """Findings on names and node ranks that lead nowhere."""
        host = read_endpoint(endpoint)[0]
        if host.isdecimal():
            if int(host) >= self._nnodes:
                yield Finding(
                    UNREACHABLE,
                    f"{endpoint}: the job has no node rank {host}, only 0 to {self._nnodes - 1}",
                    Where(nodes=(int(host),)),
                    fix="give another node rank, or the name of the host",
                )
            return
        for seat, one in seen.items():
            if one["error"]:
                yield Finding(
                    UNREACHABLE,
                    f"{endpoint}: the name does not resolve: {one['error']}",
                    Where(hosts=(self._labels[seat],)),
                    fix=Fix(
                        look(shell("getent hosts {}", host)),
                        alternatives=["correct the name, or add it to /etc/hosts or name server"],
                    ),
                )

    def _outside(
        self, endpoint: str, seen: Mapping[int, Facts], failed: Mapping[int, Facts]
    ) -> Iterator[Finding]:
        """Findings on a host that is none of the job: each host that fails is the place."""
        tried = [one for one in seen.values() if "outcome" in one]
        refused = all(one["outcome"] == "refused" for one in tried)
        others = len(tried) - len(failed)
        for words, seats in _by_words(failed).items():
            rule = self._rule(endpoint, {seat: failed[seat] for seat in seats}, None)
            more = f"; {others} other hosts reach it" if others else ""
            more += "; its service may start with the job" if refused else ""
            yield Finding(
                UNREACHABLE,
                f"{endpoint}: {words}{more}{rule.words}",
                Where(hosts=tuple(sorted(self._labels[seat] for seat in seats))),
                {"addresses": sorted({failed[seat]["address"] for seat in seats})},
                fix=rule.fix,
                severity=Severity.INFO if refused else None,
                confidence=Confidence.CERTAIN if rule.seats else Confidence.LIKELY,
            )

    def _inside(
        self, endpoint: str, owner: int, tried: int, failed: Mapping[int, Facts]
    ) -> Iterator[Finding]:
        """The finding on a host of the job: where its own rule, or all others, point at it."""
        if not failed:
            return
        words = ", ".join(list(_by_words(failed))[:_MOST_WORDS])
        rule = self._rule(endpoint, failed, owner)
        nobody = 1 < tried == len(failed)
        hosts = rule.seats or ((owner,) if nobody else ())
        strange = sorted({one["address"] for one in failed.values() if one.get("foreign")})
        if strange:
            words += f" at {', '.join(strange)}, which is no address of {self._labels[owner]}"
        yield Finding(
            BLOCKED,
            f"{endpoint}: {words} ({len(failed)} of {tried} hosts){rule.words}",
            Where(
                hosts=tuple(sorted(self._labels[seat] for seat in hosts)),
                links=link_names(self._labels, ((seat, owner) for seat in failed)),
            ),
            {"addresses": sorted({one["address"] for one in failed.values()})},
            fix=rule.fix
            or f"on {self._labels[owner]}: open tcp port {failed[min(failed)]['port']} for the "
            "hosts of the job, in its firewall, security group and ACLs",
            confidence=Confidence.CERTAIN
            if rule.seats
            else Confidence.LIKELY
            if nobody or self._are_read(endpoint, failed)
            else Confidence.POSSIBLE,
        )

    def _rule(self, endpoint: str, failed: Mapping[int, Facts], owner: int | None) -> _Rule:
        """The rule of a host that surely stops these calls: that of the owner before others."""
        first = failed[min(failed)]
        for seat in ([] if owner is None else [owner]) + sorted(failed):
            hit = self._hit(seat, endpoint, failed.get(seat, first))
            if hit:
                callers = (s for s in sorted(failed) if self._hit(s, endpoint, failed[s]))
                rules = self._rules[seat, endpoint]
                return _Rule(
                    (seat,) if seat == owner else tuple(callers),
                    f"; {by_rule(hit)}",
                    how_to_let_pass(rules, hit, self._labels[seat]),
                )
        return _Rule()

    def _are_read(self, endpoint: str, failed: Mapping[int, Facts]) -> bool:
        """True if the rules of the callers are known: else it may be they that drop the answers."""
        looked = (self._rules.get((seat, endpoint)) for seat in sorted(failed)[:_SAMPLES])
        return all(rules and rules["readable"] for rules in looked)

    def _hit(self, seat: int, endpoint: str, one: Facts) -> Facts | None:
        rules = self._rules.get((seat, endpoint))
        return fits(rules, one) if rules else None


def _owner(seen: Mapping[int, Facts]) -> int | None:
    return next((seat for seat, one in seen.items() if one["mine"]), None)


def _failed(seen: Mapping[int, Facts]) -> dict[int, Facts]:
    """Calls that failed; where the port could not be had, a refusal says nothing of the way, nor
    does silence where its host read too late what was said.
    """
    owner, late = _owner(seen), _read_late(seen)
    good = {"ok"}
    if owner is not None and seen[owner]["bind_errno"] is not None:
        good.add("refused")
    return {
        seat: one
        for seat, one in seen.items()
        if one.get("outcome", "ok") not in good and seat not in late
    }


def _read_late(seen: Mapping[int, Facts]) -> dict[int, float]:
    """Seat of each caller → seconds for which what it said lay unread, while it waited in vain."""
    owner = _owner(seen)
    if owner is None:
        return {}
    waited = {
        seat: unread_s({"attempts": [one], "source": one.get("source")}, seen[owner])
        for seat, one in seen.items()
    }
    return {seat: seconds for seat, seconds in waited.items() if seconds}


def _by_words(failed: Mapping[int, Facts]) -> dict[str, list[int]]:
    """Result in words → seats, the most frequent first."""
    words = {s: _WORDS.get(one["outcome"]) or str(one["detail"]) for s, one in failed.items()}
    return {
        word: [seat for seat in failed if words[seat] == word]
        for word, _ in Counter(words.values()).most_common()
    }


def _port(endpoint: str, one: Facts, where: Where) -> Iterator[Finding]:
    port = one["port"]
    if one["bind_errno"] == errno.EADDRINUSE and one.get("is_master"):
        yield Finding(
            IN_USE,
            f"{endpoint} is MASTER_PORT as well",
            where,
            fix="give the service another port",
            severity=Severity.FAIL,
        )
    elif one["bind_errno"] == errno.EADDRINUSE:
        held = one.get("holder") or {"pid": None, "command": "", "uid": None}
        who = f"process {held['pid']} ({held['command']}, user id {held['uid']})"
        if held["pid"] is None:
            who = "a process that this user may not see"
            who += f" (user id {held['uid']})" if held["uid"] is not None else ""
        seen = Fix(
            look(
                shell("sudo ss -ltnp 'sport = :{:number}'", port),
                "whether that is the service itself",
            )
        )
        if held["pid"]:
            seen = end_processes([held["pid"]])
        yield Finding(
            IN_USE,
            f"{endpoint} is held by {who}",
            where,
            dict(held),
            fix=Fix(
                text="give the service another port, if that is not the service itself",
                alternatives=[seen],
            ),
            severity=Severity.INFO if one.get("known") else None,
            confidence=Confidence.LIKELY,
        )
    elif one["bind_errno"] in (errno.EACCES, errno.EPERM):
        yield Finding(PRIVILEGED, f"{endpoint}: {one['bind_error']}", where)
    elif one["bind_errno"] is not None:
        yield Finding(
            IN_USE,
            f"{endpoint}: {one['bind_error']}",
            where,
            confidence=Confidence.LIKELY,
        )
    elif one["ephemeral"]:
        low, high = one["ephemeral"]
        yield Finding(
            EPHEMERAL,
            f"{endpoint} is in ip_local_port_range {low}–{high}",
            where,
            fix=Fix(
                Step(
                    shell("sysctl -w {}", reserve_port(port, one["reserved"])),
                    undo=shell(
                        'sysctl -w net.ipv4.ip_local_reserved_ports="{:number}"', one["reserved"]
                    ),
                    note="as root",
                ),
                alternatives=[f"give the service a port below {low}"],
            ),
        )
