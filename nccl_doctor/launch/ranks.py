"""Local ranks of this host, where no launcher has started them: their records, and the forks.

torch's elastic launcher stops every rank as soon as one fails; a doctor goes on without the rank
that died. So the ranks are forked here, from a process that has imported torch once for all.
Forking is safe: that process has no thread but a supervisor that waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from nccl_doctor.launch import identity
from nccl_doctor.model.launch import OPTIONS, OWN, Launch
from nccl_doctor.model.layout import Address, HostPlace
from nccl_doctor.model.options import Flags
from nccl_doctor.system import forks
from nccl_doctor.system.deadline import no_more
from nccl_doctor.system.shortage import shortage_of
from nccl_doctor.system.terminal import complain
from nccl_doctor.toolkit.slurm import slurm_hosts

CPU_RANKS = 2
"""Ranks on a host without a GPU: the smallest group."""
_GRACE_S = 1.3
"""Time for the ranks to leave after the deadline, and after a signal, by themselves."""
_LEAVE_S = 6.0
_TICK_S = 0.01
_CALM_S = 1.0
"""Longest wait for the end of a rank: should its signal be lost, it is seen all the same."""


class NoGpu(ValueError):
    """GPU ranks were asked for on a host that has no visible GPU."""


class TooManyRanks(ValueError):
    """More ranks were asked for than are examined."""


def num_local_ranks(
    wanted: str,
    environ: Mapping[str, str],
    *,
    of_torchrun: bool = False,
    source: str = "--nproc-per-node",
) -> int:
    """Number of ranks to start: `auto`, `gpu`, `cpu` or a number.

    Args:
        wanted: the word or number.
        environ: the environment.
        of_torchrun: the word is one of torchrun's; to it, `auto` without a GPU is `cpu`
            (determine_local_world_size in torch/distributed/run.py).
        source: who said the word.

    Raises:
        NoGpu: `gpu` on a host without one.
    """
    gpus = identity.num_gpus(environ)
    if wanted == "auto" and (gpus or not of_torchrun):
        return gpus or CPU_RANKS
    if wanted == "gpu":
        if not gpus:
            raise NoGpu(f"{source} gpu: this host has no visible GPU")
        return gpus
    # As torch's cpu_count: the processors that this process may use, not those of the machine. A
    # container with a limit of CPU time may use all of them, and gets as many ranks.
    return len(os.sched_getaffinity(0)) if wanted in ("auto", "cpu") else int(wanted)


Died = Callable[[int, int, str, HostPlace, Address], int]
"""Given local rank, process id and signal of a rank that was killed, the place of its host and the
address of the store: starts a process that tells the coordinator, and returns its process id."""


def run_host(
    nproc: int,
    first: Callable[[Callable[[HostPlace, Address], None]], int],
    sibling: Callable[[HostPlace, Address, int], int],
    deadline: float,
    *,
    wake: int | None = None,
    died: Died | None = None,
    more: Callable[[], float] = no_more,
) -> int:
    """Run the ranks of this host, one process each, and wait for all.

    The first one signs in for the host; the others are forked when it has been given its place, and
    never if the host does not get in, or if a signal came before.

    Args:
        nproc: number of ranks.
        first: body of local rank 0, which calls what it is given once it has its place, with that
            and the address of the store; returns its exit code.
        sibling: body of another local rank, given both and its local rank.
        deadline: `time.monotonic()` second by which the ranks leave by themselves; what is still
            there a moment later is killed.
        wake: descriptor from which the numbers of signals are read, if they are caught already.
        died: see `Died`.
        more: seconds by which the deadline is put off meanwhile.

    Returns: the exit code of local rank 0, whose report it is; 3 if it was killed.
    """
    return _HostRanks(nproc, first, sibling, deadline, died, more=more).run(
        _listen() if wake is None else wake
    )


class _HostRanks:
    """The ranks of this host, as the process that forks them sees them."""

    def __init__(
        self,
        nproc: int,
        first: Callable[[Callable[[HostPlace, Address], None]], int],
        sibling: Callable[[HostPlace, Address, int], int],
        deadline: float,
        died: Died | None,
        *,
        more: Callable[[], float],
    ) -> None:
        self._nproc = nproc
        self._first = first
        self._sibling = sibling
        self._first_deadline, self._more = deadline, more
        self._died = died
        self._running: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._messengers: set[int] = set()
        self._place: tuple[HostPlace, Address] | None = None
        self._stopped = ""
        self._interrupted = False
        self._killed = False

    def run(self, wake: int) -> int:
        """Fork them, and wait for all; `wake` as for `run_host`."""
        word, word_end = os.pipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # its number comes by `wake`, too

        def start_siblings(place: HostPlace, meeting: Address) -> None:
            os.write(word_end, json.dumps([vars(place), meeting]).encode())

        with contextlib.suppress(BlockingIOError):
            self._running[forks.fork_child(partial(self._first, start_siblings))] = 0
        if not self._running:  # no process is to be had: its report says so
            return self._first(start_siblings)
        os.close(word_end)
        listening = [word] if wake < 0 else [word, wake]
        while self._running or self._messengers:
            readable, _, _ = select.select(listening, [], [], self._calm_s())
            for number in os.read(wake, 256) if wake in readable else b"":
                if number != signal.SIGCHLD:
                    self._pass_on(number)
            if word in readable:
                listening.remove(word)
                if (message := os.read(word, 4096)) and not self._interrupted:
                    self._start_siblings(message)
            while (self._running or self._messengers) and self._reap():
                pass
            if not self._ends_late():
                break
        os.close(word)
        if 0 not in self._codes:
            how = "waits in the kernel and cannot be killed"
        elif self._stopped:
            how = f"was stopped (state {self._stopped}), and killed at the deadline"
        elif self._codes[0] < 0:
            how = f"was killed by {forks.signal_name(-self._codes[0])}"
        else:
            return self._codes[0]
        complain(f"local rank 0 {how}: its report, if any, is incomplete")
        return 3

    def _start_siblings(self, message: bytes) -> None:
        place, (host, port) = json.loads(message)
        self._place = HostPlace(**place), (host, port)
        for local in range(1, self._nproc):
            try:
                pid = forks.fork_child(partial(self._sibling, *self._place, local))
            except OSError as error:
                scarce = shortage_of(error)
                complain(f"local rank {local} is not started: {scarce.words if scarce else error}")
                continue
            self._running[pid] = local

    def _pass_on(self, number: int) -> None:
        self._interrupted = True
        self._first_deadline = min(self._deadline, time.monotonic() + _LEAVE_S)
        self._more = no_more
        self._forward(number)

    def _reap(self) -> bool:
        """Take note of a process that has ended. Returns whether there was one."""
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return False
        self._messengers.discard(pid)
        forks.living.discard(pid)
        if pid in self._running:
            local, code = self._running.pop(pid), os.waitstatus_to_exitcode(status)
            self._codes[local] = code
            if code < 0 and self._place and self._died and not (self._killed or self._interrupted):
                name = forks.signal_name(-code)
                with contextlib.suppress(OSError):  # no process is to be had: nobody is told
                    self._messengers.add(self._died(local, pid, name, *self._place))
        return True

    @property
    def _deadline(self) -> float:
        return self._first_deadline + self._more()

    def _calm_s(self) -> float:
        """Seconds in which nothing is to be done, unless a signal, a rank or its end wakes us."""
        left = self._deadline + _GRACE_S - time.monotonic()
        return min(max(left, _TICK_S), _CALM_S)

    def _ends_late(self) -> bool:
        """Kill who is late. Returns False where that does not end them either: they wait in the
        kernel, maybe for ever.
        """
        late_s = time.monotonic() - self._deadline - _GRACE_S
        if late_s > forks.REAP_WAIT_S:
            return False
        if late_s > 0 and not self._killed:
            self._killed = True
            first = [pid for pid, local in self._running.items() if local == 0]
            state = forks.look_at(first[0])[0] if first else ""
            self._stopped = state if state in ("T", "t") else ""
            self._forward(signal.SIGKILL)
        return True

    def _forward(self, number: int) -> None:
        for pid in self._running:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def _listen() -> int:
    """Catch the signals. Returns: the descriptor from which their numbers are read."""
    wake, wake_end = forks.wake_pipe()
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    for number in forks.to_catch():
        signal.signal(number, lambda *_: None)
    return wake


# Launch records of the own launcher: first of a host, then, once it has its place, of its ranks.
#
# A host knows its flags only. How its ranks are numbered is known when the others have said how
# many they start; until then a host speaks as if all hosts were like itself.


DEFAULT_PORT = 29500
"""torchrun's."""

NPROC = "PET_NPROC_PER_NODE"
"""Variable of torchrun's option, which the operators of Kubeflow set."""
_NPROC_WORDS = ("auto", "cpu", "gpu")
_PORTS = 1000
_DERIVED = "derived from the hosts' numbers of ranks"


def free_port() -> int:
    """Free port for the store of one host, below the ephemeral ports; no other host needs to know
    it.

    Where to begin looking differs between processes: two that start together must not both find
    the same one.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    for step in range(_PORTS):
        port = DEFAULT_PORT + (os.getpid() + step) % _PORTS
        try:
            with socket.socket(family) as sock:
                sock.bind(("", port))
        except OSError:
            continue
        return port
    return DEFAULT_PORT


def host_launch(
    flags: Flags, nproc: int, *, is_master: bool = False, port: int = DEFAULT_PORT
) -> Launch:
    """Launch record with which a host signs in: its flags, and the rank of its first process.

    `port` is for the store where the flags name none.

    Where the flags leave node ranks to the sign-in (`flags.any_node_rank`), the master takes
    node 0 and the others have neither node rank nor rank yet.
    """
    nnodes, node_rank = flags.nnodes or 1, flags.node_rank or 0
    spelled = {**OPTIONS[OWN], **(flags.spelled or {})}
    sources = {
        name: option if getattr(flags, name) is not None else "default"
        for name, option in spelled.items()
    }
    launch = Launch(
        launcher=OWN,
        local_rank=0,
        local_world_size=nproc,
        nnodes=nnodes,
        master_addr=flags.master_addr or "localhost",
        master_port=flags.master_port or port,
        run_id=flags.run_id,
        sources={**sources, "local_world_size": "--nproc-per-node", "local_rank": OWN},
    )
    if flags.any_node_rank and not is_master:
        return replace(launch, world_size=nnodes * nproc)
    return _numbered(replace(launch, node_rank=node_rank), node_rank * nproc, nnodes * nproc)


def host_flags(launch: Launch, environ: Mapping[str, str]) -> Flags | None:
    """The topology as a launcher tells it that starts one process per host (Kubeflow).

    None for other launchers, and where it does not tell enough. Its number of ranks may be a word.
    """
    needed = (launch.nnodes, launch.node_rank, launch.master_addr, launch.master_port)
    if not launch.per_host or None in needed:
        return None
    word = environ.get(NPROC, "")
    nproc = str(launch.local_world_size or "") or (word if word in _NPROC_WORDS else None)
    return Flags(
        nnodes=launch.nnodes,
        node_rank=launch.node_rank,
        nproc_per_node=nproc,
        master_addr=launch.master_addr,
        master_port=launch.master_port,
    )


def placed(launch: Launch, place: HostPlace, local_rank: int = 0) -> Launch:
    """The launch record of one rank of a host, now that the host has its place."""
    nnodes = place.nnodes or launch.nnodes
    mine = replace(launch, local_rank=local_rank, node_rank=place.node_rank, nnodes=nnodes)
    return _numbered(mine, place.first_rank + local_rank, place.world_size)


def _numbered(launch: Launch, rank: int, world_size: int) -> Launch:
    # A world size that was told by nobody can contradict nobody: the numbers behind it can.
    sources = {**launch.sources, "rank": OWN, "world_size": _DERIVED}
    return replace(launch, rank=rank, world_size=world_size, sources=sources)


def set_rank_env(launch: Launch, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Set the variables of a rank in this process, as torchrun would.

    Returns: `environ` with them. torch itself reads some from the process, LOCAL_RANK for one.
    """
    values = {
        "RANK": launch.rank,
        "LOCAL_RANK": launch.local_rank,
        "WORLD_SIZE": launch.world_size,
        "LOCAL_WORLD_SIZE": launch.local_world_size,
        "GROUP_RANK": launch.node_rank,
        "GROUP_WORLD_SIZE": launch.nnodes,
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": launch.master_port,
    }
    mine = {name: str(value) for name, value in values.items() if value is not None}
    os.environ.update(mine)
    return {**environ, **mine}


# Names of hosts that never signed in, from the naming rules of the scheduler. Pure.


def names_of_nodes(
    environ: Mapping[str, str],
    nnodes: int,
    master_addr: str,
    here: Iterable[tuple[int | None, str]],
) -> Mapping[int, str]:
    """Node rank → host name, for all nodes of the job, or nothing.

    Under Slurm the n-th name of the node list is node n; in Kubernetes the pods of one job count
    in their names. Nobody has to number hosts like that: a naming that contradicts a host that did
    come is not used.

    Args:
        environ: of the coordinator, unfiltered.
        nnodes: of the job.
        master_addr: of the job. In Kubernetes it is the name of pod 0, unless the pods share the
            network, and with it the names, of their machines.
        here: (node rank, host name) of those that came.
    """
    came = tuple(here)
    first = next((name for node, name in came if node == 0), "")
    names = _in_slurm(environ, nnodes)
    if not names and "KUBERNETES_SERVICE_HOST" in environ and _short(master_addr) == _short(first):
        names = _pods(nnodes, first)
    expected = dict(enumerate(names))
    fits = all(node in expected and _short(expected[node]) == _short(name) for node, name in came)
    return expected if fits else {}


def _in_slurm(environ: Mapping[str, str], nnodes: int) -> Sequence[str]:
    """A step may run on a part of the allocation, or one step on each host."""
    lists = (environ.get(f"SLURM_{of}_NODELIST", "") for of in ("STEP", "JOB"))
    return next((names for names in map(slurm_hosts, lists) if len(names) == nnodes), ())


def _pods(nnodes: int, first: str) -> Sequence[str]:
    """Pods of a StatefulSet (`SET-K`), of Kubeflow's Trainer (`JOB-node-0-K`), and of a PyTorchJob,
    where `JOB-worker-K` is node K + 1 behind `JOB-master-0`.
    """
    job = _short(first).removesuffix("-0")
    if job == _short(first):
        return ()
    if job.endswith("-master"):
        workers = job.removesuffix("master") + "worker"
        return (first, *(f"{workers}-{node}" for node in range(nnodes - 1)))
    return tuple(f"{job}-{node}" for node in range(nnodes))


def _short(name: str) -> str:
    return name.partition(".")[0].lower()
