"""Read earlier reports from a file or a folder: the one place here that touches the system."""

from __future__ import annotations

import contextlib
import json
import stat
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from nccl_doctor.judge.history.past import Earlier, Past
from nccl_doctor.model.check import Check
from nccl_doctor.model.report import Report
from nccl_doctor.system import files
from nccl_doctor.system.helpers import send

NEWEST = 50
"""Most files of a folder that are read, the last changed first."""
BUDGET_S = 10.0
"""Time limit for reading a folder, newest first: the run is waiting."""
LARGEST = 512 << 20
"""Largest report, in bytes, unpacked; one of a thousand ranks has 20 million."""

_DEVICE = "device"


def read_past(path: str, checks: Sequence[Check]) -> Past:
    """Reports of one file, or of a folder: its `*.json` and `*.json.gz` files; others there are not
    looked at.

    Of a folder what is no report is counted, with the reason.

    Args:
        path: of the file or folder.
        checks: whose figures are kept.

    Raises:
        OSError: the file or the folder cannot be read.
        ValueError: the file is not a report; says why.
    """
    place = Path(path)
    there = json.loads(send(place, lambda: _newest_first(place)))
    if there == _DEVICE:
        raise ValueError("it is a device")  # /dev/zero has no end
    if there is None:
        return Past(path, (_earlier(place, checks),))
    found: list[Earlier] = []
    left_out: Counter[str] = Counter()
    end = time.monotonic() + BUDGET_S
    for number, (name, size) in enumerate(there):
        if number >= NEWEST or time.monotonic() > end:
            left_out["older, not read"] += 1
            continue
        try:
            if size > LARGEST:
                left_out["too large"] += 1
                continue
            found.append(_earlier(place / name, checks))
        except OSError:
            left_out["not readable"] += 1
        except ValueError:
            left_out["not a report"] += 1
    return Past(path, tuple(found), dict(left_out))


def _earlier(file: Path, checks: Sequence[Check]) -> Earlier:
    data = files.read_unpacked(file, LARGEST)
    try:
        return Earlier.of(str(file), Report.from_json(json.loads(data)), checks)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _newest_first(place: Path) -> bytes:
    """Name and bytes of each report of a folder, the newest first, as JSON; null for a file, the
    word `_DEVICE` for a device.

    Runs in a child, as the folder may not answer.
    """
    if not place.is_dir():
        return json.dumps(_DEVICE if place.is_char_device() else None).encode()
    found = []
    for file in place.iterdir():
        with contextlib.suppress(OSError):  # gone meanwhile
            status = file.stat()
            if file.name.endswith((".json", f".json{files.GZIP}")) and stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime, file.name, status.st_size))
    return json.dumps([(name, size) for _, name, size in sorted(found, reverse=True)]).encode()
