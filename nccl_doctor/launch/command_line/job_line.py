"""Record of a job, as its command describes it, and how it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nccl_doctor.launch.ssh.hostfile import Entry
from nccl_doctor.model.job import Rendezvous, UnreadHosts
from nccl_doctor.toolkit.errands import send


class JobLineError(ValueError):
    """The line cannot start the job that it describes; the text is one line that says why."""


def is_file(path: Path) -> bool:
    """True if a file is there that a line names, or that its launcher would look for.

    Raises:
        JobLineError: its disk does not answer.
    """
    try:
        return send(path.parent, lambda: str(path.is_file()).encode()) == b"True"
    except OSError as error:
        raise JobLineError(f"{path}: {error.strerror}") from error


@dataclass(frozen=True)
class JobLine:
    """Job that a command describes, as its launcher would read it. None: not given.

    Defaults of the launcher stand here too, with the source `default`.

    Attributes:
        launcher: `torchrun`, `accelerate`, `deepspeed`, `vllm`, `sglang`, `fabric`, `horovodrun`,
            `colossalai`, or `none` for a line that none of them starts.
        nnodes: hosts that must be there for the job to start; of an elastic range, the fewest.
        max_nnodes: hosts that may join; equal to `nnodes` but for an elastic range.
        node_rank: of this host. None also where the launcher gives the node ranks out.
        nproc_per_node: `auto`, `gpu`, `cpu` or a number, here.
        master_addr: where the hosts meet; None where the launcher finds it out as it starts.
        master_port: None where any free port will do.
        ranks_assigned: the rendezvous gives out the node ranks (torchrun's c10d); whose address is
            `master_addr` hosts it.
        is_host: `--rdzv-conf is_host=…`: whether this host serves the rendezvous, if given.
        rendezvous: torchrun's options for it, for the checks.
        max_restarts: how often torchrun's agents start failed ranks again.
        starts_remote: one line on one host starts all the others: DeepSpeed with a hostfile, over
            ssh or with the launcher of --launcher; accelerate with mpirun's.
        shell_here: of these, one starts the ranks of its own host without ssh.
        hostfile: its path, as written. `hosts` are those of it that a DeepSpeed job uses, in order
            of node rank, with as many slots as ranks.
        unread: other hosts that a line names which starts no launcher that is known.
        asks_ssh: words with which deepspeed calls ssh before it starts ranks here, if it does.
        environ: variables that the line itself sets for its ranks; None: unset.
        sources: field → flag, variable or file that it is from.
        notes: what the user should know, one line each.
    """

    launcher: str = "none"
    nnodes: int | None = None
    max_nnodes: int | None = None
    node_rank: int | None = None
    nproc_per_node: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    ranks_assigned: bool = False
    is_host: bool | None = None
    run_id: str | None = None
    local_addr: str | None = None
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    max_restarts: int | None = None
    starts_remote: bool = False
    shell_here: bool = False
    hostfile: str | None = None
    hosts: tuple[Entry, ...] = ()
    ssh_port: int | None = None
    unread: UnreadHosts = field(default_factory=UnreadHosts)
    asks_ssh: tuple[str, ...] = ()
    environ: Mapping[str, str | None] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Said(NamedTuple):
    """One value of a line, and what said it: a flag, a variable, or a key of a file."""

    text: str
    source: str


GivenFlags = Mapping[str, Said]
"""Flag, without hyphens in front and with underscores → its value. A switch has none."""


class Draft:
    """Builder of a `JobLine`."""

    def __init__(self, launcher: str, notes: tuple[str, ...] = ()) -> None:
        self._fields: dict[str, Any] = {"launcher": launcher}
        self._sources: dict[str, str] = {}
        self._notes = list(notes)

    def put(self, name: str, value: Any, source: str = "") -> None:
        """Set a field, with its source."""
        self._fields[name] = value
        if source:
            self._sources[name] = source

    def note(self, line: str) -> None:
        """Add a line for the user."""
        self._notes.append(line)

    def done(self) -> JobLine:
        """The record."""
        return JobLine(**self._fields, sources=self._sources, notes=tuple(self._notes))


DEFAULT = "default"
"""Source of a value that is the launcher's default."""
MAX_PORT = 65535
_MANY = 10_000_000


def number(said: Said, low: int, high: int = _MANY) -> int:
    """The whole number of a text, read as the launchers' `int()` does.

    Raises:
        JobLineError: it is none, or lies outside.
    """
    text = said.text.strip()
    if not text:
        raise JobLineError(f"{said.source} is empty; is its shell variable set?")
    try:
        value = int(text)
    except ValueError:
        raise JobLineError(f"{said.source} {text!r} is not a whole number") from None
    if not low <= value <= high:
        bound = f"at least {low}" if high == _MANY else f"{low} to {high}"
        raise JobLineError(f"{said.source} {value} is not {bound}")
    return value
