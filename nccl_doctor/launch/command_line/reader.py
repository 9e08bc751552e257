"""The launcher in a command, and the topology of its job."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from nccl_doctor.launch.command_line import (
    accelerate,
    by_ssh,
    by_variables,
    deepspeed,
    servers,
    torchrun,
)
from nccl_doctor.launch.command_line.job_line import JobLine, JobLineError
from nccl_doctor.launch.command_line.several_hosts import STARTERS, several_hosts
from nccl_doctor.launch.command_line.wrappers import advice, unwrap
from nccl_doctor.launch.identity import num_gpus

_PROGRAMS = {  # name of a program: launcher, and the words that have to follow
    "torchrun": ("torchrun", ()),
    "accelerate": ("accelerate", ("launch",)),
    "accelerate-launch": ("accelerate", ()),
    "deepspeed": ("deepspeed", ()),
    "deepspeed.pt": ("deepspeed", ()),
    "ds": ("deepspeed", ()),
    "vllm": ("vllm", ("serve",)),
    "sglang": ("sglang", ("serve",)),
    "fabric": ("fabric", ("run",)),
    "horovodrun": ("horovodrun", ()),
    "colossalai": ("colossalai", ("run",)),
    "llamafactory-cli": ("llamafactory", ("train",)),
    "lmf": ("llamafactory", ("train",)),
    "swift": ("swift", ()),
    "megatron": ("megatron", ()),
}
_MODULES = {
    "torch.distributed.run": ("torchrun", ()),
    "torch.distributed.launch": ("launch", ()),
    "accelerate.commands.launch": ("accelerate", ()),
    "accelerate.commands.accelerate_cli": ("accelerate", ("launch",)),
    "deepspeed.launcher.runner": ("deepspeed", ()),
    "vllm.entrypoints.openai.api_server": ("vllm", ()),
    "sglang.launch_server": ("sglang", ()),
}
_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*t?")
_PYTHON_VALUES = "WXcm"
"""Short options of Python that take a value; `-c` and `-m` end its own."""


def read(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> JobLine:
    """Read the topology of the job that a line starts.

    Reads files that the line names, a hostfile or a configuration file, and accelerate's own.

    Args:
        argv: the words of the line, as a shell would hand them over.
        environ: variables with which it would start.
        cwd: folder in which it would start.

    Returns: a record with the launcher `none` for a line that starts no launcher that is known.

    Raises:
        JobLineError: the launcher would refuse the line, or the line contradicts itself.
    """
    line = unwrap(argv, cwd)
    base = {} if line.clean else dict(environ)
    changed = {**base, **line.environ}
    seen = {key: value for key, value in changed.items() if value is not None}
    found = _launcher(line.words)
    if found is None:
        note = _advice(line.words)
        return JobLine(
            environ=line.environ,
            notes=(note,) if note else (),
            unread=several_hosts(line.words, seen),
        )
    name, words = found
    readers: dict[str, Callable[[], JobLine | None]] = {
        "torchrun": lambda: torchrun.read(words, seen),
        "launch": lambda: torchrun.read(words, seen, torchrun.LAUNCH_FLAGS),
        "accelerate": lambda: accelerate.read(words, seen, line.cwd),
        "deepspeed": lambda: deepspeed.read(words, line.cwd),
        "vllm": lambda: servers.read("vllm", words),
        "sglang": lambda: servers.read("sglang", words),
        "fabric": lambda: by_ssh.read_fabric(words),
        "horovodrun": lambda: by_ssh.read_horovodrun(words, line.cwd),
        "colossalai": lambda: by_ssh.read_colossalai(words, line.cwd),
        "llamafactory": lambda: by_variables.read_llamafactory(seen),
        "swift": lambda: by_variables.read_swift(words, seen),
        "megatron": lambda: by_variables.read_swift(words, seen, megatron=True),
    }
    try:
        job = readers[name]()
    except JobLineError as error:
        raise JobLineError(f"{'torchrun' if name == 'launch' else name}: {error}") from error
    if job is None:
        job = JobLine(unread=several_hosts(line.words, seen))
    notes = line.notes + job.notes
    if line.cpus and (job.nproc_per_node == "cpu" or _counts_cpus(job, seen)):
        job = replace(job, nproc_per_node=str(line.cpus))
    return replace(job, environ={**line.environ, **job.environ}, notes=notes)


def is_starter(word: str) -> bool:
    """True for a program that begins the line of a job: a launcher, or a Python."""
    name = PurePath(word).name
    return name in (*_PROGRAMS, *STARTERS) or _PYTHON.fullmatch(name) is not None


def _counts_cpus(job: JobLine, environ: Mapping[str, str]) -> bool:
    return job.nproc_per_node == "auto" and not num_gpus(environ)


def _advice(words: Sequence[str]) -> str:
    """A note where a launcher or a Python stands behind a program that is not read through."""
    if _is_python(words):
        return ""
    for at in range(1, len(words)):
        behind = words[at:]
        if _launcher(behind) is not None:
            return advice(words, at, is_launcher=True)
        if _is_python(behind):
            return advice(words, at)
    return advice(words)


def _launcher(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """(launcher, the words behind it), if these words start one."""
    name = PurePath(words[0]).name if words else ""
    if name in _PROGRAMS:
        return _match(_PROGRAMS[name], words[1:])
    return _behind_python(words[1:]) if _is_python(words) else None


def _is_python(words: Sequence[str]) -> bool:
    return bool(words) and _PYTHON.fullmatch(PurePath(words[0]).name) is not None


def _match(
    known: tuple[str, tuple[str, ...]], words: Sequence[str]
) -> tuple[str, Sequence[str]] | None:
    launcher, follow = known
    if tuple(words[: len(follow)]) != follow:
        return None
    return launcher, words[len(follow) :]


def _behind_python(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """`[options] -m module …` or `[options] script …`."""
    index = 0
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        index += 1
        if word.startswith("--"):
            index += word == "--check-hash-based-pycs"
            continue
        for at, letter in enumerate(word[1:], start=1):
            if letter not in _PYTHON_VALUES:
                continue
            value = word[at + 1 :]
            if not value and index < len(words):
                value, index = words[index], index + 1
            if letter == "m":
                return _match(_MODULES[value], words[index:]) if value in _MODULES else None
            if letter == "c":
                return None
            break
    return _script(words[index:])


def _script(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """A launcher that Python is given as a file: `python $(which torchrun) …`."""
    if not words:
        return None
    path = PurePath(words[0])
    if path.name in _PROGRAMS:
        return _match(_PROGRAMS[path.name], words[1:])
    dotted = ".".join(path.with_suffix("").parts[-3:])
    return _match(_MODULES[dotted], words[1:]) if dotted in _MODULES else None
