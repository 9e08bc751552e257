"""Mechanisms of `blind`: each breaks a cluster in one way, and knows what a right answer names.

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

SYN = "tcp flags & (fin | syn | rst | ack) == syn"
PORTS = "tcp dport 32768-60999"
BLOCKED = ("peer-one-way", "peer-blocked")
DURING = ("firewall", "collectives", "groups")
"""Checks that have a process on each host for long enough to be struck."""
LOST = ("host-cut-off", "rank-silent", "rank-killed", "coordinator-lost")

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
    return at_host(f"MASTER_PORT is taken ({how})", of.names[0], "port-in-use", step)


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
    return at_host(words, of.victim, "host-cut-off", {"do": how}, waits=True)


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
    """The first name server does not answer."""
    order = of.random.choice(("dns files", "files dns"))
    step = {"do": "silent_name_server", "order": order}
    return at_host(f"name server does not answer ({order})", of.victim, "dns-slow", step)


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
    name, value = of.random.choice(
        (("TORCH_DISTRIBUTED_DEBUG", "YES"), ("NCCL_IB_DISABLE", "true"), ("NCCL_DEBUG", "VERBOSE"))
    )
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


# Calls between hosts ------------------------------------------------------------------------------


@mechanism("calls")
def ports_closed(of: Cluster) -> Fault:
    """A firewall that lets in MASTER_PORT only."""
    how = of.random.choice(
        ("drop", "reject with tcp reset", "reject with icmp type host-prohibited")
    )
    match = f"meta nfproto ipv4 {PORTS} {SYN}"
    step = {"do": "firewall", "rule": f"{match} {how}"}
    return at_host(f"ephemeral ports: {how}", of.victim, BLOCKED, step)


@mechanism("calls", least=3)
def ports_closed_for_one(of: Cluster) -> Fault:
    """A firewall that closes ephemeral ports for one host."""
    other = of.other()
    step = {"do": "drop_ephemeral", "source": other}
    return at_host(f"drops ephemeral ports from {other}", of.victim, BLOCKED, step)


@mechanism("calls")
def new_connections_limited(of: Cluster) -> Fault:
    """A limit on new connections."""
    limit = of.random.choice(("limit rate over 1/second burst 3 packets", "ct count over 4"))
    step = {"do": "firewall", "rule": f"{PORTS} {SYN} {limit} drop"}
    return at_host(f"new connections: {limit}", of.victim, BLOCKED, step)


@mechanism("calls", least=3)
def path_one_way(of: Cluster) -> Fault:
    """The path drops new connections one way."""
    link = (of.victim, of.other())
    step = {"do": "path_drops_ephemeral", "source": link[0], "target": link[1]}
    return between("the path drops new connections", [link], "peer-one-way", step)


@mechanism("calls", least=3)
def pair_broken(of: Cluster) -> Fault:
    """The path drops new connections both ways."""
    other = of.other()
    step = {"do": "break_pair", "one": of.victim, "other": other}
    links = both(of.victim, other)
    return between("the path drops new connections", links, "peer-blocked", step)


@mechanism("calls", least=3, first=False)
def pair_cut(of: Cluster) -> Fault:
    """The path drops everything between two hosts."""
    other = of.other(of.names[0])
    step = {"do": "path_cut", "source": of.victim, "target": other}
    return between("the path drops everything", both(of.victim, other), "peer-blocked", step)


@mechanism("calls", least=3, first=False)
def no_route_to_peer(of: Cluster) -> Fault:
    """No route between two hosts that are not node 0."""
    other = of.other(of.names[0])
    step = {"do": "no_route", "on": of.victim, "to": other}
    return between("no route", both(of.victim, other), "peer-no-route", step)


@mechanism("calls")
def proxy(of: Cluster) -> Fault:
    """A proxy accepts everything and passes nothing on."""
    step = {"do": "intercept"}
    return at_host("a proxy in front of all ports", of.victim, "peer-intercepted", step)


@mechanism("calls", launchers=BY_HOST, least=3)
def interface_unroutable(of: Cluster) -> Fault:
    """GLOO_SOCKET_IFNAME names an interface that no other host can reach."""
    steps = (
        {"do": "spare_nic", "name": "ext0", "address": "10.9.9.1/24"},
        {"do": "env", "set": {"GLOO_SOCKET_IFNAME": "ext0"}},
    )
    codes = ("interface-unroutable", "peer-no-route")
    return at_host("GLOO_SOCKET_IFNAME=ext0, out of reach", of.victim, codes, *steps)


@mechanism("calls")
def own_address_blocked(of: Cluster) -> Fault:
    """A host cannot reach its own address."""
    step = {"do": "block_own_address"}
    return at_host("own address is blocked", of.victim, "own-address-blocked", step)


# Speed --------------------------------------------------------------------------------------------


@mechanism("speed", least=3)
def slow_port(of: Cluster) -> Fault:
    """A slow switch port."""
    return at_host("switch port of 50 Mbit/s", of.victim, "host-slow", {"do": "slow_port"})


@mechanism("speed", least=3)
def slow_pair(of: Cluster) -> Fault:
    """A slow path between two hosts."""
    other = of.other()
    step = {"do": "slow_pair", "one": of.victim, "other": other}
    return between("path of 50 Mbit/s", both(of.victim, other), "link-slow", step)


@mechanism("speed", least=3)
def lossy_pair(of: Cluster) -> Fault:
    """A path that loses packets."""
    other, percent = of.other(), of.random.choice((2, 5, 10, 20))
    step = {"do": "lossy_pair", "one": of.victim, "other": other, "percent": percent}
    return between(f"{percent} % loss", both(of.victim, other), "link-lossy", step)


@mechanism("speed", least=3)
def lossy_host(of: Cluster) -> Fault:
    """A host that loses what it receives, or sends."""
    way, percent = of.random.choice(("in", "out")), of.random.choice((2, 5, 12, 25))
    step = {"do": "lossy_host", "way": way, "percent": percent}
    return at_host(f"{percent} % loss ({way})", of.victim, "link-lossy", step)


# During the run -----------------------------------------------------------------------------------


@mechanism("during")
def rank_killed(of: Cluster) -> Fault:
    """A rank is killed."""
    check = of.random.choice(DURING)
    step = {"do": "strike", "how": "SIGKILL", "check": check}
    return at_host(f"SIGKILL in {check}", of.victim, ("rank-crashed", "rank-killed"), step)


@mechanism("during")
def rank_stopped(of: Cluster) -> Fault:
    """A rank is stopped."""
    step = {"do": "strike", "how": "SIGSTOP"}
    return at_host("SIGSTOP in collectives", of.victim, "rank-frozen", step)


@mechanism("during", first=False)
def host_hangs(of: Cluster) -> Fault:
    """Every process of a host is stopped."""
    step = {"do": "signal_all", "how": "SIGSTOP", "at": of.random.choice(DURING)}
    return at_host(f"hangs in {step['at']}", of.victim, (*LOST, "rank-frozen"), step)


@mechanism("during", first=False)
def host_killed(of: Cluster) -> Fault:
    """Every process of a host is killed."""
    step = {"do": "signal_all", "how": "SIGKILL", "at": of.random.choice(DURING)}
    return at_host(f"all is killed in {step['at']}", of.victim, (*LOST, "rank-crashed"), step)


@mechanism("during", first=False)
def power_lost(of: Cluster) -> Fault:
    """A host is gone."""
    step = {"do": "lose_power", "at": of.random.choice(DURING)}
    links = both(of.victim, of.names[0]) if len(of.names) == 2 else ()
    return at_host(f"loses power in {step['at']}", of.victim, LOST, step, or_links=links)


@mechanism("during")
def cable_pulled(of: Cluster) -> Fault:
    """A cable is pulled."""
    step = {"do": "pull_cable", "at": of.random.choice(DURING)}
    links = both(of.victim, of.other()) if len(of.names) == 2 else ()
    return at_host(f"cable out in {step['at']}", of.victim, "host-cut-off", step, or_links=links)


@mechanism("during")
def firewall_reloaded(of: Cluster) -> Fault:
    """A firewall comes up that drops new connections to ephemeral ports."""
    step = {"do": "drop_ephemeral", "at": "collectives"}
    return at_host("firewall reloaded in collectives", of.victim, BLOCKED, step)
