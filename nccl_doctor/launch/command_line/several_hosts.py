"""Words by which a line names several hosts, where no reader knows its program."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

from nccl_doctor.launch.allocation import SIZES, other_hosts
from nccl_doctor.launch.command_line.wrappers import SHELLS, SUBMIT
from nccl_doctor.model.job import UnreadHosts

_COUNTS = frozenset(
    ("nnodes", "num-nodes", "num-machines", "n-nodes", "nodes", "node-count", "num-hosts", "nhosts")
)
_RANKS = frozenset(("node-rank", "machine-rank"))
_ADDRESSES = frozenset(
    (
        *("master-addr", "master-address", "main-address", "main-process-ip", "dist-init-addr"),
        *("nccl-init-addr", "dist-url", "init-method", "rdzv-endpoint", "coordinator-address"),
        "data-parallel-address",
    )
)
"""The last is vLLM's: its hosts of data parallelism are not counted."""
_FILES = frozenset(("hostfile", "host-file", "hosts-file", "machinefile", "machine-file"))
_LISTS = frozenset(("H", "hosts", "host-list", "hostlist", "nodelist"))
_OF_SLURM = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_HERE = ("", "localhost", "ip6-localhost")


@dataclass(frozen=True)
class _Starter:
    """A program that starts tasks: its own words for the number of hosts and for their names, and
    whether it starts them elsewhere if neither the line nor Slurm says on how many hosts. `joins`:
    its line is one for each host, which then waits for tasks. `stays`: the options, with their
    value, that keep all tasks on this host.
    """

    counts: frozenset[str] = frozenset()
    addresses: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    elsewhere: bool = True
    joins: bool = False
    stays: frozenset[tuple[str, str]] = frozenset()


_BY_NODES = _Starter(frozenset(("N",)))
_BY_MPI = _Starter(
    lists=frozenset(("host",)), files=frozenset(("default-hostfile", "f")), elsewhere=False
)
STARTERS: Mapping[str, _Starter] = {
    "srun": _BY_NODES,
    "sbatch": _BY_NODES,
    "salloc": _BY_NODES,
    "flux": _BY_NODES,
    "ray": _Starter(addresses=frozenset(("address",)), joins=True),
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"), _BY_MPI),
    **dict.fromkeys(SUBMIT, _Starter()),
    # Without -s it is local_docker: another root, and so another torch.
    "torchx": _Starter(stays=frozenset((("s", "local_cwd"), ("scheduler", "local_cwd")))),
}


def several_hosts(words: Sequence[str], environ: Mapping[str, str]) -> UnreadHosts:
    """Say by which words a line names other hosts; empty if it is content with this one.

    A number of hosts counts before names and addresses: `--nnodes 1 --master-addr NAME` is one
    host. The names of options are compared without prefix (`trainer.num_nodes=2`), and `_` is `-`.

    Args:
        words: of a program that no reader knows.
        environ: variables with which it would start.
    """
    name = PurePath(words[0]).name if words else ""
    starter = STARTERS.get(name, _Starter(elsewhere=False))
    found = _Found()
    for option, value, shown in options_in(_opened(words, environ)):
        found.take(starter, option, value, shown)
    if not found.counted:
        sizes = (*(_OF_SLURM if name in STARTERS else ()), *SIZES)
        for variable in sizes:
            if variable in environ and not found.counted:
                found.count(environ[variable], f"{variable}={environ[variable][:9]}")
    elsewhere = starter.elsewhere and not found.stays
    if found.one or not (found.said or elsewhere):
        return UnreadHosts() if found.counted else other_hosts(environ, command=True)
    said = f"the command says {found.said}" if found.said else f"{name} starts tasks elsewhere"
    return UnreadHosts(
        said=said,
        starter=name if name in STARTERS and not starter.joins else "",
        nnodes=found.nnodes,
        master_addr=found.master_addr,
        hostfile=found.hostfile,
    )


class _Found:
    def __init__(self) -> None:
        self.said = self.nnodes = self.master_addr = self.hostfile = ""
        self.counted = self.stays = False

    @property
    def one(self) -> bool:
        """True if the line counts its hosts, and there is one."""
        return self.counted and not self.nnodes

    def take(self, starter: _Starter, option: str, value: str, shown: str) -> None:
        if (option, value) in starter.stays:
            self.stays = True
        elif option in _COUNTS | starter.counts:
            self.count(value, f"{shown} {value}")
        elif option in _RANKS and re.fullmatch("0*[1-9][0-9]{,8}", value):
            self._say(f"{shown} {value}")
        elif option in _ADDRESSES | starter.addresses and (host := _other_host(value)):
            self.master_addr = host
            self._say(f"{shown} {host}")
        elif option in _ADDRESSES and not value:
            self._say(f"{shown}, which is empty; is its shell variable set?")
        elif option in _FILES | starter.files and value:
            self.hostfile = value
            self._say(f"{shown} {value}")
        elif option in _LISTS | starter.lists:
            hosts = [part for part in value.split(",") if part]
            if len(hosts) > 1 and all(re.fullmatch(r"[\w.@\[\]-]+(:\d+)?", each) for each in hosts):
                self._say(f"{shown} with {len(hosts)} hosts")

    def count(self, text: str, shown: str) -> None:
        numbers = re.fullmatch(r"(?:[0-9]{1,9}[:-])?([0-9]{1,9})", text.strip())
        if numbers is None:
            return
        self.counted = True
        if int(numbers[1]) > 1:
            self.nnodes, self.said = numbers[1], shown

    def _say(self, words: str) -> None:
        self.said = self.said or words


def _opened(words: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    """The words of a line, and those of the text that it gives to a shell, with its variables."""
    is_shell = bool(words) and PurePath(words[0]).name in SHELLS
    for at, word in enumerate(words):
        if is_shell and at and re.fullmatch("-[a-z]*c", words[at - 1]):
            for part in re.split(r"[\s;&|()\"'\\]+", word):
                yield re.sub(r"\$\{?(\w+)\}?", lambda match: environ.get(match[1], match[0]), part)
        else:
            yield word


def options_in(words: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Each option with its value: `--a b`, `--a=b`, `-a b`, `a=b`, `x.a=b`, and how it is written.

    Yields: the bare name, the value, and the name as written.
    """
    line = [*words, ""]
    for word, after in pairwise(line):
        if short := re.fullmatch(r"-([A-Z])([0-9]{1,9})", word):  # -N2
            yield short[1], short[2], f"-{short[1]}"
        match = re.fullmatch(r"([-+]*)([A-Za-z][\w.-]{0,60})(?:=(.*))?", word, re.DOTALL)
        if match is None or not (match[1] or match[3]):
            continue
        bare = match[2].rpartition(".")[2].replace("_", "-")
        bare = bare if len(bare) == 1 else bare.lower()
        yield bare, after if match[3] is None else match[3].strip("'\""), f"{match[1]}{match[2]}"


def _other_host(text: str) -> str:
    """The host of `[tcp://]HOST[:PORT]`; empty if it is this one, or none."""
    match = re.fullmatch(r"(?:tcp://)?\[?([\w.-]+|[0-9a-fA-F:.]+?)\]?(?::\d+)?(?:[/?].*)?", text)
    host = match[1] if match else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "" if host.lower() in _HERE else host
    return "" if address.is_loopback or address.is_unspecified else host
