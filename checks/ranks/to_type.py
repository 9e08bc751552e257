"""Fixes for hosts that have a wrong number, or did not come. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nccl_doctor.api import Cluster, Command, Fix, Launch, On, Rank, Step, look, number_range, shell
from nccl_doctor.toolkit.relaunch import BY_NODE_RANK, ONE_LAUNCHER, endpoint_of, start_with

_FEW = 4
"""Hosts that get a line each."""


def own_numbers(cluster: Cluster, hosts: Sequence[Sequence[Rank]]) -> str:
    """The fix for hosts, each with its ranks, that claim one node rank: to take free numbers.

    The host that MASTER_ADDR names keeps its number, or else the first one.
    """
    firsts = [ranks[0] for ranks in hosts]
    taken = {host.node_rank for host in cluster.present_hosts}
    free = [number for number in range(cluster.nnodes) if number not in taken]
    launch = firsts[0].launch or Launch()
    if launch.launcher in BY_NODE_RANK and (by_slurm := _by_slurm(firsts)):
        return by_slurm
    kept = next((r for r in firsts if _is_at(r, launch.master_addr)), firsts[0])
    others = [rank for rank in firsts if rank is not kept]
    if launch.launcher not in BY_NODE_RANK or not len(others) <= min(len(free), _FEW):
        last = max(cluster.nnodes, 2) - 1
        return f"give each of them its own node rank, 0 to {last}, or its own RANK for each process"
    return Fix(
        *(
            step
            for rank, number in zip(others, free, strict=False)
            for step in start_with([rank], "node_rank", number)
        )
    )


def _by_slurm(firsts: Sequence[Rank]) -> Fix | None:
    """The fix where Slurm has numbered the hosts, and perhaps started a launcher for each task."""
    numbers = {rank.env.get("SLURM_NODEID", "") for rank in firsts}
    if "" in numbers:
        return None
    tasks, nodes = (firsts[0].env.get(f"SLURM_{name}", "") for name in ("NTASKS", "NNODES"))
    steps = start_with(firsts, "node_rank", shell("$SLURM_NODEID"), On.EVERY)
    if tasks.isdecimal() and nodes.isdecimal() and int(tasks) > int(nodes):
        return Fix(ONE_LAUNCHER, *steps)
    return Fix(*steps) if len(numbers) == len(firsts) else None


def _is_at(rank: Rank, address: str | None) -> bool:
    return address in (rank.host.name, *rank.host.addresses)


def same_number(cluster: Cluster, hosts: Sequence[str], number: int | None) -> str:
    """The fix for hosts that expect another number of hosts than most; empty if none is known."""
    firsts = [r for h in cluster.present_hosts if h.label in hosts and (r := cluster.first_on(h))]
    by_option = all((rank.launch or Launch()).launcher in BY_NODE_RANK for rank in firsts)
    if number is None or not firsts or not by_option:
        return ""
    return Fix(*start_with(firsts, "nnodes", number))


def on_absent(cluster: Cluster, absent: Mapping[int, str], launch: Launch) -> str:
    """The fix for hosts that never came: what shows why, and what starts the job there.

    Args:
        cluster: of the run.
        absent: node rank → label of its host.
        launch: of a host that came.
    """
    nodes = list(absent)
    master, port = launch.master_addr, launch.master_port
    if not master or port is None:
        return "is the host up, and was the job started there?"
    nnodes, why = cluster.nnodes, f"shows what keeps it from {master}:{port}"
    if endpoint_of(launch):
        options = "--nnodes={} --rdzv-backend=c10d --rdzv-endpoint={}:{:number}"
        line = shell(options, nnodes, master, port)
        tried = shell("nccl-doctor run -- torchrun {} --no-python hostname", line)
        note = "if nothing runs there: the job, in this way, with the same run id"
        start = Fix(Step(shell("# torchrun {}", line), note=note))
        return Fix(look(tried, why, on=On.HERE), alternatives=[start])
    numbers: list[int | str] = [*nodes] if len(nodes) <= _FEW else ["NUMBER"]

    def of(number: int | str) -> Command:
        options = "--nnodes={} --node-rank={} --master-addr={} --master-port={}"
        return shell(options, nnodes, number, master, port)

    more = "" if numbers == nodes else f"; NUMBER is its own, of {number_range(nodes)}"
    steps: list[Step] = []
    for number in numbers:
        on = (absent[number],) if isinstance(number, int) and len(nodes) > 1 else On.HERE
        steps.append(look(shell("nccl-doctor run {}", of(number)), why + more, on=on))
    start = Fix(text="if nothing runs there: start the job there too")
    if launch.launcher == "torchrun":
        line = shell("# torchrun {}", of("NUMBER" if len(nodes) > 1 else nodes[0]))
        start = Fix(Step(line, note="if nothing runs there: the job, in this way"))
    return Fix(*steps, alternatives=[start])
