"""Steps that break a cluster, or start its hosts otherwise."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from tests.lab import faults
from tests.lab.corpus.inject import Scene, Strike, step
from tests.lab.hosts import Host
from tests.lab.lab import EPHEMERAL, MASTER_PORT

# Starting -----------------------------------------------------------------------------------------


@step
def absent(scene: Scene, host: Host) -> None:
    """The host does not start."""
    scene.absent.add(host.name)


@step
def late(scene: Scene, host: Host, s: float) -> None:
    """The host starts `s` seconds after the others."""
    scene.late_s[host.name] = s


@step
def flags(scene: Scene, host: Host, args: list[str]) -> None:
    """Other options of the launcher (torchrun's names) on one host."""
    scene.flags[host.name] += args


@step
def flags_everywhere(scene: Scene, args: list[str]) -> None:
    """Other options of the launcher on all hosts."""
    for name in scene.lab.names:
        scene.flags[name] += args


@step
def env(scene: Scene, host: Host, set: dict[str, str]) -> None:
    """Variables of one host."""
    scene.env[host.name] |= set


@step
def env_everywhere(scene: Scene, set: dict[str, str]) -> None:
    """Variables of all hosts."""
    for name in scene.lab.names:
        scene.env[name] |= set


@step
def strike(scene: Scene, host: Host, how: str, check: str = "collectives") -> None:
    """A signal (`SIGKILL`, `SIGSTOP`, …) to a rank of the host that is examining a check."""
    scene.strikes.append(Strike(host.name, check, signal.Signals[how]))


@step
def signal_all(scene: Scene, host: Host, how: str) -> None:
    """A signal to every process of the host: it hangs, or its job is killed."""
    number = signal.Signals[how]
    if number is signal.SIGSTOP:
        scene.lab.frozen.add(host.name)
    for pid in host.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@step
def lose_power(scene: Scene, host: Host) -> None:
    """The host is gone from one moment to the next, and says nothing more to anybody."""
    faults.pull_cable(scene.lab, host)
    signal_all(scene, host, "SIGKILL")


@step
def wrap(scene: Scene, host: Host, words: list[str]) -> None:
    """Start a host's command behind other words: `prlimit …`, `taskset …`."""
    scene.wrap[host.name] += words


@step
def shared_memory(scene: Scene, host: Host, options: str) -> None:
    """Remount /dev/shm of a host."""
    host.call("mount", "-o", f"remount,{options}", "/dev/shm")


@step
def sysctl(scene: Scene, host: Host, name: str, value: str) -> None:
    """Set a kernel parameter of a host's network; `name` with slashes."""
    host.call("sh", "-c", f"echo {value} > /proc/sys/{name}")


# Names --------------------------------------------------------------------------------------------


@step
def names(scene: Scene, host: Host, set: dict[str, str]) -> None:
    """Other addresses for names in one host's /etc/hosts; the empty address leaves a name out."""
    host.set_hosts(scene.lab.names_text(**set))


@step
def names_everywhere(scene: Scene, set: dict[str, str]) -> None:
    """Other addresses for names in every /etc/hosts."""
    for host in scene.lab.hosts:
        host.set_hosts(scene.lab.names_text(**set))


@step
def more_names(scene: Scene, host: Host, lines: str) -> None:
    """More lines of one host's /etc/hosts."""
    host.set_hosts(scene.lab.names_text() + lines)


@step
def rename(scene: Scene, host: Host, to: str) -> None:
    """The host calls itself something else; its old name still leads to it."""
    host.call("hostname", to)


@step
def silent_name_server(scene: Scene, host: Host, order: str = "dns files") -> None:
    """The host asks a name server that never answers, before it reads /etc/hosts, or after."""
    server = scene.lab.hosts[0] if host is not scene.lab.hosts[0] else scene.lab.hosts[1]
    faults.incoming(server, "udp dport 53 drop")
    (host.etc / "resolv.conf").write_text(f"nameserver {server.address}\n")
    (host.etc / "nsswitch.conf").write_text(f"passwd: files\ngroup: files\nhosts: {order}\n")


# Ports and packets --------------------------------------------------------------------------------


@step
def drop_master_port(scene: Scene, host: Host) -> None:
    """A silent firewall on the host in front of MASTER_PORT."""
    faults.drop_master_port(host)


@step
def reject_master_port(scene: Scene, host: Host, how: str) -> None:
    """A firewall on the host that says no: `icmp type admin-prohibited` or `tcp reset`."""
    faults.reject_master_port(host, how)


@step
def drop_calls_out(scene: Scene, host: Host) -> None:
    """A rule of the host itself drops what it sends to MASTER_PORT."""
    faults.drop_calls_out(host)


@step
def path_drops_master_port(scene: Scene, source: str, target: str) -> None:
    """Something on the way drops calls to MASTER_PORT from one host to another."""
    a, b = scene.lab[source], scene.lab[target]
    rule = f"ip saddr {a.address} ip daddr {b.address} tcp dport {MASTER_PORT} drop"
    faults.on_the_path(scene.lab, rule)


@step
def port_taken(scene: Scene, host: Host, behaviour: str = "http", port: int = MASTER_PORT) -> None:
    """Another program has MASTER_PORT: it answers in `http`, or is `mute`."""
    faults.foreign_server(host, port, behaviour)


@step
def drop_ephemeral(scene: Scene, host: Host, source: str = "") -> None:
    """The host's firewall lets in MASTER_PORT only; with `source`, for that host."""
    faults.drop_ephemeral(host, scene.lab[source] if source else None)


@step
def path_drops_ephemeral(scene: Scene, source: str, target: str) -> None:
    """Something on the way drops calls to ephemeral ports from one host to another."""
    a, b = scene.lab[source], scene.lab[target]
    rule = (
        f"ip saddr {a.address} ip daddr {b.address} tcp dport {EPHEMERAL[0]}-{EPHEMERAL[1]} "
        "tcp flags & (fin | syn | rst | ack) == syn drop"
    )
    faults.on_the_path(scene.lab, rule)


@step
def break_pair(scene: Scene, one: str, other: str) -> None:
    """No new connections to ephemeral ports between two hosts, either way."""
    faults.break_pair(scene.lab, scene.lab[one], scene.lab[other])


@step
def intercept(scene: Scene, host: Host) -> None:
    """A proxy on the host accepts every connection and passes nothing on."""
    faults.intercept_ephemeral(host)


@step
def forward(scene: Scene, host: Host) -> None:
    """A proxy on the host passes every connection on."""
    faults.forward_ephemeral(host)


@step
def path_cut(scene: Scene, source: str, target: str) -> None:
    """Something between two hosts drops everything, both ways."""
    faults.cut_path(scene.lab, scene.lab[source], scene.lab[target])


@step
def mtu_black_hole(scene: Scene) -> None:
    """All paths lose large packets without a word."""
    faults.black_hole_large_packets(scene.lab)


@step
def firewall(scene: Scene, host: Host, rule: str) -> None:
    """One rule of the host for packets that come in by eth0."""
    faults.incoming(host, rule)


@step
def iptables(scene: Scene, host: Host, rule: list[str]) -> None:
    """One rule that somebody made with iptables, for packets that come in by eth0."""
    host.call("iptables", "-A", "INPUT", "-i", "eth0", *rule)


@step
def block_own_address(scene: Scene, host: Host) -> None:
    """The host drops what it sends to its own address by loopback."""
    faults.drop_own_address(host)


@step
def slow_port(scene: Scene, host: Host) -> None:
    """The switch port of a host is limited to 50 Mbit/s towards it."""
    faults.slow_port(scene.lab, host)


@step
def slow_pair(scene: Scene, one: str, other: str) -> None:
    """The road between two hosts carries 50 Mbit/s."""
    faults.slow_pair(scene.lab, scene.lab[one], scene.lab[other])


@step
def lossy_pair(scene: Scene, one: str, other: str, percent: int) -> None:
    """The road between two hosts loses packets by chance."""
    faults.lossy_pair(scene.lab, scene.lab[one], scene.lab[other], percent)


@step
def lossy_host(scene: Scene, host: Host, way: str, percent: int) -> None:
    """Packets into a host, or `out` of it, are lost by chance."""
    faults.lossy_host(scene.lab, host, way, percent)


@step
def queue(scene: Scene, host: Host, words: list[str]) -> None:
    """A queueing discipline of the host itself on eth0: `tbf rate 50mbit …`."""
    host.call("tc", "qdisc", "add", "dev", "eth0", "root", *words)


# Interfaces and routes ----------------------------------------------------------------------------


@step
def spare_nic(scene: Scene, host: Host, name: str, address: str, up: bool = True) -> None:
    """One more interface, with an address (`192.0.2.1/24`) that no other host can route to."""
    host.call("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"[:15])
    at_once = ["nodad"] if ":" in address else []  # else it cannot be used for a second or two
    if at_once:  # nor can the one that the kernel would add
        host.call("ip", "link", "set", name, "addrgenmode", "none")
    host.call("ip", "addr", "add", address, "dev", name, *at_once)
    if up:
        host.call("ip", "link", "set", name, "up")
        host.call("ip", "link", "set", f"{name}p"[:15], "up")


@step
def mtu(scene: Scene, host: Host, size: int) -> None:
    """Another MTU on eth0."""
    host.call("ip", "link", "set", "eth0", "mtu", str(size))


@step
def pull_cable(scene: Scene, host: Host) -> None:
    """The cable of the host is out: its card has no carrier."""
    faults.pull_cable(scene.lab, host)


@step
def link_down(scene: Scene, host: Host) -> None:
    """Somebody took the card of the host down."""
    faults.set_link_down(host)


@step
def loopback_down(scene: Scene, host: Host) -> None:
    """Somebody took the loopback interface of the host down."""
    host.call("ip", "link", "set", "lo", "down")


@step
def no_route(scene: Scene, host: Host, to: str) -> None:
    """The host has no route to another one."""
    host.call("ip", "route", "add", "unreachable", f"{scene.lab[to].address}/32")


@step
def route(scene: Scene, host: Host, kind: str, to: str) -> None:
    """A route of the host that throws away what goes to another one: `prohibit`, `blackhole`."""
    host.call("ip", "route", "add", kind, f"{scene.lab[to].address}/32")


@step
def neighbour(scene: Scene, host: Host, of: str, mac: str) -> None:
    """An entry made by hand in the host's neighbour table, for another host."""
    address = scene.lab[of].address
    host.call(
        *("ip", "neigh", "replace", address, "dev", "eth0", "lladdr", mac, "nud", "permanent")
    )


@step
def address_of(scene: Scene, host: Host, other: str) -> None:
    """The host has the address of another one too."""
    host.call("ip", "addr", "add", f"{scene.lab[other].address}/24", "dev", "eth0")
