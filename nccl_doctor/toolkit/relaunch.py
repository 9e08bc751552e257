"""Steps that start the job with another value, in the way in which it has the present one. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from nccl_doctor.model.cluster import Rank
from nccl_doctor.model.fixes import UNKNOWN, On, Step, export, word
from nccl_doctor.model.launch import OWN, Launch

_VARIABLES = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "nnodes": "NNODES",
    "node_rank": "NODE_RANK",
}
BY_OPTIONS = (OWN, "torchrun")
"""Launchers that read no variables; torchrun sets those that its ranks have."""


def start_with(
    ranks: Iterable[Rank], field: str, value: object, on: On | None = None
) -> tuple[Step, ...]:
    """The steps on the hosts of these ranks, one for each way in which they have the value.

    An option is a comment, `# --master-port 29500`: it is typed in the line that starts the job.

    Args:
        ranks: one of each host.
        field: of the launch record.
        value: the right one, or a word of `UNKNOWN`.
        on: which hosts they are, in words. What the first of them has stands for all.
    """
    hosts: dict[tuple[str, str], list[str]] = {}
    for rank in ranks:
        hosts.setdefault(_given(rank.launch or Launch(), field), []).append(rank.host.label)
    found = list(hosts.items())[: 1 if on else None]
    return tuple(_step(name, old, str(value), on or tuple(at)) for (name, old), at in found)


def _given(launch: Launch, field: str) -> tuple[str, str]:
    """The option or variable that has the value on a host, and that value as text."""
    name, old = launch.sources.get(field, ""), getattr(launch, field)
    if launch.launcher in BY_OPTIONS and not name.startswith("--"):
        name = f"--{field.replace('_', '-')}"
    elif launch.launcher == "deepspeed" and field.startswith("master_"):
        name = f"--{field}"
    elif not (name.startswith("--") or (name.isidentifier() and name.isupper())):
        name = _VARIABLES[field]
    return name, "" if old is None else str(old)


def _step(name: str, old: str, new: str, on: On | tuple[str, ...]) -> Step:
    if name.startswith("--"):
        undo = f"# {name} {word(old)}" if old else ""
        return Step(f"# {name} {word(new)}", on, undo=undo, note="in the line that starts the job")
    step = export(**{name: new})
    command = f"# {step.command}" if new in UNKNOWN else step.command
    return Step(command, on, undo=f"export {name}={word(old)}" if old else step.undo)
