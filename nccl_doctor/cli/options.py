"""Options of the commands that examine, judge or show: each one once.

An entry says how an option is written, its type, its default and its help, the heading it stands
under in `--help`, the commands that have it, and whether it may stand in the configuration file.
The commands, the headings and the keys of the file are made of this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from nccl_doctor.cli.needs import Endpoint, InitMethod, StoragePath, Url
from nccl_doctor.cli.params import HostName, LocalRanks, Mesh, NameList, Number, Seconds
from nccl_doctor.cli.settings import read_config
from nccl_doctor.model.codec import MAX_RANKS
from nccl_doctor.model.job import GROUPS
from nccl_doctor.report.formats import about, formats
from nccl_doctor.report.profiles import PROFILES

F = TypeVar("F", bound=Callable[..., Any])
Types = tuple[type, ...]

_EXAMINE = "run env"
_JUDGE = "run env judge merge autopsy"
_REPORT = "run env judge merge autopsy show"
_TEXT: Types = (str,)
_WHOLE: Types = (int,)
_NUMBER: Types = (int, float)
_SWITCH: Types = (bool,)
_LIST: Types = (list,)


@dataclass(frozen=True)
class OptionRow:
    """One option: as click takes it, and the commands that have it.

    `in_file`: types of its value in the configuration file; none: it cannot stand there.
    """

    flags: tuple[str, ...]
    commands: frozenset[str]
    in_file: Types
    given: Mapping[str, Any]

    def option(self) -> click.Option:
        """The option of click."""
        return click.Option(self.flags, **self.given)

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return str(click.Option(self.flags, **self.given).name)


def _entry(
    *flags: str, of: str = "run", in_file: Types = (), about: str = "", **given: Any
) -> OptionRow:
    return OptionRow(flags, frozenset(of.split()), in_file, {"help": about or None, **given})


_ABOUT_GITHUB = "Write annotations and the step summary of GitHub Actions."
_ABOUT_KEY = (
    "Key for the pseudonyms: a file with a secret, or the map of an earlier report. The same key "
    "gives the same pseudonyms."
)

HEADINGS: Mapping[str, tuple[OptionRow, ...]] = {
    "Hosts and ranks": (
        _entry(
            "--nnodes",
            in_file=_WHOLE,
            type=Number(1, most=MAX_RANKS),
            about="Number of hosts. [default: 1]",
        ),
        _entry(
            "--node-rank",
            in_file=_WHOLE,
            type=Number(0, most=MAX_RANKS),
            about="Index of this host. [default: 0]",
        ),
        _entry(
            "--nproc-per-node",
            in_file=(int, str),
            type=LocalRanks(),
            about="Number of ranks on this host. [default: auto: one per GPU, or 2 without a GPU]",
        ),
        _entry(
            "--master-addr",
            in_file=_TEXT,
            type=HostName(),
            about="Host of rank 0. [default: localhost]",
        ),
        _entry(
            "--master-port",
            in_file=_WHOLE,
            type=Number(1, 65535),
            about="Port on that host. [default: 29500; with one host, a free port]",
        ),
        _entry(
            "--standalone",
            is_flag=True,
            about="This host alone, as for torchrun: the same as --nnodes 1.",
        ),
        _entry(
            "--hostfile",
            in_file=_TEXT,
            metavar="FILE",
            about="Start nccl-doctor over ssh on every host in FILE; lines are `host slots=N`, as "
            "for deepspeed.",
        ),
        _entry(
            "--topology",
            in_file=_TEXT,
            metavar="FILE",
            about="Leaf switches of the network, as in Slurm's topology.conf: lines "
            "`SwitchName=leaf1 Nodes=gpu[001-016]`. Read by rank 0. With more than 64 hosts, "
            "only some of each two switches are tested with each other. [default: the switches "
            "that Slurm tells]",
        ),
        _entry(
            "--key",
            in_file=_TEXT,
            metavar="FILE",
            about="File with a secret, the same on every host, that only its owner can read. "
            "Messages from anyone without the key are rejected. Not needed for one host or "
            "--hostfile.",
        ),
        _entry("--relay", is_flag=True, hidden=True),
        _entry("--again", metavar="FILE", hidden=True),
        _entry("--agents-from", type=Number(2, MAX_RANKS), hidden=True),
    ),
    "The job": (
        _entry(
            "--backend",
            of=_EXAMINE,
            in_file=_TEXT,
            type=click.Choice(["auto", "nccl", "gloo"]),
            default="auto",
            show_default=True,
            about="Backend of the job; auto: nccl if any host has a GPU.",
        ),
        _entry(
            "--mesh",
            in_file=_TEXT,
            type=Mesh(),
            about="Device mesh of the job, for example dp=2,sp=1,tp=4; every group of every "
            "dimension is tested.",
        ),
        _entry(
            "--groups",
            in_file=_TEXT,
            type=click.Choice(GROUPS),
            default="auto",
            show_default=True,
            about="Process groups of the job. one: the default group; many: more by new_group; "
            "weight-sync: a side group with processes of another world (RLHF); auto: not known.",
        ),
        _entry(
            "--autopsy",
            metavar="DIR",
            about="Save the output of COMMAND in DIR, best a folder that all hosts share. If "
            "the job fails, name the rank that failed first, and examine the hosts again.",
        ),
        _entry(
            "--hang-after",
            type=Seconds(),
            metavar="SECONDS",
            about="With --autopsy: if the job prints nothing for this time, say where its ranks "
            "stand; py-spy is used if it is installed. The job goes on.",
        ),
        _entry(
            "--init-method",
            in_file=_TEXT,
            metavar="URL",
            type=InitMethod(),
            about="How the job calls init_process_group: file:///PATH is examined on every host; "
            "tcp://HOST:PORT stands for --master-addr and --master-port; env:// is the default.",
        ),
        _entry(
            "--deepspeed-config",
            in_file=_TEXT,
            metavar="FILE",
            about="DeepSpeed configuration of the job; its batch sizes and parallel degrees are "
            "checked against the cluster.",
        ),
        _entry(
            "--expect-load-seconds",
            in_file=_NUMBER,
            type=Seconds(),
            about="Time that rank 0 works alone before the first barrier; the time-outs are "
            "compared with it.",
        ),
    ),
    "Checks": (
        _entry(
            "--level",
            in_file=_TEXT,
            type=click.Choice(["quick", "standard", "full"]),
            default="standard",
            show_default=True,
            about="quick: no collectives; standard: collectives; full: larger messages and all "
            "links.",
        ),
        _entry(
            "--with-dcgm",
            in_file=_WHOLE,
            metavar="LEVEL",
            type=Number(1, 4),
            about="Run DCGM's diagnosis of this level, 1 to 4, on each host (dcgmi diag -r LEVEL). "
            "From level 2 on it takes minutes: give --timeout.",
        ),
        _entry(
            "--hold-idle",
            in_file=_NUMBER,
            type=Seconds(),
            about="Test whether connections between the hosts survive this time without "
            "traffic: the longest pause of the job. Needs a --timeout 90 s longer.",
        ),
        _entry(
            "--path",
            "paths",
            in_file=_LIST,
            multiple=True,
            metavar="DIR[:ro]",
            type=StoragePath(),
            about="Storage of the job (checkpoints, data, caches): every host writes a small "
            "file and looks for those of the others; with :ro none is written. May be repeated.",
        ),
        _entry(
            "--endpoint",
            "endpoints",
            in_file=_LIST,
            multiple=True,
            metavar="HOST:PORT",
            type=Endpoint(),
            about="Port of a service of the job (Ray, vLLM, metrics). HOST is a host of the "
            "job, by name, address or node rank: the port must be free there, and reachable "
            "from the others. To any other HOST every host must connect. May be repeated.",
        ),
        _entry(
            "--reach",
            in_file=_LIST,
            multiple=True,
            metavar="URL",
            type=Url(),
            about="Service outside the job that every host must reach (hub, registry, tracking "
            "server): http, https or tcp://HOST:PORT. Path, user and password are not used. May "
            "be repeated.",
        ),
        _entry(
            "--select",
            of=_EXAMINE,
            in_file=(str, list),
            type=NameList(),
            about="Run only these checks or finding codes.",
        ),
        _entry(
            "--ignore",
            of=_EXAMINE,
            in_file=(str, list),
            type=NameList(),
            about="Leave out these checks or finding codes.",
        ),
        _entry(
            "--config",
            of=_EXAMINE,
            metavar="FILE",
            is_eager=True,
            callback=read_config,
            about="File with defaults for options, and expected values. [default: "
            "nccl-doctor.toml, or [tool.nccl-doctor] in pyproject.toml, in the working directory, "
            "unless another user may have written it]",
        ),
    ),
    "Time limits": (
        _entry(
            "--timeout",
            in_file=_NUMBER,
            type=Seconds(),
            default=120.0,
            show_default=True,
            about="Time limit for the whole run. Without this option, the time that GPUs and "
            "communicators take to start is added with NCCL where a round would lack it, at most "
            "480 s; stderr and the report say how much.",
        ),
        _entry(
            "--join-timeout",
            in_file=_NUMBER,
            type=Seconds(),
            default=60.0,
            show_default=True,
            about="Time to reach rank 0, and to wait for all ranks to sign in.",
        ),
        _entry(
            "--collective-timeout",
            in_file=_NUMBER,
            type=Seconds(),
            default=20.0,
            show_default=True,
            about="Time limit for one attempt with one group. With NCCL the time that GPUs and "
            "communicators take to start is added.",
        ),
        _entry(
            "--retry",
            of=_EXAMINE,
            metavar="SECONDS",
            type=Seconds(),
            about="Examine again until the exit code would be 0, for hosts that come up late; no "
            "attempt begins after this time. Only the last one prints its report, the others a "
            "line on stderr.",
        ),
        _entry("--pause", of=_EXAMINE, type=Seconds(), hidden=True),
    ),
    "Reports (PATH - writes to stdout, in place of the text)": (
        _entry(
            "--format",
            "format_",
            of="show",
            type=click.Choice(["text", *formats()]),
            default="text",
            show_default=True,
            about="Format of what is printed to stdout.",
        ),
        *(
            _entry(
                f"--{name}",
                name,
                of=_REPORT,
                in_file=_TEXT,
                metavar="PATH",
                about=f"Write the report to PATH as {about(name)}.",
            )
            for name in formats()
        ),
        _entry(
            "--github/--no-github",
            of=_JUDGE,
            in_file=_SWITCH,
            default=None,
            about=f"{_ABOUT_GITHUB} [default: on if GITHUB_ACTIONS is set]",
        ),
        # What shows a verdict once more tells GitHub only if it is asked to.
        _entry("--github/--no-github", of="show", about=_ABOUT_GITHUB),
        _entry(
            "--output-dir",
            in_file=_TEXT,
            metavar="DIR",
            about="Folder for the partial report of each host, node<K>.json. If all hosts share "
            "it, rank 0 also reads the partial reports of hosts that cannot reach it.",
        ),
    ),
    "The archive": (
        _entry(
            "--output",
            of="bundle",
            metavar="PATH",
            about="Archive to write. [default: FILE, ending in .bundle.tar.gz]",
        ),
        _entry(
            "--log",
            "logs",
            of="bundle",
            metavar="FILE",
            multiple=True,
            about="Log to add, for example one of NCCL_DEBUG_FILE; may be given more than once.",
        ),
        _entry(
            "--no-tools",
            of="bundle",
            is_flag=True,
            about="Leave out the output of nvidia-smi, ibstat, ip ….",
        ),
    ),
    "Verdict": (
        _entry(
            "--exit-profile",
            of=_JUDGE,
            in_file=_TEXT,
            type=click.Choice(PROFILES),
            default="native",
            show_default=True,
            about="Exit code for that system, and one line for it in place of the report.",
        ),
        _entry(
            "--exit-profile",
            of="show",
            type=click.Choice(PROFILES),
            about="Exit code of the verdict for that system, and one line for it in place of the "
            "report.",
        ),
        _entry(
            "--baseline",
            of="run judge",
            in_file=_TEXT,
            metavar="FILE|DIR",
            about="Earlier reports of the same hosts to compare with: a file, or a folder of "
            "*.json or *.json.gz files. Speeds are judged with five or more.",
        ),
        _entry(
            "--before",
            of="autopsy",
            metavar="FILE",
            about="Report of an examination of the same hosts before the job.",
        ),
        _entry(
            "--after",
            of="autopsy",
            metavar="FILE",
            about="Report of one after the job: what only this one finds is a cause too.",
        ),
        _entry(
            "--strict",
            of=_EXAMINE,
            in_file=_SWITCH,
            is_flag=True,
            about="Treat warnings as failures.",
        ),
    ),
    "Output": (
        _entry(
            "--redact",
            of=f"{_REPORT} diff",
            in_file=_SWITCH,
            is_flag=True,
            about="Replace hosts, addresses, users and paths by pseudonyms. The real names are "
            "written next to the report, as PATH.map.json.",
        ),
        _entry(
            "--no-redact",
            of="bundle issue",
            is_flag=True,
            about="Keep real names, addresses and paths.",
        ),
        _entry(
            "--redact-key",
            of=f"{_REPORT} diff bundle issue",
            in_file=_TEXT,
            metavar="FILE",
            about=_ABOUT_KEY,
        ),
        _entry(
            "--quiet",
            "-q",
            of=_REPORT,
            in_file=_SWITCH,
            is_flag=True,
            about="Show only the verdict and what to fix.",
        ),
        _entry(
            "--verbose",
            "-v",
            of=_REPORT,
            in_file=_WHOLE,
            count=True,
            about="Show all values that were measured; -vv: the table of checks, too.",
        ),
    ),
}
"""The options, under their headings, in the order of --help."""


def _entries() -> Iterator[OptionRow]:
    for entries in HEADINGS.values():
        yield from entries


def with_options(command: str) -> Callable[[F], F]:
    """Decorator that gives a command its options."""

    def decorate(function: F) -> F:
        for entry in reversed([each for each in _entries() if command in each.commands]):
            function = click.option(*entry.flags, **entry.given)(function)
        return function

    return decorate


def grouped(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Headings and the options under them, for the options of one command."""
    placed: set[str] = set()
    for heading, entries in HEADINGS.items():
        here = [name for name in dict.fromkeys(each.name for each in entries) if name in names]
        placed.update(here)
        if here:
            yield heading, here
    rest = [name for name in names if name not in placed]
    if rest:
        yield "Other options", rest


def in_file() -> dict[str, Types]:
    """Keys of the configuration file, with dashes, and the types of their values."""
    return {each.name.replace("_", "-"): each.in_file for each in _entries() if each.in_file}
