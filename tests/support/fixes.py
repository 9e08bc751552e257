"""Whether the commands of a fix can be typed as they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from nccl_doctor.api import Fix, Step
from nccl_doctor.model.fixes import UNKNOWN

_UNKNOWN = re.compile(rf"\b(?:{'|'.join(UNKNOWN)})\b")
_LEFT_OUT = re.compile(r"<[a-z][\w -]*>|…|\.\.\.")
_FOR_ZSH = re.compile(r"(?:^|\s)=\w")
"""A word that zsh takes for the name of a command; `export A==b` has none."""


def steps_of(fix: str) -> Iterator[Step]:
    """Steps of a fix, and of its other ways."""
    if isinstance(fix, Fix):
        yield from fix.steps
        for other in fix.alternatives:
            yield from other.steps


def wrong_lines(fix: str) -> list[str]:
    """Commands that a shell would take otherwise than they are meant, and what takes them back."""
    lines = [line for step in steps_of(fix) for line in (step.command, step.undo) if line]
    return [line for line in lines if _is_wrong(line)]


def _is_wrong(line: str) -> bool:
    if _LEFT_OUT.search(line) or len(line.splitlines()) != 1:
        return True
    if line.startswith("#"):
        return not line.startswith("# ")
    return bool(_UNKNOWN.search(line) or _FOR_ZSH.search(line)) or not _is_whole(line)


def _is_whole(line: str) -> bool:
    try:
        return bool(shlex.split(line)) and line.count("$(") <= line.count(")")
    except ValueError:
        return False


_PROGRAMS = (
    "amd-smi apparmor_parser arping ausearch chmod chronyc cpupower dcgmi dmesg ethtool "
    "fuser getent hostnamectl ibstat ibv_devices ibv_devinfo iptables journalctl loginctl lspci "
    "mlxconfig mlxlink modprobe numactl nvidia-smi nstat perfquery setpci sha256sum show_gids "
    "sminfo ssh-copy-id ssh-keygen ssh-keyscan sysctl systemctl taskset timedatectl tracepath "
    "tuned-adm ulimit umount"
)
"""Names that mean nothing else."""
_WITH_MORE = {
    "accelerate": "launch",
    "apt": "install",
    "docker": "run|update|network",
    "dnf": "install",
    "echo": r"\S+",
    "export": r"[A-Z]\w*\b",
    "ip": r"-\S+|addr|link|neigh|route",
    "kill": r"-\w+|\d+|PID",
    "kubectl": r"\w+",
    "mount": r"-\w+|/\S+",
    "nft": "insert|add|list|delete",
    "ping": r"-\w|\d\S+",
    "pip": r"install|uninstall|show",
    "podman": "run|update",
    "ps": r"-\w+|aux",
    "python": r"-c|-m pip",
    "ray": "start",
    "scontrol": r"\w+",
    "ssh": r"-\w|\S+ true",
    "ss": r"-\w+",
    "unset": r"[A-Z]\w*\b",
    "until": r"\w+ .*; do",
}
"""Names that are words as well, and what makes a command of them."""
_COMMAND = re.compile(
    r"`|(?<![\w/.-])--[a-z]"
    rf"|(?<![\w/.-])(?:{'|'.join(_PROGRAMS.split())})(?![\w-])"
    rf"|(?<![\w/.-])(?:{'|'.join(f'{name} (?:{more})' for name, more in _WITH_MORE.items())})"
)


def prose_with_commands(fix: str) -> list[str]:
    """Sentences of a fix with a command in them.

    The text of a fix with steps is their summary on one line: there it may stand.
    """
    if not isinstance(fix, Fix):
        return [fix] if _COMMAND.search(fix) else []
    prose = [] if fix.steps else [str(fix)]
    prose += [step.note for step in fix.steps]
    found = [words for words in prose if _COMMAND.search(words)]
    return found + [words for way in fix.alternatives for words in prose_with_commands(way)]


def in_full(fix: str) -> str:
    """Text of a fix, and of its other ways."""
    return "; or ".join([str(fix), *map(str, getattr(fix, "alternatives", ()))])
