"""Options of a run: one record, the same for every participant.

Filled by the command line and the configuration file; travels from the coordinator as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.model.findings import Level
from nccl_doctor.model.job import Job
from nccl_doctor.model.launch import Launch


@dataclass(frozen=True)
class Options:
    """Options of `run` that matter after parsing; times in seconds.

    `select` and `ignore` hold check names and finding codes. `config` is the path of the
    configuration file: `expected` comes from it. With `hands_over` the job follows in the same
    processes: MASTER_PORT must be free when they leave. `outputs` maps formats to the paths that
    the report is written to, `-` for stdout; with `github`, GitHub Actions gets the findings too.
    `exit_profile` is one of `profiles.PROFILES`. With `timeout_grows` nobody gave `timeout_s`, so
    rank 0 may put the end of the run off, by `MOST_MORE_S` at most. `absent_nodes` are node ranks
    that are known not to come: the sign-in does not wait for them. `baseline` is where earlier
    reports are. With `redact`, the report gets pseudonyms as it is written, made with the key in
    the file `redact_key`, if there is one. In a job of at least `agents_from` ranks, those of a
    host have an agent (`gather.agent`).
    """

    backend: str = "auto"
    level: Level = Level.STANDARD
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    timeout_s: float = 120.0
    timeout_grows: bool = False
    join_timeout_s: float = 60.0
    collective_timeout_s: float = 20.0
    strict: bool = False
    outputs: Mapping[str, str] = field(default_factory=dict)
    github: bool = False
    output_dir: str | None = None
    redact: bool = False
    redact_key: str | None = None
    baseline: str | None = None
    verbosity: int = 0
    quiet: bool = False
    hands_over: bool = False
    expected: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    absent_nodes: tuple[int, ...] = ()
    exit_profile: str = "native"
    agents_from: int = 128
    job: Job = field(default_factory=Job)


@dataclass(frozen=True)
class Flags:
    """The topology as the command line gives it; None where it was not given.

    `nproc_per_node` is `auto`, `gpu`, `cpu` or a number. With `any_node_rank` the sign-in gives
    out the node ranks (as torchrun's c10d rendezvous does), and the host that MASTER_ADDR leads to
    is node 0, unless `is_host` says which one is; `run_id` keeps such jobs apart. With
    `starts_ranks` this process is a host of the job even under a launcher: it is a command behind
    `--` that starts the ranks. `spelled` are the options of that command, by field, where they are
    not our own.
    """

    nnodes: int | None = None
    node_rank: int | None = None
    nproc_per_node: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    any_node_rank: bool | None = None
    is_host: bool | None = None
    run_id: str | None = None
    starts_ranks: bool | None = None
    spelled: Mapping[str, str] | None = None


_FIELDS = {  # flag: field of Launch, and the variable that every launcher's ranks agree on
    "nnodes": ("nnodes", "NNODES"),
    "node_rank": ("node_rank", "NODE_RANK"),
    "nproc_per_node": ("local_world_size", "LOCAL_WORLD_SIZE"),
    "master_addr": ("master_addr", "MASTER_ADDR"),
    "master_port": ("master_port", "MASTER_PORT"),
}


def contradictions(flags: Flags, launch: Launch) -> list[str]:
    """Flags that say something else than the launcher that started us, one line each.

    A flag about which the launcher says nothing counts too: it would be ignored in silence. The
    words `auto`, `gpu` and `cpu` of --nproc-per-node say no number, so they agree with any.
    """
    lines = []
    for name, (field_name, variable) in _FIELDS.items():
        given = getattr(flags, name)
        launched = getattr(launch, field_name)
        by_rule = name.startswith("master") and launch.given(field_name) is None
        if by_rule and str(given) != str(launched):
            launched = None  # nobody said where to meet: what is exported will be stronger
        if given is None or (name == "nproc_per_node" and not str(given).isdecimal()):
            continue
        option = f"--{name.replace('_', '-')} {given}"
        if launched is None:
            lines.append(
                f"{option}: under {launch.launcher} this value comes from the environment, where "
                f"it is missing; export {variable}={given} instead"
            )
        elif str(given) != str(launched):
            source = launch.sources.get(field_name, "")
            lines.append(
                f"{option}: {launch.launcher} has {launched}{f' ({source})' if source else ''}; "
                f"leave the option out"
            )
    return lines
