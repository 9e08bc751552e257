"""Does every host's own name lead to an address that the other hosts can use?

What it checks
--------------
Every host resolves its own host name, as gloo will. gloo publishes the first answer that it can
bind, a link-local one too, which nss-myhostname may name first; the check reports which one that
is: an address of an interface, a loopback address, or none at all. Whether the other hosts reach it
is what check `firewall` tries. A host with GLOO_SOCKET_IFNAME set is not judged, as gloo does not
look up the name there. Whichever way gloo chooses, its addresses on all hosts must be of one
family: all IPv4, or all IPv6.

Why it matters
--------------
With the line "127.0.1.1 myhost" that many distributions write into /etc/hosts, gloo makes its peers
connect to themselves: refused at once, or no answer until the time-out. A name that does not
resolve leads to 127.0.0.1 as well. With an IPv6 address on one host and an IPv4 address on another,
gloo stops at once: `ss1.ss_family == ss2.ss_family. 2 vs 10`. NCCL chooses by interface and is not
affected, but a job with NCCL often has gloo groups too.

How to fix
----------
Set GLOO_SOCKET_IFNAME to the exact interface, or let the host's own name resolve to its address on
the network that the hosts share: put "ADDRESS NAME" into /etc/hosts in place of the loopback line.
For one family everywhere: GLOO_SOCKET_IFNAME, as gloo takes the first address of an interface, IPv4
before IPv6; or list each host's own name with its IPv4 address, before any IPv6 one.

When it is wrong
----------------
If all ranks are on one machine, loopback is right and nothing is reported. A name that appears
later than the few seconds of this check is reported as missing; the finding is only likely if there
was no answer at all by then. For a host that did not sign in this is only a warning: its own name
is not what kept it out.

References
----------
PyTorch: torch.distributed, choosing the network interface (GLOO_SOCKET_IFNAME); createDefaultDevice
in ProcessGroupGloo.cpp; gloo/transport/tcp/device.cc (isInitiator); pytorch/gloo issue 399;
nss-myhostname(8), getaddrinfo(3), hosts(5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Command,
    Confidence,
    Context,
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
    fill,
    likely_address,
    odd_ones_out,
    shell,
    spans_machines,
)
from nccl_doctor.toolkit.host import host_name
from nccl_doctor.toolkit.hosts import is_namesake, published_address, sides_in_words
from nccl_doctor.toolkit.net.interfaces import interfaces, is_loopback
from nccl_doctor.toolkit.net.names import LookUp, look_up
from nccl_doctor.toolkit.net.routes import source_towards
from nccl_doctor.toolkit.peers.common_interface import (
    NONE_FOUND,
    Choice,
    common_interface,
    interface_fix,
)
from nccl_doctor.toolkit.shared_kinds import ADDR_DIGITS_ONLY, ADDR_LOOPBACK, ADDR_UNRESOLVABLE

NOT_OURS = ADDR_LOOPBACK.variant(
    title="A host's own name leads to an address that the host does not have",
    why="gloo cannot bind that address, and publishes 127.0.0.1 in its place: peers that receive "
    "it connect to themselves.",
)

_IPV4_FIRST = "put the IPv4 addresses of the hosts into /etc/hosts, before IPv6 ones"
FAMILIES_DIFFER = Kind(
    code="gloo-families-differ",
    layer=Layer.NAME,
    title="gloo would take IPv6 on some hosts and IPv4 on others",
    why="gloo compares the addresses of both ends of each connection, and stops if their families "
    "differ: ss1.ss_family == ss2.ss_family. 2 vs 10.",
    fix=Fix(
        Step(
            shell("# export GLOO_SOCKET_IFNAME=NIC"),
            On.EVERY,
            note="gloo takes the first address of it, IPv4 before IPv6",
            undo=shell("unset GLOO_SOCKET_IFNAME"),
        ),
        alternatives=[_IPV4_FIRST],
    ),
    effects=(Effect.DIFFERENCE,),
)

LOOK_UP_S = 4.0  # just under the resolver's own first time-out of 5 s


class OwnNameFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    own: dict[str, Any]
    interfaces: list[list[Any]]
    source: str


class OwnName(Check):
    """Resolves the own host name as gloo does."""

    name = "own_name"
    layer = Layer.NAME
    cost = "seconds"
    instant_when_answered = True
    kinds = (ADDR_UNRESOLVABLE, ADDR_LOOPBACK, ADDR_DIGITS_ONLY, FAMILIES_DIFFER)
    reads = ("firewall", "interfaces")

    def observe(self, ctx: Context) -> OwnNameFacts:
        """Answers for the own host name, and the own address on the way to MASTER_ADDR.

        Each within 4 s, whatever the resolver does.
        """
        own = host_name()
        ctx.breadcrumb(f"look up {own}")
        return {
            "own": look_up(own, LOOK_UP_S).to_json(),
            "interfaces": [
                [nic.name, list(nic.addresses)]
                for nic in interfaces()
                if nic.up and not nic.loopback
            ],
            "source": source_towards(ctx.launch.master_addr, LOOK_UP_S),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each host, and on a difference between them, if the job spans machines."""
        if spans_machines(cluster):
            reports = list(cluster.facts(self.name))
            owners: dict[str, set[int]] = {}
            named: dict[str | None, set[int]] = {}
            bad = [(r, f, each) for r, f in reports for each in _published(cluster, r, f)]
            for rank, facts in reports if bad else ():
                owners.setdefault(_own_address(facts), set()).add(rank.host.id)
                named.setdefault(rank.host.name, set()).add(rank.host.id)
            for rank, facts, found in bad:
                # Whoever took the address of another host lost the one that its name leads to;
                # whoever took its name is led to the other one's.
                taken = len(owners[_own_address(facts)]) > 1
                cloned = "hostname-duplicate" if len(named[rank.host.name]) > 1 else None
                why = "address-duplicate" if taken else cloned
                yield found.replaced(explained_by=why if found.kind is NOT_OURS else None)
            yield from _families(cluster)


def _own_address(facts: Mapping[str, Any]) -> str:
    nic = likely_address(facts["interfaces"], facts.get("source", ""))
    return nic[1] if nic else ""


def _published(cluster: Cluster, rank: Rank, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Finding on the address that gloo publishes: the first of the own name that can be bound."""
    published = published_address(rank, facts)
    if rank.env.get("GLOO_SOCKET_IFNAME") or (published and not is_loopback(published)):
        return
    own = LookUp.from_json(facts["own"])
    name, answers = own.query, own.answers
    nic = likely_address(facts["interfaces"], facts.get("source", ""))
    other_way: str = f'put "{nic[1]} {name}" into /etc/hosts in place of its line' if nic else ""
    if not answers:
        kind, message = ADDR_UNRESOLVABLE, f"does not resolve: {own.error}"
        other_way = f'put "{nic[1]} {name}" into /etc/hosts' if nic else ""
    elif name.isdecimal():
        kind, message = ADDR_DIGITS_ONLY, f"is read as the IPv4 address {answers[0]}"
        letter = shell("hostnamectl set-hostname n{}", name)
        digits = shell("hostnamectl set-hostname {}", name)
        note = "a name with a letter; as root"
        other_way = Fix(Step(letter, undo=digits, note=note, persists=True))
    elif published:
        kind, message = ADDR_LOOPBACK, f"resolves to {published}: gloo sends that to its peers"
    else:
        kind = NOT_OURS
        message = f"resolves to {', '.join(answers)}, not its own address: gloo takes 127.0.0.1"
    if is_namesake(rank):  # the name is what is wrong
        other_way = ""
    others = [other_way] if other_way else []
    common = common_interface(cluster)
    use = nic[0] if nic else ""
    if common is not None:  # an address on the way to MASTER_ADDR need not be on that to all
        use = common.get(rank.seat, "")
    steps = [
        Step(
            shell("export GLOO_SOCKET_IFNAME={}", use)
            if use
            else shell("# export GLOO_SOCKET_IFNAME=NIC"),
            undo=shell("unset GLOO_SOCKET_IFNAME") if use else Command(),
            note="" if use else "with the interface that leads to the other hosts",
        )
    ]
    # The name did not keep this host out: it would matter only later.
    fails = cluster.backend == "gloo" and rank.host.joined
    yield Finding(
        kind,
        f"own host name {name} {message}",
        Where(hosts=(rank.host.name,) if rank.host.name else ()),
        fix=Fix(text=str(NONE_FOUND), alternatives=others)
        if common == {}
        else Fix(*steps, alternatives=others),
        severity=Severity.FAIL if fails else Severity.WARN,
        confidence=Confidence.LIKELY if own.timed_out else Confidence.CERTAIN,
    )


def _families(cluster: Cluster) -> Iterator[Finding]:
    """Finding on hosts where gloo takes an address of another family than elsewhere."""
    families: dict[str, str] = {}
    chosen: dict[str, list[str]] = {}
    nics: dict[int, str] = {}
    for rank, facts in cluster.facts("interfaces"):
        picks = facts["choices"]["gloo"]["picks"]
        # A loopback address is another fault, which this one would only follow.
        if picks and not is_loopback(picks[0][1]):
            nics[rank.seat], address = picks[0]
            families[rank.host.label] = "IPv6" if ":" in address else "IPv4"
            chosen.setdefault(families[rank.host.label], []).append(rank.host.label)
    odd = odd_ones_out(families)
    if odd is not None:
        yield Finding(
            FAMILIES_DIFFER,
            f"the address that gloo takes is {sides_in_words(chosen)}",
            Where(hosts=tuple(sorted(odd.places))),
            fix=_one_family(cluster, nics),
            severity=Severity.FAIL if cluster.backend == "gloo" else Severity.WARN,
        )


def _one_family(cluster: Cluster, nics: Choice) -> str:
    """The fix that names interfaces which all have an IPv4 address; empty where none are known.

    `nics`: interface of each host whose address gloo takes now.
    """
    used = nics if len(set(nics.values())) == 1 else common_interface(cluster) or {}
    for rank, facts in cluster.facts("interfaces"):
        own = (nic for nic in facts["interfaces"] if nic["name"] == used.get(rank.seat))
        if all(":" in address for nic in own for address in nic["addresses"]):
            return ""
    if len(names := set(used.values())) == 1:
        return fill(FAMILIES_DIFFER.fix, NIC=names.pop())
    return Fix(*interface_fix(cluster, nccl=False).steps, alternatives=[_IPV4_FIRST])
