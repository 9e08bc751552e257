"""Break torch in one rank of a test's job, or its clock, from outside.

This folder goes on the PYTHONPATH of a rank, and TEST_BREAK names the fault; where all ranks of a
host share an environment, TEST_BREAK_LOCAL_RANK says which of them has it. TEST_CLOCK is how many
seconds the clock is ahead. The rank's supervisor
stays whole; every child that it forks to look at something meets a broken torch, as it would meet a
broken driver or library.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def wrong_result(dist: Any) -> None:
    """Every all-reduce of this rank gives it 1 too much in the first element."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        work = real(tensor, *args, **kwargs)
        if work is None:
            tensor.view(-1)[0] += 1
        return work

    dist.all_reduce = all_reduce


def one_member_too_many(dist: Any) -> None:
    """Every group that this rank forms has, as it believes, one more member."""
    real = dist.distributed_c10d._new_process_group_helper

    @functools.wraps(real)
    def helper(group_size: int, *args: Any, **kwargs: Any) -> Any:
        return real(group_size + 1, *args, **kwargs)

    dist.distributed_c10d._new_process_group_helper = helper


def freezes_in_all_reduce(dist: Any) -> None:
    """The first all-reduce of this rank stops the process, as a debugger would."""
    dist.all_reduce = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGSTOP)


def waits_in_all_reduce(dist: Any) -> None:
    """No all-reduce of this rank ever begins: the round is open for as long as a test wants it.

    A file in the folder TEST_WAITS, named by the rank, says that it is there.
    """

    def all_reduce(*args: Any, **kwargs: Any) -> None:
        open(os.path.join(os.environ["TEST_WAITS"], str(dist.get_rank())), "w").close()
        while True:
            time.sleep(60)

    dist.all_reduce = all_reduce


def store_ends_at_once(dist: Any) -> None:
    """A store that this rank serves beside MASTER_PORT is gone before anybody reaches it."""
    real = dist.TCPStore

    def store(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        made = real(host, port, *args, **kwargs)
        beside = kwargs.get("is_master") and port != int(os.environ["MASTER_PORT"])
        return dist.HashStore() if beside else made

    dist.TCPStore = store


def freezes_in_the_second_group(dist: Any) -> None:
    """The all-reduce of the second further group stops the process."""
    made: list[Any] = []
    real_new_group, real_all_reduce = dist.new_group, dist.all_reduce

    def new_group(*args: Any, **kwargs: Any) -> Any:
        made.append(real_new_group(*args, **kwargs))
        return made[-1]

    def all_reduce(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if len(made) > 1 and group is made[1]:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real_all_reduce(tensor, *args, group=group, **kwargs)

    dist.new_group, dist.all_reduce = new_group, all_reduce


def swaps_new_groups(dist: Any) -> None:
    """Of a group and the group of all others, the second is made before the first."""
    real = dist.new_group
    kept: dict[tuple[int, ...], Any] = {}

    def new_group(ranks: Any, *args: Any, **kwargs: Any) -> Any:
        others = tuple(rank for rank in range(dist.get_world_size()) if rank not in ranks)
        if others and others not in kept and tuple(ranks) not in kept:
            kept[others] = real(list(others), *args, **kwargs)
        if tuple(ranks) not in kept:
            kept[tuple(ranks)] = real(ranks, *args, **kwargs)
        return kept[tuple(ranks)]

    dist.new_group = new_group


def skips_a_new_group(dist: Any) -> None:
    """The second call of new_group does nothing."""
    real = dist.new_group
    calls: list[Any] = []

    def new_group(ranks: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(ranks)
        if len(calls) == 2:
            return dist.GroupMember.NON_GROUP_MEMBER
        return real(ranks, *args, **kwargs)

    dist.new_group = new_group


def reduces_another_size(dist: Any) -> None:
    """Every all-reduce of this rank is of 1000 elements more than it was asked for."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return real(tensor.new_ones(tensor.numel() + 1000), *args, **kwargs)

    dist.all_reduce = all_reduce


def _among_neighbours(dist: Any, act: Callable[[], Any]) -> None:
    """Act before each all-reduce of neighbouring ranks that are not all ranks."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        members = dist.get_process_group_ranks(group) if group is not None else []
        few = 1 < len(members) < dist.get_world_size()
        if few and members[-1] - members[0] == len(members) - 1:
            act()
        return real(tensor, *args, group=group, **kwargs)

    dist.all_reduce = all_reduce


def stops_among_neighbours(dist: Any) -> None:
    """As under a debugger, but only in the innermost dimension of a mesh."""
    _among_neighbours(dist, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def waits_among_neighbours(dist: Any) -> None:
    """For ever, so that it looks like one that waits for another."""
    _among_neighbours(dist, lambda: time.sleep(3600))


def no_device_mesh(dist: Any) -> None:
    """A torch before 2.2."""
    sys.modules["torch.distributed.device_mesh"] = None  # type: ignore[assignment]


def sleeps_in_its_second_all_reduce(dist: Any) -> None:
    """The second all-reduce of this rank never starts: Python sleeps, and is not stopped."""
    real, calls = dist.all_reduce, []

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        while len(calls) == 2:
            time.sleep(60)
        return real(*args, **kwargs)

    dist.all_reduce = all_reduce


def meets_nobody(dist: Any) -> None:
    """This rank looks for its peers where none of them is: it waits as they do, and they for it."""
    real = dist.init_process_group

    def init_process_group(*args: Any, store: Any = None, **kwargs: Any) -> Any:
        return real(*args, store=dist.PrefixStore("elsewhere", store), **kwargs)

    dist.init_process_group = init_process_group


def another_seed(dist: Any) -> None:
    """Whatever seed torch is given, this rank takes the next."""
    torch = sys.modules["torch"]
    real = torch.manual_seed
    torch.manual_seed = lambda seed: real(seed + 1)


def sees_one_gpu(dist: Any) -> None:
    """A torch with CUDA where this process is given one GPU, whatever its local rank: `cuda:0`.

    The CPU is that GPU, and gloo is NCCL: torch allows tensors on `cpu:0`, and on no `cpu:1`.
    """
    torch = sys.modules["torch"]
    real_device, real_init = torch.device, dist.init_process_group

    class Devices(type):
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, real_device)

        def __call__(cls, kind: Any, *index: int) -> Any:
            return real_device(kind.replace("cuda", "cpu"), *index)

    def use(device: Any) -> None:
        if device.index:
            raise RuntimeError("CUDA error: invalid device ordinal")

    def name_of(device: Any) -> str:
        use(device)
        return "a GPU"

    def init_process_group(backend: str, *args: Any, **kwargs: Any) -> Any:
        return real_init(backend.replace("nccl", "gloo"), *args, **kwargs)

    torch.device = Devices("device", (), {})
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device, torch.cuda.get_device_name = use, name_of
    dist.init_process_group = init_process_group


def p2p_is_broken(dist: Any) -> None:
    """As `sees_one_gpu`, and an all-reduce among several never ends while P2P is on."""
    sees_one_gpu(dist)
    real = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        while dist.get_world_size() > 1 and os.environ.get("NCCL_P2P_DISABLE") != "1":
            time.sleep(60)
        return real(*args, **kwargs)

    dist.all_reduce = all_reduce


def maps_files(dist: Any) -> None:
    """As `sees_one_gpu`, and each group maps two files in /dev/shm, as NCCL does.

    One of them is unlinked as the group is destroyed; the other one is only closed, as it is while
    another rank of the host has a reference. Their names begin with TEST_FILES; TEST_ENDED is told
    of each group that is formed and destroyed.
    """
    import mmap
    import tempfile

    sees_one_gpu(dist)
    real_init, real_destroy = dist.init_process_group, dist.destroy_process_group
    held: list[tuple[int, mmap.mmap, str]] = []
    folder, prefix = os.path.split(os.environ["TEST_FILES"])

    def note(word: str) -> None:
        with open(os.environ["TEST_ENDED"], "a") as file:
            file.write(f"{word}\n")

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            handle, path = tempfile.mkstemp(prefix=prefix, dir=folder)
            os.posix_fallocate(handle, 0, 1 << 16)
            held.append((handle, mmap.mmap(handle, 1 << 16), path))
        note("formed")
        return real_init(*args, **kwargs)

    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        real_destroy(*args, **kwargs)
        os.unlink(held[0][2])
        for handle, memory, _ in held:
            memory.close()
            os.close(handle)
        note("destroyed")

    dist.init_process_group = init_process_group
    dist.destroy_process_group = destroy_process_group


def deepspeed_lacks_a_library(dist: Any) -> None:
    """DeepSpeed is there, and cannot be imported."""

    class Lacking(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
            return importlib.machinery.ModuleSpec(name, self) if name == "deepspeed" else None

        def exec_module(self, module: Any) -> None:
            raise ImportError("libcudart.so.12: no such file")

    sys.meta_path.insert(0, Lacking())


def sends_wrong_parts(dist: Any) -> None:
    """In an all-to-all, every part that this rank has for another one is wrong by 1."""
    real = dist.all_to_all_single

    def all_to_all_single(got: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        wrong = given + 1
        wrong.chunk(size)[rank].copy_(given.chunk(size)[rank])
        return real(got, wrong, *args, **kwargs)

    dist.all_to_all_single = all_to_all_single


def freezes_in_all_to_all(dist: Any) -> None:
    """The first all-to-all of this rank stops the process, as a debugger would."""
    dist.all_to_all_single = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGSTOP)


def lacks_all_to_all(dist: Any) -> None:
    """A torch whose gloo has no all-to-all, in the words of Backend.hpp."""

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Backend gloo does not support alltoall_base")

    dist.all_to_all_single = all_to_all_single


FAULTS = {
    fault.__name__: fault
    for fault in (
        wrong_result,
        another_seed,
        one_member_too_many,
        freezes_in_all_reduce,
        waits_in_all_reduce,
        store_ends_at_once,
        freezes_in_the_second_group,
        swaps_new_groups,
        skips_a_new_group,
        reduces_another_size,
        stops_among_neighbours,
        waits_among_neighbours,
        no_device_mesh,
        sleeps_in_its_second_all_reduce,
        meets_nobody,
        sees_one_gpu,
        p2p_is_broken,
        maps_files,
        deepspeed_lacks_a_library,
        sends_wrong_parts,
        freezes_in_all_to_all,
        lacks_all_to_all,
    )
}


_FORKS: list[bool] = []
"""Forks that led to this process; each says whether it broke torch."""


def _break() -> None:
    """Break torch once, below the process that the user started and the supervisor."""
    dist = sys.modules.get("torch.distributed")
    here = os.environ.get("LOCAL_RANK")
    mine = os.environ.get("TEST_BREAK_LOCAL_RANK", here) == here
    _FORKS.append(dist is not None and mine and bool(_FORKS) and not any(_FORKS))
    if _FORKS[-1]:
        FAULTS[os.environ["TEST_BREAK"]](dist)


def _put_clock_wrong(seconds: int) -> None:
    """Put the wall clock of Python wrong, and leave its timers alone.

    libfaketime of Debian 12 makes time.sleep of Python 3.11 fail (its issue 426).
    """
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + seconds
    time.time_ns = lambda: right_ns() + seconds * 10**9


if "TEST_BREAK" in os.environ:
    os.register_at_fork(after_in_child=_break)
if "TEST_CLOCK" in os.environ:
    _put_clock_wrong(int(os.environ["TEST_CLOCK"]))
