"""Xids and SXids in the kernel log since this machine was started, if it can be read."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict

_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+(?::[0-9a-fA-F.]+)+)((?: GPU-C?I:\d+)*)\): (\d+)"
    r"(?:, (.*))?"
)
"""After the bus, with MIG on: the GPU instance, and the compute instance in it."""
_SXID = re.compile(
    r"nvidia-nvswitch(\d+): SXid \(PCI:([0-9a-fA-F:.]+)\): 0*(\d+), (Fatal|Non-fatal),? ?"
    r"(?:Link (\d+) ?)?(.*)"
)
_KMSG = re.compile(r"\d+,\d+,(\d+),[^;]*;(.*)")
_DMESG = re.compile(r"\[ *(\d+)\.\d+\]")
_BOOT = re.compile(r"Linux version \d")
_FILES = ("var/log/kern.log", "var/log/messages", "var/log/syslog")
_TAIL_BYTES = 4 << 20
_MOST = 64
_TEXT = 160

Record = tuple[float | None, str]
"""(seconds after the start of the kernel, text); the first is None where the log has wall time."""


class KernelLog(TypedDict):
    """The messages of drivers in the kernel log, as `read_kernel_log` returns them."""

    source: str | None
    reason: str
    xids: list[dict[str, Any]]
    sxids: list[dict[str, Any]]


def read_kernel_log(root: Path = Path("/"), crumb: Callable[..., None] | None = None) -> KernelLog:
    """Messages of the drivers of GPUs and NVSwitches.

    Args:
        root: folder in which `dev/kmsg` and `var/log` lie.
        crumb: called with each file before it is opened.

    Returns: `source`, the file read, or None; `reason` why others were not; `xids`, one for each
    GPU and number, oldest first: `{bus, xid, count, age_s, text}`, the bus as the kernel writes it
    without the function (`0000:1b:00`), age and text of the last, the age None where the log does
    not tell; `sxids`, the same of each NVSwitch and number: `{switch, bus, sxid, fatal, link,
    count, age_s, text}`, the link None where none is named.
    """
    refused = []
    for name in ("dev/kmsg", *_FILES):
        path = root / name
        if crumb is not None:
            crumb("reading the kernel log", file=str(path))
        try:
            records = list(_kmsg(path) if name == "dev/kmsg" else _syslog(path))
        except OSError as error:
            refused.append(f"/{name}: {error.strerror or error}")
            continue
        now = time.monotonic()
        xids, sxids = _counted(records, now, _xid), _counted(records, now, _sxid)
        return {"source": f"/{name}", "reason": "", "xids": xids, "sxids": sxids}
    return {"source": None, "reason": "; ".join(refused), "xids": [], "sxids": []}


def _counted(
    records: Iterable[Record], now: float, read: Callable[[str], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Entries that `read` finds in the records: the last of each place and number, with a count."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for at_s, text in records:
        seen = read(text)
        if seen is None:
            continue
        key = seen["bus"], seen.get("xid"), seen.get("sxid"), seen.get("fatal")
        found[key] = {
            **seen,
            "count": found[key]["count"] + 1 if key in found else 1,
            "age_s": None if at_s is None else round(max(0.0, now - at_s)),
        }
    return list(found.values())[-_MOST:]


def _xid(text: str) -> dict[str, Any] | None:
    match = _XID.search(text)
    if match is None:
        return None
    # Some drivers write the function (`.0`) or a long domain, some do not.
    domain, _, rest = match.group(1).lower().split(".")[0].partition(":")
    bus = f"{int(domain, 16):04x}:{rest}" if ":" in rest else f"0000:{domain}:{rest}"
    said = ", ".join(filter(None, (match.group(2).strip(), match.group(4))))
    return {"bus": bus, "xid": int(match.group(3)), "text": said[:_TEXT]}


def _sxid(text: str) -> dict[str, Any] | None:
    """The SXid of the line that shows whether it is fatal; further lines hold registers."""
    match = _SXID.search(text)
    if match is None:
        return None
    switch, bus, number, fatal, link, words = match.groups()
    return {
        "switch": int(switch),
        "bus": bus.lower(),
        "sxid": int(number),
        "fatal": fatal == "Fatal",
        "link": None if link is None else int(link),
        "text": words[:_TEXT],
    }


def _kmsg(path: Path) -> Iterator[Record]:
    """Records of the ring buffer; read before anything is returned, so that errors come here."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    lines: list[str] = []
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            lines = os.read(fd, _TAIL_BYTES).decode("utf-8", "replace").splitlines()
        else:
            lines = list(_records(fd))
    finally:
        os.close(fd)
    return (_record(line) for line in lines)


def _records(fd: int) -> Iterator[str]:
    for _ in range(200_000):  # more than any buffer holds; new ones may come while we read
        try:
            data = os.read(fd, 8192)
        except BlockingIOError:
            return
        except BrokenPipeError:  # the oldest was overwritten: go on with the next
            continue
        if not data:
            return
        yield data.decode("utf-8", "replace").split("\n", 1)[0]


def _record(line: str) -> Record:
    found = _KMSG.match(line)
    if found:
        return int(found.group(1)) / 1e6, found.group(2)
    stamp = _DMESG.search(line)
    return float(stamp.group(1)) if stamp else None, line


def _syslog(path: Path) -> Iterator[Record]:
    """The end of a log file, from the last start of the kernel in it."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    starts = [number for number, line in enumerate(lines) if _BOOT.search(line)]
    return (_record(line) for line in lines[starts[-1] if starts else 0 :])
