"""Real children: whatever one does, the supervisor learns how it ended, in time."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor import registry
from nccl_doctor.api import Context, Launch, Skip, Untested
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.observe import probe
from nccl_doctor.observe.handoff import SocketPairHandoff
from nccl_doctor.system import forks
from nccl_doctor.toolkit.groups.stacks import main_stack
from tests.ranks.ranks import descendants, gone
from tests.support import disks
from tests.support.waiting import until

DEADLINE_S = 1.0
CLONE_VFORK = 0x4000  # <linux/sched.h>
SLACK_S = 2.5  # examining a stuck child, killing it, and a busy machine


def run_all(*jobs: probe.ProbeJob) -> list[Outcome]:
    before = set(descendants(os.getpid()))
    outcomes = probe.run(jobs)
    assert not forks.living
    assert set(descendants(os.getpid())) <= before  # nothing is left, not even to reap
    return outcomes


def outcome_of(work: Callable[[Any], Any], deadline_s: float = 10.0) -> Outcome:
    (outcome,) = run_all(probe.ProbeJob("test", work, time.monotonic() + deadline_s))
    return outcome


def test_sockets_that_one_child_leaves_another_one_finds_open() -> None:
    handoff = SocketPairHandoff()

    def outcome_with(work: Callable[[Any], Any]) -> Outcome:
        job = probe.ProbeJob("test", work, time.monotonic() + 10, files=handoff.files)
        return run_all(job)[0]

    def leave(line: Any) -> dict[str, Any]:
        server = socket.create_server(("127.0.0.1", 0))
        caller = socket.create_connection(server.getsockname())
        caller.sendall(b"early")
        handoff.put({"who": 7}, [server, caller])
        return {}

    def find(line: Any) -> dict[str, Any]:
        found = handoff.take()
        assert found is not None
        value, (server, caller) = found
        accepted, _ = server.accept()
        accepted.sendall(b"late")
        heard = [accepted.recv(9).decode(), caller.recv(9).decode()]
        return {**value, "heard": heard, "left": handoff.take()}

    assert outcome_with(leave).facts == {}
    assert outcome_with(find).facts == {"who": 7, "heard": ["early", "late"], "left": None}


def test_facts_come_back_with_breadcrumbs() -> None:
    def work(line: Any) -> dict[str, Any]:
        line.breadcrumb("look", at="door")
        return {"answer": [1, 2]}

    outcome = outcome_of(work)
    assert outcome.status is OutcomeStatus.OK
    assert outcome.facts == {"answer": [1, 2]}
    assert [(c["step"], c["at"]) for c in outcome.breadcrumbs] == [("look", "door")]


@pytest.mark.parametrize(
    ("error", "status"), [(Skip, OutcomeStatus.SKIPPED), (Untested, OutcomeStatus.UNTESTED)]
)
def test_skip_and_untested_carry_their_reason(
    error: type[Exception], status: OutcomeStatus
) -> None:
    def work(line: Any) -> dict[str, Any]:
        raise error("no such thing here")

    outcome = outcome_of(work)
    assert (outcome.status, outcome.reason) == (status, "no such thing here")


def test_a_part_that_could_be_seen_comes_with_the_reason() -> None:
    def work(line: Any) -> dict[str, Any]:
        raise Untested("one of two could not be read", {"read": 1})

    outcome = outcome_of(work)
    assert (outcome.status, outcome.facts) == (OutcomeStatus.OK, {"read": 1})
    assert outcome.reason == "one of two could not be read"
    assert Outcome.from_json(outcome.to_json()) == outcome


def test_exception_is_a_fact_with_its_place() -> None:
    def work(line: Any) -> dict[str, Any]:
        print("said before")
        raise KeyError("lost")

    outcome = outcome_of(work)
    assert outcome.status is OutcomeStatus.RAISED
    assert "KeyError: 'lost'" in outcome.reason
    assert "test_probe.py" in outcome.reason


def test_facts_that_are_not_json_are_a_fault_of_the_check() -> None:
    outcome = outcome_of(lambda line: {"a": object()})
    assert outcome.status is OutcomeStatus.RAISED
    assert "not JSON" in outcome.reason


def test_facts_beyond_the_bound_are_refused() -> None:
    outcome = outcome_of(lambda line: {"a": "x" * (probe.MAX_MESSAGE_BYTES + 1)})
    assert outcome.status is OutcomeStatus.RAISED
    assert str(probe.MAX_MESSAGE_BYTES) in outcome.reason


def test_hang_is_stopped_at_the_deadline_and_says_where_it_was() -> None:
    def stuck_here(line: Any) -> dict[str, Any]:
        line.breadcrumb("all_reduce", sequence=7)
        print("the last thing it said", flush=True)
        time.sleep(1000)
        return {}

    started = time.monotonic()
    outcome = outcome_of(stuck_here, DEADLINE_S)
    assert DEADLINE_S <= time.monotonic() - started < DEADLINE_S + SLACK_S
    assert outcome.status is OutcomeStatus.HUNG
    assert outcome.last_step == "all_reduce"
    assert outcome.state == "S"
    assert "in stuck_here" in outcome.stack
    assert main_stack(outcome.stack).splitlines()[-1].startswith("stuck_here (")  # no frame of ours
    assert "the last thing it said" in outcome.log_tail


@pytest.fixture
def crowded() -> Iterator[int]:
    """A processor that four other processes keep busy."""
    processor = max(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{processor}])\nprint(flush=True)\nwhile True: pass"
    others = [
        subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(4)
    ]
    for each in others:
        assert each.stdout is not None
        each.stdout.readline()
    yield processor
    for each in others:
        each.kill()
        each.wait()
        assert each.stdout is not None
        each.stdout.close()


@pytest.mark.parametrize("spare_s", [0.0, 60.0])
def test_one_that_lacked_a_processor_gets_that_time_in_addition(
    crowded: int, spare_s: float
) -> None:
    def work(line: Any) -> dict[str, Any]:
        os.sched_setaffinity(0, [crowded])
        line.breadcrumb("count")
        while time.process_time() < DEADLINE_S / 2:  # at a fifth of the speed
            pass
        return {"done": True}

    job = probe.ProbeJob("test", work, time.monotonic() + DEADLINE_S, spare_s=spare_s)
    (outcome,) = run_all(job)
    assert outcome.status is (OutcomeStatus.OK if spare_s else OutcomeStatus.UNTESTED), outcome
    assert spare_s or outcome.reason == "not done in time: the processors of this host are busy"
    assert job.spare_s <= spare_s


@pytest.mark.parametrize("spare_s", [0.0, 60.0])
def test_one_that_begins_late_gets_the_time_that_it_asked_for(spare_s: float) -> None:
    def work(line: Any) -> dict[str, Any]:
        time.sleep(0.7 * DEADLINE_S)  # so that the next one has less than it asked for
        return {}

    until = time.monotonic() + DEADLINE_S
    jobs = [
        probe.ProbeJob(name, work, until, shared="both", spare_s=spare_s, asked_s=DEADLINE_S)
        for name in ("first", "next")
    ]
    first, later = run_all(*jobs)
    assert first.status is OutcomeStatus.OK
    assert later.status is (OutcomeStatus.OK if spare_s else OutcomeStatus.HUNG), later


def test_one_that_sleeps_gets_no_more_time(crowded: int) -> None:
    started = time.monotonic()
    job = probe.ProbeJob("test", lambda line: time.sleep(99), started + DEADLINE_S, spare_s=60.0)
    (outcome,) = run_all(job)
    assert outcome.status is OutcomeStatus.HUNG
    assert time.monotonic() - started < DEADLINE_S + SLACK_S


def test_an_answer_in_time_counts_however_late_it_is_read() -> None:
    """As where this process had no processor for longer than the rest of the deadline."""
    job = probe.ProbeJob("test", lambda line: {"done": True}, time.monotonic() + DEADLINE_S)
    crew = probe._Crew([job], wait_for_stopped=True)
    crew.fork()
    (child,) = crew._children
    assert select.select([child.pipe], [], [], SLACK_S)[0]
    until(lambda: time.monotonic() >= job.deadline)
    while crew.busy:
        crew.stop_late()
        crew.listen()
    assert [outcome.facts for outcome in crew.outcomes] == [{"done": True}]


def test_stopped_child_is_seen_as_stopped() -> None:
    def work(line: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}

    outcome = outcome_of(work, DEADLINE_S)
    assert (outcome.status, outcome.state) == (OutcomeStatus.HUNG, "T")


def in_kernel(seconds: float) -> None:
    """Wait in state D, as whoever calls vfork waits for its child; only SIGKILL ends it before."""
    libc = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(1 << 16)
    top = ctypes.c_void_p((ctypes.addressof(stack) + len(stack)) & ~15)
    usleep = ctypes.cast(libc.usleep, ctypes.c_void_p)
    how = CLONE_VFORK | signal.SIGCHLD
    os.waitpid(libc.clone(usleep, top, how, ctypes.c_void_p(int(seconds * 1e6))), 0)


def test_one_that_waits_in_the_kernel_for_good_is_seen_there() -> None:
    def work(line: Any) -> dict[str, Any]:
        in_kernel(1000)
        return {}

    started = time.monotonic()
    outcome = outcome_of(work, DEADLINE_S)
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    assert (outcome.status, outcome.state, outcome.stack) == (OutcomeStatus.HUNG, "D", "")


def test_one_that_was_in_the_kernel_for_a_moment_is_not_stuck_there() -> None:
    deadline = time.monotonic() + DEADLINE_S

    def waits_here(line: Any) -> dict[str, Any]:
        in_kernel(deadline - time.monotonic() + probe.STACK_WAIT_S / 10)
        time.sleep(1000)
        return {}

    (outcome,) = run_all(probe.ProbeJob("test", waits_here, deadline))
    assert (outcome.status, outcome.state) == (OutcomeStatus.HUNG, "S")
    assert "in waits_here" in outcome.stack


def test_many_that_cannot_be_killed_cost_no_more_than_one(tmp_path: Path) -> None:
    """As where the driver of eight GPUs does not return."""
    with disks.frozen(tmp_path) as disk:

        def writes_here(line: Any) -> dict[str, Any]:
            (disk / "file").write_text("x")
            return {}

        before = set(descendants(os.getpid()))
        started = time.monotonic()
        deadline = started + DEADLINE_S
        outcomes = probe.run(
            [probe.ProbeJob(f"test{k}", writes_here, deadline) for k in range(8)]
            + [probe.ProbeJob("sleeps", lambda line: time.sleep(1000) or {}, deadline)]
        )
        took_s = time.monotonic() - started
        states = [outcome.state for outcome in outcomes]
        left = set(descendants(os.getpid())) - before
    assert states == ["D"] * 8 + ["S"]
    assert took_s < DEADLINE_S + 2 * SLACK_S
    assert len(left) == 8
    for pid in left:  # killed all the same: gone once the disk lets them
        os.waitpid(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_death_by_signal_is_a_fact(number: signal.Signals) -> None:
    def dies_here(line: Any) -> dict[str, Any]:
        line.breadcrumb("before")
        os.kill(os.getpid(), number)
        return {}

    outcome = outcome_of(dies_here)
    assert (outcome.status, outcome.signal) == (OutcomeStatus.DIED, number.name)
    assert outcome.last_step == "before"
    if number is not signal.SIGKILL:
        assert "in dies_here" in outcome.stack


def test_exit_code_is_a_fact() -> None:
    outcome = outcome_of(lambda line: os._exit(7))
    assert (outcome.status, outcome.exit_code) == (OutcomeStatus.DIED, 7)


def test_what_a_child_started_does_not_outlive_it() -> None:
    def work(line: Any) -> dict[str, Any]:
        line.breadcrumb("started", pid=subprocess.Popen(["sleep", "1000"]).pid)
        return {}

    outcome = outcome_of(work)
    pid = outcome.breadcrumbs[0]["pid"]
    assert gone([pid])


def test_jobs_run_side_by_side_and_one_stuck_delays_no_other_verdict() -> None:
    def slow(line: Any) -> dict[str, Any]:
        time.sleep(DEADLINE_S / 2)  # four of them one after the other would be late
        return {"slow": True}

    def stuck(line: Any) -> dict[str, Any]:
        time.sleep(1000)
        return {}

    started = time.monotonic()
    jobs = [probe.ProbeJob("slow", slow, started + 10) for _ in range(4)]
    jobs.insert(2, probe.ProbeJob("stuck", stuck, started + DEADLINE_S))
    outcomes = probe.run(jobs)
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    ok = OutcomeStatus.OK
    assert [o.status for o in outcomes] == [ok, ok, OutcomeStatus.HUNG, ok, ok]


def stops(line: Any) -> dict[str, Any]:
    """Work that a signal stops."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return {"goes": "on"}


def test_a_stopped_job_is_given_up_before_its_deadline() -> None:
    started = time.monotonic()
    job = probe.ProbeJob("test", stops, started + 60.0)
    (outcome,) = probe.run([job], wait_for_stopped=False)
    least = probe.PATIENCE_S + forks.STOPPED_S
    assert least < time.monotonic() - started < least + SLACK_S
    assert (outcome.status, outcome.state) == (OutcomeStatus.HUNG, "T")
    assert not forks.living


def test_a_job_that_goes_on_after_a_stop_is_waited_for() -> None:
    def stops_twice(line: Any) -> dict[str, Any]:
        for _ in range(2):
            wakes = subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
            stops(line)
            wakes.wait()
            time.sleep(0.5)  # whoever looks sees it run; if nobody looks, it was never stopped
        return {"went": "on"}

    job = probe.ProbeJob("test", stops_twice, time.monotonic() + 60.0)
    (outcome,) = probe.run([job], wait_for_stopped=False)
    assert (outcome.status, outcome.facts) == (OutcomeStatus.OK, {"went": "on"})


def shared(*works: Callable[[Any], Any], deadline_s: float = 10.0) -> list[Outcome]:
    end = time.monotonic() + deadline_s
    return run_all(*(probe.ProbeJob(f"n{n}", w, end, shared="one") for n, w in enumerate(works)))


def who(line: Any) -> dict[str, Any]:
    """Work that says which process did it."""
    with open("/proc/self/comm") as file:
        return {"pid": os.getpid(), "name": file.read().strip()}


def test_shared_jobs_are_served_by_one_child_under_the_name_of_each() -> None:
    first, second = shared(who, who)
    assert first.facts["pid"] == second.facts["pid"] != os.getpid()
    assert (first.facts["name"], second.facts["name"]) == ("ncd:n0", "ncd:n1")
    alone = [probe.ProbeJob("own", who, time.monotonic() + 10) for _ in range(2)]
    assert len({outcome.facts["pid"] for outcome in probe.run(alone)}) == 2


def test_each_name_of_a_shared_child_has_its_own() -> None:
    end = time.monotonic() + 10
    jobs = [probe.ProbeJob("job", who, end, shared=name) for name in ("a", "b", "a", "b")]
    pids = [outcome.facts["pid"] for outcome in probe.run(jobs)]
    assert pids[0] == pids[2] != pids[1] == pids[3]


def test_shared_jobs_keep_their_words_apart() -> None:
    def talks(line: Any) -> dict[str, Any]:
        line.breadcrumb("first")
        print("what the first one said")
        return {}

    def fails(line: Any) -> dict[str, Any]:
        line.breadcrumb("second")
        print("what the second one said")
        raise ValueError("no good")

    first, second, third = shared(talks, fails, who)
    assert [crumb["step"] for crumb in first.breadcrumbs] == ["first"]
    assert [crumb["step"] for crumb in second.breadcrumbs] == ["second"]
    assert second.status is OutcomeStatus.RAISED
    assert second.log_tail == "what the second one said"
    assert third.status is OutcomeStatus.OK


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_crash_in_a_shared_child_costs_only_its_own_job(place: int) -> None:
    def dies(line: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return {}

    works = [who, who]
    works.insert(place, dies)
    outcomes = shared(*works)
    died = outcomes.pop(place)
    assert (died.status, died.signal) == (OutcomeStatus.DIED, "SIGSEGV")
    assert "in dies" in died.stack
    assert [outcome.status for outcome in outcomes] == [OutcomeStatus.OK] * 2


def test_what_another_job_left_behind_is_not_blamed_on_the_next() -> None:
    def leaves_a_bomb(line: Any) -> dict[str, Any]:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return {}

    def victim(line: Any) -> dict[str, Any]:
        time.sleep(0.5)  # the bomb goes off meanwhile, if it can
        return {"survived": True}

    first, second = shared(leaves_a_bomb, victim)
    assert first.status is OutcomeStatus.OK
    assert (second.status, second.facts) == (OutcomeStatus.OK, {"survived": True})


def test_nothing_waits_behind_a_shared_job_that_is_slow() -> None:
    def slow(line: Any) -> dict[str, Any]:
        time.sleep(probe.PATIENCE_S + 0.7)  # longer than others are patient
        return {"pid": os.getpid()}

    def stuck(line: Any) -> dict[str, Any]:
        time.sleep(1000)
        return {}

    def when(line: Any) -> dict[str, Any]:
        return {"at": time.monotonic()}

    started = time.monotonic()
    deadline_s = probe.PATIENCE_S + 2.0
    first, hung, *rest = shared(slow, stuck, when, when, deadline_s=deadline_s)
    assert time.monotonic() - started < deadline_s + SLACK_S
    assert first.status is OutcomeStatus.OK
    assert hung.status is OutcomeStatus.HUNG
    assert "in stuck" in hung.stack
    for outcome in rest:
        assert outcome.facts["at"] - started < probe.PATIENCE_S + 0.7


@contextlib.contextmanager
def few_files(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_open_files_are_enough_for_many_children() -> None:
    # Found in the lab: with a limit of 128 the supervisor itself failed, before it could say so.
    end = time.monotonic() + 20
    jobs = [probe.ProbeJob(f"n{n}", lambda line, n=n: {"n": n}, end) for n in range(100)]
    with few_files(max(map(int, os.listdir("/proc/self/fd"))) + 64):
        outcomes = probe.run(jobs)
    assert [outcome.facts for outcome in outcomes] == [{"n": n} for n in range(100)]


def test_what_finds_no_room_in_time_is_untested() -> None:
    end = time.monotonic() + DEADLINE_S
    jobs = [probe.ProbeJob("stuck", lambda line: time.sleep(1000) or {}, end) for _ in range(2)]
    with few_files(len(os.listdir("/proc/self/fd")) + 16):  # room for one
        first, last = probe.run(jobs)
    assert (first.status, last.status) == (OutcomeStatus.HUNG, OutcomeStatus.UNTESTED)
    assert "not started in time" in last.reason


def test_child_does_not_outlive_its_parent() -> None:
    """The parent is killed with SIGKILL: the kernel must take the child along."""
    memory = mmap.mmap(-1, 4)  # a child has no open file of its parent
    parent = os.fork()
    if parent == 0:
        try:

            def work(line: Any) -> dict[str, Any]:
                memory[:4] = os.getpid().to_bytes(4, "big")
                time.sleep(1000)
                return {}

            probe.run([probe.ProbeJob("orphan", work, time.monotonic() + 60)])
        finally:
            os._exit(0)
    child = until(lambda: int.from_bytes(memory[:4], "big"))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert gone([child])
    assert child != parent


def test_what_a_child_knew_outlives_its_deadline() -> None:
    def stuck(line: Any) -> dict[str, Any]:
        line.so_far({"seen": 1})
        line.so_far({"seen": 2})
        line.breadcrumb("waiting for the others")
        time.sleep(1000)
        return {}

    outcome = outcome_of(stuck, DEADLINE_S)
    assert (outcome.status, outcome.facts) == (OutcomeStatus.OK, {"seen": 2})
    assert outcome.reason == "hung in waiting for the others"  # so it is no pass


def test_what_a_child_knew_hides_no_other_end() -> None:
    def work(line: Any, then: Callable[[], Any]) -> Any:
        line.so_far({"seen": 1})
        return then()

    def ends(then: Callable[[], Any]) -> Outcome:
        return outcome_of(lambda line: work(line, then))

    assert ends(lambda: {"seen": 2}).facts == {"seen": 2}
    assert ends(lambda: os.kill(os.getpid(), signal.SIGKILL)).status is OutcomeStatus.DIED
    assert ends(lambda: 1 / 0).status is OutcomeStatus.RAISED


def test_no_secret_leaves_a_child() -> None:
    hidden, heard = "open" + "sesame", []

    def work(line: Any) -> Any:
        line.breadcrumb(f"calling https://bob:{hidden}@head", api_key=hidden)
        line.witness("said", f"--password {hidden}")
        print("x" * 3000 + f" password={'y' * 990}{hidden}")  # the word is cut off the tail
        print("z" * 3000, flush=True)
        if os.environ.get("NO_SUCH") is None:
            raise ValueError(f"token={hidden}")
        return {}

    (outcome,) = run_all(
        probe.ProbeJob("test", work, time.monotonic() + 10.0, heard=heard.append),
    )
    told = f"{outcome.to_json()} {heard}"
    assert outcome.status is OutcomeStatus.RAISED
    assert hidden not in told
    assert "y" * 10 not in told
    assert heard[0]["step"] == "calling https://***@head"
    facts = outcome_of(lambda line: {"a": [f"token={hidden}", 1, None], "password": hidden}).facts
    assert facts == {"a": ["token=***", 1, None], "password": "***"}


def test_which_checks_share_a_child() -> None:
    checks = {check.name: check for check in registry.installed()}
    launch = Launch(launcher="plain", rank=0, world_size=2, local_rank=0)
    end = time.monotonic() + 10

    def sharing(backend: str, child: str) -> set[str]:
        context = Context(launch, {}, backend=backend)
        jobs = {name: probe.job_of(each, context, end) for name, each in checks.items()}
        return {name for name, job in jobs.items() if job.shared == child}

    instant = {name for name, each in checks.items() if each.cost == "instant"}
    on_gpu = {name for name, each in checks.items() if each.instant_without_gpu}
    answered = {name for name, each in checks.items() if each.instant_when_answered}
    assert {"gpu_work", "gpu_state", "backend_device", "net_plugin"} <= on_gpu
    assert {"master_addr", "own_name"} <= answered
    assert "port" not in answered  # it waits for rank 0 on purpose
    assert sharing("nccl", "instant") == instant
    assert sharing("gloo", "instant") == instant | on_gpu
    assert sharing("gloo", "answered") == sharing("nccl", "answered") == answered
    assert len(instant) + len(on_gpu) + len(answered) == len(instant | on_gpu | answered)
