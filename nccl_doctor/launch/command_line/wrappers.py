"""Programs that stand in front of another and then become it: `env A=B`, `numactl`, `nice`, …

What stays on this host and keeps the words of the line is read through. What starts tasks
elsewhere, or in another root, is not: nccl-doctor belongs behind it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from nccl_doctor.launch.command_line.binding import bound_cpus
from nccl_doctor.launch.command_line.job_line import JobLineError
from nccl_doctor.model.job import TAKE_A_COMMAND
from nccl_doctor.system.masking import masked_command


@dataclass(frozen=True)
class _Wrapper:
    """The wrapper's own words: options that take the next word, and words that are no options."""

    values: str = ""
    words: int = 0
    subcommand: str = ""


_CONDA = _Wrapper("-n --name -p --prefix --cwd", subcommand="run")
_WRAPPERS = {
    "chrt": _Wrapper("-T --sched-runtime -P --sched-period -D --sched-deadline", words=1),
    "conda": _CONDA,
    "exec": _Wrapper("-a"),
    "hatch": _Wrapper("-e --env", subcommand="run"),
    "ionice": _Wrapper("-c --class -n --classdata"),
    "mamba": _CONDA,
    "micromamba": _CONDA,
    "nice": _Wrapper("-n --adjustment"),
    "nohup": _Wrapper(),
    "numactl": _Wrapper(
        "-i --interleave -p --preferred -P --preferred-many -N --cpunodebind -m --membind "
        "-C --physcpubind -w --weighted-interleave"
    ),
    "pdm": _Wrapper("-p --project", subcommand="run"),
    "pipenv": _Wrapper(subcommand="run"),
    "pixi": _Wrapper("-e --environment --manifest-path", subcommand="run"),
    "poetry": _Wrapper("-C --directory -P --project", subcommand="run"),
    "setsid": _Wrapper(),
    "stdbuf": _Wrapper("-i --input -o --output -e --error"),
    "taskset": _Wrapper(words=1),
    "time": _Wrapper("-f --format -o --output"),
    "timeout": _Wrapper("-k --kill-after -s --signal", words=1),
    "unbuffer": _Wrapper(),
    "uv": _Wrapper(
        "-p --python --with --with-editable --with-requirements --extra --group --only-group "
        "--no-group --env-file --project --directory --package --index --index-url -i "
        "--default-index --extra-index-url --python-platform --config-file --cache-dir",
        subcommand="run",
    ),
}
SUBMIT = (
    *("ansible", "ansible-playbook", "aprun", "arena", "bsub", "clush", "condor_submit", "dstack"),
    *("helm", "jsrun", "kubectl", "oarsub", "oc", "pdsh", "pjsub", "pssh", "qsub", "runai", "sky"),
    *("ssh", "torchx"),
)
"""Programs that start tasks elsewhere, whatever their line says."""
_ELSEWHERE = {
    *("srun", "sbatch", "salloc", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"),
    *("flux", "ray", "parallel", *SUBMIT),
    *("docker", "podman", "singularity", "apptainer", "enroot", "nerdctl"),
}
SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DEEPEST = 16


@dataclass(frozen=True)
class Unwrapped:
    """The program that a line becomes, and what stood in front of it.

    `environ`: variables that the line sets (None: unsets); `clean`: it drops all others. `cpus`:
    number of CPUs to which it binds the program, as the kernel counts them; None: as many as here.
    """

    words: tuple[str, ...]
    cwd: Path
    environ: dict[str, str | None] = field(default_factory=dict)
    clean: bool = False
    notes: tuple[str, ...] = ()
    cpus: int | None = None


def unwrap(argv: Sequence[str], cwd: Path) -> Unwrapped:
    """Read through the programs in front.

    Raises:
        JobLineError: a program in front is left without one behind it.
    """
    line = Unwrapped(tuple(argv), cwd)
    for _ in range(_DEEPEST):
        name = PurePath(line.words[0]).name if line.words else ""
        if name == "env":
            line = _behind_env(line)
        elif name in _WRAPPERS and (words := _behind(_WRAPPERS[name], line.words)) is not None:
            line = _bound(replace(line, notes=line.notes + _other_python(line, words)), words)
        else:
            return line
        if not line.words:
            raise JobLineError(f"{masked_command(argv)}: no program after {name}")
    return line


def advice(words: Sequence[str], at: int | None = None, *, is_launcher: bool = False) -> str:
    """A note on a program that is not read through; empty where there is nothing to say.

    `at` is the index of the program that it starts, as far as it is known.
    """
    name = PurePath(words[0]).name if words else ""
    if name in SHELLS or name.endswith((".sh", ".bash")):
        return (
            f"the command that {name} starts is not read: put `nccl-doctor run --` before the "
            "launcher in it"
        )
    if not is_launcher and name not in _ELSEWHERE:
        return ""
    why = "starts tasks on other hosts" if name in _ELSEWHERE else "is not known here"
    if name == "ray":  # its line is no job's: the tasks come later, from another program
        return "ray starts no ranks by itself: run nccl-doctor on each of its hosts, or in a worker"
    if not at and name not in TAKE_A_COMMAND:
        return f"{name} {why}: put `nccl-doctor run --` before the program that it starts there"
    front = masked_command(words[:at] if at else words[:1])
    behind = masked_command(words[at : at + 1]) if at else "COMMAND"
    return f"{name} {why}: put nccl-doctor after it: {front} nccl-doctor run -- {behind} …"


def _bound(line: Unwrapped, words: tuple[str, ...]) -> Unwrapped:
    """The line with the `words` that are left, and the CPUs to which the ones before them bind."""
    front = line.words[: len(line.words) - len(words)]
    cpus = bound_cpus(front)
    if cpus == 0:
        note = f"to which CPUs {masked_command(front)} binds is not read: give --nproc-per-node N"
        return replace(line, words=words, notes=(*line.notes, note))
    return replace(line, words=words, cpus=line.cpus if cpus is None else cpus)


def _other_python(line: Unwrapped, words: Sequence[str]) -> tuple[str, ...]:
    """A note where what stands in front chooses the Python, and so the torch, of the job."""
    front = line.words[: len(line.words) - len(words)]
    if not _WRAPPERS[PurePath(front[0]).name].subcommand:
        return ()
    line_behind = f"{masked_command(front)} nccl-doctor run -- {' '.join(words[:1])} …"
    return (f"{front[0]} may use another torch than the one examined; better: {line_behind}",)


def _behind(wrapper: _Wrapper, words: Sequence[str]) -> tuple[str, ...] | None:
    """The words behind a wrapper's own; None where it is used for something else."""
    rest = list(words[1:])
    if wrapper.subcommand:
        rest = _behind_options(wrapper, rest)
        if rest[:1] != [wrapper.subcommand]:
            return None
        del rest[0]
    return tuple(_behind_options(wrapper, rest)[wrapper.words :])


def _behind_options(wrapper: _Wrapper, words: list[str]) -> list[str]:
    values = wrapper.values.split()
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        if words[index] == "--":
            return words[index + 1 :]
        index += 2 if words[index] in values else 1
    return words[index:]


def _behind_env(line: Unwrapped) -> Unwrapped:
    """`env [-i] [-u NAME] [-C DIR] [-S TEXT] [NAME=VALUE]… PROGRAM …`."""
    rest, environ, cwd, clean = list(line.words[1:]), dict(line.environ), line.cwd, line.clean
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        if word in ("-", "-i", "--ignore-environment"):
            clean, environ = True, {}
            continue
        match = re.fullmatch(r"(-[uCS]|--unset|--chdir|--split-string)(?:=?(.+))?", word, re.DOTALL)
        if match is None:
            continue  # -0, -v, --block-signal and others: none takes another word
        value = match[2] if match[2] is not None else (rest.pop(0) if rest else "")
        if match[1] in ("-u", "--unset"):
            environ[value] = None
        elif match[1] in ("-C", "--chdir"):
            cwd = cwd / value
        else:
            try:
                rest = shlex.split(value) + rest
            except ValueError as error:
                raise JobLineError(f"env {word} {value!r}: {error}") from error
    while rest and (assignment := _ASSIGNMENT.fullmatch(rest[0])):
        environ[assignment[1]] = assignment[2]
        del rest[0]
    return replace(line, words=tuple(rest), environ=environ, cwd=cwd, clean=clean)
