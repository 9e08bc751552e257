"""Description of the job by the user: the groups and settings that the checks try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GROUPS = ("auto", "one", "many", "weight-sync")
"""Values of `Job.groups`: not known; the default group alone; further groups by `new_group`; and
a side group with processes of another world, over a store of its own, as RLHF trainers have it.
"""


TAKE_A_COMMAND = frozenset(
    ("srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "jsrun", "aprun")
)
"""Programs that start tasks, and have the program of a task right behind their options."""


@dataclass(frozen=True)
class Rendezvous:
    """Options by which torchrun's agents meet, as the command of the job gives them; empty if it
    does not. `conf_from` names the flag or variable of `conf`.
    """

    backend: str = ""
    endpoint: str = ""
    conf: str = ""
    conf_from: str = ""
    local_addr: str = ""


@dataclass(frozen=True)
class UnreadHosts:
    """Other hosts that the job has, by its command or by variables of its scheduler, where it could
    not be read who they are.

    `said` is what says so, in words; empty: nothing does. `starter` is the program if it starts
    tasks (srun, mpirun); `variable` the one of a scheduler. The rest is what the line tells of the
    options of `run`; empty: nothing.
    """

    said: str = ""
    starter: str = ""
    nnodes: str = ""
    master_addr: str = ""
    hostfile: str = ""
    variable: str = ""


class Leaf(NamedTuple):
    """Leaf switch of the network, and the list of the hosts below it."""

    leaf_switch: str
    hostlist: str


@dataclass(frozen=True)
class Job:
    """The job that will follow.

    `mesh` are the dimensions of its device mesh, outermost first, each with its size.
    `deepspeed_config` is the parsed file, `deepspeed_path` where it came from. `deepspeed` says
    that the job's own command, or an option, shows that it uses DeepSpeed. `expect_load_s` is how
    long rank 0 works alone before the first barrier, in seconds. `dcgm_level` is the level of the
    diagnosis by DCGM that the GPUs are to pass before it. `hold_idle_s` is how long connections
    between the hosts are to survive a silence, in seconds. `paths` are storage that it needs, each
    with whether it writes there; `endpoints` are `HOST:PORT` of its services; `reach` are URLs of
    services outside of it, without path, user and password. `init_file` is the file in which its
    ranks meet, where they meet in one; `init_store` is the `HOST:PORT` of init_method where that is
    not the place where the ranks of this run meet. `launcher` and `rendezvous` are those of its
    command, where that is known, or else what torchrun's variables say to the pods of an elastic
    job; `elastic` are the fewest and the most hosts that it starts with, where they differ.
    `max_restarts` is how often torchrun's agents start failed ranks again, if the command says it.
    `unread` are hosts of its command that are not examined. `asks_ssh` are the words with which
    deepspeed calls ssh before it starts ranks on this host, the last one the host that it asks.
    `leaves` are the leaf switches of the network, each with the list of the hosts below it, where
    the user tells them.
    """

    mesh: tuple[tuple[str, int], ...] = ()
    groups: str = "auto"
    deepspeed: bool = False
    deepspeed_config: Mapping[str, Any] | None = None
    deepspeed_path: str = ""
    expect_load_s: float | None = None
    dcgm_level: int | None = None
    hold_idle_s: float | None = None
    paths: tuple[tuple[str, bool], ...] = ()
    endpoints: tuple[str, ...] = ()
    reach: tuple[str, ...] = ()
    init_file: str = ""
    init_store: str = ""
    launcher: str = ""
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    elastic: tuple[int, int] | None = None
    max_restarts: int | None = None
    unread: UnreadHosts = field(default_factory=UnreadHosts)
    asks_ssh: tuple[str, ...] = ()
    leaves: tuple[Leaf, ...] = ()

    @property
    def has_several_groups(self) -> bool:
        """True if the user says that the job forms groups besides the default one."""
        return bool(self.mesh) or self.groups in ("many", "weight-sync")
