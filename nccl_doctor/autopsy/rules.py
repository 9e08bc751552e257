"""Rules that find the rank which failed first, and why; the surest first. Pure.

Each rule answers with a finding, or passes on to the next one. They stand on 170 jobs that died,
with truth: a launcher names a victim in two of five, and the first error of a console is a
victim's in half of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.autopsy import kinds
from nccl_doctor.autopsy.messages import Message
from nccl_doctor.autopsy.ranks import Ended, JobEnd, Line, RankEnd, numbers_of
from nccl_doctor.model.findings import Confidence, Finding, Kind, Severity, Where, numbered
from nccl_doctor.system.forks import signal_name
from nccl_doctor.toolkit.gpu.xid import xid_of
from nccl_doctor.toolkit.groups.errors import meaning_of

Rule = Callable[[JobEnd], "Finding | None"]

_BY_ITSELF = (-11, -7, -4, -8, -31)
"""Signals by which a process ends through its own fault: SEGV, BUS, ILL, FPE, SYS."""
_LONGEST = 300
"""Characters of the text of an exception in a message."""
_MOST_RANGES = 8
_MOST_SIGNALS = 64
_ABORT, _BUS, _KILL, _TERMINATE = -6, -7, -9, -15


def first_failure(job: JobEnd) -> Finding | None:
    """Finding on the first failure; None if nothing in the text failed."""
    for rule in RULES:
        found = rule(job)
        if found is not None:
            evidence = {"rule": rule.__name__.strip("_").replace("_", " "), **found.evidence}
            return found.replaced(evidence=evidence)
    return _untold(job)


def victims(job: JobEnd, causes: Sequence[Finding]) -> Iterator[Finding]:
    """Findings on the other ranks: they lost a rank, or waited for it."""
    blamed = {rank for cause in causes for rank in cause.where.ranks}
    for kind, name in ((kinds.COLLECTIVE_HANG, "timed-out"), (kinds.COLLECTIVE_FAILED, "closed")):
        lost = [rank for rank in job.ranks.values() if rank.rank not in blamed and rank.says(name)]
        if lost and causes:
            first = next(each for each in lost[0].ended if each.says(name))
            yield _found(
                kind,
                _in_short(first.raised.error),
                lost,
                first.at,
                explained_by=causes[0].code,
                explained_why="they lost that rank, or waited for it",
            )


# The rules, in their order.


def _barrier_names_it(job: JobEnd) -> Finding | None:
    """A monitored barrier knows who did not come, and says so on rank 0."""
    if not job.all("late"):
        return None
    late = [numbers_of(message.values["ranks"]) for message, _ in job.all("late")]
    ranks = [job.rank(rank) for rank in sorted({rank for each in late for rank in each})]
    message, at = job.all("late")[0]
    words = f"it did not come to a monitored barrier within {message.values['ms']} ms"
    return _found(kinds.LOADER_STALLED, words, ranks, at)


def _odd_fingerprint(job: JobEnd) -> Finding | None:
    """Fingerprints of TORCH_DISTRIBUTED_DEBUG=DETAIL tell each rank's call; the fewest differ."""
    calls: dict[int, str] = {}
    for message, _ in job.all("fingerprint"):
        values = message.values
        calls.setdefault(int(values["rank"]), _call(values["call"]))
        if "other_rank" in values:
            calls.setdefault(int(values["other_rank"]), _call(values["other_call"]))
    odd = _fewest(calls)
    if not odd:
        return None
    usual = Counter(calls.values()).most_common(1)[0][0]
    words = f"it calls {calls[odd[0]]}; the others call {usual}"
    _, at = job.all("fingerprint")[0]
    return _found(kinds.COLLECTIVE_MISMATCH, words, [job.rank(rank) for rank in odd], at)


def _odd_call(job: JobEnd) -> Finding | None:
    """Calls at one number of a group, by NCCL's watchdog on each rank: the fewest differ."""
    by_number: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for rank in job.ranks.values():
        about = rank.progress[0].message if rank.progress else None
        for told, _ in rank.calls:
            values, number = told.message.values, int(told.message.values["number"])
            # The line itself does not name the group; the next one of its rank does.
            known = about is not None and about.number("number") == number
            group = about.values.get("group", "") if known and about else ""
            call = values["operation"]
            call += f" of {values['size_in']} elements" if "size_in" in values else ""
            by_number[group, number].setdefault(rank.rank, call)
    for (group, number), calls in sorted(by_number.items()):
        if odd := _fewest(calls):
            usual = Counter(calls.values()).most_common(1)[0][0]
            words = f"at number {number} it calls {calls[odd[0]]}; the others call {usual}"
            ranks = [job.rank(rank) for rank in odd]
            at = ranks[0].calls[0][1]
            sure = Confidence.LIKELY if group else Confidence.POSSIBLE
            return _found(kinds.COLLECTIVE_MISMATCH, words, ranks, at, confidence=sure)
    return None


def _gpu_error(job: JobEnd) -> Finding | None:
    """A broken GPU, by the log of its driver, outranks the error of the process on it."""
    for message, at in job.all("xid"):
        number = int(message.values["number"])
        row = xid_of(number)
        if row is None or row.severity is Severity.INFO:
            continue
        rank = job.pids.get(int(message.values.get("pid", "0")))
        words = f"Xid {number} of the GPU at {message.values['bus']}: {row.means}"
        sure = Confidence.LIKELY if rank is None else Confidence.CERTAIN
        ranks = [] if rank is None else [job.rank(rank)]
        return _found(kinds.GPU_XID, words, ranks, at, confidence=sure)
    return None


def _all_interrupted(job: JobEnd) -> Finding | None:
    """KeyboardInterrupt on every rank, or a signal that the launcher got, comes from outside."""
    signalled = [] if _srun_reacts(job) else job.all("signalled")
    interrupted = [rank for rank in job.ranks.values() if _is_interrupt(rank)]
    others = [rank for rank in job.ranks.values() if rank.own and not _is_interrupt(rank)]
    if others or not (signalled or (len(interrupted) > 1 and len(interrupted) >= job.size - 1)):
        return None
    hung = any(_is_hard(rank) or rank.timed_out for rank in job.ranks.values())
    if hung and not interrupted:
        return None
    if signalled:
        message, at = signalled[0]
        words = f"the launcher got {signal_name(int(message.values['signal']))}"
    else:
        first = interrupted[0].own
        assert first is not None
        at, words = first.at, "every rank was interrupted (SIGINT)"
    frames = {rank.rank: str(rank.own.raised.own_frame) for rank in interrupted if rank.own}
    if odd := _fewest(frames):
        usual = Counter(frames.values()).most_common(1)[0][0]
        words += f"; {numbered('rank', odd)} was at {frames[odd[0]]}, the others at {usual}"
    return _found(kinds.JOB_STOPPED, words, [], at)


def _srun_reacts(job: JobEnd) -> bool:
    """True if a task failed before launchers got a signal: srun then ends the others by one."""
    failed = [at for message, at in job.all("task-ended") if "exit code" in message.values["how"]]
    signalled = [at for _, at in job.all("signalled")]
    return bool(failed and signalled) and all(
        at.source == failed[0].source and at.number > failed[0].number for at in signalled
    )


def _cancelled(job: JobEnd) -> Finding | None:
    """Slurm says that it cancelled the step, and why, unless a rank failed before."""
    if not job.all("cancelled"):
        return None
    message, at = next(
        (each for each in job.all("cancelled") if {"reason", "state"} & {*each[0].values}),
        job.all("cancelled")[0],
    )
    reason, state = message.values.get("reason", "").lower(), message.values.get("state", "")
    by_itself = state not in ("", "CANCELLED")  # ranks then end with 1, as they lose each other
    if any(r.own or ((r.code or 0) > 0 and not by_itself) for r in job.ranks.values()):
        return None
    if any(_is_hard(rank) and rank.code != _KILL for rank in job.ranks.values()):
        return None
    if not (reason or by_itself) and any(rank.code == _KILL for rank in job.ranks.values()):
        return None  # srun -K cancels the step as a rank was killed
    words = f"Slurm cancelled it due to {reason}" if reason else "Slurm cancelled it"
    words = f"its state in Slurm is {state}" if by_itself else words
    return _found(kinds.JOB_STOPPED, words, [], at)


def _gpu_shared(job: JobEnd) -> Finding | None:
    """NCCL names two ranks that have one GPU."""
    for rank in job.ranks.values():
        for ended in rank.ended:
            for message in ended.raised.messages:
                if message.says == "gpu-shared":
                    values = message.values
                    both = [job.rank(int(values[name])) for name in ("rank", "second")]
                    words = f"both have the GPU at {values['device']}"
                    return _found(kinds.GPU_SHARED, words, both, ended.at)
    return None


def _own_exception(job: JobEnd) -> Finding | None:
    """An exception that is about no other rank is its rank's own; the first of them counts."""
    own = [(rank.own, rank) for rank in job.ranks.values() if rank.own is not None]
    if not own:
        return None
    first, _ = min(own, key=lambda pair: (pair[0].at.source.attempt, pair[0].raised.line))
    same = [rank for each, rank in own if _what(each) == _what(first)]
    return _raised(first, same)


def _out_of_gpu_memory(job: JobEnd) -> Finding | None:
    """NCCL has no memory on a GPU, and says whose process it is: the exceptions follow from it."""
    for message, at in job.all("nccl-memory"):
        values = message.values
        known = job.pids.get(int(values["pid"]))
        words = f"NCCL found no memory on GPU {values['gpu']} for process {values['pid']}"
        ranks = [] if known is None else [job.rank(known)]
        found = _found(kinds.GPU_OUT_OF_MEMORY, words, ranks, at)
        return found.replaced(where=found.where | Where(hosts=(values["host"],)))
    return None


def _not_started(job: JobEnd) -> Finding | None:
    """Python does not find the program of the ranks, and ends without an exception."""
    if not job.all("not-started"):
        return None
    message, at = job.all("not-started")[0]
    words = f"Python does not find {message.values['what']}: {message.values['why']}"
    return _found(kinds.RANK_RAISED, words, [], at)


def _stood_still(job: JobEnd) -> Finding | None:
    """A process that does not react to SIGTERM was stopped, or waits in the kernel."""
    frozen = [rank for rank in job.ranks.values() if rank.does_not_react]
    if not frozen:
        return None
    if stopped := job.all("stopped"):
        return _found(kinds.RANK_FROZEN, "its process is stopped (state T)", frozen, stopped[0][1])
    _, at = job.all("does-not-react")[0]
    return _found(kinds.RANK_FROZEN, "it did not react to SIGTERM for 30 s", frozen, at)


def _ended_by_signal(job: JobEnd) -> Finding | None:
    """SIGKILL, SIGSEGV and the like are sent to no victim: they outrank what a launcher blames."""
    hard = [rank for rank in job.ranks.values() if _is_hard(rank)]
    if not hard:
        return None
    rank, code = hard[0], hard[0].code
    assert code is not None
    words = f"it ended by {signal_name(-code)}{_pid(rank)}"
    sure = Confidence.LIKELY if rank.is_local else Confidence.CERTAIN
    if rank.is_local:
        words += "; its number is that on its host"
    if code != _KILL:
        words += "; a full /dev/shm ends a process so: df -h /dev/shm" if code == _BUS else ""
        return _found(kinds.RANK_CRASHED, words, [rank], None, confidence=sure)
    if rank.out_of_memory:
        return _found(kinds.OUT_OF_MEMORY_KILL, words, [rank], None, confidence=sure)
    for message, at in job.all("memory-kill"):
        pid = message.values.get("pid")
        if pid is None or rank.pid is None:
            likely = Confidence.LIKELY
            return _found(kinds.OUT_OF_MEMORY_KILL, words, [rank], at, confidence=likely)
        if int(pid) == rank.pid:
            return _found(kinds.OUT_OF_MEMORY_KILL, words, [rank], at, confidence=sure)
    return _found(kinds.RANK_KILLED, words, [rank], None, confidence=sure)


def _one_ended(job: JobEnd) -> Finding | None:
    """DeepSpeed says how one process ended, and not which: the one that says nothing itself."""
    codes = {message.number("code") or 0: at for message, at in job.all("one-ended")}
    code, at = next(((code, at) for code, at in codes.items() if code not in (0, 1)), (0, None))
    if code == 0 or -code in (-_TERMINATE, -_ABORT) or any(rank.own for rank in job.ranks.values()):
        return None
    silent = job.silent if len(job.silent) == 1 else []
    kind, words = kinds.RANK_EXITED, f"exit code {code}"
    if code < 0:
        kind = kinds.RANK_KILLED if code == _KILL else kinds.RANK_CRASHED
        words = f"a process ended by {signal_name(-code)}"
    words += "" if silent else "; deepspeed does not say which one"
    return _found(kind, words, silent, at, confidence=Confidence.LIKELY)


def _ended_on_host(job: JobEnd) -> Finding | None:
    """UCX, MPICH and the kernel name a process and its host, and not its rank."""
    for message, at in [*job.all("caught-signal"), *job.all("mpich-ended")]:
        values = message.values
        number = int(values.get("signal") or values["code"])
        known = job.pids.get(int(values["pid"]))
        words = f"process {values['pid']} ended by {signal_name(number)}"
        if "signal" not in values and number > _MOST_SIGNALS:
            words = f"process {values['pid']} ended with exit code {number}"
        kind = kinds.RANK_KILLED if number in (-_KILL, 128 - _KILL) else kinds.RANK_CRASHED
        ranks = [] if known is None else [job.rank(known)]
        found = _found(kind, words, ranks, at, confidence=Confidence.LIKELY)
        return found.replaced(where=found.where | Where(hosts=(values["host"],)))
    for message, at in job.all("memory-kill"):
        pid = message.values.get("pid")
        words = f"process {pid} was killed" if pid else "a process of the step was killed"
        return _found(kinds.OUT_OF_MEMORY_KILL, words, [], at, confidence=Confidence.LIKELY)
    for message, at in job.all("ray-died"):
        known = job.pids.get(int(message.values["pid"]))
        words = f"process {message.values['pid']} was gone, says Ray, and left no exception"
        ranks = [] if known is None else [job.rank(known)]
        found = _found(kinds.RANK_SILENT, words, ranks, at, confidence=Confidence.LIKELY)
        return found.replaced(where=found.where | Where(hosts=(message.values["host"],)))
    return None


def _aborted(job: JobEnd) -> Finding | None:
    """SIGABRT without an exception is a crash, unless gloo aborts a rank that got a wrong size."""
    aborted = [rank for rank in job.ranks.values() if rank.code == _ABORT]
    if len(aborted) != 1 or aborted[0].ended or job.all("aborts") or job.all("sizes-differ"):
        return None
    return _found(kinds.RANK_CRASHED, f"it ended by SIGABRT{_pid(aborted[0])}", aborted, None)


def _terminated_alone(job: JobEnd) -> Finding | None:
    """A SIGTERM to one rank, which its launcher did not send, comes from outside."""
    sent = {message.values["pid"] for message, _ in job.all("terminates")}
    ended = [
        rank
        for rank in job.ranks.values()
        if rank.code == _TERMINATE and rank.pid is not None and str(rank.pid) not in sent
    ]
    lost = any(rank.says("closed") for rank in job.ranks.values())
    if len(ended) != 1 or ended[0].is_victim or not lost or (not sent and len(job.ranks) < 2):
        return None
    words = f"it ended by SIGTERM{_pid(ended[0])}, which its launcher had not sent"
    return _found(kinds.RANK_KILLED, words, ended, None)


def _sizes_differ(job: JobEnd) -> Finding | None:
    """Gloo aborts the rank that receives too much: the text does not tell who differs."""
    if not job.all("sizes-differ"):
        return None
    message, at = job.all("sizes-differ")[0]
    values = message.values
    words = (
        f"gloo got {values['got']} bytes of a collective for which {values['wanted']} were expected"
        "; the text does not say which rank differs"
    )
    return _found(kinds.COLLECTIVE_MISMATCH, words, [], at, confidence=Confidence.POSSIBLE)


def _exit_code(job: JobEnd) -> Finding | None:
    """An exit code that Python gives to no exception was chosen by the process."""
    ended = [r for r in job.ranks.values() if r.code is not None and r.code > 1 and not r.is_victim]
    if not ended:
        return None
    rank = ended[0]
    return _found(kinds.RANK_EXITED, f"exit code {rank.code}{_pid(rank)}", [rank], None)


def _port_in_use(job: JobEnd) -> Finding | None:
    """The store could not be served: by the launcher, or by the rank that raises it."""
    every = [(each, r) for r in job.ranks.values() for each in r.ended]
    for ended, rank in [*every, *((each, None) for each in (*job.loose, *job.launcher))]:
        if ended.says("in-use"):
            ranks = [rank] if rank else []
            return _found(kinds.PORT_IN_USE, _in_short(ended.raised.error), ranks, ended.at)
    return None


def _name_unknown(job: JobEnd) -> Finding | None:
    """A name that does not resolve is looked up again and again until the time-out."""
    if not job.all("unresolved"):
        return None
    message, at = job.all("unresolved")[0]
    return _found(kinds.ADDR_UNRESOLVABLE, f"{message.values['host']} does not resolve", [], at)


def _loose_exception(job: JobEnd) -> Finding | None:
    """An exception without a rank is that of the rank which the launcher blames, if it is silent.

    A thread's is not: its rank goes on.
    """
    own = [each for each in job.loose if each.is_own]
    if not own:
        return None
    # Each host's launcher blames a rank of its own: the one in the text of this exception counts.
    blamed = [
        rank
        for rank in job.ranks.values()
        if rank.blamed
        and rank.code in (1, _ABORT)
        and not rank.is_victim
        and rank.listed == own[0].at.source.name
    ]
    if len(blamed) == 1 and not own[0].raised.thread:
        return _raised(own[0], blamed)
    silent = job.silent
    if own[0].raised.thread and len(silent) == 1:
        return _raised(own[0], silent, confidence=Confidence.LIKELY)
    if own[0].raised.thread:
        return None
    return _raised(own[0], [], confidence=Confidence.LIKELY)


def _ended_with_threads(job: JobEnd) -> Finding | None:
    """SIGABRT "without an active exception" is how a process ends whose gloo threads live."""
    if not job.all("aborts"):
        return None
    quiet = [r for r in job.ranks.values() if r.code == _ABORT and not r.is_victim]
    if len(quiet) != 1:
        return None
    words = "it ended while threads of gloo were alive (SIGABRT), without an exception"
    return _found(kinds.RANK_EXITED, words, quiet, job.all("aborts")[0][1])


def _ended_well_first(job: JobEnd) -> Finding | None:
    """A launcher says that one process ended with 0, and others failed."""
    failed = any(rank.is_victim for rank in job.ranks.values())
    for message, at in job.all("ended-well"):
        rank = job.pids.get(int(message.values["pid"]))
        if rank is not None and failed:
            words = "its process ended with exit code 0 before the others"
            return _found(kinds.RANK_ENDED_EARLY, words, [job.rank(rank)], at)
    return None


def _behind(job: JobEnd) -> Finding | None:
    """NCCL's watchdog tells the last collective that each rank has called: a rank is behind that
    has not called the one in which others timed out. All call some more while they wait.
    """
    by_group: dict[str, dict[int, int]] = defaultdict(dict)
    failed: dict[str, int] = defaultdict(int)
    for rank in job.ranks.values():
        if rank.progress is not None:
            message = rank.progress[0].message
            group = message.values.get("group", "")
            by_group[group][rank.rank] = int(message.values["enqueued"])
            failed[group] = max(failed[group], message.number("number") or 0)
    for group, called in by_group.items():
        behind = [job.rank(rank) for rank, number in called.items() if number < failed[group]]
        if behind and 2 * len(behind) < len(called) and behind[0].progress is not None:
            words = f"it has called {called[behind[0].rank]} collectives of this group; others wait"
            words += f" in number {failed[group]}"
            at = behind[0].progress[1]
            return _found(kinds.COLLECTIVE_MISSING, words, behind, at, confidence=Confidence.LIKELY)
    return None


def _not_in_a_collective(job: JobEnd) -> Finding | None:
    """By the stacks of a job that hangs, some ranks wait in a collective and others do not."""
    stacks = {rank.rank: rank.stacks[-1] for rank in job.ranks.values() if rank.stacks}
    elsewhere = [rank for rank, (stack, _) in stacks.items() if not stack.is_in_collective]
    waiting = [rank for rank in stacks if rank not in elsewhere]
    if not waiting or not elsewhere or len(elsewhere) > len(waiting):
        return None
    stack, at = stacks[elsewhere[0]]
    where = f"{numbered('rank', waiting, _MOST_RANGES)} at {stacks[waiting[0]][0].own_frame}"
    words = f"it is at {stack.own_frame or stack.frames[-1]}; {where} in a collective"
    ranks = [job.rank(rank) for rank in elsewhere]
    return _found(kinds.LOADER_STALLED, words, ranks, at, confidence=Confidence.LIKELY)


def _one_host_silent(job: JobEnd) -> Finding | None:
    """A host whose launcher has started ranks and says no more is gone, where others lost ranks."""
    if not job.launched or not any(rank.is_victim for rank in job.ranks.values()):
        return None
    speak = {each.at.source.name for rank in job.ranks.values() for each in rank.ended}
    quiet = {at.source.name: at for _, at in job.all("starts")}
    for name in (job.launched | speak) & quiet.keys():
        del quiet[name]
    if len(quiet) != 1:
        return None
    ((name, at),) = quiet.items()
    words = f"no rank failed in {name}, and its launcher does not say that they ended"
    return _found(kinds.HOST_SILENT, words, [], at, confidence=Confidence.LIKELY)


def _only_silent(job: JobEnd) -> Finding | None:
    """The one rank without any exception is waited for, where all others time out."""
    timed, silent = _timed_out(job), job.silent
    listed = [rank for rank in silent if rank.listed]  # of one host's text, only its own ranks are
    silent = listed if len(listed) == 1 else silent
    if not timed or len(silent) != 1:
        return None
    words = f"{numbered('rank', [rank.rank for rank in timed], _MOST_RANGES)} waited and timed out"
    at = timed[0].calls[0][1] if timed[0].calls else timed[0].ended[0].at
    return _found(kinds.LOADER_STALLED, words, silent, at, confidence=Confidence.LIKELY)


def _ended_with_1(job: JobEnd) -> Finding | None:
    """Exit code 1 without an exception is sys.exit with a text; victims have an exception."""
    lost = [rank for rank in job.ranks.values() if rank.says("closed")]
    exited = [rank for rank in job.silent if rank.code == 1]
    if not lost or len(exited) != 1:
        return None
    words = f"it ended with exit code 1{_pid(exited[0])} and no exception"
    return _found(kinds.RANK_EXITED, words, exited, None, confidence=Confidence.LIKELY)


def _only_one_gone(job: JobEnd) -> Finding | None:
    """The one rank without a word, where others lost one, has ended: from torch 2.13 on with 0.

    The block lists all that failed there; before, and without a launcher, it may have been killed.
    """
    closed = [rank for rank in job.ranks.values() if rank.says("closed")]
    if not closed or _timed_out(job):
        return None
    gone, at = [rank for rank in job.silent if not rank.listed], closed[0].ended[0].at
    if len(gone) != 1:
        return None
    if job.lists_all:
        words = "it left no exception and is not among those that failed; the others lost it"
        return _found(kinds.RANK_ENDED_EARLY, words, gone, at, confidence=Confidence.LIKELY)
    words = "it left no exception, and the others lost it"
    return _found(kinds.RANK_SILENT, words, gone, at, confidence=Confidence.LIKELY)


def _came_late(job: JobEnd) -> Finding | None:
    """A rank whose connection was closed, where all others timed out, came when they had gone."""
    timed = _timed_out(job)
    late = [rank for rank in job.ranks.values() if rank.says("closed") and rank not in timed]
    if not timed or len(late) != 1 or len(timed) + 1 != job.size:
        return None
    words = "it came to the collective when the others had timed out"
    at = late[0].ended[0].at
    return _found(kinds.LOADER_STALLED, words, late, at, confidence=Confidence.POSSIBLE)


def _other_frame(job: JobEnd) -> Finding | None:
    """The fewest ranks, where all time out at two places, left out a collective."""
    timed = [rank for rank in job.ranks.values() if rank.says("timed-out") and rank.ended]
    frames = {rank.rank: str(rank.ended[0].raised.own_frame) for rank in timed}
    if len(set(frames.values())) < 2:
        return None
    odd = _fewest(frames)
    at = timed[0].ended[0].at
    if not odd:
        words = "; ".join(f"rank {rank} waits at {frame}" for rank, frame in sorted(frames.items()))
        return _found(kinds.COLLECTIVE_ORDER, words, [], at, confidence=Confidence.POSSIBLE)
    usual = Counter(frames.values()).most_common(1)[0][0]
    words = f"it waits at {frames[odd[0]]}; the others wait at {usual}"
    ranks = [job.rank(rank) for rank in odd]
    return _found(kinds.COLLECTIVE_MISSING, words, ranks, at, confidence=Confidence.POSSIBLE)


def _never_formed(job: JobEnd) -> Finding | None:
    """A rendezvous that gives up tells keys of a missing rank, clients, or an unreachable store."""
    every = [*job.loose, *job.launcher, *(each for r in job.ranks.values() for each in r.ended)]
    said = [(message, each.at) for each in every for message in each.raised.messages]
    missing = sorted({int(m.values["rank"]) for m, _ in said if m.says == "key-missing"} - {0})
    for message, at in said:
        if missing and message.says == "key-missing":
            words = f"its address is missing in the store: {message.values['key']}"
            return _found(kinds.RANK_ABSENT, words, [job.rank(rank) for rank in missing], at)
    for message, at in said:
        if message.says == "clients":
            joined, wanted = message.values["joined"], message.values["wanted"]
            in_agent = any(each.at == at for each in job.launcher)
            kind = kinds.HOST_ABSENT if in_agent else kinds.RANK_ABSENT
            words = f"{joined} of {wanted} {'hosts' if in_agent else 'ranks'} had joined"
            return _found(kind, words, [], at)
    for message, at in [*job.all("no-route"), *job.all("unreached"), *said]:
        if message.says in ("no-route", "unreached"):
            kind = kinds.NO_ROUTE if message.says == "no-route" else kinds.PORT_REFUSED
            return _found(kind, _place_of_store(message), [], at)
    for message, at in said:
        if message.says == "nodes-missing":
            return _found(kinds.HOST_ABSENT, "the launcher does not say how many joined", [], at)
        if message.says == "id-missing":
            words = "it did not publish the id of NCCL's group in the store"
            absent = [job.rank(int(message.values["rank"]))]
            return _found(kinds.RANK_ABSENT, words, absent, at, confidence=Confidence.LIKELY)
        if message.says in ("not-connected", "mesh-failed"):
            return _found(kinds.GROUP_INIT_FAILED, _place_of_store(message), [], at)
    return None


def _blamed_alone(job: JobEnd) -> Finding | None:
    """Exit code 1 of the rank that the launcher blames, where no text of any rank is here."""
    blamed = [rank for rank in job.ranks.values() if rank.blamed and rank.code == 1]
    if not blamed or job.loose or any(rank.ended for rank in job.ranks.values()):
        return None
    words = "exit code 1; the text of the ranks is not here"
    return _found(kinds.RANK_RAISED, words, blamed[:1], None, confidence=Confidence.POSSIBLE)


RULES: Sequence[Rule] = (
    _barrier_names_it,
    _odd_fingerprint,
    _odd_call,
    _gpu_error,
    _all_interrupted,
    _cancelled,
    _gpu_shared,
    _own_exception,
    _out_of_gpu_memory,
    _not_started,
    _stood_still,
    _ended_by_signal,
    _ended_on_host,
    _one_ended,
    _aborted,
    _terminated_alone,
    _sizes_differ,
    _exit_code,
    _port_in_use,
    _name_unknown,
    _loose_exception,
    _ended_with_threads,
    _never_formed,
    _ended_well_first,
    _behind,
    _not_in_a_collective,
    _one_host_silent,
    _only_silent,
    _ended_with_1,
    _only_one_gone,
    _came_late,
    _other_frame,
    _blamed_alone,
)


def _untold(job: JobEnd) -> Finding | None:
    """The finding that nothing here tells the cause; None if nothing failed either."""
    victims = [rank for rank in job.ranks.values() if rank.is_victim]
    failed = [rank for rank in job.ranks.values() if rank.code or rank.listed]
    if not (victims or failed or job.loose or job.launcher):
        return None
    if victims:
        ranks = numbered("rank", [rank.rank for rank in victims], _MOST_RANGES)
        words = f"{ranks} lost another rank, or waited for it; no rank in the text failed by itself"
    else:
        words = "it shows that the job failed, and no rank says why"
    return _found(kinds.CAUSE_NOT_TOLD, words, [], None)


def _raised(ended: Ended, ranks: list[RankEnd], confidence: Confidence | None = None) -> Finding:
    """Finding on an exception that is a rank's own."""
    raised = ended.raised
    kind: Kind = kinds.RANK_RAISED
    if ended.says("write-failed"):
        kind = kinds.STORAGE_FULL
    elif ended.says("gpu-memory"):
        kind = kinds.GPU_OUT_OF_MEMORY
    elif ended.says("variable-missing"):
        kind = kinds.MISSING_VARIABLE
    frame = raised.own_frame or (raised.frames[-1] if raised.frames else None)
    meaning = meaning_of("\n".join((raised.error, *raised.more)))
    words = _in_short(raised.error)
    words += f", at {frame}" if frame else ""
    words += f" ({meaning.means})" if meaning and kind is kinds.RANK_RAISED else ""
    evidence = {"frames": [f"{each.file}:{each.line} in {each.function}" for each in raised.frames]}
    sure = confidence or Confidence.CERTAIN
    return _found(kind, words, ranks, ended.at, confidence=sure, evidence=evidence)


def _found(
    kind: Kind,
    words: str,
    ranks: Sequence[RankEnd],
    at: Line | None,
    *,
    confidence: Confidence = Confidence.CERTAIN,
    evidence: Mapping[str, Any] | None = None,
    explained_by: str | None = None,
    explained_why: str = "",
) -> Finding:
    where = Where(
        hosts=tuple(sorted({rank.host for rank in ranks} - {""})),
        ranks=tuple(sorted(rank.rank for rank in ranks)),
    )
    place = {} if at is None else {"file": at.source.name, "line": at.number}
    return Finding(
        kind,
        words if at is None else f"{words} ({at})",
        where,
        {**place, **(evidence or {})},
        confidence=confidence,
        explained_by=explained_by,
        explained_why=explained_why,
    )


def _fewest(said: Mapping[int, str]) -> list[int]:
    """Ranks that say another thing than most do; none where no thing is said by most."""
    counted = Counter(said.values()).most_common()
    if len(counted) < 2 or counted[0][1] == counted[1][1]:
        return []
    return sorted(rank for rank, what in said.items() if what != counted[0][0])


def _is_interrupt(rank: RankEnd) -> bool:
    return rank.own is not None and rank.own.raised.name == "KeyboardInterrupt"


def _is_hard(rank: RankEnd) -> bool:
    return rank.code in (_KILL, *_BY_ITSELF) and not rank.does_not_react


def _timed_out(job: JobEnd) -> list[RankEnd]:
    return [rank for rank in job.ranks.values() if rank.timed_out]


def _what(ended: Ended) -> tuple[str, str]:
    """Exception and place, to find ranks that raise the same."""
    return ended.raised.name, str(ended.raised.own_frame)


def _call(text: str) -> str:
    """A fingerprint without its sequence number, which differs on a rank that left one out."""
    head, _, rest = text.partition("OpType=")
    return f"OpType={rest}" if rest else head


def _pid(rank: RankEnd) -> str:
    return "" if rank.pid is None else f" (process {rank.pid})"


def _place_of_store(message: Message) -> str:
    values = message.values
    host = values.get("host") or values.get("address")
    port = values.get("port") or values.get("at")
    return f"{host}:{port} could not be reached" if host else "the text does not name the address"


def _in_short(error: str) -> str:
    """The text of an exception, without the rest of a long one."""
    return error if len(error) <= _LONGEST else f"{error[:_LONGEST]} …"
