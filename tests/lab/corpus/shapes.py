"""Steps that give a cluster another shape: odd, and fine."""

from __future__ import annotations

from tests.lab.corpus.inject import Scene, step
from tests.lab.hosts import Host

_GATEWAY = "192.168.77.254"


def _renumber(scene: Scene, addresses: dict[str, str], length: int) -> None:
    """Give each host one address on eth0 in place of its own, and all their names."""
    for host in scene.lab.hosts:
        address = addresses[host.name]
        host.call("ip", "addr", "flush", "dev", "eth0", "scope", "global")
        nodad = ["nodad"] if ":" in address else []
        host.call("ip", "addr", "add", f"{address}/{length}", "dev", "eth0", *nodad)
        host.set_hosts(scene.lab.names_text(**addresses))


@step
def ipv6_only(scene: Scene) -> None:
    """No IPv4 address but loopback's, and names that lead to IPv6 addresses."""
    _renumber(scene, {host.name: f"fd77::{host.index + 1}" for host in scene.lab.hosts}, 64)


@step
def both_families(scene: Scene) -> None:
    """An IPv6 address beside the IPv4 one, and names that lead to both."""
    more = ""
    for host in scene.lab.hosts:
        address = f"fd77::{host.index + 1}"
        host.call("ip", "addr", "add", f"{address}/64", "dev", "eth0", "nodad")
        more += f"{address} {host.name}\n"
    for host in scene.lab.hosts:
        host.set_hosts(scene.lab.names_text() + more)


@step
def stand_alone(scene: Scene) -> None:
    """Addresses with /32, as in GCE or a pod of Calico, and a gateway that the device leads to."""
    lab = scene.lab
    lab.in_switch("ip", "addr", "add", f"{_GATEWAY}/24", "dev", "br0")
    lab.in_switch("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    _renumber(scene, {host.name: host.address for host in lab.hosts}, 32)
    for host in lab.hosts:
        host.call("ip", "route", "add", "default", "via", _GATEWAY, "dev", "eth0", "onlink")


@step
def gateway(scene: Scene) -> None:
    """A gateway with a default route by eth0."""
    scene.lab.in_switch("ip", "addr", "add", f"{_GATEWAY}/24", "dev", "br0")
    for host in scene.lab.hosts:
        host.call("ip", "route", "add", "default", "via", _GATEWAY)


@step
def full_names(scene: Scene, domain: str = "cluster.example") -> None:
    """Host names with a domain, each with its short name."""
    lines = "".join(
        f"{host.address} {host.name}.{domain} {host.name}\n" for host in scene.lab.hosts
    )
    for host in scene.lab.hosts:
        host.set_hosts(lines)
        host.call("hostname", f"{host.name}.{domain}")


@step
def mtu_everywhere(scene: Scene, size: int) -> None:
    """Another MTU on all hosts and the switch: jumbo frames, or a tunnel's."""
    for host in scene.lab.hosts:
        scene.lab.in_switch("ip", "link", "set", f"p{host.index}", "mtu", str(size))
        host.call("ip", "link", "set", "eth0", "mtu", str(size))


@step
def rules(scene: Scene, text: str) -> None:
    """The lines of an input chain on every host, whose policy is to drop."""
    for host in scene.lab.hosts:
        host.nft(
            "table inet filter {\n chain input {\n"
            "type filter hook input priority 0; policy drop;\n"
            f"{text}\n }}\n}}\n"
        )


@step
def busy(scene: Scene, host: Host, processes: int = 1) -> None:
    """Other programs compute on the host."""
    for _ in range(processes):
        host.python("while True: pass")


@step
def sysctl_everywhere(scene: Scene, name: str, value: str) -> None:
    """A kernel parameter of every host's network; `name` with slashes."""
    for host in scene.lab.hosts:
        host.call("sh", "-c", f"echo {value} > /proc/sys/{name}")


@step
def file(scene: Scene, host: Host, path: str, text: str) -> None:
    """A file in a folder of the host's own: /dev/shm."""
    host.call("sh", "-c", 'cat > "$1"', "sh", path, stdin=text)


@step
def wrap_everywhere(scene: Scene, words: list[str]) -> None:
    """Start every host's command behind other words."""
    for name in scene.lab.names:
        scene.wrap[name] += words
