"""Slurm's host lists, as in SLURM_JOB_NODELIST: `node[01-04,07],gpu3`; and its nodes. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nccl_doctor.model.commands import Command, shell

MAX_HOSTS = 100_000
"""More than any cluster has: a longer list is a mistake, and is not expanded."""

_DIGITS = 9
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})(\D*)", re.DOTALL)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def slurm_hosts(text: str, most: int = MAX_HOSTS) -> tuple[str, ...]:
    """Host names in the order of the list; zeros that pad a number stay, a name may have several
    brackets.

    Returns: an empty tuple if the text is no host list, or has more than `most`: a part of a list
    would be misleading.
    """
    try:
        hosts = tuple(itertools.islice(_hosts(text.strip(), most), most + 1))
    except ValueError:
        return ()
    return hosts if len(hosts) <= most else ()


def host_ranges(names: Iterable[str]) -> str:
    """Host names as such a list: `gpu[001-064],login1`; the inverse of `slurm_hosts`.

    Names that differ in their last number only are one item, in the order in which the first came.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for name in names:
        parts = _NUMBERED.fullmatch(name)
        key = (parts[1], parts[3]) if parts else (name, "")
        found.setdefault(key, {})[parts[2] if parts else ""] = None
    return ",".join(_item(before, after, [*found[before, after]]) for before, after in found)


def _item(before: str, after: str, numbers: Sequence[str]) -> str:
    if len(numbers) == 1:
        return f"{before}{numbers[0]}{after}"
    padded = {len(number) for number in numbers if number[:1] == "0" and len(number) > 1}
    by_width: dict[int, list[int]] = {}
    for number in numbers:
        if number:
            by_width.setdefault(len(number) if len(number) in padded else 0, []).append(int(number))
    ranges = [text for width, each in by_width.items() for text in _ranges(sorted(each), width)]
    bare = [f"{before}{after}"] if "" in numbers else []
    return ",".join([*bare, f"{before}[{','.join(ranges)}]{after}"])


def _ranges(numbers: Sequence[int], width: int) -> Iterator[str]:
    first = 0
    for i, number in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            start = f"{numbers[first]:0{width}d}"
            yield start if i == first else f"{start}-{number:0{width}d}"
            first = i + 1


def place_of_host(environ: Mapping[str, str], name: str) -> tuple[int, tuple[str, ...]] | None:
    """Number of a host in the list of its step, which tasks are given in that order, and the list:
    by SLURM_NODEID and SLURM_STEP_NODELIST, of srun(1). None where they are not those of the host
    of this name: variables of the batch script are copied to others by ssh and mpirun.
    """
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    hosts, number = slurm_hosts(listed), environ.get("SLURM_NODEID", "")
    if not (number.isdecimal() and len(number) < _DIGITS and int(number) < len(hosts)):
        return None
    same = hosts[int(number)].partition(".")[0].lower() == name.partition(".")[0].lower()
    return (int(number), hosts) if same else None


def address_of(node: str) -> Command:
    """Shell substitution for the address by which Slurm itself reaches a node.

    Where the name of a node does not resolve (NodeName is what slurm.conf says), its NodeAddr leads
    there.
    """
    return shell(_ADDRESS, node)


def first_address() -> Command:
    """The same for the first node of the job, by the list that a batch script has."""
    first = shell('"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"')
    return shell(_ADDRESS, first)


_ADDRESS = "$(scontrol show node {} | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)"


def _hosts(text: str, most: int) -> Iterator[str]:
    """Names one by one.

    Raises:
        ValueError: this is no host list.
    """
    for name in _names(text):
        parts: list[list[str]] = []
        at = 0
        while at < len(name):
            piece = _PIECE.match(name, at)
            if piece is None:
                raise ValueError(name)
            parts.append([piece[2]] if piece[2] else _numbers(piece[1], most))
            at = piece.end()
        for combination in itertools.product(*parts):
            yield "".join(combination)


def _names(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    start, depth = 0, 0
    for at, sign in enumerate(text + ","):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            if start == at:
                raise ValueError(text)
            yield text[start:at]
            start = at + 1
    if depth:
        raise ValueError(text)


def _numbers(text: str, most: int) -> list[str]:
    """The numbers of `01-03,07`."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= most:
            raise ValueError(text)
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found
