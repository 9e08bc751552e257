"""Steps that start the job with another value, in the way in which it has the present one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nccl_doctor.model.cluster import Rank
from nccl_doctor.model.commands import Command, shell, unknown_in
from nccl_doctor.model.fixes import On, Step, export
from nccl_doctor.model.launch import ENDPOINT, OPTIONS, OWN, PER_HOST, Launch

_VARIABLES = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "nnodes": "NNODES",
    "node_rank": "NODE_RANK",
}
STARTERS: Mapping[str, str] = {
    "srun": "srun",
    "mpirun": "mpirun",
    "mpi": "mpiexec",
    "pals": "mpiexec",
    "prterun": "prterun",
    "flux": "flux run",
    "jsrun": "jsrun",
    "horovod": "horovodrun",
}
"""Launcher whose tasks may be ranks → the program that starts them, as it is typed."""
BY_NODE_RANK = (OWN, "torchrun", "accelerate", *PER_HOST)
"""Launchers that are told the node rank and the number of hosts on each host."""
ONE_LAUNCHER = Step(shell("# srun --ntasks-per-node=1"), On.EVERY, note="one launcher on each host")
"""Step where each task of srun has started a launcher of ranks."""
PASS_ON = (*STARTERS, *PER_HOST, "ray")
"""Launchers that pass the variables of a shell on, or whose hosts have their own."""
_ENDPOINTS = (ENDPOINT, "PET_RDZV_ENDPOINT", "--dist-init-addr")


def start_with(
    ranks: Iterable[Rank], field: str, value: object, on: On | None = None
) -> tuple[Step, ...]:
    """The steps on the hosts of these ranks, one for each way in which they have the value.

    An option is a comment, `# --master-port 29500`: it is typed in the line that starts the job, as
    the launcher of that line spells it.

    Args:
        ranks: one of each host.
        field: of the launch record.
        value: the right one, a word of `UNKNOWN`, or a `Command` that a shell puts in its place.
        on: which hosts they are, in words. What the first of them has stands for all.
    """
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for rank in ranks:
        new = value if isinstance(value, Command) else str(value)
        given = _given(rank.launch or Launch(), field, new)
        hosts.setdefault(given, []).append(rank.host.label)
    found = list(hosts.items())[: 1 if on else None]
    return tuple(_step(*given, on or tuple(at)) for given, at in found)


def endpoint_of(launch: Launch | None) -> str:
    """The endpoint of torchrun as it was given, where that is what master and port are read from;
    else empty.
    """
    name = launch.sources.get("master_addr", "") if launch else ""
    if launch is None or name not in _ENDPOINTS:
        return ""
    return f"{name}={_endpoint(launch.master_addr or '', str(launch.master_port))}"


def _given(launch: Launch, field: str, new: str) -> tuple[str, str, str]:
    """The option or variable that has the value on a host, that value as text, and the new one."""
    name, options = launch.sources.get(field, ""), OPTIONS.get(launch.launcher, {})
    if not name.startswith("--"):
        is_variable = name.isidentifier() and name.isupper()
        if field in options and not (is_variable and launch.launcher == OWN):
            name = options[field]  # the variable is what the launcher made of it
        elif not is_variable:
            name = _VARIABLES[field]
    old = getattr(launch, field)
    if name in _ENDPOINTS:
        addr, port = launch.master_addr or "", str(launch.master_port)
        at = _endpoint(new, port) if field == "master_addr" else _endpoint(addr, new)
        return name, _endpoint(addr, port), at
    return name, "" if old is None else str(old), new


def _endpoint(host: str, port: str) -> str:
    if isinstance(host, Command):
        return shell("{}:{:number}", host, port)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _step(name: str, old: str, new: str, on: On | tuple[str, ...]) -> Step:
    if name.startswith("--"):
        undo = shell("# {:option} {}", name, old) if old else Command()
        return Step(
            shell("# {:option} {}", name, new),
            on,
            undo=undo,
            note="in the line that starts the job",
        )
    step = export(**{name: new})
    command = shell("# {}", step.command) if unknown_in(new) else step.command
    return Step(command, on, undo=shell("export {:variable}={}", name, old) if old else step.undo)
