"""Mechanisms of `blind`: each breaks a cluster in one way, and knows what a right answer names.

These break hosts; `between` has the others.

A mechanism may have several right codes where two checks see the same fact, and no more places than
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.lab.corpus import Cause
from tests.lab.corpus.blind import Cluster, Fault, mechanism

OWN = ("own",)
NO_RENDEZVOUS = ("own", "plain")
"""Launchers that need no rendezvous, and so can say why none can form."""
BY_HOST = ("own", "torchrun", "c10d", "plain")
"""Launchers that give each host variables of its own."""
WRAPPED = ("own", "torchrun", "c10d")
"""Launchers whose command can stand behind other words."""

Step = Mapping[str, Any]
Link = tuple[str, str]


def at_host(
    title: str,
    host: str,
    codes: str | Sequence[str],
    *steps: Step,
    waits: bool = False,
    or_links: Sequence[Link] = (),
) -> Fault:
    """A fault of one host; each step is taken there."""
    one = [codes] if isinstance(codes, str) else codes
    cause = Cause(frozenset(one), hosts=frozenset([host]), or_links=frozenset(or_links))
    placed = [{**step, "on": host} for step in steps]
    return Fault(f"{host}: {title}", placed, [cause], frozenset([host]), waits)


def between(
    title: str, links: Sequence[Link], codes: str | Sequence[str], *steps: Step, waits: bool = False
) -> Fault:
    """A fault of a link, of one or both directions."""
    one = [codes] if isinstance(codes, str) else codes
    source, target = links[0]
    arrow = "↔" if len(links) > 1 else "→"
    cause = Cause(frozenset(one), links=frozenset(links))
    return Fault(
        f"{source} {arrow} {target}: {title}", steps, [cause], frozenset((source, target)), waits
    )


def both(one: str, other: str) -> list[Link]:
    """A link, both ways."""
    return [(one, other), (other, one)]


# Hosts that cannot join ---------------------------------------------------------------------------


@mechanism("join", launchers=NO_RENDEZVOUS)
def master_unresolvable(of: Cluster) -> Fault:
    """MASTER_ADDR is not in /etc/hosts."""
    step = {"do": "names", "set": {of.names[0]: ""}}
    return at_host("does not know MASTER_ADDR", of.victim, "addr-unresolvable", step, waits=True)


@mechanism("join", launchers=NO_RENDEZVOUS, first=False)
def master_stale(of: Cluster) -> Fault:
    """MASTER_ADDR leads to an address that nobody has."""
    step = {"do": "names", "set": {of.names[0]: "192.168.77.99"}}
    codes = ("addr-differs", "no-route")
    return at_host("has an old address of MASTER_ADDR", of.victim, codes, step, waits=True)


@mechanism("join", launchers=NO_RENDEZVOUS, first=False, least=3)
def master_is_another(of: Cluster) -> Fault:
    """MASTER_ADDR leads to another host of the job."""
    address = f"192.168.77.{of.names.index(of.other(of.names[0])) + 1}"
    step = {"do": "names", "set": {of.names[0]: address}}
    return at_host(
        "takes another host for MASTER_ADDR", of.victim, "addr-differs", step, waits=True
    )


@mechanism("join", launchers=OWN, first=False)
def master_is_localhost(of: Cluster) -> Fault:
    """--master-addr localhost on one host."""
    word = of.random.choice(("localhost", "127.0.0.1"))
    step = {"do": "flags", "args": ["--master-addr", word]}
    return at_host(f"MASTER_ADDR={word}", of.victim, "addr-loopback", step, waits=True)


@mechanism("join", launchers=NO_RENDEZVOUS, first=False)
def other_port(of: Cluster) -> Fault:
    """Another MASTER_PORT on one host."""
    port = of.random.randint(20000, 29999)
    step: Step = {"do": "env", "set": {"MASTER_PORT": str(port)}}
    if of.launcher == "own":
        step = {"do": "flags", "args": ["--master-port", str(port)]}
    return at_host(f"MASTER_PORT={port}", of.victim, "master-port-differs", step, waits=True)


@mechanism("join", launchers=NO_RENDEZVOUS)
def port_taken(of: Cluster) -> Fault:
    """Another program has MASTER_PORT."""
    how = of.random.choice(("http", "mute"))
    step = {"do": "port_taken", "behaviour": how}
    fault = at_host(f"MASTER_PORT is taken ({how})", of.names[0], "port-in-use", step)
    return Fault(fault.title, fault.steps, fault.causes, frozenset(of.names))


@mechanism("join", launchers=NO_RENDEZVOUS)
def port_closed(of: Cluster) -> Fault:
    """A firewall of node 0 in front of MASTER_PORT."""
    how = of.random.choice(("drop", "icmp type admin-prohibited", "tcp reset"))
    step: Step = {"do": "drop_master_port"}
    if how != "drop":
        step = {"do": "reject_master_port", "how": how}
    codes = ("port-blocked", "port-refused") if how == "tcp reset" else ("port-blocked",)
    fault = at_host(f"MASTER_PORT is closed ({how})", of.names[0], codes, step, waits=True)
    return Fault(fault.title, fault.steps, fault.causes, frozenset(of.names), waits=True)


@mechanism("join", launchers=NO_RENDEZVOUS, first=False)
def calls_out_dropped(of: Cluster) -> Fault:
    """A host's own firewall drops its calls to MASTER_PORT."""
    step = {"do": "drop_calls_out"}
    return at_host("drops its calls to MASTER_PORT", of.victim, "port-blocked", step, waits=True)


@mechanism("join", launchers=NO_RENDEZVOUS, first=False)
def path_to_port(of: Cluster) -> Fault:
    """Something on the path drops MASTER_PORT."""
    link = (of.victim, of.names[0])
    step = {"do": "path_drops_master_port", "source": link[0], "target": link[1]}
    return between("the path drops MASTER_PORT", [link], "port-blocked", step, waits=True)


@mechanism("join", launchers=NO_RENDEZVOUS, first=False)
def absent(of: Cluster) -> Fault:
    """A host does not start."""
    node = of.names.index(of.victim)
    cause = Cause(frozenset(["host-absent"]), nodes=frozenset([node]))
    steps = [{"do": "absent", "on": of.victim}]
    title = f"{of.victim}: does not start"
    return Fault(title, steps, [cause], frozenset([of.victim]), waits=True)


@mechanism("join", launchers=NO_RENDEZVOUS)
def cable_out(of: Cluster) -> Fault:
    """A cable is out, or the card is down."""
    how = of.random.choice(("pull_cable", "link_down"))
    words = {"pull_cable": "cable out", "link_down": "card down"}[how]
    fault = at_host(words, of.victim, "host-cut-off", {"do": how}, waits=True)
    if of.victim != of.names[0]:
        return fault
    # Nobody can sign in: of what else is wrong, a part shows at the sign-in only.
    return Fault(fault.title, fault.steps, fault.causes, frozenset(of.names), waits=True)


@mechanism("join", launchers=NO_RENDEZVOUS, first=False)
def no_route_to_master(of: Cluster) -> Fault:
    """A host has no route to node 0."""
    step = {"do": "no_route", "to": of.names[0]}
    return at_host("no route to node 0", of.victim, "no-route", step, waits=True)


@mechanism("join", launchers=OWN, first=False)
def node_rank_twice(of: Cluster) -> Fault:
    """Two hosts have one node rank."""
    other = of.other()
    step = {"do": "flags", "on": of.victim, "args": ["--node-rank", other.removeprefix("nd")]}
    hosts = frozenset([of.victim, other])
    cause = Cause(frozenset(["node-rank-duplicate"]), hosts=hosts)
    return Fault(f"{of.victim} has the node rank of {other}", [step], [cause], hosts)


@mechanism("join", launchers=OWN, least=3)
def other_nnodes(of: Cluster) -> Fault:
    """One host has another --nnodes."""
    count = len(of.names) + of.random.choice((-1, 1))
    step = {"do": "flags", "args": ["--nnodes", str(count)]}
    return at_host(f"--nnodes {count}", of.victim, "nnodes-differs", step)


# Hosts whose groups cannot form, and facts of a host ----------------------------------------------


@mechanism("shut", launchers=BY_HOST)
def own_name_loopback(of: Cluster) -> Fault:
    """Debian's line for the own name."""
    step = {"do": "names", "set": {of.victim: "127.0.1.1"}}
    return at_host("own name leads to 127.0.1.1", of.victim, "addr-loopback", step)


@mechanism("shut", launchers=NO_RENDEZVOUS, first=False)
def own_name_unresolvable(of: Cluster) -> Fault:
    """A host cannot resolve its own name."""
    step = {"do": "names", "set": {of.victim: ""}}
    return at_host("own name does not resolve", of.victim, "addr-unresolvable", step)


@mechanism("facts", launchers=NO_RENDEZVOUS)
def name_server_silent(of: Cluster) -> Fault:
    """The name server does not answer what is not in /etc/hosts."""
    step = {"do": "silent_name_server", "order": "files dns"}
    return at_host("name server does not answer (files dns)", of.victim, "dns-slow", step)


@mechanism("join", launchers=NO_RENDEZVOUS)
def name_server_first(of: Cluster) -> Fault:
    """A name server that does not answer is asked before /etc/hosts: its host takes ten seconds
    to join, which the join time-out may not leave it.
    """
    step = {"do": "silent_name_server", "order": "dns files"}
    return at_host("name server does not answer (dns files)", of.victim, "dns-slow", step)


@mechanism("shut", launchers=BY_HOST)
def interface_missing(of: Cluster) -> Fault:
    """GLOO_SOCKET_IFNAME names no interface."""
    name = of.random.choice(("ib7", "ens5", "eth1"))
    step = {"do": "env", "set": {"GLOO_SOCKET_IFNAME": name}}
    return at_host(f"GLOO_SOCKET_IFNAME={name}", of.victim, "interface-missing", step)


@mechanism("shut", launchers=BY_HOST)
def interface_loopback(of: Cluster) -> Fault:
    """GLOO_SOCKET_IFNAME=lo."""
    step = {"do": "env", "set": {"GLOO_SOCKET_IFNAME": "lo"}}
    return at_host("GLOO_SOCKET_IFNAME=lo", of.victim, "interface-loopback", step)


@mechanism("shut", launchers=BY_HOST)
def interface_down(of: Cluster) -> Fault:
    """GLOO_SOCKET_IFNAME names an interface that is down."""
    steps = (
        {"do": "spare_nic", "name": "ext0", "address": "10.9.9.1/24", "up": False},
        {"do": "env", "set": {"GLOO_SOCKET_IFNAME": "ext0"}},
    )
    return at_host("GLOO_SOCKET_IFNAME=ext0, which is down", of.victim, "interface-down", *steps)


@mechanism("facts", least=3)
def other_mtu(of: Cluster) -> Fault:
    """Another MTU on one host."""
    size = of.random.choice((1400, 1450, 9000))
    return at_host(f"MTU {size}", of.victim, "mtu-differs", {"do": "mtu", "size": size})


@mechanism("facts", launchers=BY_HOST)
def variable_bad(of: Cluster) -> Fault:
    """A variable has a value that its reader refuses or misreads."""
    bad = [("NCCL_IB_DISABLE", "true"), ("NCCL_DEBUG", "VERBOSE")]
    if of.launcher not in ("torchrun", "c10d"):  # torchrun itself dies of it, and starts no doctor
        bad.append(("TORCH_DISTRIBUTED_DEBUG", "YES"))
    name, value = of.random.choice(bad)
    step = {"do": "env", "set": {name: value}}
    return at_host(f"{name}={value}", of.victim, "env-bad-value", step)


@mechanism("facts", launchers=BY_HOST)
def variable_misspelt(of: Cluster) -> Fault:
    """A variable is misspelt."""
    name = of.random.choice(("NCCL_SOKET_IFNAME", "NCCL_IB_DISABEL", "GLOO_SOCKET_IFNAMES"))
    step = {"do": "env", "set": {name: "eth0"}}
    return at_host(f"{name} is set", of.victim, "env-unknown-variable", step)


@mechanism("facts", launchers=BY_HOST, least=3)
def variable_differs(of: Cluster) -> Fault:
    """A variable that has to be the same everywhere differs."""
    step = {"do": "env", "set": {"TORCH_GLOO_LAZY_INIT": "1"}}
    return at_host("TORCH_GLOO_LAZY_INIT=1", of.victim, "env-differs", step)


@mechanism("facts")
def shared_memory_small(of: Cluster) -> Fault:
    """/dev/shm is too small."""
    size = of.random.choice(("1m", "4m"))
    step = {"do": "shared_memory", "options": f"size={size}"}
    return at_host(f"/dev/shm of {size}", of.victim, "shm-too-small", step)


@mechanism("facts", launchers=WRAPPED)
def open_files_low(of: Cluster) -> Fault:
    """A low limit of open files."""
    step = {"do": "wrap", "words": ["prlimit", "--nofile=128:128"]}
    return at_host("128 open files", of.victim, "open-files-limit-low", step)


@mechanism("facts", launchers=WRAPPED, ranks=2)
def one_core(of: Cluster) -> Fault:
    """All ranks of a host share one core."""
    step = {"do": "wrap", "words": ["taskset", "--cpu-list", "0"]}
    return at_host("one core for two ranks", of.victim, "cpu-limit-low", step)


@mechanism("facts", launchers=NO_RENDEZVOUS)
def few_ports(of: Cluster) -> Fault:
    """Few ephemeral ports."""
    value = "50000 50019"
    step = {"do": "sysctl", "name": "net/ipv4/ip_local_port_range", "value": value}
    return at_host("20 ephemeral ports", of.victim, "ports-exhausted", step)
