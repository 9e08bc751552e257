"""Kinds of check port."""

from __future__ import annotations

from nccl_doctor.api import Fix, Kind, Layer, On, Severity, Step, look, shell

PORT_IN_USE = Kind(
    code="port-in-use",
    layer=Layer.PORT,
    title="Another process holds MASTER_PORT",
    why="Rank 0 cannot serve the store; the other ranks connect to that process, or wait.",
    fix="choose another MASTER_PORT on every host, or end the process that holds it",
)
PORT_OF_ANOTHER_RANK_0 = PORT_IN_USE.variant(
    title="Another nccl-doctor on this host serves MASTER_PORT",
    why="Two processes of this host say that they are rank 0: RANK or the node rank is the same in "
    "all, or each task has started a launcher of its own. Or another job is examined here now.",
)
PORT_PRIVILEGED = Kind(
    code="port-privileged",
    layer=Layer.PORT,
    title="This user may not bind MASTER_PORT",
    why="Ports below ip_unprivileged_port_start (1024) are for root; rank 0 cannot serve there.",
    fix=Fix(
        Step(shell("export MASTER_PORT=29500"), On.EVERY, note="or another one from 1024 to 32767")
    ),
)
PORT_FORBIDDEN = PORT_PRIVILEGED.variant(
    title="A security rule forbids this process to bind MASTER_PORT",
    why="The port is not one of those for root: SELinux, AppArmor or a seccomp profile refuses it, "
    "and rank 0 cannot serve there.",
    fix=Fix(
        look(shell("ausearch -m avc -ts recent"), "shows the rule of SELinux"),
        look(shell("dmesg | grep -i -e apparmor -e audit"), "that of AppArmor, and others"),
        alternatives=["allow it there, or start the container with another profile"],
    ),
)
PORT_EPHEMERAL = Kind(
    code="port-ephemeral",
    layer=Layer.PORT,
    title="MASTER_PORT is in the range from which the kernel assigns ports to clients",
    why="An outgoing connection may hold it at the moment when rank 0 needs it.",
    fix="choose a MASTER_PORT below the range, or add it to net.ipv4.ip_local_reserved_ports",
    severity=Severity.WARN,
)
PORT_REFUSED = Kind(
    code="port-refused",
    layer=Layer.PORT,
    title="The master refuses connections to MASTER_PORT",
    why="The host answers, but nothing listens at that port: rank 0 is not running, serves "
    "another port or runs elsewhere; or a firewall answers with a reset.",
    fix=Fix(
        look(shell("# sudo ss -ltnp"), "rank 0's host: is rank 0 running, with this MASTER_PORT?")
    ),
)
PORT_NOT_THE_STORE = Kind(
    code="port-not-the-store",
    layer=Layer.PORT,
    title="The service at MASTER_PORT is not a TCPStore",
    why="Another service holds the port, or a proxy accepts connections for it; torch connects "
    "and then waits for an answer until its time-out.",
    fix=Fix(
        look(shell("# sudo ss -ltnp"), "rank 0's host: who has MASTER_PORT"),
        alternatives=["choose a free MASTER_PORT on every host"],
    ),
)
NO_ROUTE = Kind(
    code="no-route",
    layer=Layer.ROUTE,
    title="No route to the master's address",
    why="There is no route to it, from here or from a router on the way, or no host on the local "
    "network has the address.",
    fix=Fix(
        look(shell("ip route get ADDRESS")),
        alternatives=["is rank 0's host up, on the same network? Is MASTER_ADDR right?"],
    ),
)
WRONG_ENTRY = NO_ROUTE.variant(
    title="A fixed entry of the neighbour table leads to another machine than the master",
    why="The kernel asks nobody for that address: what the host sends to it goes to a machine that "
    "does not take it, and calls get no answer.",
)
"""An entry that a person or a program made, and that only stands where nothing asks again."""
DEAD_ROUTE = NO_ROUTE.variant(
    title="A route of the host leads nowhere, in the way of the master",
    why="The kernel refuses every packet to that address before it leaves the host.",
)
