"""Fixes written as one line of a table, with their commands in backticks. Pure.

    `nvidia-smi -L` (all of them?); `nvidia-smi nvlink -e`; or `export A=0` (to see); ask the owner

Parts stand between `; `. Commands that follow each other are one way, `or` begins another, and so
does what is no command. A command that sets something is known by its first word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nccl_doctor.model.commands import Command, shell
from nccl_doctor.model.fixes import Fix, On, Step, look
from nccl_doctor.toolkit.slurm import first_address

_COMMAND = re.compile(r"(or )?`([^`]+)`(?: \((.*)\))?")
_COMMANDS = re.compile(r"`([^`]*)`")
_CHANGES = ("# ", "unset ", "ulimit ", "modprobe ", "mkdir ", "pip ", "systemctl ", "sysctl -w ")


_OF_HOST = re.compile(
    r"(?:export|unset|#)(?: (?:[\w@%+=:,./-]|'[^']*'|\"'\"|\$[A-Za-z_]\w*|"
    rf"{re.escape(first_address())})+)+",
    re.ASCII,
)
"""A command that a host may have written: plain and quoted words, and values of variables."""


def fix_of(text: str, on: On = On.EVERY, *, of_host: bool = False) -> str:
    """The fix of a line; the line itself where it has no command.

    Args:
        text: as above.
        on: where variables are set.
        of_host: whether it comes from facts. A command of them that may run more than it shows is
            text.
    """
    if of_host and not all(map(_is_harmless, _COMMANDS.findall(text))):
        return text
    if "`" not in text:
        return text
    ways: list[list[Step] | str] = []
    for part in text.split("; "):
        found = _COMMAND.fullmatch(part)
        if found is None:
            ways.append(part.removeprefix("or "))
            continue
        step = _step(found[2], found[3] or "", on)
        if found[1] or not ways or isinstance(ways[-1], str):
            ways.append([step])
        else:
            ways[-1].append(step)
    first, *others = map(_way, ways)
    return Fix(*first.steps, text="" if first.steps else str(first), alternatives=others)


def _is_harmless(command: str) -> bool:
    return command.isprintable() and _OF_HOST.fullmatch(command) is not None


def _way(way: Iterable[Step] | str) -> Fix:
    return Fix(text=way) if isinstance(way, str) else Fix(*way)


def _step(command: str, note: str, on: On) -> Step:
    if command.startswith("export "):
        names = [word.partition("=")[0] for word in command.split()[1:] if "=" in word]
        return Step(Command(command), on, undo=shell("unset {:variable}", names), note=note)
    if command.startswith(_CHANGES):
        return Step(Command(command), note=note)
    return look(Command(command), note)


def end_processes(pids: Iterable[int | str]) -> Fix:
    """The fix that ends processes, after a look at whose they are: they may be a stranger's."""
    known = ",".join(str(pid) for pid in pids)
    each = known.split(",")
    one = len(each) == 1
    return Fix(
        look(shell("ps -o user,pid,lstart,args -p {:number}", known), f"whose {_ARE[one]}"),
        Step(shell("kill {:number}", each), note=f"if {_NEEDS[one]}", persists=True),
    )


_ARE = {True: "it is", False: "they are"}
_NEEDS = {True: "it is yours, and nobody needs it", False: "they are yours, and nobody needs them"}
