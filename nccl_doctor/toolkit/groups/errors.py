"""Meanings of error texts of torch, NCCL or CUDA, in one sentence each. Pure.

The rows are in errors.toml, and those of errors of a GPU in machine/gpuerrors.toml.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from nccl_doctor.toolkit.advice import fix_of
from nccl_doctor.toolkit.gpu.tables import gpu_error
from nccl_doctor.toolkit.tables import read_table

_LONGEST = 100_000
"""Characters of a text that are searched, from its end."""
_CUDA = re.compile(r"\bcuda[^\n]{0,200}?\b(?:error|failure|out of memory)\b[^\n]{0,300}")
"""Messages of CUDA; other lines may contain its error numbers as process ids or line numbers."""
_PLACE = re.compile(r"\.(?:cc|cpp|cu|cuh|h|hpp|py):\d+")


@dataclass(frozen=True)
class Meaning:
    """The meaning of an error.

    `means` is a clause on what happened, `ask` what to do next. The cause is `of_another` rank than
    the one that raises it.
    """

    means: str
    ask: str
    of_another: bool = False


def meaning_of(text: str) -> Meaning | None:
    """The meaning of an error, or of a log with one in it; None for text that is in no row."""
    text = text[-_LONGEST:].lower()
    return _row_of(text, later=False) or _of_gpu(text) or _row_of(text, later=True)


def _row_of(text: str, *, later: bool) -> Meaning | None:
    for fragments, is_later, meaning in _rows():
        if is_later == later and all(fragment.search(text) for fragment in fragments):
            return meaning
    return None


def _of_gpu(text: str) -> Meaning | None:
    said = "\n".join(_PLACE.sub("", found.group()) for found in _CUDA.finditer(text))
    error = gpu_error(said)
    return Meaning(error.means, error.ask) if error else None


@functools.cache
def _rows() -> tuple[tuple[tuple[re.Pattern[str], ...], bool, Meaning], ...]:
    data = read_table(__package__, "errors.toml")
    return tuple(
        (
            tuple(re.compile(each) for each in row["fragments"]),
            row.get("later", False),
            Meaning(row["means"], fix_of(row["ask"]), row.get("of_another", False)),
        )
        for row in data["error"]
    )
