"""Kinds of check firewall, and the fixes that several of them have."""

from __future__ import annotations

from nccl_doctor.api import Fix, Kind, Layer, On, Step, look, shell
from nccl_doctor.toolkit.nccl.use_interface import CHOOSE
from nccl_doctor.toolkit.peers.matrix import PeerCall

OPEN = "open all tcp between the job's hosts, at least the range net.ipv4.ip_local_port_range"

INTERFACE_UNROUTABLE = Kind(
    code="interface-unroutable",
    layer=Layer.ROUTE,
    title="The other hosts cannot reach a chosen address, but can reach another address",
    why="NCCL opens data channels on every interface it finds (bridges, VPN, a second NIC): if "
    "one of them leads nowhere, the job hangs after a healthy bootstrap.",
    fix=CHOOSE,
)
PEER_NO_ROUTE = Kind(
    code="peer-no-route",
    layer=Layer.ROUTE,
    title="There is no route to the address that another host chose",
    why="The connection fails at once (Network is unreachable, No route to host); NCCL does not "
    "try again.",
    fix=Fix(
        look(shell("ip route get ADDRESS"), "shows the way that it would take, and why not"),
        Step(
            shell("# ip route add ADDRESS dev NIC"),
            undo=shell("# ip route del ADDRESS dev NIC"),
            note="NIC is the interface in a network of that host",
        ),
        alternatives=[CHOOSE],
    ),
)
MTU_BLACKHOLE = Kind(
    code="mtu-blackhole",
    layer=Layer.ROUTE,
    title="Small packets arrive, large packets are silently lost",
    why="Bootstrap and small collectives work; the first large one hangs until the time-out.",
    fix=Fix(
        look(shell("ping -c 2 -M do -s 1472 ADDRESS"), "answered: the path carries an MTU of 1500"),
        Step(shell("# ip link set dev NIC mtu SIZE"), On.EVERY, note="to what the path carries"),
        alternatives=['let ICMP "fragmentation needed" pass on the way'],
    ),
)
PEER_BLOCKED = Kind(
    code="peer-blocked",
    layer=Layer.PORT,
    title="Hosts cannot connect to each other on ephemeral ports",
    why="NCCL and gloo connect all hosts on ephemeral ports: with a silent drop the job waits for "
    "its whole time-out, NCCL up to an hour.",
    fix=OPEN,
)
PEER_ONE_WAY = Kind(
    code="peer-one-way",
    layer=Layer.PORT,
    title="Connections on ephemeral ports work in one direction only",
    why="NCCL connects every pair of hosts in both directions, gloo from the greater address to "
    "the smaller one only.",
    fix=OPEN,
)
PEER_INTERCEPTED = Kind(
    code="peer-intercepted",
    layer=Layer.PORT,
    title="Something else answers on the ports between the hosts",
    why="A proxy (service mesh, transparent proxy) or another host accepts the connection and "
    "does not pass it on: everything looks connected and no data moves.",
    fix="exclude the job's traffic from the proxy (Istio: annotation sidecar.istio.io/inject: "
    '"false"), and look for redirect rules and duplicate addresses',
)

UNUSED = "; gloo connects these hosts from the other side alone, and does not need it; NCCL does"
"""Words where every failed call is one that the job does not make."""

DEAD_ROUTE = "A route of a host leads nowhere, in the way of another host"
NO_NEIGHBOUR = {
    "title": "No host on the local network answers for the address of another host",
    "why": "The address is in a network that both hosts are said to be in, and packets for it stay "
    "on the host that sends them: another VLAN, a wrong subnet mask, or an address that is gone.",
}


NO_ANSWER = Fix(
    look(shell("ip neigh show ADDRESS"), "compare VLAN, cable and subnet mask of both ends"),
    alternatives=[CHOOSE],
)

_PAYLOADS = (8972, 4472, 1472, 1452, 1432, 1412, 1392, 1372, 1352, 1322, 1272, 1172, 972, 548)
"""Sizes of a ping to try, from the MTUs of jumbo frames and Ethernet down, through those of tunnels
(1480, 1450, 1420, 1400, …) to what every path carries."""


def lower_mtu(call: PeerCall, caller: str) -> Fix:
    """The fix for a path that loses large packets: the MTU that it carries, for both its ends."""
    bare, device = call.address.partition("%")[0], call.interface.partition(":")[0]
    others = [Fix(text='let ICMP "fragmentation needed" pass on the way')]
    if call.carries:
        set_it = shell("ip link set dev {} mtu", device)
        lower = Step(
            shell("{} {}", set_it, call.carries),
            on=On.EVERY,
            undo=shell("{} {}", set_it, call.mtu),
            note="the largest packets that pass; the MTU has to be the same on all hosts",
        )
        return Fix(lower, alternatives=others)
    headers = 48 if ":" in bare else 28
    ping = shell("ping -c 2 -W 1 -M do -s $size {} > /dev/null 2>&1", call.address)
    print_it = shell('echo "MTU $((size + {:number}))"', headers)
    return Fix(
        look(
            shell("for size in {}; do {} && {} && break; done", _PAYLOADS, ping, print_it),
            "prints the MTU that the path carries",
            on=(caller,),
        ),
        Step(
            shell("# ip link set dev {} mtu SIZE", device),
            on=On.EVERY,
            note="SIZE is that MTU; it has to be the same on all hosts of the network",
        ),
        text="lower the MTU of both ends to what the path carries",
        alternatives=others,
    )


def if_reached(fix: str) -> Fix:
    """A fix for hosts that can reach an address, as another way."""
    steps = fix.steps if isinstance(fix, Fix) else ()
    return Fix(*steps) if steps else Fix(text=f"if they can reach it: {fix}")
