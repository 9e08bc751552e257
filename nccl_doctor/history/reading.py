"""Read earlier reports from a file or a folder: the one place here that touches the system."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from nccl_doctor.contract import Check
from nccl_doctor.history.past import Earlier, Past
from nccl_doctor.record import Report

NEWEST = 50
"""Files of a folder that are looked into, by the time of their last change."""
BUDGET_S = 10.0
"""Reading a folder ends after this time, newest first: the run is waiting."""
LARGEST = 256 << 20
"""Bytes of a file of a folder; a report of a thousand ranks has some tens of millions."""


def read_past(path: str, checks: Sequence[Check]) -> Past:
    """Reports of one file, or of a folder: its `*.json` files; others there are not looked at.

    Of a folder what is no report is counted, with the reason.

    Args:
        path: of the file or folder.
        checks: whose figures are kept.

    Raises:
        OSError: the file or the folder cannot be read.
        ValueError: the file is not a report; says why.
    """
    place = Path(path)
    if not place.is_dir():
        return Past(path, (_earlier(place, checks),))
    found: list[Earlier] = []
    left_out: Counter[str] = Counter()
    end = time.monotonic() + BUDGET_S
    for number, file in enumerate(_newest_first(place)):
        if number >= NEWEST or time.monotonic() > end:
            left_out["older, not read"] += 1
            continue
        try:
            if file.stat().st_size > LARGEST:
                left_out["too large"] += 1
                continue
            found.append(_earlier(file, checks))
        except OSError:
            left_out["not readable"] += 1
        except ValueError:
            left_out["not a report"] += 1
    return Past(path, tuple(found), dict(left_out))


def _earlier(file: Path, checks: Sequence[Check]) -> Earlier:
    data = file.read_bytes()
    try:
        return Earlier.of(str(file), Report.from_json(json.loads(data)), checks)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _newest_first(folder: Path) -> Iterator[Path]:
    files = [each for each in folder.iterdir() if each.suffix == ".json" and each.is_file()]
    yield from sorted(files, key=lambda file: (_changed(file), file.name), reverse=True)


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0
