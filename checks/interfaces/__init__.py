"""Which interfaces and addresses would NCCL and gloo choose on each host, and can these work?

What it checks
--------------
The interfaces and addresses that NCCL (bootstrap, and data over sockets) and gloo would choose on
this host, by their own rules, from the environment and NCCL's configuration files, and which
variable or rule decided: whether the requested interface exists, is running and has an address,
whether it is loopback, and whether the hosts of one network have the same MTU; where NCCL uses
Google's TCPX or TCPXO, whether the cards that NCCL_FASTRAK_IFNAME or
NCCL_GPUDIRECTTCPX_SOCKET_IFNAME name are there. If hosts that chose different networks could not
reach each other (check `firewall`), their choices are reported.
Where the job uses NCCL (2.22 or newer) and torch has loaded it, NCCL itself is asked once on each
host, by ncclGetUniqueId in a child of its own: which interface it takes for its bootstrap, and
which variables it takes from its configuration files. Its answer counts, and the rules explain it.
Since 2.30.3 it also says how it reads some variables (ncclParamDumpAll), which check `environment`
uses. It needs no GPU, takes about 20 ms, listens on one port for that time, and writes no file.
RCCL is not asked: the rules count.

Why it matters
--------------
NCCL and gloo choose addresses themselves and send them to the other hosts. A library that does not
find the requested interface fails at once, and the ranks on the other hosts wait for it until their
time-out; a library that sends a loopback address makes its peers connect to themselves.

How to fix
----------
Name the interface: NCCL_SOCKET_IFNAME==eth0 (the second = means the exact name) and
GLOO_SOCKET_IFNAME=eth0 (gloo knows exact names only). A value that an image sets hides a good one
in /etc/nccl.conf, as the environment wins: unset it. Give all hosts of one network the same MTU.

When it is wrong
----------------
Where an address stands alone (/32 or /128: GCE, Calico, VPC CNI), its network is told by interface
and gateway. A network plug-in of NCCL may choose by its own rules. A plug-in for variables
(NCCL_ENV_PLUGIN) is seen in what NCCL says about its bootstrap only. For a host that did not sign
in this is only a warning: its choice of interface is not what kept it out. If half of the hosts
have one MTU and half another, it is not known which one is wrong, so no host is blamed.

References
----------
NCCL user guide, environment variables (NCCL_SOCKET_IFNAME) and troubleshooting (networking); NCCL
src/misc/socket.cc; PyTorch documentation of torch.distributed (choosing the network interface).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Figure,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Rank,
    Setup,
    Severity,
    Step,
    Where,
    host_labels,
    look,
    shell,
    spans_machines,
)
from nccl_doctor.toolkit.nccl.answer import LibraryAnswer, ask_nccl
from nccl_doctor.toolkit.nccl.interface_choice import COMM_ID, NCCL_VARIABLE
from nccl_doctor.toolkit.nccl.library import mapped_nccl
from nccl_doctor.toolkit.nccl.survey import Survey, survey
from nccl_doctor.toolkit.nccl.use_interface import CHOOSE, use_interface
from nccl_doctor.toolkit.net.interfaces import is_loopback, is_virtual
from nccl_doctor.toolkit.net.shapers import shapers
from nccl_doctor.toolkit.peers.common_interface import (
    NONE_FOUND,
    common_interface,
    interface_fix,
)
from nccl_doctor.toolkit.peers.matrix import first_calls

from .comparison import (
    INTERFACE_DIFFERS,
    MTU_DIFFERS,
    differs,
    main_of,
    mtu_differs,
    uses,
)

INTERFACE_MISSING = Kind(
    code="interface-missing",
    layer=Layer.ROUTE,
    title="The variable names an interface that the host does not have",
    why="The library finds no address to listen on and fails at once on this host; the ranks on "
    "the other hosts wait for it until their time-out.",
    fix=CHOOSE,
)
PLUGIN_CARD_MISSING = INTERFACE_MISSING.variant(
    why="The network plug-in that NCCL would use is told to use a card that is not there: it may "
    "refuse to start, or leave out a rail that its peers have.",
)
COMM_ID_NOWHERE = INTERFACE_MISSING.variant(title="NCCL_COMM_ID leads to no interface of the host")
INTERFACE_DOWN = Kind(
    code="interface-down",
    layer=Layer.ROUTE,
    title="The chosen interface is not running or has no address",
    why="NCCL skips an interface without carrier; an address that gloo binds there cannot be "
    "reached.",
    fix=Fix(
        Step(shell("# ip link set NIC up"), undo=shell("# ip link set NIC down")),
        alternatives=["check the cable", CHOOSE],
    ),
)
NONE_RUNS = INTERFACE_DOWN.variant(
    title="No interface of the host can carry what the job sends",
    why="All of them are down, or have no address: the library finds none to listen on, and the "
    "other hosts wait for this one until their time-out.",
    fix=Fix(
        look(shell("ip -br addr")),
        Step(shell("# ip link set NIC up"), undo=shell("# ip link set NIC down")),
        alternatives=["check the cable, and give the interface its address"],
    ),
)
INTERFACE_LOOPBACK = Kind(
    code="interface-loopback",
    layer=Layer.ROUTE,
    title="The library would send a loopback address to the other hosts",
    why="A host that receives 127.0.0.1 connects to itself: refused at once, or no answer until a "
    "time-out.",
    fix=CHOOSE,
)
ANSWER_DIFFERS = Kind(
    code="nccl-answer-differs",
    layer=Layer.ROUTE,
    title="NCCL does not do what nccl-doctor expects of its release",
    why="NCCL itself was asked, and its answer counts. But other checks follow the rules: what "
    "they say about NCCL's variables and interfaces on this host may be wrong.",
    fix="report it to the developers of nccl-doctor, with this report",
    severity=Severity.INFO,
)


class InterfacesFacts(Survey):
    """Facts that `observe` returns; other checks read them. `shapers`: interface → what tc has
    there that holds packets back.
    """

    shapers: dict[str, str]


class Interfaces(Check):
    """Compares the interfaces that NCCL and gloo would choose on each host."""

    name = "interfaces"
    layer = Layer.ROUTE
    cost = "seconds"
    instant_when_answered = True
    kinds = (
        INTERFACE_MISSING,
        INTERFACE_DOWN,
        INTERFACE_LOOPBACK,
        INTERFACE_DIFFERS,
        MTU_DIFFERS,
        ANSWER_DIFFERS,
    )
    at_once = (INTERFACE_MISSING,)
    deadline_s = 12.0  # two names, and NCCL: 3 s each
    reads = ("firewall", "own_name", "rdma")

    def observe(self, ctx: Context) -> InterfacesFacts:
        """The choices, and the interfaces to choose from; `asked`: NCCL's answer, or None."""

        def ask() -> LibraryAnswer | None:
            loaded = mapped_nccl() if "nccl" in ctx.backend else ()
            return ask_nccl(loaded[0], ctx.env, ctx.breadcrumb) if loaded else None

        ctx.breadcrumb("choosing interfaces as NCCL and gloo do")
        return {**survey(ctx.env, root=ctx.root, ask=ask), "shapers": shapers()}

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """The interfaces that the job would use, and what each library picks."""
        for rank, facts in cluster.facts(self.name):
            here = Where(hosts=(rank.host.label,))
            mtu = {each["name"]: each["mtu"] for each in facts["interfaces"]}
            for entry in facts["listen"]:
                nic = entry["interface"]
                said = f"{entry['address']}, MTU {mtu.get(nic)}"
                yield Figure(f"interface {nic}", said, here)
            for name, library in (("gloo", "gloo"), ("NCCL sockets", "nccl-sockets")):
                picks = facts.get("choices", {}).get(library, {}).get("picks") or ()
                if picks:
                    yield Figure(f"{name} on", ", ".join(" ".join(pick) for pick in picks), here)

    def sections(self, cluster: Cluster) -> Iterator[Setup]:
        """The interfaces that the job would use."""
        for rank, facts in cluster.facts(self.name):
            mtu = {each["name"]: each.get("mtu") for each in facts.get("interfaces") or ()}
            for entry in facts.get("listen") or ():
                known = {**entry, "mtu": mtu.get(entry["interface"])}
                yield Setup("interface", known, rank.host.id)

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on each host's choices, then on differences between hosts."""
        reports = list(cluster.facts(self.name))
        _, by_fault = first_calls(cluster)
        common = common_interface(cluster)
        sources = {rank.seat: facts.get("source", "") for rank, facts in cluster.facts("own_name")}
        for rank, facts in reports:
            good: str | None = _alone(facts, sources.get(rank.seat, ""))
            if common is not None:
                good = common.get(rank.seat, _of_all(common, facts)) if common else None
            for library in ("nccl", "gloo"):
                yield from _bad_choice(cluster, rank, facts, library, good)
            yield from _answered_otherwise(rank, facts.get("asked"))
        yield from _cards_missing(cluster, reports)
        mains = {rank.seat: main_of(cluster, facts) for rank, facts in reports}
        known = {seat: main for seat, main in mains.items() if main is not None}
        labels = host_labels(cluster)
        yield from mtu_differs(labels, known, {rank.seat: facts for rank, facts in reports})
        of_nccl = "nccl" in cluster.backend
        fix = interface_fix(cluster, nccl=of_nccl, gloo=not of_nccl)
        yield from differs(labels, known, by_fault, fix)


def _alone(facts: Mapping[str, Any], source: str) -> str:
    """An interface to recommend if no calls were made: the only one, or the one that leads to
    MASTER_ADDR (with the own address `source`); else empty.
    """
    usable = {
        str(nic["name"]): nic["addresses"]
        for nic in facts["interfaces"]
        if nic["running"] and not is_virtual(nic["name"])
        if any(not is_loopback(address) for address in nic["addresses"])
    }
    to_master = (name for name, addresses in usable.items() if source in addresses)
    return next(iter(usable)) if len(usable) == 1 else next(to_master, "")


def _of_all(common: Mapping[int, str], facts: Mapping[str, Any]) -> str:
    """The interface that all other hosts have in common, if a host that was not called has it."""
    names = set(common.values())
    here = {nic["name"] for nic in facts["interfaces"] if nic["running"]}
    return min(names) if len(names) == 1 and names <= here else ""


def _bad_choice(
    cluster: Cluster, rank: Rank, facts: Mapping[str, Any], library: str, good: str | None
) -> Iterator[Finding]:
    if library == "nccl":
        library = "nccl-sockets" if facts["nccl_data"] == "sockets" else "nccl-bootstrap"
    choice, used = facts["choices"][library], uses(cluster, library)
    loops = [pick for pick in choice["picks"] if is_loopback(pick[1])]
    if not (choice["problem"] or loops or choice.get("left_out")):
        return
    variable, names = choice["variable"], choice["names"]
    said = f"{variable}={choice['value']}" if variable else f"{library}: {choice['reason']}"
    if choice["origin"] not in ("", "environment"):
        said += f" (in {choice['origin']})"
    if choice["problem"] and (variable or used):
        kind, fault = INTERFACE_DOWN, "not running, or no address"
        if choice["problem"] != "down":
            kind = INTERFACE_MISSING if variable else INTERFACE_DOWN
            kind = COMM_ID_NOWHERE if variable == COMM_ID else kind
            fault = _missing(choice, facts.get("asked"))
        elif not (variable or names):
            kind = NONE_RUNS
    elif loops and spans_machines(cluster) and (used or library == "gloo" or variable):
        kind, fault = INTERFACE_LOOPBACK, f"the other hosts would get {loops[0][1]}"
        names = [pick[0] for pick in loops]
    else:
        yield from _left_out(rank, choice, said)
        return
    fix = _good_file(choice, facts) or _name_it(library, good, choice, kind, rank.host.label)
    # The choice did not keep this host out: it would matter only later.
    fails = used and rank.host.joined
    yield Finding(
        kind,
        f"{said}: {fault}",
        Where(hosts=(rank.host.label,), interfaces=tuple(sorted(set(names)))),
        {
            "decided by": choice["reason"],
            "interfaces": {nic["name"]: nic["addresses"] for nic in facts["interfaces"]},
        },
        fix="" if kind is NONE_RUNS else fix,
        severity=Severity.FAIL if fails else Severity.WARN if variable or used else Severity.INFO,
        # gloo looks up the host's own name: that is what to fix.
        explained_by=None if variable or library != "gloo" else "addr-loopback",
    )


def _left_out(rank: Rank, choice: Mapping[str, Any], said: str) -> Iterator[Finding]:
    """Interfaces that are named but skipped: the job starts with fewer interfaces than it asked."""
    skipped = choice.get("left_out", ())
    if skipped:
        used = ", ".join(name for name, _ in choice["picks"])
        yield Finding(
            INTERFACE_DOWN,
            f"{said}: {', '.join(skipped)} is not running, or has no address: NCCL silently skips "
            f"it and would use {used}",
            Where(hosts=(rank.host.label,), interfaces=tuple(sorted(skipped))),
            {"decided by": choice["reason"], "left out": skipped},
            fix=Fix(
                *(
                    Step(shell("ip link set {} up", name), undo=shell("ip link set {} down", name))
                    for name in skipped
                ),
                alternatives=[Fix(text=f"check the cable, or take it out of {choice['variable']}")],
            ),
            severity=Severity.WARN,
        )


def _cards_missing(
    cluster: Cluster, reports: Iterable[tuple[Rank, Mapping[str, Any]]]
) -> Iterator[Finding]:
    """Cards that a host lacks, though they are named to the plug-in that NCCL would use there."""
    roads = {rank.host.id: facts["road"] for rank, facts in cluster.facts("rdma")}
    for rank, facts in reports:
        if roads.get(rank.host.id) != "plugin":
            continue
        for variable, names in facts.get("lacking", {}).items():
            yield Finding(
                PLUGIN_CARD_MISSING,
                f"{variable} names {', '.join(names)}: no such interface",
                Where(hosts=(rank.host.label,), interfaces=tuple(names)),
                fix=Fix(
                    look(shell("ip -br link"), f"name its cards in {variable}, rail by rail"),
                    alternatives=["bring back the card that is gone"],
                ),
                severity=Severity.WARN,  # how the plug-in takes it is not known
            )


def _missing(choice: Mapping[str, Any], asked: Mapping[str, Any] | None) -> str:
    if asked and choice["problem"] == "refused":
        words = asked["error"] or f"ncclGetUniqueId returned {asked['result']}"
        return f"NCCL {asked['version']} refuses: {words}"
    if choice["problem"] == "invalid":
        return "neither an address nor a host name that resolves here"
    root = choice["variable"] == COMM_ID
    return "no interface in its subnet" if root else "no such interface"


def _answered_otherwise(rank: Rank, asked: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Finding on what NCCL itself says, where that is not what the rules say."""
    if asked is None:
        return
    said = []
    if asked["differs"]:
        took = " ".join(filter(None, (asked["interface"], asked["address"])))
        expected = " ".join(asked["expected"]) or "none"
        said.append(f"takes {took or 'no interface'}, not {expected}")
    if asked["read_otherwise"]:
        said.append(f"reads {', '.join(asked['read_otherwise'])} otherwise")
    if said:
        by = f" with plug-in {asked['plugin']}" if asked["plugin"] else ""
        yield Finding(
            ANSWER_DIFFERS,
            f"NCCL {asked['version']}{by} {'; '.join(said)}",
            Where(hosts=(rank.host.label,)),
            dict(asked),
        )


def _good_file(choice: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Advice to let a configuration file decide, if it has a good value and the environment hides
    it, as in an image that was made for other hosts; else empty.
    """
    told = facts.get("by_file")
    if choice["variable"] != NCCL_VARIABLE or not told:
        return ""
    good = [name for name, address in told["picks"] if not is_loopback(address)]
    if not good:
        return ""
    note = f"it hides {told['origin']}, which has {NCCL_VARIABLE}={told['value']} and so takes "
    note += f"{', '.join(good)}; in a container: take its ENV out of the image"
    return Fix(Step(shell("unset {:variable}", NCCL_VARIABLE), note=note))


def _name_it(
    library: str, nic: str | None, choice: Mapping[str, Any], kind: Kind, host: str
) -> str:
    """The fix that names an interface; `nic` is empty if it is not known, None if there is none."""
    if choice["variable"] == COMM_ID:
        ways = ["give it an address of rank 0 in a network of every host"]
        newer = ["install NCCL 2.30.3 or newer"] if "outside" in choice["reason"] else []
        return Fix(Step(shell("unset {:variable}", COMM_ID), On.EVERY), alternatives=ways + newer)
    of_gloo, variable = library == "gloo", choice["variable"]
    step = use_interface(nic or "", nccl=not of_gloo, gloo=of_gloo)
    other = note = ""
    if not of_gloo and choice["origin"] not in ("", "environment"):
        other = f"correct {choice['origin']}"
    elif of_gloo and kind is INTERFACE_MISSING:
        note = "whole names, separated by commas: the ^, = and prefixes of NCCL_SOCKET_IFNAME "
        note += "mean nothing to gloo"
    elif of_gloo and not variable:
        other = f"let {host} resolve to the address of {nic or 'that interface'} (/etc/hosts: "
        other += "remove the line with 127.0.1.1)"
    was = choice["value"] if variable and choice["origin"] == "environment" else ""
    undo = shell("export {:variable}={}", variable, was) if was else step.undo
    step = replace(step, on=On.HERE, undo=undo, note=note or step.note)
    others = [Fix(text=other)] if other else []
    if nic is None:
        return Fix(text=str(NONE_FOUND), alternatives=others)
    return Fix(step, alternatives=others)
