"""The coordinator is told of a death over a real store: by who has the key of the run alone."""

from __future__ import annotations

import pytest

from nccl_doctor.gather.context import Key
from nccl_doctor.gather.ends import Deaths, death_of, seal_of, tell_killed
from nccl_doctor.gather.envelope import OPEN, Seal
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.gather.opening import MEETING, open_run, prefix_of
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.model.launch import Launch
from tests.support.waiting import comes

pytestmark = pytest.mark.xdist_group("torch")

SECRET, RUN = b"s" * 32, "run of the test"
KEYS = {"none": None, "of this run": Key(SECRET, lasts=False), "of a file": Key(SECRET, lasts=True)}


def coordinators(port: int, key: Key | None, evidence: EvidenceLog | None = None) -> Deaths:
    """Deaths as rank 0 sees them, once it has opened the run."""
    seal = Seal(key.secret) if key else OPEN
    meeting = ControlStore("127.0.0.1", port, timeout_s=5, prefix=MEETING, seal=seal)
    open_run(meeting, RUN)
    box = meeting.beside(prefix_of(RUN), seal_of(key, RUN))
    return Deaths(box, evidence or EvidenceLog(Launch(rank=0, world_size=2), {}, {}))


@pytest.mark.parametrize("run_id", ["", RUN], ids=["the one that is open", "its own"])
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_death_is_told_with_the_key_of_the_run(
    store_port: int, key: Key | None, run_id: str
) -> None:
    deaths = coordinators(store_port, key)
    tell_killed(("127.0.0.1", store_port), death_of(7, 1, "SIGKILL"), key, run_id)
    assert deaths.look()
    assert deaths.ranks == {1}


def test_a_stranger_without_the_key_tells_of_no_death(store_port: int) -> None:
    deaths = coordinators(store_port, KEYS["of this run"])
    tell_killed(("127.0.0.1", store_port), death_of(7, 1, "SIGKILL"), run_id=RUN)
    deaths.look()
    assert deaths.ranks == set()


def test_the_death_of_one_is_none_of_who_came_after_it(store_port: int) -> None:
    """With the same process id: a container that was started again counts from 1."""
    evidence = EvidenceLog(Launch(rank=0, world_size=2), {}, {})
    deaths = coordinators(store_port, None, evidence)
    death = death_of(7, 1, "SIGKILL")
    who = SignIn("token", 7, Launch(rank=1, world_size=2), "nd1", death["host"])
    evidence.sign_in(3, who, 0.0)
    tell_killed(("127.0.0.1", store_port), death)
    assert deaths.look()
    assert deaths.of(3) == "SIGKILL"
    deaths.replaced(who)
    assert deaths.of(3) is None
    tell_killed(("127.0.0.1", store_port), death)
    assert comes(deaths.look)
    assert deaths.of(3) == "SIGKILL"
