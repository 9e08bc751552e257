"""Faults of real clusters, as they are injected into the lab.

Rules match the first packet of a connection (SYN without ACK) where the fault is about who may
connect: a rule on all packets would also eat the replies to connections of the other direction.
Rules of a host carry `iifname eth0`, so that it still reaches its own address.
"""

from __future__ import annotations

from tests.lab.hosts import Host
from tests.lab.lab import EPHEMERAL, MASTER_PORT, Lab
from tests.lab.processes import Process

_SYN = "tcp flags & (fin | syn | rst | ack) == syn"
_PORTS = f"{EPHEMERAL[0]}-{EPHEMERAL[1]}"


def incoming(host: Host, rule: str, interface: str = "eth0") -> None:
    """Add one rule for packets that come in by an interface."""
    host.nft(
        f"""
        table inet fault {{
            chain input {{
                type filter hook input priority 0; policy accept;
                iifname {interface} {rule}
            }}
        }}
        """
    )


def drop_master_port(host: Host, port: int = MASTER_PORT) -> None:
    """A silent firewall in front of the master port."""
    incoming(host, f"tcp dport {port} drop")


def reject_master_port(host: Host, how: str, port: int = MASTER_PORT) -> None:
    """A firewall that says no. `how`: `icmp type admin-prohibited` or `tcp reset`."""
    incoming(host, f"meta nfproto ipv4 tcp dport {port} reject with {how}")


def drop_ephemeral(host: Host, source: Host | None = None) -> None:
    """A firewall that lets in the master port alone; `source`: only from there."""
    origin = f"ip saddr {source.address} " if source else ""
    incoming(host, f"{origin}tcp dport {_PORTS} {_SYN} drop")


def pull_cable(lab: Lab, host: Host) -> None:
    """The host's card has no carrier any more: its port of the switch is down."""
    lab.in_switch("ip", "link", "set", f"p{host.index}", "down")


def set_link_down(host: Host) -> None:
    """Somebody took the host's card down."""
    host.call("ip", "link", "set", "eth0", "down")


def on_the_path(lab: Lab, *rules: str) -> None:
    """Add rules for packets between hosts, where no host can see them: on the switch."""
    lines = "\n                ".join(rules)
    lab.in_switch(
        *("nft", "-f", "-"),
        stdin=f"""
        table bridge fault {{
            chain forward {{
                type filter hook forward priority 0; policy accept;
                {lines}
            }}
        }}
        """,
    )


def cut_path(lab: Lab, one: Host, *others: Host) -> None:
    """Something between one host and others drops everything, both ways."""
    pairs = [(one.address, other.address) for other in others]
    on_the_path(
        lab,
        *(f"ip saddr {a} ip daddr {b} drop" for pair in pairs for a, b in (pair, pair[::-1])),
    )


def break_pair(lab: Lab, one: Host, other: Host) -> None:
    """Something between two hosts lets no new connection to ephemeral ports pass, either way."""
    on_the_path(
        lab,
        *(
            f"ip saddr {a.address} ip daddr {b.address} tcp dport {_PORTS} {_SYN} drop"
            for a, b in ((one, other), (other, one))
        ),
    )


def forget_silent_connections(lab: Lab, host: Host, after_s: int) -> None:
    """A firewall on the road to one host that drops what belongs to no connection it remembers.

    As a security group does it: the first packet of a connection is let through, later ones only
    while it has seen another one in the last `after_s` seconds.
    """
    forth = "ip saddr . tcp sport . ip daddr . tcp dport"
    back = "ip daddr . tcp dport . ip saddr . tcp sport"
    lab.in_switch(
        *("nft", "-f", "-"),
        stdin=f"""
        table bridge forgets {{
            set known {{
                type ipv4_addr . inet_service . ipv4_addr . inet_service
                flags dynamic, timeout
                size 65535
                timeout {after_s}s
            }}
            chain forward {{
                type filter hook forward priority 0; policy accept;
                ip saddr != {host.address} ip daddr != {host.address} accept
                ip protocol != tcp accept
                {_SYN} update @known {{ {forth} timeout {after_s}s }} accept
                {forth} @known update @known {{ {forth} timeout {after_s}s }} accept
                {back} @known update @known {{ {back} timeout {after_s}s }} accept
                ip protocol tcp drop
            }}
        }}
        """,
    )


def black_hole_large_packets(lab: Lab, size: int = 1200) -> None:
    """A path that loses packets over `size` bytes and says nothing.

    Offloads are turned off on both ends of each wire, else large segments would pass uncut.
    """
    off = ("tso", "off", "gso", "off", "gro", "off")
    for each in lab.hosts:
        each.call("ethtool", "-K", "eth0", *off)
        lab.in_switch("ethtool", "-K", f"p{each.index}", *off)
    on_the_path(lab, f"meta length > {size} drop")


def slow_port(lab: Lab, host: Host) -> None:
    """A switch port that sends to one host at 50 Mbit/s."""
    limit = ("rate", "50mbit", "burst", "64k", "latency", "50ms")
    lab.in_switch("tc", "qdisc", "add", "dev", f"p{host.index}", "root", "tbf", *limit)


def slow_pair(lab: Lab, one: Host, other: Host) -> None:
    """A road between two hosts that carries 50 Mbit/s, both ways; both are fast with others."""
    for source, target in ((one, other), (other, one)):
        port = f"dev p{target.index}"
        commands = f"""
            qdisc add {port} root handle 1: htb default 1 r2q 1000
            class add {port} parent 1: classid 1:1 htb rate 10gbit
            class add {port} parent 1: classid 1:2 htb rate 50mbit
            filter add {port} parent 1: protocol ip u32 match ip src {source.address} flowid 1:2
        """
        lab.in_switch("tc", "-batch", "-", stdin=commands.replace("\n            ", "\n"))


def lossy_pair(lab: Lab, one: Host, other: Host, percent: int) -> None:
    """A road between two hosts that loses packets by chance, both ways."""
    on_the_path(
        lab,
        *(
            f"ip saddr {a.address} ip daddr {b.address} numgen random mod 100 < {percent} drop"
            for a, b in ((one, other), (other, one))
        ),
    )


def lossy_host(lab: Lab, host: Host, way: str, percent: int) -> None:
    """A road that loses packets by chance on its way into a host, or `out` of it."""
    end = {"in": "daddr", "out": "saddr"}[way]
    on_the_path(lab, f"ip {end} {host.address} numgen random mod 100 < {percent} drop")


_SERVER = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", int(sys.argv[1])), backlog=128)
print("listening", flush=True)
kept = []
while True:
    client, _ = server.accept()
    kept.append(client)
    if sys.argv[2] == "http":
        client.recv(4096)
        client.sendall(b"HTTP/1.1 400 Bad Request\\r\\nConnection: close\\r\\n\\r\\n")
        client.close()
"""


def foreign_server(host: Host, port: int = MASTER_PORT, behaviour: str = "http") -> Process:
    """Some other program on a port: answers in HTTP, or (`mute`) accepts and never says a word."""
    process = host.python(_SERVER, str(port), behaviour)
    process.wait_for("listening", 10)
    return process


_RELAY = """
import socket, struct, sys, threading
ORIGINAL = 80  # SO_ORIGINAL_DST of linux/netfilter_ipv4.h
def pass_on(source, to):
    try:
        while data := source.recv(65536):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)
    except OSError:
        pass
server = socket.create_server(("0.0.0.0", int(sys.argv[1])), backlog=128)
print("listening", flush=True)
while True:
    client, _ = server.accept()
    _, port, packed = struct.unpack_from("!HH4s", client.getsockopt(socket.SOL_IP, ORIGINAL, 16))
    try:
        far = socket.create_connection((socket.inet_ntoa(packed), port), 5, ("127.0.0.6", 0))
    except OSError:
        client.close()
        continue
    far.settimeout(None)
    for ends in ((client, far), (far, client)):
        threading.Thread(target=pass_on, args=ends, daemon=True).start()
"""


def forward_ephemeral(host: Host, port: int = 15006) -> Process:
    """A proxy that passes all connections on, and calls from 127.0.0.6, as Istio's does."""
    process = host.python(_RELAY, str(port))
    process.wait_for("listening", 10)
    _divert_ephemeral(host, port)
    return process


def intercept_ephemeral(host: Host, port: int = 15001) -> Process:
    """A proxy, as of a service mesh, that accepts every connection and passes nothing on."""
    process = foreign_server(host, port, "mute")
    _divert_ephemeral(host, port)
    return process


def _divert_ephemeral(host: Host, port: int) -> None:
    host.nft(
        f"""
        table inet fault {{
            chain prerouting {{
                type nat hook prerouting priority -100; policy accept;
                iifname eth0 tcp dport {_PORTS} redirect to :{port}
            }}
        }}
        """
    )


def pid_inside(process: Process) -> int:
    """Process id as the host itself sees it."""
    with open(f"/proc/{process.pid}/status") as status:
        for line in status:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    raise AssertionError("the kernel says no NSpid")


def drop_calls_out(host: Host, port: int = MASTER_PORT) -> None:
    """A firewall of a host that does not let its own calls to the master port out."""
    host.nft(
        f"""
        table inet fault {{
            chain output {{
                type filter hook output priority 0; policy accept;
                oifname eth0 tcp dport {port} drop
            }}
        }}
        """
    )


def drop_own_address(host: Host) -> None:
    """A firewall that forgot that a host calls its own address by the loopback interface."""
    host.nft(
        f"""
        table inet fault {{
            chain input {{
                type filter hook input priority 0; policy accept;
                iifname lo ip daddr {host.address} tcp dport {_PORTS} {_SYN} drop
            }}
        }}
        """
    )
