"""The ranks of a host that have an agent: as if each answered by itself, whoever is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.hosts import Host
from tests.lab.lab import Lab
from tests.lab.reading import ROUND_S, SIGN_IN_S, check_cause, check_clean, check_healthy, loud
from tests.lab.run import Run

AGENTS = ("--agents-from", "2")


def answer_by_themselves(run: Run) -> set[int]:
    """Ranks that took the time of their own sign-in: of others, the agent had the seat."""
    assert run.report is not None, str(run)
    return {rank["rank"] for rank in run.report["ranks"] if "seat_s" in rank["joining"]}


def agents(host: Host) -> list[Path]:
    """Folders in /proc of the agents of a host."""
    table = Path(f"/proc/{host.init}/root/proc")
    folders = [each for each in table.iterdir() if each.name.isdigit()]
    return [each for each in folders if (each / "comm").read_text().strip() == "ncd:agent"]


def hit_agent(host: Host, number: int) -> Callable[[], None]:
    """A signal to the agent of a host."""

    def act() -> None:
        (agent,) = agents(host)
        handle = os.open(agent, os.O_RDONLY | os.O_DIRECTORY)
        signal.pidfd_send_signal(handle, number)
        os.close(handle)

    return act


def check_lost(run: Run, code: str, rank: int) -> None:
    """One rank of nd1 is named, and nobody else; the verdict is not known."""
    assert run.report is not None, str(run)
    assert run.report["verdict"] == "unknown", str(run)
    (found,) = loud(run.report)
    assert found["code"] == code, str(run)
    assert (found["where"]["hosts"], found["where"]["ranks"]) == (["nd1"], [rank]), str(run)


def test_a_host_signs_in_and_answers_by_one_agent(lab: Lab) -> None:
    run = lab.plain_doctor(*AGENTS, nproc=3)
    check_healthy(run, 6)
    assert answer_by_themselves(run) == {0, 1, 2}, "those of rank 0's host alone"


@pytest.mark.wide
def test_under_torchrun(lab: Lab) -> None:
    run = lab.torchrun_doctor(*AGENTS)
    check_healthy(run, 4)
    assert answer_by_themselves(run) == {0, 1}


def test_with_the_own_launcher_the_first_one_signs_in_for_the_host_before_it_has_a_place(
    lab: Lab,
) -> None:
    run = lab.own_doctor(*AGENTS, nproc=3)
    check_healthy(run, 6)
    assert answer_by_themselves(run) == {0, 1, 2, 3}


def test_with_a_key(lab: Lab, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    run = lab.plain_doctor(*AGENTS, "--key", str(key), nproc=2)
    check_healthy(run, 4)
    assert answer_by_themselves(run) == {0, 1}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_is_lost_and_nobody_misses_it(lab: Lab, number: signal.Signals) -> None:
    with lab.strike(2, 0, act=hit_agent(lab["nd1"], number)) as strike:
        run = lab.plain_doctor(*AGENTS, nproc=2)
    assert strike.pid, str(run)
    check_healthy(run, 4)
    assert answer_by_themselves(run) == {0, 1}


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_is_lost_before_it_has_signed_in(lab: Lab, number: signal.Signals) -> None:
    with lab.strike(None, number, "ncd:agent", hosts=["nd1"]) as strike:
        run = lab.plain_doctor(*AGENTS, nproc=2)
    assert strike.pid, str(run)
    check_healthy(run, 4)
    assert answer_by_themselves(run) == {0, 1, 2, 3}


@pytest.mark.parametrize("rank", [2, 3])
def test_a_rank_is_killed_that_has_an_agent(lab: Lab, rank: int) -> None:
    """The first one of a host takes the agent with it: the others go on by themselves."""
    with lab.strike(rank, signal.SIGKILL, parent=True) as strike:
        run = lab.plain_doctor(*AGENTS, nproc=2)
    assert strike.pid, str(run)
    check_clean(run, SIGN_IN_S + 2 * ROUND_S)
    check_lost(run, "rank-killed", rank)


@pytest.mark.wide  # half a minute each
@pytest.mark.parametrize("rank", [2, 3])
def test_a_rank_is_stopped_that_has_an_agent(lab: Lab, rank: int) -> None:
    with lab.strike(rank, signal.SIGSTOP, parent=True) as strike:
        run = lab.plain_doctor(*AGENTS, nproc=2, awaited=[0, 1])
    assert strike.pid, str(run)
    check_lost(run, "rank-silent", rank)
    assert run.codes[:2] == [3, 3], str(run)


@pytest.mark.wide
def test_a_host_loses_its_cable(make_lab: Callable[..., Lab]) -> None:
    from tests.lab.faults import pull_cable

    lab = make_lab("nd0", "nd1", "nd2")
    act = lambda: pull_cable(lab, lab["nd2"])  # noqa: E731
    with lab.strike(4, 0, act=act) as strike:
        run = lab.plain_doctor(*AGENTS, nproc=2)
    assert strike.pid, str(run)
    check_cause(run, run.report, {"host-cut-off", "rank-silent"}, hosts=["nd2"])
