"""Rules of check master_addr: what the answers of all hosts say, of each host and of the master."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Rank,
    Severity,
    Step,
    Where,
    likely_address,
    look,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.hosts import WHO, everybody_came_in, is_namesake, who_has_what
from nccl_doctor.toolkit.net.dial import SILENCE_S
from nccl_doctor.toolkit.net.interfaces import is_loopback
from nccl_doctor.toolkit.net.names import LookUp, meant_address
from nccl_doctor.toolkit.relaunch import endpoint_of, start_with
from nccl_doctor.toolkit.shared_kinds import ADDR_DIGITS_ONLY, ADDR_LOOPBACK, ADDR_UNRESOLVABLE
from nccl_doctor.toolkit.slurm import address_of, place_of_host, slurm_hosts

ADDR_DIFFERS = Kind(
    code="addr-differs",
    layer=Layer.NAME,
    title="MASTER_ADDR leads to different machines on different hosts",
    why="A host that looks for rank 0 at another address never reaches it.",
    fix=Fix(Step(shell("# export MASTER_ADDR=ADDRESS"), On.EVERY, note="of rank 0's host")),
)
ADDR_NOT_ON_MASTER = Kind(
    code="addr-not-on-master",
    layer=Layer.NAME,
    title="MASTER_ADDR is not an address of rank 0's host",
    why="Rank 0 serves the store on its own host; all other ranks look for it elsewhere.",
    fix=Fix(
        Step(shell("# export MASTER_ADDR=ADDRESS"), On.EVERY, note="of the host that runs rank 0"),
        alternatives=["start rank 0 on the host that MASTER_ADDR names"],
    ),
)
ADDR_FAMILY_MIXED = Kind(
    code="addr-family-mixed",
    layer=Layer.NAME,
    title="MASTER_ADDR has addresses of an IP family that this host cannot use",
    why="torch tries the answers in the resolver's order, as a rule IPv6 first. Without a route "
    "each costs an attempt, and if there is no other answer the master cannot be reached.",
    fix="remove the AAAA record of the master, or give this host an IPv6 route",
    severity=Severity.WARN,
)
DNS_SLOW = Kind(
    code="dns-slow",
    layer=Layer.NAME,
    title="Name look-ups are slow",
    why="torch looks up the name of every peer when it connects, for its log: each connection of "
    "the store waits for it.",
    fix="repair the name server in /etc/resolv.conf, or list the hosts of the job in /etc/hosts",
    severity=Severity.WARN,
    effects=(Effect.DELAYS,),
)

_PLAIN = re.compile(r"[\w.:% -]+")
"""A line of /etc/hosts that no shell takes for anything else."""
_SHOWN = 4
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


class View:
    """The facts of one host, and what the rules need to know of it.

    `port` has the facts of check `port`, which looks the name up and calls for as long as hosts may
    join.
    """

    def __init__(
        self,
        cluster: Cluster,
        rank: Rank,
        facts: Mapping[str, Any],
        port: Mapping[str, Any] | None,
    ) -> None:
        self.rank, self.host, self.facts = rank, rank.host, facts
        self.name = str(facts["master_addr"])
        self.found = LookUp.from_json(facts["master"])
        self.answers = self.found.answers
        self.came_s: float | None = None
        self.road: Mapping[str, Any] = (port or {}).get("knock", {})
        self.limit_s = (port or {}).get("store_timeout_s")
        late = self.road.get("name")
        if late and late["answers"] and not self.answers:
            self.answers, self.came_s = tuple(late["answers"]), late["came_s"]
        self.meant = meant_address(self.name)
        """What MASTER_ADDR says without brackets, or without zeros that make a number octal."""
        octal = "." in self.meant and self.meant not in self.answers
        self.is_digits = self.name.isdecimal() or (octal and bool(self.answers))
        self.is_loopback = bool(self.answers) and all(is_loopback(a) for a in self.answers)
        self.leads_somewhere = bool(self.answers) and not (self.is_digits or self.is_loopback)
        self.is_master = any(other.rank == 0 for other in cluster.ranks_on(rank.host))
        self.got_in = rank.host.joined and not self.is_master
        """True if it reached the coordinator through MASTER_ADDR; rank 0 needs not to."""

    @property
    def where(self) -> Where:
        """The host as a place."""
        return Where(hosts=(self.host.name,) if self.host.name else ())

    @property
    def shown(self) -> str:
        """MASTER_ADDR and where it leads, in words; an endpoint as it was given."""
        said = endpoint_of(self.rank.launch) or f"MASTER_ADDR={self.name}"
        return f"{said} resolves to {', '.join(self.answers)}"

    @property
    def meets(self) -> bool:
        """True if a store answers at MASTER_ADDR, and it is not one of this host."""
        last = self.road.get("last") or {}
        return last.get("answer") == "store" and not self.owns(str(last.get("address")))

    def owns(self, address: str) -> bool:
        """True if an address leads to this host."""
        return address in self.host.addresses or is_loopback(address)

    def is_kept_at(self, addresses: Collection[str]) -> bool:
        """True if torch does not go on from one of these: another program answers there, or it is
        silent for longer than the job waits.
        """
        last = self.road.get("last") or {}
        if last.get("answer") and last["address"] in addresses:
            return True
        silent = [
            at
            for at, became in self.road.get("passed", ())
            if became == "dropped"
            if at in addresses
        ]
        return self.limit_s is not None and self.limit_s < SILENCE_S * len(silent)

    def is_told(self) -> bool:
        """True if this host was given its node rank, which is else 0."""
        launch = self.rank.launch
        return launch is not None and launch.sources.get("node_rank") != "default"

    def is_elsewhere(self) -> bool:
        """True if this host certainly is not rank 0's, by its own launch record."""
        node = self.rank.launch.node_rank if self.rank.launch else None
        first_of_host = self.rank.local_rank == 0 and self.rank.rank
        return not self.is_master and bool(node if node is not None else first_of_host)

    def address(self) -> str | None:
        """The address of this host that peers can most likely reach."""
        likely = likely_address(self.facts["interfaces"], self.facts.get("source", ""))
        return likely and likely[1]


_LOCAL_ADDR = Fix(
    Step(
        shell("# --local-addr ADDRESS"),
        note="in the line of torchrun, on rank 0's host: its address",
    )
)


def unusable(view: View, views: Sequence[View], master: View | None) -> Iterator[Finding]:
    """Findings on a MASTER_ADDR that is no name, does not resolve here, or cannot be used;
    `master` is the host of rank 0.
    """
    name, found = view.name, view.found
    serves = (master and master.address()) or ""
    if view.is_digits and not view.got_in and not view.is_loopback:
        octal = "; a part that begins with 0 is octal" if view.meant else ""
        text = f"{view.shown}: it is read as a number{octal}"
        right = view.meant or serves
        steps = start_with([view.rank], "master_addr", right, On.HERE) if right else ()
        fix: str = Fix(*steps) if steps else ""
        yield Finding(
            ADDR_DIGITS_ONLY,
            text,
            view.where,
            fix=fix,
            effects=(Effect.SHUTS_OUT,) if view.is_master else (),
        )
    elif view.came_s is not None:
        yield Finding(
            ADDR_UNRESOLVABLE.variant(title="MASTER_ADDR did not resolve at first"),
            f"MASTER_ADDR={name} did not resolve at first ({found.error}); it resolved to "
            f"{view.answers[0]} after {view.came_s:.0f} s",
            view.where,
            fix=Fix(
                look(shell("until getent hosts {}; do sleep 1; done", name), "before the launch"),
                alternatives=["in Kubernetes: publishNotReadyAddresses: true on the service"],
            ),
            severity=Severity.INFO,  # torch asks again until its time-out
        )
    elif not view.answers:
        address = _answer_elsewhere(views, master) or serves
        fix = f"add rank 0's host to /etc/hosts here: ADDRESS {name}"
        nodes = slurm_hosts(view.rank.env.get("SLURM_JOB_NODELIST", ""))
        if name in nodes and _PLAIN.fullmatch(name):
            steps = start_with([view.rank], "master_addr", address_of(name), On.EVERY)
            fix = Fix(*(replace(step, note="by which Slurm reaches it") for step in steps))
        if "/" in name or name.count(":") == 1:
            fix = "MASTER_ADDR takes only a name or an address: the port goes into MASTER_PORT"
        elif address and _PLAIN.fullmatch(name):
            fix = Fix(_add_line(address, name))
        launch = view.rank.launch
        if view.meant:
            fix = Fix(*start_with([view.rank], "master_addr", view.meant, On.HERE))
        elif "%" in name:
            fix = _address_of_rank_0(view, "an address of rank 0's host without a zone", address)
        elif launch and launch.agent_store and launch.launcher != "ray":
            # With the c10d rendezvous it is the name that rank 0's agent found for itself.
            steps = fix.steps if isinstance(fix, Fix) else ()
            fix = Fix(*steps, text="" if steps else str(fix), alternatives=[_LOCAL_ADDR])
        late = "; it resolved later, as this host did sign in" if view.got_in else ""
        yield Finding(
            ADDR_UNRESOLVABLE,
            f"MASTER_ADDR={name} does not resolve: {found.error}{late}",
            view.where,
            {"took_s": list(found.took_s)},
            fix=fix,
            severity=Severity.WARN if view.got_in else None,
            confidence=Confidence.LIKELY if found.timed_out else Confidence.CERTAIN,
            effects=(Effect.SHUTS_OUT,) if view.is_master else (),
        )
    useless = [a for a in view.facts["no_route"] if ":" in a]
    if useless and view.leads_somewhere:
        works = view.got_in or view.is_master
        stuck = set(view.answers) <= set(view.facts["no_route"])
        yield Finding(
            ADDR_FAMILY_MIXED,
            f"{view.shown}, but there is no route to {', '.join(useless)}",
            view.where,
            fix=_for_literal(view) if name in useless else "",
            severity=Severity.INFO if works else Severity.FAIL if stuck else None,
        )


def _for_literal(view: View) -> Fix:
    """The fix for an IPv6 address as MASTER_ADDR, to which there is no route."""
    other = _address_of_rank_0(view, "the IPv4 address of rank 0's host")
    return Fix(text="give this host an IPv6 route", alternatives=[other])


def _address_of_rank_0(view: View, note: str, address: str = "") -> Fix:
    """The fix that puts another address, if it is known, where this host has MASTER_ADDR from."""
    steps = start_with([view.rank], "master_addr", address or "ADDRESS", On.EVERY)
    return Fix(*(replace(step, note=note) for step in steps))


def loopback(cluster: Cluster, views: Sequence[View]) -> Iterator[Finding]:
    """Findings on a MASTER_ADDR that is a loopback address."""
    master = host_of_rank_0(views)
    address = (master and master.address()) or ""
    # Seen from one machine, two node ranks that share it look the same.
    confidence = Confidence.CERTAIN if len(views) > 1 else Confidence.LIKELY
    for view in views:
        # Whether it is loopback on every host, not only by a line in this host's hosts file.
        anywhere = view.name in (*_LOOPBACK_NAMES, *view.answers)
        # Rank 0's host may resolve to 127.0.1.1: it does reach its own store there.
        theirs = anywhere and not everybody_came_in(cluster)
        if view.is_loopback and (theirs if view.is_master else not view.got_in):
            entry = f"take {view.name} off the loopback line of /etc/hosts"
            others = [] if anywhere else [Fix(text=entry)]
            steps = _lead_to(view, views, address)
            if len(views) == 1 and view.is_master and not view.is_told():
                steps = _any_of_them(view, address)  # each host may take itself for node 0
            fix = Fix(*steps, alternatives=others)
            said, twin = "", is_namesake(view.rank)
            if twin:  # its own line in /etc/hosts is right, and the name is wrong
                node = view.rank.launch.node_rank if view.rank.launch else None
                said = f"; this host, node {node}, has that name itself"
                rename = Step(
                    shell("# hostnamectl set-hostname NAME"), note="each host needs its own name"
                )
                fix = Fix(rename, alternatives=[fix])
            yield Finding(
                ADDR_LOOPBACK,
                f"{view.shown}, in a job of {max(cluster.nnodes, len(cluster.hosts))} hosts{said}",
                view.where,
                fix=fix,
                confidence=confidence,
                explained_by="hostname-duplicate" if twin else None,
                effects=(Effect.SHUTS_OUT,) if view.is_master else (),
            )


def _lead_to(view: View, views: Sequence[View], address: str) -> tuple[Step, ...]:
    """The steps that give MASTER_ADDR: on one host, or on all where all have the same value.

    A comment where the address is not known.
    """
    alike = len({each.name for each in views}) == 1
    where = On.EVERY if alike else On.HERE
    steps = start_with([view.rank], "master_addr", address or "ADDRESS", where)
    if address:
        return steps
    return tuple(replace(step, note="that of rank 0's host") for step in steps)


def _any_of_them(view: View, own: str) -> tuple[Step, ...]:
    """The steps that give one address on all hosts, where it is open which host is node 0: that of
    Slurm's first one, which is the same on all screens.
    """
    place = place_of_host(view.rank.env, view.host.label)
    first = place[1][0] if place is not None else "ADDRESS"
    steps = start_with([view.rank], "master_addr", first, On.EVERY)
    if place is not None:
        return steps
    mine = f", {own} for example" if own else ""
    note = f"in the line that starts the job: the same on all, of one of the hosts{mine}"
    return tuple(replace(step, note=note) for step in steps)


def _add_line(address: str, name: str) -> Step:
    """The step that adds a line to /etc/hosts; a shell takes it for nothing else."""
    # A container has the file as a mount, which `sed -i` cannot replace.
    line = shell("{:address} {:plain}", address, name)
    left = shell("LEFT=$(grep -vxF '{}' /etc/hosts)", line)
    undo = shell("{}; printf '%s\\n' \"$LEFT\" > /etc/hosts", left)
    return Step(shell('echo "{}" >> /etc/hosts', line), undo=undo, persists=True)


def _answer_elsewhere(views: Sequence[View], master: View | None) -> str:
    """The address of rank 0's host to which MASTER_ADDR resolves elsewhere: its own, or one that
    led somebody there; empty if there is none.
    """
    answers = Counter(a for view in views for a in view.answers if not is_loopback(a))
    led_in = {a for view in views for a in view.answers if view.got_in}
    usual = [a for a, _ in answers.most_common()]
    own = [a for a in usual if master is None or master.owns(a)]
    return next(iter([*own, *(a for a in usual if a in led_in)]), "")


def host_of_rank_0(views: Sequence[View]) -> View | None:
    """The host of rank 0; if several claim to be, the one that MASTER_ADDR leads to."""
    claims = [view for view in views if view.is_master]
    return min(claims, key=lambda view: not any(map(view.owns, view.answers)), default=None)


def differing(views: Sequence[View]) -> Iterator[Finding]:
    """Findings on hosts whose answers are not rank 0's addresses, or else not those of most."""
    # An answer to which there is no route costs torch nothing: it tries the next one at once.
    used = {v: [a for a in v.answers if a not in v.facts["no_route"]] or v.answers for v in views}
    asked = {view: tuple(sorted(used[view])) for view in views if view.leads_somewhere}
    master = host_of_rank_0(views)
    usual: tuple[str, ...] | None
    if master and any(map(master.owns, master.answers)):
        known_at = (*master.answers, *master.host.addresses)
        usual = tuple(a for a in known_at if master.owns(a) and not is_loopback(a))
        odd = tuple(view for view in asked if not all(map(master.owns, used[view])))
    else:
        result = odd_ones_out(asked)
        usual, odd = (result.usual, result.places) if result else (None, ())
    who = who_has_what((view.host.label, ", ".join(answers)) for view, answers in asked.items())
    sure = Confidence.CERTAIN if master else Confidence.LIKELY if usual else Confidence.POSSIBLE
    for view in odd:
        known, fix = "there is no majority", _address_of_rank_0(view, "of rank 0's host")
        if usual:
            known = f"rank 0 is at {usual[0]}"
            steps = start_with([view.rank], "master_addr", usual[0], On.HERE)
            other = f"correct {view.name} in /etc/hosts or the name server"
            fix = Fix(*steps, alternatives=[Fix(text=other)])
        severity = Severity.INFO if view.got_in else None
        right = [a for a in used[view] if a in (usual or ())]
        if right:  # torch tries one after the other
            before = used[view][: used[view].index(right[0])]
            severity = Severity.INFO
            if before:
                severity = Severity.FAIL if view.is_kept_at(before) else Severity.WARN
                known += f"; torch tries {before[0]} first"
        yield Finding(
            ADDR_DIFFERS,
            f"{view.shown}; {known}",
            view.where,
            {WHO: who},
            fix=fix,
            severity=severity,
            confidence=sure,
        )


def slow(
    view: View, own: Mapping[str, Any] | None, called: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Findings on slow look-ups.

    Args:
        view: of a host.
        own: its look-up of its own name by check own_name, if any.
        called: those of the addresses that call the store, if it serves it.
    """
    clients = [LookUp.from_json(data) for data in called if data.get("slow")]
    others = [*([own] if own else []), *view.facts["reverse"]]
    # A master's name that never resolved has its own finding.
    slow = [view.found] if view.found.answers and view.found.slow else []
    slow += [LookUp.from_json(data) for data in others if data.get("slow")]
    slow += clients
    fix = ""
    if not slow and view.found.answers and view.facts.get("ipv6", {}).get("slow"):
        slow = [LookUp.from_json({**view.facts["ipv6"], "query": f"{view.name} for IPv6 alone"})]
        steps = start_with([view.rank], "master_addr", view.found.answers[0], On.EVERY)
        other = "repair the name server in /etc/resolv.conf, or take it out"
        fix = Fix(*steps, alternatives=[Fix(text=other)])
    if slow:
        spent = {found: f"{max(found.took_s[:2]):.0f} s" for found in slow}
        shown = [
            f"{found.query} {'gave no answer in ' if found.timed_out else ''}{spent[found]}"
            for found in slow
        ]
        more = f" and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
        turn = "; torch's store looks up each client, one after the other" if clients else ""
        turn = "; torch's store asks for it first, at each connection" if fix else turn
        if clients and not any(found.answers for found in clients):
            turn += " (since 2.9 until one is not found)"
        yield Finding(
            DNS_SLOW,
            f"slow twice in a row: {', '.join(shown[:_SHOWN])}{more}{turn}",
            view.where,
            {"took_s": {found.query: list(found.took_s) for found in slow}},
            fix=fix,
        )
