"""Rules of an autopsy, each on the console of a made-up job, and on real ones."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest

from nccl_doctor.autopsy.console import read_console
from nccl_doctor.autopsy.examine import examine
from nccl_doctor.autopsy.kinds import AUTOPSY_KINDS
from nccl_doctor.autopsy.ranks import Source, job_of
from nccl_doctor.autopsy.rules import first_failure, victims
from nccl_doctor.model.findings import Confidence, Finding
from nccl_doctor.registry import load
from tests.support.consoles import CLOSED, TIMED_OUT, block, job, raised

CONSOLES = Path(__file__).parents[3] / "shared" / "samples" / "consoles"
CERTAIN, LIKELY, POSSIBLE = Confidence.CERTAIN, Confidence.LIKELY, Confidence.POSSIBLE


def found(*texts: str, names: tuple[str, ...] = ()) -> Finding:
    cause = first_failure(job(*texts, names=names))
    assert cause is not None
    return cause


def said(finding: Finding) -> tuple[str, tuple[int, ...], Confidence]:
    return finding.code, finding.where.ranks, finding.confidence


def lost(*ranks: int) -> str:
    return "".join(raised(rank, CLOSED) for rank in ranks)


def waited(*ranks: int) -> str:
    return "".join(raised(rank, TIMED_OUT) for rank in ranks)


def test_the_exception_of_a_rank_outranks_victims_that_print_first() -> None:
    text = lost(1, 3) + raised(2, "KeyError: 'labels'", line=23, name="load_batch") + lost(0)
    cause = found(text + block({0: 1, 1: 1, 2: 1, 3: 1}, root=1))
    assert said(cause) == ("rank-raised", (2,), CERTAIN)
    assert "KeyError: 'labels', at job.py:23 in load_batch" in cause.message
    assert cause.evidence["line"] == 13
    others = [*victims(job(text), [cause])]
    assert [(each.code, each.where.ranks) for each in others] == [("collective-failed", (0, 1, 3))]
    assert others[0].explained_by == "rank-raised"


def test_ranks_that_raise_the_same_at_the_same_place_are_named_together() -> None:
    text = raised(0, CLOSED) + raised(3, "ValueError: nan") + raised(1, "ValueError: nan")
    assert said(found(text)) == ("rank-raised", (1, 3), CERTAIN)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("RuntimeError: basic_ios::clear: iostream error", "storage-full"),
        ("OSError: [Errno 28] No space left on device: '/ckpt/7'", "storage-full"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 G",
            "gpu-out-of-memory",
        ),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", "gpu-out-of-memory"),
        (
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment "
            "variable MASTER_PORT expected, but not set",
            "launch-missing-variable",
        ),
        ("DistBackendError: NCCL\n[rank3]: Cuda failure 2 'out of memory'", "gpu-out-of-memory"),
    ],
)
def test_some_exceptions_have_a_code_of_their_own(error: str, code: str) -> None:
    assert said(found(lost(0) + raised(3, error))) == (code, (3,), CERTAIN)


def test_an_exception_in_which_a_lost_connection_was_handled_is_a_victims() -> None:
    wrapped = raised(1, CLOSED) + "[rank1]: \n[rank1]: During handling of the above exception, an"
    wrapped += "other exception occurred:\n[rank1]: \n" + raised(1, "RuntimeError: step failed")
    cause = found(wrapped + raised(2, "KeyError: 3"))
    assert said(cause) == ("rank-raised", (2,), CERTAIN)
    assert said(found(wrapped + lost(0, 3) + block({0: 1, 1: 1, 3: 1}, root=1)))[0] != "rank-raised"


def test_the_error_of_nccl_stands_behind_the_exception() -> None:
    error = (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:219, remote process\n"
        "[rank1]: ncclRemoteError: A call failed possibly due to a network error or a remote"
    )
    text = raised(1, error) + raised(0, "AssertionError")
    assert said(found(text)) == ("rank-raised", (0,), CERTAIN)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(-9, "rank-killed"), (-11, "rank-crashed"), (-7, "rank-crashed"), (-6, "rank-crashed")],
)
def test_a_signal_outranks_the_root_of_the_block(code: int, expected: str) -> None:
    text = lost(0, 2) + block({0: -15, 1: code, 2: 1, 3: -15}, root=0)
    cause = found(text)
    assert said(cause) == (expected, (1,), CERTAIN)
    assert "(process 1001)" in cause.message
    assert ("/dev/shm" in cause.message) == (code == -7)


def test_sigabrt_without_an_active_exception_is_the_end_of_a_process_that_left() -> None:
    text = "terminate called without an active exception\n" + lost(0, 1, 3)
    assert said(found(text + block({0: 1, 1: 1, 2: -6, 3: 1}, root=2)))[:2] == ("rank-exited", (2,))


def test_the_kernel_log_tells_why_a_rank_was_killed() -> None:
    dmesg = "[12.1] Memory cgroup out of memory: Killed process 1001 (python3) total-vm:9kB\n"
    text = lost(0, 2) + block({0: 1, 1: -9, 2: 1}, root=1)
    assert said(found(text, dmesg)) == ("out-of-memory-kill", (1,), CERTAIN)
    other = dmesg.replace("1001", "77")
    assert said(found(text, other)) == ("rank-killed", (1,), CERTAIN)


def test_a_broken_gpu_outranks_the_error_of_its_process() -> None:
    text = raised(2, "RuntimeError: CUDA error: unspecified launch failure") + lost(0, 1)
    text += block({0: 1, 1: 1, 2: 1}, root=2)
    xid = "NVRM: Xid (PCI:0000:3b:00): {}, pid=1002, name=python\n"
    assert said(found(text, xid.format(79))) == ("gpu-xid", (2,), CERTAIN)
    assert said(found(text, xid.format(43))) == ("rank-raised", (2,), CERTAIN)  # a follow-up


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGHUP"])
def test_a_signal_to_the_launcher_stops_the_job(signal: str) -> None:
    number = {"SIGTERM": 15, "SIGHUP": 1}[signal]
    text = f"W1127 23:1 api.py:1028] Received {number} death signal, shutting down workers\n"
    cause = found(text + lost(0, 1), block({2: 1, 3: 1}, root=2))
    assert said(cause) == ("job-stopped", (), CERTAIN)
    assert signal in cause.message
    hung = found(text + waited(0, 1, 3))
    assert said(hung) == ("loader-stalled", (2,), LIKELY)


def test_an_interrupt_on_every_rank_comes_from_outside() -> None:
    every = "".join(raised(rank, "KeyboardInterrupt") for rank in range(4))
    assert said(found(every)) == ("job-stopped", (), CERTAIN)
    hung = raised(3, "KeyboardInterrupt", line=23, name="load_batch")
    hung += "".join(raised(rank, "KeyboardInterrupt") for rank in range(3))
    assert "rank 3 was at job.py:23 in load_batch, the others at job.py:47" in found(hung).message
    alone = lost(0, 2, 3) + raised(1, "KeyboardInterrupt")
    assert said(found(alone)) == ("rank-raised", (1,), CERTAIN)


SACCT = """\
JobID           JobName  Partition    Account  AllocCPUS      State ExitCode
------------ ---------- ---------- ---------- ---------- ---------- --------
4711              train        gpu        lab         64 {:>10} {:>8}
4711.batch        batch                   lab         64     FAILED      1:0
4711.0           python                   lab         64 {:>10} {:>8}
"""
"""What sacct prints, with the states and exit codes of the job and of its step."""


@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED", "NODE_FAIL", "DEADLINE"])
def test_the_state_of_the_job_in_slurm_outranks_ranks_that_lost_each_other(state: str) -> None:
    ends = lost(0, 1, 2) + block({0: 1, 1: 1, 2: 1}, root=1)
    for text in (
        SACCT.format(state, "0:0", "CANCELLED", "0:15"),
        f"JobID|State|ExitCode\n4711|{state}|0:0\n4711.0|CANCELLED|0:15\n",
        f"JobId=4711 JobName=train\n   JobState={state} Reason=None Dependency=(null)\n",
    ):
        cause = found(ends, text)
        assert said(cause) == ("job-stopped", (), CERTAIN)
        assert f"its state in Slurm is {state}" in cause.message
    raised_first = ends + raised(2, "KeyError: 3")
    assert said(found(raised_first, text)) == ("rank-raised", (2,), CERTAIN)


def test_a_step_that_slurm_cancelled_with_its_job_tells_no_cause() -> None:
    killed = lost(0, 2) + block({0: 1, 1: -9, 2: 1}, root=1)
    for state in ("FAILED", "COMPLETED", "CANCELLED by 1000", "CANCELLED+"):
        text = SACCT.format(state, "1:0", "CANCELLED", "0:9")
        assert said(found(killed, text)) == ("rank-killed", (1,), CERTAIN)
    assert said(found(SACCT.format("CANCELLED+", "0:0", "CANCELLED", "0:15")))[0] == "job-stopped"
    assert first_failure(job("step 4711 TIMEOUT=30 of NCCL\n4711 steps before TIMEOUT\n")) is None


@pytest.mark.parametrize(
    "text",
    [
        SACCT.format("FAILED", "1:0", "OUT_OF_ME+", "0:125"),
        "4711|OUT_OF_MEMORY|0:125\n",
        "   JobState=OUT_OF_MEMORY Reason=OutOfMemory Dependency=(null)\n",
        "    Last State:  Terminated\n      Reason:    OOMKilled\n      Exit Code: 137\n",
        "      terminated:\n        exitCode: 137\n        reason: OOMKilled\n",
    ],
)
def test_a_scheduler_tells_that_memory_was_the_reason(text: str) -> None:
    killed = lost(0, 2) + block({0: 1, 1: -9, 2: 1}, root=1)
    assert said(found(killed, text)) == ("out-of-memory-kill", (1,), LIKELY)
    assert said(found(text)) == ("out-of-memory-kill", (), LIKELY)


def test_slurm_says_why_it_cancelled() -> None:
    text = "slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-11-27T23:41 DUE TO TIME LIMIT"
    cause = found(f"{text} ***\nsrun: error: n1: tasks 0-3: Terminated\n")
    assert said(cause) == ("job-stopped", (), CERTAIN)
    assert "due to time limit" in cause.message


def test_srun_tells_the_exit_of_each_task() -> None:
    text = lost(0, 1, 3) + "srun: error: n1: task 2: Exited with exit code 3\n"
    text += "srun: error: n1: tasks 0-1,3: Exited with exit code 1\n"
    assert said(found(text)) == ("rank-exited", (2,), CERTAIN)
    killed = lost(0, 2) + "srun: error: n1: task 1: Killed\n"
    assert said(found(killed)) == ("rank-killed", (1,), CERTAIN)


def test_open_mpi_5_wraps_its_line() -> None:
    text = "prterun noticed that process rank 1 with PID 4321 on node n1 exited on\nsignal 9"
    assert said(found(lost(0, 2) + f"{text} (Killed).\n")) == ("rank-killed", (1,), CERTAIN)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "/opt/venv/bin/python3: can't open file '/home/me/trian.py': [Errno 2] No such file or "
            "directory",
            "does not find /home/me/trian.py: No such file or directory",
        ),
        (
            "/usr/bin/python: Error while finding module specification for 'train.main' "
            "(ModuleNotFoundError: No module named 'train')",
            "does not find train.main: ModuleNotFoundError: No module named 'train'",
        ),
        ("/usr/bin/python3.11: No module named trian", "trian: No module named trian"),
    ],
)
def test_a_program_that_is_not_there(line: str, words: str) -> None:
    cause = found(f"{line}\n{line}\n" + block({0: 1, 1: 1}, root=0))
    assert said(cause) == ("rank-raised", (), CERTAIN)
    assert words in cause.message
    own = raised(1, "ModuleNotFoundError: No module named 'apex'")
    assert said(found(own + block({0: -15, 1: 1}, root=1))) == ("rank-raised", (1,), CERTAIN)


def test_ranks_that_went_on_a_step_further_than_others_are_not_behind() -> None:
    text = "".join(watchdog(rank, 7) + progress(rank, 15 + rank % 2) for rank in range(4))
    assert said(found(text))[0] == "cause-not-told"


def test_ray_names_the_process_that_has_gone_and_its_address() -> None:
    raylet = (
        "(raylet) A worker died or was killed while executing a task by an unexpected system "
        "error. To troubleshoot the problem, check the logs for the dead worker. RayTask ID: ff "
        "Worker ID: d8 Node ID: 84 Worker IP address: 10.0.0.7 Worker port: 10185 Worker PID: 907 "
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
        "connection error code 2. End of file. There are some potential root causes. (1) The "
        "process is killed by SIGKILL by OOM killer due to high memory usage.\n"
    )
    driver = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 9, in <module>\n'
        "    ray.get(refs)\nray.exceptions.ActorDiedError: The actor died unexpectedly before "
        "finishing this task.\n"
    )
    cause = found(driver + lost(0, 1) + raylet)
    assert (cause.code, cause.where.hosts, cause.confidence) == (
        "rank-silent",
        ("10.0.0.7",),
        LIKELY,
    )
    assert "process 907 was gone, says Ray" in cause.message
    own = found(driver + lost(0, 1) + raylet + raised(3, "KeyError: 'a'"))
    assert said(own) == ("rank-raised", (3,), CERTAIN)
    assert said(found(driver))[0] == "cause-not-told"


@pytest.mark.parametrize(
    ("code", "expected"),
    [(-9, "rank-killed"), (-11, "rank-crashed"), (3, "rank-exited"), (1, "rank-silent")],
)
def test_deepspeed_says_how_one_process_ended(code: int, expected: str) -> None:
    text = lost(0, 1, 3)
    end = f"['/opt/python', '-u', 'job.py', '--local_rank=3'] exits with return code = {code}\n"
    cause = found(f"{text}[ERROR] [launch.py:325:sigkill_handler] {end}")
    assert said(cause) == (expected, (2,), LIKELY)
    several = found(f"{lost(0, 3)}{end}")
    if code != 1:
        assert said(several) == (expected, (), LIKELY)
        assert "deepspeed does not say which one" in several.message
    assert said(found(text + raised(2, "KeyError: 'a'") + end)) == ("rank-raised", (2,), CERTAIN)


def test_launchers_that_srun_ends_as_a_task_failed_are_not_stopped_from_outside() -> None:
    failed = "srun: error: n1: task 1: Exited with exit code 1\nsrun: Terminating StepId=9.1\n"
    got = "WARNING:torch.distributed.elastic.agent.server.api:Received 15 death signal, shutting\n"
    assert said(found(got + failed))[:1] == ("job-stopped",)  # scancel: torchrun then ends with 1
    closed = (
        'Traceback (most recent call last):\n  File "/opt/venv/bin/torchrun", line 8, in <module>\n'
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError\n"
    )
    assert said(found(closed + failed + got))[:1] == ("cause-not-told",)
    own = raised(1, "KeyError: 'a'")
    assert said(found(own + failed + got))[:2] == ("rank-raised", (1,))


@pytest.mark.parametrize("failure", ["'out of memory'", "2 'out of memory'"])
def test_nccl_says_which_process_has_no_memory_on_its_gpu(failure: str) -> None:
    log = (
        "gpu7:1001:3066048 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by "
        "remote peer gpu7-ib<51159>\n"
        f"gpu7:1002:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure {failure}\n"
    )
    cause = found(log + lost(0, 1))
    assert (cause.code, cause.where.hosts, cause.where.ranks) == (
        "gpu-out-of-memory",
        ("gpu7",),
        (),
    )
    assert "GPU 3 for process 1002" in cause.message
    assert said(found(log + lost(0, 1) + block({0: 1, 1: 1, 2: 1}, root=0)))[1] == (2,)


def test_who_does_not_react_to_sigterm_stood_still() -> None:
    text = waited(0, 2, 3) + "Unable to shutdown process 1001 via 15, forcefully exiting via 9"
    cause = found(text + "\n" + block({0: 1, 1: -9, 2: 1, 3: 1}, root=0))
    assert said(cause) == ("rank-frozen", (1,), CERTAIN)


def test_the_silent_rank_among_those_that_timed_out_is_waited_for() -> None:
    text = waited(0, 1, 2) + block({0: 1, 1: -15, 2: -15, 3: -15}, root=0)
    cause = found(text)
    assert said(cause) == ("loader-stalled", (3,), LIKELY)
    assert [each.where.ranks for each in victims(job(text), [cause])] == [(0, 1, 2)]


def test_a_monitored_barrier_knows_who_did_not_come() -> None:
    text = raised(1, "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received err")
    text += raised(0, "RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 9 ms")
    assert said(found(text)) == ("loader-stalled", (2, 3), CERTAIN)


def test_the_rank_that_is_in_no_list_ended_well() -> None:
    text = lost(0, 1, 3)
    listed = block({0: -15, 1: 1, 3: -15}, root=1)
    assert said(found(text + listed)) == ("rank-ended-early", (2,), LIKELY)
    older = block({1: 1}, root=1, named=False)
    assert said(found(text + older)) == ("rank-silent", (2,), LIKELY)


def test_deepspeed_says_who_ended_well() -> None:
    spawned = "".join(
        f"[INFO] [launch.py:256:main] process {1000 + rank} spawned with command: "
        f"['python', '-u', 'job.py', '--local_rank={rank}']\n"
        for rank in range(3)
    )
    text = spawned + "[launch.py:351:main] Process 1002 exits successfully.\n" + lost(0, 1)
    assert said(found(text)) == ("rank-ended-early", (2,), CERTAIN)


def test_the_fewest_fingerprints_differ() -> None:
    def call(rank: int, operation: str) -> str:
        shape = "TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float)"
        running = f"Rank {rank} is running collective"
        return f"{running}: CollectiveFingerPrint(SequenceNumber=3, OpType={operation}, {shape})"

    odd, usual = "BROADCAST", "ALLREDUCE"
    text = "".join(
        raised(
            rank,
            "RuntimeError: Detected mismatch between collectives on ranks. "
            f"{call(rank, odd if rank == 1 else usual)}, "
            f"but {call(other, odd if other == 1 else usual)}.",
        )
        for rank, other in ((0, 1), (1, 2), (2, 1), (3, 1))
    )
    cause = found(text)
    assert said(cause) == ("collective-mismatch", (1,), CERTAIN)
    assert "BROADCAST" in cause.message


def test_a_size_that_gloo_refuses_names_nobody() -> None:
    text = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 516 vs 512.\n"
    )
    cause = found(text + lost(2, 3) + block({0: -6, 2: 1, 3: 1}, root=0))
    assert said(cause) == ("collective-mismatch", (), POSSIBLE)
    assert "516 bytes" in cause.message


def test_if_all_time_out_the_fewest_that_wait_elsewhere_are_named() -> None:
    text = waited(0, 1, 3) + raised(2, TIMED_OUT, line=66)
    assert said(found(text)) == ("collective-missing", (2,), POSSIBLE)
    tie = waited(0, 2) + raised(1, TIMED_OUT, line=66) + raised(3, TIMED_OUT, line=66)
    assert said(found(tie)) == ("collective-order", (), POSSIBLE)
    assert said(found(waited(0, 1, 2, 3)))[:2] == ("cause-not-told", ())


def watchdog(rank: int, number: int, operation: str = "ALLREDUCE", size: int = 1024) -> str:
    return (
        f"[rank{rank}]:[E1127 12:00:00.123456789 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog "
        f"caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={operation}, "
        f"NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600012 milliseconds\n"
    )


def progress(rank: int, enqueued: int, group: str = "0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E1127 12:00:00.1 ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID {group} "
        f"Rank {rank}]  failure detected by watchdog at work sequence id: 7 PG status: last "
        f"enqueued work: {enqueued}, last completed work: 6\n"
    )


def test_the_watchdog_of_nccl_tells_who_calls_another_size() -> None:
    calls = [watchdog(rank, 7, size=512 if rank == 5 else 1024) for rank in range(8)]
    cause = found("".join(call + progress(rank, 9) for rank, call in enumerate(calls)))
    assert said(cause) == ("collective-mismatch", (5,), LIKELY)
    assert "512 elements" in cause.message
    assert said(found("".join(calls))) == ("collective-mismatch", (5,), POSSIBLE)


def test_the_same_number_in_two_groups_is_no_difference() -> None:
    text = "".join(
        watchdog(rank, 7, "ALLREDUCE" if rank < 6 else "BROADCAST")
        + progress(rank, 9, "3(dp)" if rank < 6 else "4(tp)")
        for rank in range(8)
    )
    assert said(found(text))[:2] == ("cause-not-told", ())


def test_older_lines_of_the_watchdog_have_no_prefix_and_no_size() -> None:
    text = "".join(
        f"loss=2.6][E ProcessGroupNCCL.cpp:458] [Rank {rank}] Watchdog caught collective operation"
        " timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800441 ms\n"
        f"[E ProcessGroupNCCL.cpp:1664] [PG 0 Rank {rank}] Exception (either an error or timeout) "
        f"detected by watchdog at work: 9, last enqueued NCCL work: {8 if rank == 2 else 12}, last "
        "completed NCCL work: 8.\n"
        for rank in range(4)
    )
    assert said(found(text)) == ("collective-missing", (2,), LIKELY)


def test_the_watchdog_of_nccl_tells_who_is_behind() -> None:
    text = "".join(
        watchdog(rank, 7) + progress(rank, 6 if rank == 2 else 9) for rank in (0, 1, 2, 3)
    )
    assert said(found(text)) == ("collective-missing", (2,), LIKELY)
    without = "".join(watchdog(rank, 7) for rank in (0, 1, 3))
    assert said(found(without)) == ("loader-stalled", (2,), LIKELY)


@pytest.mark.parametrize(
    ("error", "code", "ranks"),
    [
        (
            "torch.distributed.DistStoreError: wait timeout after 8000ms, keys: "
            "/default_pg/0//cpu//0/3",
            "rank-absent",
            (3,),
        ),
        (
            "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and "
            "retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get("
            "'0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
            "rank-absent",
            (0,),
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, invalid usage\n"
            "[rank1]: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65000",
            "gpu-shared-by-ranks",
            (0, 1),
        ),
        (
            "torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 3/4 "
            "clients joined.",
            "rank-absent",
            (),
        ),
        (
            "torch.distributed.DistNetworkError: The client socket has timed out after 8000ms "
            "while trying to connect to (head, 29500).",
            "port-refused",
            (),
        ),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any "
            "local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE",
            "port-in-use",
            (1,),
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:219, unhandled "
            "system error\n[rank1]: socketStartConnect: Connect to 10.1.1.1<37521> failed : Conne",
            "group-init-failed",
            (),
        ),
    ],
)
def test_a_launch_that_never_formed(error: str, code: str, ranks: tuple[int, ...]) -> None:
    cause = found(raised(1, error))
    assert said(cause) == (code, ranks, LIKELY if ranks == (0,) else CERTAIN)


def test_clients_are_hosts_where_a_launcher_counts_them() -> None:
    agent = (
        'Traceback (most recent call last):\n  File "/opt/venv/bin/torchrun", line 7, in <module>\n'
        "torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 1/2 "
        "clients joined.\n"
    )
    cause = found(agent)
    assert said(cause) == ("host-absent", (), CERTAIN)
    assert "1 of 2 hosts" in cause.message


def test_a_name_that_does_not_resolve() -> None:
    text = "[W1127 socket.cpp:1] The IPv6 network addresses of (nodeX, 29500) cannot be retrieved "
    cause = found(f"{text}(gai error: -2 - Name or service not known).\n")
    assert said(cause) == ("addr-unresolvable", (), CERTAIN)
    assert "nodeX does not resolve" in cause.message


def test_text_without_a_prefix_is_of_the_rank_whose_file_it_is() -> None:
    text = raised(None, "FileNotFoundError: '/data/tokenizer.json'")
    others = [raised(rank, CLOSED) for rank in (0, 1)]
    cause = found(*others, text, names=("out0.log", "out1.log", "out2.log"))
    assert said(cause) == ("rank-raised", (2,), CERTAIN)
    one = found(lost(0), text, names=("rank0.log", "rank_2.log"))
    assert said(one) == ("rank-raised", (2,), CERTAIN)


def test_a_thread_that_ends_is_its_rank_where_only_one_is_silent() -> None:
    text = "Exception in thread Thread-1 (feed):\n" + raised(None, "KeyError: 7") + waited(0, 2, 3)
    assert said(found(text)) == ("rank-raised", (1,), LIKELY)


def test_a_job_that_ended_well_has_no_finding() -> None:
    assert first_failure(job("step 1 loss 0.5\n[rank0]: done\n" * 50)) is None


def test_every_code_of_an_autopsy_is_explained() -> None:
    known = load().kinds
    assert {kind.code for kind in AUTOPSY_KINDS} <= set(known)


SAME = {
    "oom-killed": {"out-of-memory-kill", "rank-silent"},
    "rank-crashed": {"rank-crashed", "rank-silent"},
    "rank-ended-early": {"rank-ended-early", "rank-silent"},
    "rank-terminated": {"rank-killed"},
    "gpu-memory": {"gpu-out-of-memory"},
    "interrupted": {"job-stopped", "rank-raised"},
    "terminated-from-outside": {"job-stopped"},
    "node-missing": {"host-absent"},
    "master-wrong": {"no-route"},
    "rank-busy": {"loader-stalled"},
    "wrong-group": {"loader-stalled", "collective-missing"},
    "collective-missing": {"collective-missing", "loader-stalled", "collective-mismatch"},
    "rank-raised": {"rank-raised", "rank-exited"},
}
"""Codes that are right for a cause of the samples, where it is not the name itself."""


@pytest.mark.skipif(not CONSOLES.is_dir(), reason="the samples are not here")
def test_real_consoles_name_no_innocent() -> None:
    truth = json.loads((CONSOLES / "truth.json").read_text())
    places: Counter[str] = Counter()
    wrong: list[str] = []
    codes = 0
    for name, known in truth.items():
        consoles = []
        for file in known["files"]:
            with open(CONSOLES / file, "rb") as stream:
                consoles.append((Source.named(file), [*read_console(stream)]))
        cause = first_failure(job_of(consoles))
        ranks = [] if cause is None else [*cause.where.ranks]
        guilty = [rank for rank in known["culprit_ranks"] if isinstance(rank, int)]
        if ranks and ranks != guilty:
            wrong.append(f"{name}: {guilty}, not {ranks}")
        places["right" if ranks == guilty else "not told"] += 1
        codes += cause is not None and cause.code in SAME.get(known["cause"], {known["cause"]})
    assert wrong == []
    assert places["right"] >= 72
    assert codes >= 78


def pyspy(pid: int, *frames: str) -> str:
    lines = [f"Process {pid}: python3 job.py", "Python v3.11.7 (/usr/bin/python3.11)", ""]
    lines += [f'Thread {pid} (idle): "MainThread"', *(f"    {frame}" for frame in frames)]
    return "\n".join([*lines, f'Thread {pid + 1} (idle): "pin"', "    wait (threading.py:1)", ""])


def faulthandler(*frames: tuple[str, int, str]) -> str:
    lines = ["Current thread 0x00007ff825e95b80 (most recent call first):"]
    return "\n".join(
        [*lines, *(f'  File "{file}", line {line} in {name}' for file, line, name in frames), ""]
    )


_ALL_REDUCE = "all_reduce (torch/distributed/distributed_c10d.py:3252)"


def test_stacks_of_a_job_that_hangs_tell_who_is_not_in_the_collective() -> None:
    waits = (_ALL_REDUCE, "train (job.py:47)", "<module> (job.py:73)")
    reads = ("load_batch (job.py:21)", "train (job.py:44)", "<module> (job.py:73)")
    texts = [pyspy(100 * rank, *(reads if rank == 3 else waits)) for rank in range(4)]
    names = tuple(f"pyspy.rank{rank}.txt" for rank in range(4))
    cause = found(*texts, names=names)
    assert said(cause) == ("loader-stalled", (3,), LIKELY)
    assert "it is at job.py:21 in load_batch; ranks 0–2 at job.py:47 in train" in cause.message
    torch = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    waiting = faulthandler((torch, 3252, "all_reduce"), ("/home/job.py", 47, "train"))
    reading = faulthandler(("/home/job.py", 21, "load_batch"), ("/home/job.py", 44, "train"))
    two = found(waiting, reading, names=("con0.log", "con1.log"))
    assert said(two) == ("loader-stalled", (1,), LIKELY)
    assert first_failure(job(waiting, waiting, names=("con0.log", "con1.log"))) is None


def test_a_number_of_a_thousand_digits_is_no_number() -> None:
    text = "  rank      : 1 (local_rank: 0)\n  exitcode  : 9 (pid: 7)\n".replace("1", "1" * 5000)
    assert first_failure(job(text)) is None


def test_slurm_says_that_memory_ran_out() -> None:
    text = (
        lost(0, 2) + "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0. Some of the step"
    )
    text += " tasks have been OOM Killed.\nsrun: error: n1: tasks 1,3: Out Of Memory\n"
    assert said(found(text)) == ("out-of-memory-kill", (1,), CERTAIN)
    alone = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup.\n"
    assert said(found(alone)) == ("out-of-memory-kill", (), LIKELY)


def test_a_task_is_no_rank_where_each_runs_a_launcher() -> None:
    text = raised(None, "KeyError: 7").replace("\n", "\n1: ")
    assert said(found(f"1: {text}")) == ("rank-raised", (1,), CERTAIN)
    agent = "1: E1127 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 9) of binary: python\n"
    assert said(found(f"1: {text}\n{agent}"))[:2] == ("rank-raised", ())


def test_a_line_of_torchrun_without_its_block_tells_the_rank_of_the_host() -> None:
    text = (
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 "
    )
    cause = found(text + "(pid: 812917) of binary: /opt/venv/bin/python\n")
    assert said(cause) == ("rank-killed", (3,), LIKELY)
    assert "its number is that on its host" in cause.message


def test_processes_of_torch_multiprocessing_are_ranks() -> None:
    parent = (
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n'
        "torch.multiprocessing.spawn.{}\n"
    )
    killed = "ProcessExitedException: process 2 terminated with signal SIGKILL"
    assert said(found(parent.format(killed))) == ("rank-killed", (2,), CERTAIN)
    error = "ProcessRaisedException: \n\n-- Process 1 terminated with the following error:"
    text = parent.format(error) + raised(None, "KeyError: 'a'")
    assert said(found(text)) == ("rank-raised", (1,), CERTAIN)


def test_mpich_and_ucx_name_a_process_and_its_host() -> None:
    text = "=   PID 9665 RUNNING AT gpu7\n=   EXIT CODE: {}\n=   CLEANING UP REMAINING PROCESSES\n"
    killed = found(text.format(9))
    assert (killed.code, killed.where.hosts, killed.confidence) == (
        "rank-killed",
        ("gpu7",),
        LIKELY,
    )
    ranked = "=   RANK 3 PID 9665 RUNNING AT gpu7\n=   KILLED BY SIGNAL: 11 (Segmentation fault)\n"
    assert said(found(ranked)) == ("rank-crashed", (3,), CERTAIN)
    ucx = "[gpu7:132060:0:132730] Caught signal 11 (Segmentation fault: address not mapped)\n"
    crashed = found(ucx)
    assert (crashed.code, crashed.where.hosts) == ("rank-crashed", ("gpu7",))


def test_local_ranks_of_two_hosts_are_not_mixed_up() -> None:
    failed = "E1127 api.py:1002] failed (exitcode: {}) local_rank: {} (pid: {}) of binary: python\n"
    other = block({0: 1, 1: 1}, root=0).replace("rank      : 0", "rank      : 2")
    other = other.replace("rank      : 1", "rank      : 3").replace("pid: 100", "pid: 200")
    first = lost(0) + failed.format(-9, 1, 1001) + block({0: -15, 1: -9}, root=1)
    second = lost(2, 3) + failed.format(1, 0, 2000) + other
    for texts in ((first, second), (second, first), (first + second,), (second + first,)):
        assert said(found(*texts)) == ("rank-killed", (1,), CERTAIN)


@pytest.mark.skipif(not CONSOLES.is_dir(), reason="the samples are not here")
@pytest.mark.parametrize(
    "names",
    [
        ("pyspy.rank0.txt", "pyspy.rank3.txt"),
        ("pyspy-native.rank0.txt", "pyspy.rank3.txt"),
        ("pyspy-native.rank0.txt", "pyspy-json.rank3.json"),
        ("pyspy-native.rank0.txt", "gdb.rank3.txt"),
        ("con0.log", "con1.log", "con2.log", "con3.log"),
    ],
)
def test_real_stacks_of_a_rank_in_its_loader(names: tuple[str, ...]) -> None:
    files = [str(CONSOLES.parent / "stacks" / name) for name in names]
    (cause,) = examine(files, io.BytesIO(), started="2026-11-28T10:00:00+00:00").root_causes
    assert said(cause) == ("loader-stalled", (3,), LIKELY)
    place = "clock_nanosleep.c:48" if "gdb.rank3.txt" in names else "job.py:21 in load_batch"
    assert f"it is at {place}" in cause.message


def gdb(pid: int, *frames: str) -> str:
    """What `thread apply all bt` prints of a rank; other threads of gloo wait at all times."""
    idle = ("0x1 in epoll_wait () from /lib/libc.so.6", "0x2 in gloo::Loop::run() () from /x/l.so")
    made = ""
    for number, lwp, each in ((2, pid + 1, idle), (1, pid, frames)):
        made += f'Thread {number} (Thread 0x7f{lwp:x} (LWP {lwp}) "python3"):\n'
        made += "".join(f"#{at}  {frame}\n" for at, frame in enumerate(each)) + "\n"
    return made


def test_native_stacks_tell_who_is_not_in_the_collective() -> None:
    waits = (
        "0x00007f in pthread_cond_wait (cond=0x1) at ./nptl/pthread_cond_wait.c:618",
        "0x00007f in c10d::Work::wait(std::chrono::duration<long, std::ratio<1l, 1000l> >) () "
        "from /opt/venv/lib/libtorch_cpu.so",
    )
    nccl = (
        "0x00007f in poll () from /lib/libc.so.6",
        "0x00007f in pncclCommInitRank () from /l.so",
    )
    reads = ("0x00007f in __GI___read (fd=3, buf=0x1) at ../sysdeps/read.c:26",)
    texts = [gdb(100 * (1 + rank), *each) for rank, each in enumerate((waits, nccl, reads))]
    cause = found(*texts, names=tuple(f"gdb.rank{rank}.txt" for rank in range(3)))
    assert said(cause) == ("loader-stalled", (2,), LIKELY)
    assert "it is at read.c:26 in __GI___read" in cause.message


@pytest.mark.parametrize(
    "text",
    [
        "Error: Failed to get stack traces\n\nCaused by:\n    1: unexpected waitpid result "
        "PtraceEvent(Pid(1001), SIGSTOP, 128) to 1001\n",
        "Name:\tpython3\nState:\tT (stopped)\n",
    ],
)
def test_a_process_that_is_stopped_stands_still(text: str) -> None:
    names = ("pyspy.rank0.txt", "pyspy.rank1.txt", "pyspy.rank2.txt")
    waits = (_ALL_REDUCE, "train (job.py:47)")
    cause = found(pyspy(1000, *waits), text, pyspy(1002, *waits), names=names)
    assert said(cause) == ("rank-frozen", (1,), CERTAIN)


def test_the_text_of_one_host_tells_which_of_its_ranks_is_silent() -> None:
    other = block({2: 1, 3: -15}, root=2)
    assert said(found(waited(2) + other)) == ("loader-stalled", (3,), LIKELY)


def test_a_folder_of_torchrun_has_a_rank_that_is_in_no_list() -> None:
    listed = lost(0, 1) + block({0: -15, 1: 1}, root=1)
    names = ("console.log", *(f"logs/x/attempt_0/{rank}/stderr.log" for rank in range(3)))
    assert said(found(listed, "", "", "", names=names)) == ("rank-ended-early", (2,), LIKELY)


def test_an_exception_without_a_rank_is_of_the_host_in_whose_text_it_is() -> None:
    late = "torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 3/4 "
    first = raised(None, late + "clients joined.") + block({0: -15, 1: 1}, root=1)
    second = raised(None, "FileNotFoundError: '/data'") + block({2: -15, 3: 1}, root=3)
    for texts in ((first, second), (second, first)):
        assert said(found(*texts)) == ("rank-raised", (3,), CERTAIN)
    assert said(found(first + second))[:2] == ("rank-raised", ())


STARTS = "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default\n"
ENDS = "E1129 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 1000) of binary: python\n"


@pytest.mark.parametrize("told", [waited(0, 1), lost(0, 1)])
def test_a_host_whose_launcher_says_no_more_is_gone(told: str) -> None:
    other = STARTS + told + ENDS + block({0: 1, 1: -15}, root=0)
    cause = found(other, STARTS + "step 3 loss 0.3\n")
    assert said(cause) == ("rank-silent", (), LIKELY)
    assert "consoleb.log, line 1" in cause.message
    assert cause.evidence["rule"] == "one host silent"


@pytest.mark.parametrize(
    "second",
    [
        STARTS + waited(2) + ENDS + block({2: 1, 3: -15}, root=2),  # it says how its ranks ended
        STARTS + waited(2, 3),  # cut off, but its ranks speak
        "[12.1] eth0: link is up\n",  # no console of a job
    ],
)
def test_a_host_that_says_something_is_not_gone(second: str) -> None:
    other = STARTS + waited(0, 1) + ENDS + block({0: 1, 1: -15}, root=0)
    assert found(other, second).code != "rank-silent"


def test_of_two_silent_hosts_none_is_named() -> None:
    other = STARTS + waited(0, 1) + ENDS + block({0: 1, 1: -15}, root=0)
    assert found(other, STARTS, STARTS).code == "cause-not-told"


def test_where_no_rank_lost_another_one_a_silent_host_is_no_cause() -> None:
    other = STARTS + raised(0, "KeyError: 3") + ENDS + block({0: 1, 1: -15}, root=0)
    assert found(other, STARTS).code == "rank-raised"
