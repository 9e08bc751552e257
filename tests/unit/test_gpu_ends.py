"""A process that did not come back from the GPU driver: how sure that the GPU is why."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor.api import Confidence, Outcome, OutcomeStatus
from nccl_doctor.toolkit.gpu.ends import certainty, certainty_of, certainty_of_reader, is_gone
from tests.support.rows import each_row

CERTAIN, LIKELY = Confidence.CERTAIN, Confidence.LIKELY


@each_row(
    ("state", "wchan", "sure"),
    [
        ("D", "", CERTAIN),
        ("D", "0", CERTAIN),  # where the kernel does not say
        ("D", "os_acquire_rwlock_write", CERTAIN),
        ("D", "uvm_va_space_register_gpu", CERTAIN),
        ("D", "rpc_wait_bit_killable", None),  # its library is on a file server that is gone
        ("D", "request_wait_answer", None),
        ("D", "folio_wait_bit_common", None),
        ("D", "mem_cgroup_handle_over_high", None),  # the control group is short of memory
        ("D", "__refrigerator", None),  # docker pause
        ("S", "do_freezer_trap", None),
        ("T", "", None),
        ("t", "", None),
        ("S", "", LIKELY),
        ("R", "", LIKELY),
        ("Z", "", LIKELY),
        ("", "", LIKELY),
    ],
)
def test_one_that_did_not_return(state: str, wchan: str, sure: Confidence | None) -> None:
    assert certainty(hung=True, state=state, wchan=wchan) is sure
    end = Outcome(OutcomeStatus.HUNG, state=state, wchan=wchan)
    assert certainty_of(end) is sure
    stuck = {"call": "x", "how": "did not return within 9 s", "state": state, "wchan": wchan}
    assert certainty_of_reader(stuck) is sure


@each_row(
    ("signal", "sure"),
    [
        *((name, CERTAIN) for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")),
        *((name, None) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP")),
        *((name, None) for name in ("SIGXCPU", "SIGSYS", "SIGPIPE", "SIGALRM", "signal 40")),
        (None, LIKELY),
    ],
)
def test_one_that_died(signal: str | None, sure: Confidence | None) -> None:
    assert certainty(hung=False, signal=signal) is sure
    assert certainty_of(Outcome(OutcomeStatus.DIED, signal=signal)) is sure
    how = f"killed the process, {signal}" if signal else "ended the process with exit code 1"
    assert certainty_of_reader({"call": "x", "how": how, "state": "", "wchan": ""}) is sure


def test_time_in_which_the_examination_itself_was_stopped_does_not_count() -> None:
    late = {"call": "x", "how": "did not return within 9 s", "wchan": "", "stopped_s": 8.0}
    assert certainty_of_reader({**late, "state": "S"}) is None
    assert certainty_of_reader({**late, "state": "D"}) is LIKELY
    assert certainty_of_reader({**late, "state": "D", "stopped_s": 0.0}) is CERTAIN


@pytest.mark.parametrize("status", [OutcomeStatus.OK, OutcomeStatus.RAISED, OutcomeStatus.SILENT])
def test_one_that_did_neither(status: OutcomeStatus) -> None:
    assert certainty_of(Outcome(status)) is None


@pytest.mark.parametrize(
    ("gpu", "gone"),
    [
        ({"lost": True}, True),
        ({"lost": False}, False),
        ({"lost": False, "wedged": {"how": "killed the process, SIGKILL"}}, False),
        ({"lost": False, "wedged": {"how": "killed the process, SIGSEGV"}}, True),
        ({"lost": False, "wedged": {"how": "did not return within 9 s", "state": "D"}}, True),
    ],
)
def test_a_gpu_that_is_gone(gpu: dict[str, Any], gone: bool) -> None:
    assert is_gone(gpu) is gone
