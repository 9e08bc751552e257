"""Strangers of every kind beside a healthy job: with a key they change nothing, without one nobody
is blamed for what they did.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.gather.envelope import OPEN, Seal
from nccl_doctor.gather.opening import prefix_of
from tests.ranks.ranks import Ranks, supervisor
from tests.ranks.strangers.job import (
    JOIN_S,
    WAIT_S,
    Job,
    meeting_of,
    run_of,
    store_of,
)
from tests.ranks.strangers.rogues import AFTER, BEFORE, LARGE, Rogue, Target, finishes

pytestmark = pytest.mark.xdist_group("torch")

SECRET = Seal(b"secret" * 8)
LATER_S = 2.5
"""Shorter than any wait that a stranger could prolong: `GOODBYE_S`, the shortest, is 3 s."""
KEYED, OPENLY = 1.3, 1.5
"""Most memory of rank 0, as a multiple of what it takes without strangers."""


@dataclass
class Seen:
    """A run: its report, the seconds from the start of rank 1, and most memory of rank 0, in KB."""

    report: dict[str, Any]
    codes: list[int]
    seconds: float
    memory: int


def most_memory(pid: int) -> int:
    """VmHWM of a process, as it was last before it ended."""
    most = 0
    path = Path(f"/proc/{pid}/status")
    while True:
        try:
            found = re.search(r"VmHWM:\s+(\d+)", path.read_text())
        except OSError:
            return most
        if found is None:  # it has ended
            return most
        most = max(most, int(found[1]))
        time.sleep(0.002)  # it is looked at as long as it lives


def play(
    ranks: Ranks, seal: Seal, *, listed: bool, before: Iterable[Rogue], after: Iterable[Rogue]
) -> Seen:
    """Run the job with rogues, who write before rank 0 comes, and before rank 1 does."""
    meeting = meeting_of(ranks, seal)
    names = meeting if listed else meeting.public()
    store = store_of(ranks)
    for rogue in before:
        rogue(Target(store, names, names.beside(prefix_of("none"), seal)))
    ranks.start([0])
    with ThreadPoolExecutor(1) as pool:
        memory = pool.submit(most_memory, supervisor(ranks.processes[0].pid))
        run = run_of(ranks, seal)
        run.get("seat/0", WAIT_S)
        target = Target(store, names, run if listed else run.public())
        for rogue in after:
            rogue(target)
        store.check(["nothing"])  # answered once all that was written before is there
        began = time.monotonic()
        ranks.start([1])
        ended = ranks.wait(WAIT_S)
        seconds = time.monotonic() - began
    assert not [each.stderr for each in ended.values() if "Traceback" in each.stderr]
    codes = [ended[rank].code for rank in sorted(ended)]
    return Seen(ranks.report(), codes, seconds, memory.result())


def without_strangers(job: Job, *keys: str) -> Seen:
    seal = SECRET if any(keys) else OPEN
    return play(job.of(*keys), seal, listed=False, before=(), after=())


@pytest.mark.parametrize("listed", [False, True], ids=["known names", "names of the run"])
@pytest.mark.parametrize(
    "rogues",
    [*([each] for each in LARGE), [each for each in AFTER.values() if each not in LARGE]],
    ids=[*(each.__name__ for each in LARGE), "all others"],
)
def test_with_a_key_strangers_change_nothing(
    job: Job, listed: bool, rogues: Sequence[Rogue]
) -> None:
    keys = ("secret", "secret")
    healthy = without_strangers(job, *keys)
    assert (healthy.report["verdict"], healthy.codes) == ("pass", [0, 0])
    assert not [f for f in healthy.report["findings"] if f["severity"] != "info"]
    took, noticed = [], False
    for _ in range(4):  # what strangers cost, and do in time, not what else the machine does
        seen = play(
            job.of(*keys),
            SECRET,
            listed=listed,
            before=BEFORE.values(),
            after=(*rogues, finishes),
        )
        assert (seen.report["verdict"], seen.codes) == ("pass", [0, 0])
        told = [f for f in seen.report["findings"] if f["severity"] != "info"]
        assert {(f["code"], f["severity"]) for f in told} <= {("stranger-writes", "warn")}
        assert not any(value for f in told for value in f["where"].values())
        assert seen.memory < KEYED * healthy.memory
        took.append(seen.seconds)
        noticed = noticed or bool(told)
        if noticed and min(took) < healthy.seconds + LATER_S:
            break
    assert noticed
    assert min(took) < healthy.seconds + LATER_S


@pytest.mark.parametrize("name", [*BEFORE, *AFTER])
def test_without_a_key_nobody_is_blamed_for_what_strangers_wrote(job: Job, name: str) -> None:
    healthy = without_strangers(job)
    assert healthy.report["verdict"] == "pass"
    before = [BEFORE[name]] if name in BEFORE else []
    after = [AFTER[name]] if name in AFTER else []
    seen = play(job.of(), OPEN, listed=True, before=before, after=after)
    assert seen.report["verdict"] in ("pass", "unknown")
    assert not [f for f in seen.report["findings"] if f["severity"] == "fail"]
    if seen.report["verdict"] == "unknown":
        codes = {f["code"] for f in seen.report["root_causes"]}
        assert codes & {"message-refused", "doctor-version-differs", "key-differs"}
    assert seen.seconds < JOIN_S
    assert seen.memory < OPENLY * healthy.memory
