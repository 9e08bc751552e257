"""How fast is an autopsy, and how much memory does it take? torchfrtrace reads the same dumps.

One console of 100 MB, the dumps of 1,024 ranks with 2,000 entries each, and those of the first 64
of them, which torchfrtrace of the installed torch reads too. All are made up: a rank raises in the
console, and one rank leaves out the last collective in the dumps. Writes a table into a page, above
its heading "Measured".

    python benchmarks/autopsy_speed.py --write docs/autopsy.md

Exit code 0 where every bar is met, else 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.consoles import CLOSED, raised
from tests.support.dumps import entry, form, recorded

HEADING, NEXT_HEADING = "## Speed", "## Measured"
CONSOLE_BYTES = 100_000_000
RANKS, ENTRIES, SHARED_RANKS = 1024, 2000, 64
CULPRIT = 7
_PREFIX = "dump_"


@dataclass(frozen=True)
class Took:
    """What one program took: seconds of a processor, as other work on the machine does not count,
    and its peak of memory in MB; `code` is its exit code.
    """

    seconds: float
    megabytes: float
    code: int


def write_console(file: Path) -> None:
    """100 MB of training lines of eight ranks; then one raises, and the others lose it."""
    lines = [
        f"[rank{rank}]: 2026-11-29 10:17:54 INFO step {step} loss 2.3{step:04d} lr 0.0003 tokens/s "
        f"{41_000 + rank}\n"
        for step in range(1000)
        for rank in range(8)
    ]
    block = "".join(lines)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(CONSOLE_BYTES // len(block) + 1):
            out.write(block)
        out.write(raised(0, CLOSED) + raised(CULPRIT, "KeyError: 'labels'") + raised(3, CLOSED))


def write_dumps(folder: Path, ranks: int) -> None:
    """Dumps as torch 2.13 writes them for NCCL: all ranks but one wait in the last collective."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(ranks)])}}
    frames = [{"name": "train", "filename": "train.py", "line": 41}]
    entries = [entry(number, frames=frames) for number in range(1, ENTRIES)]
    waits = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
    last = entry(ENTRIES, frames=frames, **waits)
    for rank in range(ranks):
        called = entries if rank == CULPRIT else [*entries, last]
        dump = recorded(called, pg_config=config, pg_status={"0": _status(len(called))})
        (folder / f"{_PREFIX}{rank}").write_bytes(form("torch", dump))


def _status(enqueued: int) -> dict[str, int]:
    done = ENTRIES - 1
    return {
        "last_enqueued_collective": enqueued,
        "last_started_collective": done,
        "last_completed_collective": done,
    }


def autopsy(path: Path) -> Took:
    """Run the command on a path."""
    return took([sys.executable, "-m", "nccl_doctor", "autopsy", str(path)])


def torchfrtrace(folder: Path) -> Took:
    """Run torch's own reader on the same dumps; it prints every entry of the ones that differ."""
    module = "torch.distributed.flight_recorder.fr_trace"
    return took([sys.executable, "-m", module, str(folder), "--prefix", _PREFIX])


def took(line: Sequence[str]) -> Took:
    """Run a line without its output; its own memory is the peak of that process alone."""
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return Took(used.ru_utime + used.ru_stime, used.ru_maxrss / 1000, child.returncode)


def main() -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="page whose part above Measured is replaced")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        console, every, some = (Path(name, part) for part in ("console.log", "every", "some"))
        write_console(console)
        for folder, ranks in ((every, RANKS), (some, SHARED_RANKS)):
            folder.mkdir()
            write_dumps(folder, ranks)
        of_console, of_all, of_some = map(autopsy, (console, every, some))
        theirs = torchfrtrace(some)
    ratio = theirs.seconds / of_some.seconds
    rows = [
        ("a console of 100 MB", of_console, "at most 2 s and 150 MB"),
        (f"dumps of {RANKS:,} ranks, {ENTRIES:,} entries each", of_all, "at most 5 s"),
        (f"dumps of {SHARED_RANKS} ranks", of_some, f"a tenth of torchfrtrace: {1 / ratio:.2f}"),
        ("the same, torchfrtrace", theirs, ""),
    ]
    text = "\n".join(
        [
            HEADING,
            "",
            "`python benchmarks/autopsy_speed.py`: seconds of a processor, Python's start with it.",
            "",
            "| input | CPU seconds | memory, MB | exit code | bar |",
            "|---|---|---|---|---|",
            *(
                f"| {what} | {each.seconds:.1f} | {each.megabytes:.0f} | {each.code} | {bar} |"
                for what, each, bar in rows
            ),
            "",
        ]
    )
    print(text)
    if given.write:
        page = given.write.read_text(encoding="utf-8")
        before, _, after = page.partition(NEXT_HEADING)
        before = before.partition(HEADING)[0]
        given.write.write_text(f"{before}{text}\n{NEXT_HEADING}{after}", encoding="utf-8")
    is_fast = of_console.seconds <= 2 and of_console.megabytes <= 150 and of_all.seconds <= 5
    return 0 if is_fast and ratio >= 10 and of_console.code == of_all.code == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
