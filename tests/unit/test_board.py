"""The board of a run, as lines: never too many, never too long, the late ones first."""

from __future__ import annotations

import time

import pytest

from nccl_doctor.gather import progress
from nccl_doctor.gather.progress import MOST_LINES, BoardRow, CurrentStep, Phase, lay_out, phase_of
from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Layer

WAITS = CurrentStep(shell("waiting for node 1"), 12.3, 25.0, Phase.SIGN_IN)


def test_few_hosts_have_a_line_each() -> None:
    rows = [BoardRow("ux0", "here"), BoardRow("node 1", "not here yet", late=True)]
    assert lay_out(WAITS, rows, 79) == [
        "[3/7] waiting for node 1 (12 of 25 s)",
        "  ux0     here",
        "  node 1  not here yet",
    ]


def test_of_many_hosts_only_those_behind_are_shown_and_folded() -> None:
    rows = [BoardRow(f"gpu{i:03d}", "done", late=False) for i in range(1, 61)]
    rows += [BoardRow(f"gpu{i:03d}", "not here yet", late=True) for i in range(61, 65)]
    assert lay_out(WAITS, rows, 79)[1:] == [
        "  gpu[061-064]  not here yet",
        "  60 other hosts are not behind",
    ]


@pytest.mark.parametrize("width", [79, 39, 10])
@pytest.mark.parametrize("height", [MOST_LINES, 3, 1])
def test_never_too_many_lines_and_never_too_long(width: int, height: int) -> None:
    step = CurrentStep("a step with " + "many words " * 20, 1.0, 60.0, Phase.SPEED)
    rows = [BoardRow(f"host{'x' * i}-{i}", f"rank {i} not done yet", late=True) for i in range(40)]
    for some in (rows, rows[:5], []):
        lines = lay_out(step, some, width, height)
        assert 1 <= len(lines) <= height
        assert all(len(line) <= max(width, 20) for line in lines)
    assert "(1 of 60 s)" in lay_out(step, rows, width)[0]  # words are cut, not the times


def test_what_a_host_is_called_moves_no_cursor() -> None:
    lines = lay_out(WAITS, [BoardRow("\x1b[2Jux0\n", "here")], 79)
    assert "\x1b" not in "".join(lines)
    assert not any("\n" in line for line in lines)


def test_a_limit_is_never_shown_as_passed_and_phases_follow_the_layers() -> None:
    assert CurrentStep(shell("x"), 31.0, 30.0).line() == "x (30 of 30 s)"
    phases = [phase_of(layer) for layer in sorted(Layer, key=lambda layer: layer.order)]
    assert phases == sorted(phases)


@pytest.mark.parametrize("logs", [True, False])
def test_where_there_is_no_terminal_a_long_wait_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logs: bool
) -> None:
    monkeypatch.setattr(progress, "_LONG_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    now = time.monotonic()
    made = progress.Progress(shown=True, deadline=now + 100, speaks=True, logs=logs)
    made.say("examining this host", Phase.THIS_HOST)
    assert capsys.readouterr().err == ""
    made.say("waiting for node 1", Phase.SIGN_IN, now + 25.4)
    made.tick()
    made.say("waiting for nobody", Phase.SIGN_IN, now + 25.4)
    made.say("a round", Phase.NETWORK, now + 30)
    made.end("FAIL, see node 0 (ux0): 1 problem")
    assert (
        capsys.readouterr().err.splitlines()
        == [
            "nccl-doctor: [3/7] waiting for node 1 (0 of 25 s)",
            "nccl-doctor: FAIL, see node 0 (ux0): 1 problem",
        ]
        * logs
    )
