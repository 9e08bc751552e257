"""Mechanisms of `blind` between hosts, in their speed, and during the run."""

from __future__ import annotations

from tests.lab.corpus.blind import Cluster, Fault, mechanism
from tests.lab.corpus.mechanisms import BY_HOST, at_host, between, both

SYN = "tcp flags & (fin | syn | rst | ack) == syn"
PORTS = "tcp dport 32768-60999"
NO_SRUN = ("own", "torchrun", "c10d", "plain")
"""Launchers that wait for no task of a host that nobody reaches, or on which everything is stopped
or killed, slurmstepd too: srun does.
"""
BLOCKED = ("peer-one-way", "peer-blocked")
DURING = ("firewall", "collectives", "groups")
"""Checks that have a process on each host for long enough to be struck."""
LOST = ("host-cut-off", "rank-silent", "rank-killed", "coordinator-lost")


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
    """A route of a host leads nowhere, on the way to another one that is not node 0."""
    other = of.other(of.names[0])
    return at_host(
        f"no route to {other}", of.victim, "peer-no-route", {"do": "no_route", "to": other}
    )


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


@mechanism("during", first=False, launchers=NO_SRUN)
def host_hangs(of: Cluster) -> Fault:
    """Every process of a host is stopped."""
    step = {"do": "signal_all", "how": "SIGSTOP", "at": of.random.choice(DURING)}
    return at_host(f"hangs in {step['at']}", of.victim, (*LOST, "rank-frozen"), step)


@mechanism("during", first=False, launchers=NO_SRUN)
def host_killed(of: Cluster) -> Fault:
    """Every process of a host is killed."""
    step = {"do": "signal_all", "how": "SIGKILL", "at": of.random.choice(DURING)}
    return at_host(f"all is killed in {step['at']}", of.victim, (*LOST, "rank-crashed"), step)


@mechanism("during", first=False, launchers=NO_SRUN)
def power_lost(of: Cluster) -> Fault:
    """A host is gone."""
    step = {"do": "lose_power", "at": of.random.choice(DURING)}
    links = both(of.victim, of.names[0]) if len(of.names) == 2 else ()
    return at_host(f"loses power in {step['at']}", of.victim, LOST, step, or_links=links)


@mechanism("during", launchers=NO_SRUN)
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
