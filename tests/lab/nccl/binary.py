"""Which variables a library of NCCL asks for, and with which defaults: from its code.

A library tells only a few of them (`ncclParamDumpAll`, since 2.30.3). For each other number, its
code calls `ncclLoadParam` with the name and the default, and `ncclGetEnv` or `getenv` with the name
of a text. So the calls are read, as objdump prints them for x86-64; the wheels have symbols.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nccl_doctor.system.helpers import send_foreign
from nccl_doctor.toolkit.nccl.answer import ask_nccl
from nccl_doctor.toolkit.variables.table import AUTO, table
from nccl_doctor.toolkit.variables.values import canonical
from nccl_doctor.toolkit.versions import release

OF_PLUGINS = frozenset(
    (
        "NCCL_TUNER_CONFIG_FILE",
        "NCCL_PROFILER_CE_POLLER_INTERVAL_MICROSECONDS",
        "NCCL_PROFILER_CE_TIMING",
    )
)
"""Names that the plug-ins read which NCCL's source has as examples."""
_LINE = re.compile(r"\s*[0-9a-f]+:\s+(\w+)\s*(.*)")
_NUMBER = re.compile(r"([er])si,(0x[0-9a-f]+)")
_READERS = re.compile(r"<(?:_Z13ncclLoadParam\w*|_Z10ncclGetEnvPKc|getenv@plt)>")
_NAME = re.compile(rb"NCCL_[A-Z0-9_]+(?=\0)")
_UNSET = "-2147483648"
"""NCCL_CONFIG_UNDEF_INT: the configuration of a communicator, or NCCL itself, decides."""
_NOTHING = ("", "NONE", _UNSET)
_LIMIT_S = 120
_ANSWER_S = 30.0
_NEAR = 16
"""Instructions before a call in which its arguments are loaded."""


@dataclass
class Asked:
    """Names that a library asks for, of those the numbers with their default, and all its texts."""

    names: set[str] = field(default_factory=set)
    defaults: dict[str, str] = field(default_factory=dict)
    texts: frozenset[str] = frozenset()


class Tabled(NamedTuple):
    """How many names and defaults of a library were compared with the table, and what differs."""

    names: int
    defaults: int
    differences: tuple[str, ...]


def asked(library: Path) -> Asked:
    """What a library asks for."""
    data = library.read_bytes()
    head = _objdump("-h", str(library))
    section = re.search(r"\.rodata +[0-9a-f]+ +([0-9a-f]+) +[0-9a-f]+ +([0-9a-f]+)", head)
    assert section is not None, "it has no .rodata"
    shift = int(section[2], 16) - int(section[1], 16)

    def name_at(address: int) -> str:
        found = _NAME.match(data, address + shift)
        return found[0].decode() if found else ""

    code = _objdump("-d", "--no-show-raw-insn", "-M", "intel", "-j", ".text", str(library))
    found = Asked(texts=frozenset(text.decode() for text in _NAME.findall(data)))
    for address, default in calls(code.splitlines()):
        name = name_at(address)
        if name:
            found.names.add(name)
        if name and default is not None:
            found.defaults[name] = str(default)
    return found


def calls(code: Iterable[str]) -> list[tuple[int, int | None]]:
    """Calls of functions that read a variable: the address of its name, and the default.

    Args:
        code: lines of objdump, with Intel's syntax.
    """
    found = []
    before: list[tuple[str, str]] = []
    for line in code:
        match = _LINE.match(line)
        if match is None:
            before = []  # another function
            continue
        before = [*before[-_NEAR:], (match[1], match[2])]
        if match[1] in ("call", "jmp") and _READERS.search(match[2]):
            address, default = _arguments(before[:-1])
            if address is not None:
                found.append((address, default if "ncclLoadParam" in match[2] else None))
    return found


def _arguments(before: list[tuple[str, str]]) -> tuple[int | None, int | None]:
    """The first two arguments of a call: an address of constants, and a number."""
    name: int | None = None
    default: int | None = None
    for operation, words in reversed(before):
        if operation == "call":
            break
        if name is None and operation == "lea" and words.startswith("rdi,"):
            pointer = re.search(r"# ([0-9a-f]+)", words)
            name = int(pointer[1], 16) if pointer else None
        if default is None:
            default = _as_second(operation, words)
    return name, default


def _as_second(operation: str, words: str) -> int | None:
    if (operation, words) == ("xor", "esi,esi"):
        return 0
    if operation == "or" and words == "rsi,0xffffffffffffffff":
        return -1
    number = _NUMBER.fullmatch(words) if operation in ("mov", "movabs") else None
    if number is None:
        return None
    value = int(number[2], 16)
    return value - (1 << 64) if value >> 63 else value


def told_by(library: Path) -> dict[str, str]:
    """Variable → default, of those that a library lists itself; empty before 2.30.3."""

    def ask() -> bytes:  # in a child: this process would keep the library
        answer = ask_nccl(str(library), {}, patience_s=_ANSWER_S)
        assert answer is not None
        values = answer.readings.items()
        return json.dumps({n: each.value for n, each in values if not each.taken}).encode()

    told: dict[str, str] = json.loads(send_foreign("defaults", ask, 2 * _ANSWER_S))
    return told


def compare(version: str, library: Path) -> Tabled:
    """The table against a library: `differences`, and how much was compared."""
    found, told = asked(library), told_by(library)
    return Tabled(
        len(found.names | told.keys()),
        len(found.defaults.keys() | told.keys()),
        tuple(differences(version, found, told)),
    )


def differences(version: str, found: Asked, told: Mapping[str, str]) -> list[str]:
    """Where a library and the table of variables differ, in words.

    A default of `auto` is not compared: the value is decided later than in these calls.

    Args:
        version: of the library.
        found: of its code.
        told: variable → default, of those that it lists itself.
    """
    now, rows, lines = release(version), table(), []
    ignored = next(lib for lib in rows.libraries if lib.name == "nccl").ignores
    for name in sorted(found.names | told.keys()):
        row = rows.variables.get(name)
        if row is None and name not in rows.unread and not ignored(name):
            lines.append(f"{name}: not in the table")
        elif row is not None and row.since and release(row.since) > now:
            lines.append(f"{name}: in the table since {row.since}")
    for name, default in sorted({**found.defaults, **told}.items()):
        if (row := rows.variables.get(name)) is None or row.gone:
            continue
        row = row.at(now)
        if row.default == AUTO or (row.default is None and default in _NOTHING):
            continue
        if canonical(row, (row.default or "").strip()) != canonical(row, default):
            lines.append(f"{name}: {default}, in the table {row.default}")
    for name, row in sorted(rows.variables.items()):
        there = row.library == "nccl" and row.since and release(row.since) <= now
        gone = row.gone and release(row.gone.lstrip("<=")) <= now
        if there and not gone and name not in found.texts | OF_PLUGINS | told.keys():
            lines.append(f"{name}: in the table since {row.since}, and not in the library")
    return lines


def _objdump(*words: str) -> str:
    run = ["objdump", *words]
    return subprocess.run(run, check=True, capture_output=True, text=True, timeout=_LIMIT_S).stdout
