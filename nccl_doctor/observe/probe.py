"""Probes: every `observe()` in a forked child, which may hang, crash or be killed without harm to
the run.

One that misses its deadline is first examined as a person would (what was its last step, its Python
stack, its /proc state, the end of its output), then killed with all it started.

Forking from a participant that has imported torch costs some 10 ms; importing torch again would
cost 1–5 s. Jobs that are done in an instant therefore share one child while all goes well, and
those that are if they are answered another one. The one that is not is left behind in it, and the
rest go on elsewhere.

The participant must have no busy thread of its own while it forks: a lock that such a thread holds
at that moment stays locked in the child for ever (seen with torch's store server, whose thread does
name look-ups; hence `store_server` runs it in a process of its own).
"""

from __future__ import annotations

import resource
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.model.check import Check, Context
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.observe.child import (
    BUSY_HOST,
    FILES,
    MAX_MESSAGE_BYTES,
    Child,
    ProbeJob,
    outcome_without_child,
)
from nccl_doctor.observe.line import ChildLine
from nccl_doctor.system.forks import REAP_WAIT_S
from nccl_doctor.system.shortage import Shortage, shortage_of, soft_limit
from nccl_doctor.toolkit.host import open_descriptors

__all__ = ["MAX_MESSAGE_BYTES", "ChildLine", "ProbeJob", "job_of", "patience", "run"]

AT_ONCE = 64
"""Children at the same time."""
PATIENCE_S = 1.0
"""Time in a shared child after which the other jobs get another child."""
STACK_WAIT_S = 0.3
"""Time for the stacks of children that missed their deadlines."""
SCARCE_S = 2.0
"""Time to try again while no child at all can be started: another program may end."""
_OWN_FILES = 64
"""Open files that a child needs for itself."""


def run(
    jobs: Iterable[ProbeJob],
    tick: Callable[[], None] = lambda: None,
    *,
    wait_for_stopped: bool = True,
    left: Callable[[Collection[str]], None] = lambda names: None,
) -> list[Outcome]:
    """Run every job in a child, as many at once as there is room for, and wait for all.

    Args:
        jobs: what to run; returns by the latest of their deadlines, with what they may spare for
            want of a processor, and 1.5 s to collect.
        tick: called several times a second while waiting.
        wait_for_stopped: wait to its deadline for a job that a signal has stopped, not only
            `STOPPED_S`.
        left: called as often as `tick`, with the names of the jobs that have not ended.

    Returns: outcomes in the order of `jobs`.
    """
    crew = _Crew(jobs, wait_for_stopped)
    while crew.busy:
        crew.fork()
        crew.stop_late()
        crew.listen()
        if names := crew.left:
            left(names)
        tick()
    return crew.outcomes


def patience(check: Check, context: Context) -> float:
    """Seconds that a check asks for to observe alone."""
    try:
        return float(check.deadline(context))
    except Exception:  # a plug-in's mistake must not stop the others
        return check.deadline_s


def job_of(
    check: Check,
    context: Context,
    deadline: float,
    grace_s: float = 0.0,
    spare_s: float = 0.0,
) -> ProbeJob:
    """The job of one `observe`, which is killed `grace_s` after its own deadline, and up to
    `spare_s` later if it lacked a processor.
    """

    def work(line: ChildLine) -> Mapping[str, Any]:
        inside = replace(
            context,
            breadcrumb=line.breadcrumb,
            witness=line.witness,
            so_far=line.so_far,
            deadline=job.deadline - grace_s,
        )
        return check.observe(inside)

    if check.cost == "instant" or (check.instant_without_gpu and context.backend != "nccl"):
        shared = "instant"
    else:
        shared = "answered" if check.instant_when_answered else ""
    files = () if context.handoff is None else context.handoff.files
    job = ProbeJob(
        check.name,
        work,
        deadline + grace_s,
        shared=shared,
        unaided=check.unaided,
        files=files,
        spare_s=spare_s,
        asked_s=max(0.0, deadline + grace_s - time.monotonic()) if spare_s else 0.0,
    )
    return job


class _Crew:
    """The children of one `run`, and what is left for them to do."""

    def __init__(self, jobs: Iterable[ProbeJob], wait_for_stopped: bool) -> None:
        self._jobs = list(jobs)
        self._wait_for_stopped = wait_for_stopped
        self._outcomes: dict[int, Outcome] = {}
        self._children: list[Child] = []
        self._room = _room()
        self._scarce_until = 0.0
        self._to_come = deque([job] for job in self._jobs if not job.shared)
        shared: dict[str, list[ProbeJob]] = {}
        for job in self._jobs:
            if job.shared:
                shared.setdefault(job.shared, []).append(job)
        self._to_come += shared.values()

    @property
    def busy(self) -> bool:
        """True if a child is running, or a job is left."""
        return bool(self._children or self._to_come)

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcome of each job, in order."""
        return [self._outcomes[id(job)] for job in self._jobs]

    @property
    def left(self) -> list[str]:
        """Names of the jobs without an outcome so far."""
        return [job.name for job in self._jobs if id(job) not in self._outcomes]

    def fork(self) -> None:
        """Give everything to children that there is room for."""
        while self._to_come and len(self._children) < self._room:
            jobs = self._to_come.popleft()
            now = time.monotonic()
            in_time = [job for job in jobs if now < job.deadline + job.spare_s]
            for job in jobs:
                if job not in in_time:
                    words = BUSY_HOST
                    if self._room < AT_ONCE:
                        words = f"at most {self._room} child processes run at once"
                    words = f"not started in time: {words}"
                    self._outcomes[id(job)] = Outcome(OutcomeStatus.UNTESTED, reason=words)
            if not in_time:
                continue
            try:
                self._children.append(Child(in_time))
                self._scarce_until = 0.0
            except OSError as error:
                scarce = shortage_of(error)
                if scarce is None:
                    raise
                self._to_come.appendleft(in_time)
                self._make_do(scarce)
                return

    def _make_do(self, scarce: Shortage) -> None:
        """Go on with the children that there are; without one, wait a little, and give up."""
        if self._children:
            self._room = len(self._children)
            return
        now = time.monotonic()
        self._scarce_until = self._scarce_until or now + SCARCE_S
        if now < self._scarce_until:
            time.sleep(0.05)
            return
        for jobs in self._to_come:
            for job in jobs:
                self._outcomes[id(job)] = outcome_without_child(job, scarce.words)
        self._to_come.clear()

    def stop_late(self) -> None:
        """End what has missed its deadline, and let nothing wait behind what is slow."""
        slow = [child for child in self._children if child.busy_s > PATIENCE_S]
        slow = [child for child in slow if child.busy_s - child.lacked_s > PATIENCE_S]
        for child in slow:
            self._to_come += [[job] for job in child.relieve()]
        now = time.monotonic()
        # An answer that came in time counts, however late this process gets to read it.
        self._hear([child for child in self._children if now >= child.job.deadline], 0)
        late = [child for child in self._children if now >= child.job.deadline]
        late = [child for child in late if not child.put_off()]
        if not self._wait_for_stopped:
            late += [child for child in slow if child not in late and child.is_stopped()]
        if not late:
            return
        # Each step for all at once: each of many that are wedged needs its moment, and nobody is
        # waited for who cannot even be killed.
        for child in late:
            child.ask()
        until = time.monotonic() + STACK_WAIT_S
        silent = late
        while silent and time.monotonic() < until:
            time.sleep(0.01)
            silent = [child for child in silent if not child.answered()]
        time.sleep(0.02)  # a stack is written thread by thread
        for child in late:
            child.kill()
        by = time.monotonic() + REAP_WAIT_S
        for child in late:
            self._end(child, by)

    def listen(self) -> None:
        """Hear what children have to say, for a moment or until the next deadline."""
        if not self._children:
            return
        nearest = min(child.job.deadline for child in self._children)
        self._hear(self._children, min(max(0.0, nearest - time.monotonic()), 0.2))

    def _hear(self, children: Sequence[Child], timeout_s: float) -> None:
        by_pipe = {child.pipe: child for child in children}
        readable, _, _ = select.select(list(by_pipe), [], [], timeout_s)
        for pipe in readable:
            child = by_pipe[pipe]
            if not child.pump():
                self._end(child)
            elif child.ready:
                done = child.job
                self._outcomes[id(done)] = child.send_on()

    def _end(self, child: Child, by: float | None = None) -> None:
        """`by`: as for `Child.conclude`, of one that is late."""
        self._children.remove(child)
        rest = child.relieve()
        job, fell = child.job, child.fell
        self._outcomes[id(job)] = child.conclude(by)
        if fell and by is None and time.monotonic() < job.deadline:
            self._to_come.append([job])  # not what another left behind in that process: once more
        if rest:
            self._to_come.append(rest)


def _room() -> int:
    """Number of children at once: with a low limit of open files few, so that it is reported."""
    limit = soft_limit(resource.RLIMIT_NOFILE)
    if limit is None:
        return AT_ONCE
    try:
        free = limit - open_descriptors() - _OWN_FILES
    except OSError:  # not even one more, to count them
        return 1
    return max(1, min(AT_ONCE, free // FILES))
