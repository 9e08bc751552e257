"""Mapping of ranks to GPUs: shared, hidden, beyond the visible ones, or guessed. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nccl_doctor.api import (
    Cluster,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Severity,
    Step,
    Where,
    export,
    number_range,
    odd_ones_out,
    place_of,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import EXCLUSIVE_PROCESS, count_gpus
from nccl_doctor.toolkit.gpu.mps import hosts_with_mps
from nccl_doctor.toolkit.versions import USE_NCCL2, loaded_nccl, process_group, public, release

GPU_HIDDEN = Kind(
    "gpu-hidden",
    Layer.DEVICE,
    "A variable hides GPUs from ranks",
    "A process sees only the GPUs that CUDA_VISIBLE_DEVICES names, numbered again from 0.",
    Fix(
        Step(shell("unset CUDA_VISIBLE_DEVICES")),
        alternatives=["give all ranks of a host the same one, with a GPU for each rank"],
    ),
)
ORDERS_DIFFER = GPU_HIDDEN.variant(
    title="Ranks of one host see the same GPUs in different orders",
    why="GPU 0 of one rank is another GPU than GPU 0 of the next: with LOCAL_RANK as the number, "
    "two ranks may take one GPU, and none takes another.",
)
HIDDEN_BY_GROUP = GPU_HIDDEN.variant(
    title="A control group hides GPUs from ranks",
    why="A process may open only the GPUs that its control group allows, whatever its variables "
    "say; what it cannot open, NCCL cannot reach.",
)
GPU_SHARED = Kind(
    "gpu-shared-by-ranks",
    Layer.DEVICE,
    "Several ranks on one GPU",
    "NCCL refuses two ranks of one communicator on one GPU (`Duplicate GPU detected`); ranks "
    "that do not get this error hang.",
    "Give each rank of a host its own LOCAL_RANK, and call torch.cuda.set_device(LOCAL_RANK) "
    "before init_process_group.",
)
LOCAL_RANK_BEYOND = Kind(
    "local-rank-beyond-gpus",
    Layer.DEVICE,
    "LOCAL_RANK is higher than the number of the last visible GPU",
    "torch.cuda.set_device(LOCAL_RANK) fails with `invalid device ordinal`; torch 2.15 uses "
    "LOCAL_RANK modulo the number of GPUs.",
    "the same CUDA_VISIBLE_DEVICES, with a GPU for each rank, for all ranks of the host; or "
    "torch.cuda.set_device(LOCAL_RANK % torch.cuda.device_count())",
    Severity.WARN,
)
GPU_GUESSED = Kind(
    "gpu-guess-differs",
    Layer.DEVICE,
    "By default torch takes another GPU than LOCAL_RANK's",
    "Without LOCAL_RANK, init_process_group of torch 2.15 binds a rank to GPU RANK modulo the "
    "number of GPUs; older versions do so in a barrier() before a device is set.",
    "set LOCAL_RANK for every rank, and call torch.cuda.set_device(LOCAL_RANK) before "
    "init_process_group; or name the GPU in the call: barrier(device_ids=[LOCAL_RANK]), "
    'init_process_group("nccl", device_id=torch.device("cuda", LOCAL_RANK))',
    Severity.WARN,
)
_MEANT = Fix(
    Step(shell("nvidia-smi -c DEFAULT"), note="if it is meant; as root", persists=True),
    alternatives=["start MPS"],
)
_EACH_ITS_OWN = Fix(
    Step(
        shell("# docker run --gpus '\"device=NUMBER\"'"), note="each container with GPUs of its own"
    ),
    alternatives=["in Kubernetes: a limit nvidia.com/gpu for each pod"],
)
_SHARE = Fix(
    replace(export(NCCL_MULTI_RANK_GPU_ENABLE="1"), note="NCCL 2.30.3 or newer"),
    alternatives=["give each rank a GPU of its own"],
)
_LOCAL_RANK = Fix(
    Step(shell("export LOCAL_RANK=$SLURM_LOCALID"), note="in each task of srun, before the script"),
    alternatives=["with another launcher: set LOCAL_RANK for every rank"],
)
_VISIBLE_FIX = (
    "nothing, if the script takes the GPU that it sees; else set the same CUDA_VISIBLE_DEVICES, "
    "with a GPU for each rank, for all ranks of a host"
)
_KNOWS_PARTS_SINCE = (2, 30, 3)
"""First NCCL that tells MIG instances of one GPU apart."""


class SeenByRank(NamedTuple):
    """A rank and its facts of check `backend_device`.

    `own` is the GPU that it would take, and `uuid` that of this GPU; `uuids` are those of all GPUs
    that it sees, in their order. None where there is none, or torch does not report it.
    """

    rank: Rank
    facts: Mapping[str, Any]
    own: Mapping[str, Any] | None
    uuid: str | None
    uuids: tuple[str | None, ...]

    @classmethod
    def of(cls, rank: Rank, facts: Mapping[str, Any]) -> SeenByRank:
        """The same, by the facts."""
        devices, index = facts["devices"], facts["device"]
        uuids = tuple([device["uuid"] for device in devices])
        if index is None:
            return cls(rank, facts, None, None, uuids)
        return cls(rank, facts, devices[index], uuids[index], uuids)

    @property
    def sees(self) -> tuple[str, ...]:
        """Sorted UUIDs of all GPUs that this rank sees; empty where torch does not report them."""
        known = [uuid for uuid in self.uuids if uuid is not None]
        return tuple(sorted(known)) if len(known) == len(self.uuids) else ()

    @property
    def on_host(self) -> int:
        """Number of GPUs that the kernel shows on its host."""
        return count_gpus(self.facts["host_gpus"])

    @property
    def build(self) -> str:
        """Name and version of its torch."""
        return f"torch {self.facts['torch']}"

    @property
    def hiding(self) -> str:
        """The variables that hide GPUs, as `NAME='value'`."""
        return " ".join(f"{name}={value!r}" for name, value in self.facts["visible"].items())

    @property
    def has_local_rank(self) -> bool:
        """True if LOCAL_RANK is in the environment of the program."""
        launch = self.rank.launch
        by_launch = launch is not None and launch.sources.get("local_rank") == "LOCAL_RANK"
        return "LOCAL_RANK" in self.rank.env or by_launch


def sharing_is_meant(ranks: Sequence[Rank]) -> bool:
    """True if a setting allows several ranks to use one GPU."""
    allowed = all(rank.env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" for rank in ranks)
    ids = {rank.env["NCCL_HOSTID"] for rank in ranks if "NCCL_HOSTID" in rank.env}
    return allowed or len(ids) == len(ranks)


def judge_mapping(cluster: Cluster, hosts: Iterable[Sequence[SeenByRank]]) -> Iterator[Finding]:
    """Findings on the GPUs that ranks take, for a job over NCCL.

    Args:
        cluster: for the PCI addresses of GPUs, by check `gpu_affinity`.
        hosts: the ranks of each host that has a GPU for every rank.
    """
    known = list(hosts)
    for mine in known:
        hidden = list(_visible_differs(mine))
        yield from hidden
        known_by = any(found.level is not Severity.INFO for found in hidden)
        for found in _beyond(mine):
            yield found.replaced(explained_by=GPU_HIDDEN.code if known_by else None)
        yield from _guessed(mine)
    yield from _shared(hosts_with_mps(cluster), (one for mine in known for one in mine))
    yield from _parts(cluster, {one.rank.seat: one for mine in known for one in mine})


def _visible_differs(mine: Sequence[SeenByRank]) -> Iterator[Finding]:
    """A finding on ranks that see other GPUs: because of variables, or of control groups."""
    first = mine[0]
    shown = first.facts["visible"]
    if all(one.uuids == first.uuids and one.facts["visible"] == shown for one in mine):
        return
    said = {one.rank.seat: one.hiding or "unset" for one in mine}
    seen = {one.rank.seat: (said[one.rank.seat], one.sees) for one in mine}
    odd = odd_ones_out(seen)
    if odd is None:
        return
    taken = {one.uuid or one.rank.seat for one in mine}
    if len(taken) == len(mine):  # else they share a GPU: another finding
        where = place_of(one.rank for one in mine if one.rank.seat in odd.places)
        if len(set(said.values())) > 1:
            sides = [f"{said[one.rank.seat]} (local rank {one.rank.local_rank})" for one in mine]
            text = f"the variable differs between ranks of one host: {', '.join(sides)}"
            if len({one.sees for one in mine}) == 1:  # the same GPUs, in other orders
                yield Finding(ORDERS_DIFFER, text, where, severity=Severity.WARN)
                return
            # NCCL copies between GPUs all the same: CUDA needs none of them to be visible for that.
            yield Finding(GPU_HIDDEN, text, where, fix=_VISIBLE_FIX, severity=Severity.INFO)
            return
        sides = [f"{', '.join(one.sees)} (local rank {one.rank.local_rank})" for one in mine]
        yield Finding(
            HIDDEN_BY_GROUP,
            f"ranks of one host see different GPUs, though their variables are the same "
            f"({next(iter(said.values()))}): a control group hides the other GPUs, and so NCCL "
            "cannot reach the memory of the other ranks' GPUs",
            where,
            {"seen": sides},
            Fix(
                Step(
                    shell("# srun --gpus-per-node={} --gpu-bind=none", len(mine)),
                    note="not for each task: every rank of a host sees all its GPUs",
                )
            ),
            Severity.WARN,
        )


def _beyond(mine: Sequence[SeenByRank]) -> Iterator[Finding]:
    """Findings on ranks that have a GPU, but not under the number LOCAL_RANK."""
    by_count: dict[int, list[Rank]] = defaultdict(list)
    for one in mine:
        count, local = len(one.uuids), one.rank.local_rank
        if local is not None and local >= count and one.has_local_rank:
            by_count[count].append(one.rank)
    for count, ranks in by_count.items():
        numbers = number_range([rank.local_rank or 0 for rank in ranks])
        gpus = f"{count} visible {'GPU' if count == 1 else 'GPUs'}"
        text = f"LOCAL_RANK {numbers}, but {gpus}, numbered 0 to {count - 1}"
        yield Finding(LOCAL_RANK_BEYOND, text, place_of(ranks))


def _guessed(mine: Sequence[SeenByRank]) -> Iterator[Finding]:
    """Findings on GPUs that torch takes by RANK, where LOCAL_RANK is not set."""
    wrong = [
        one
        for one in mine
        if one.rank.rank is not None
        and (guess := one.rank.rank % len(one.uuids)) != one.facts["device"]
        and one.uuids[guess]
    ]
    if not wrong:
        return
    by_number = {
        one.rank.seat: one.facts["devices"][one.rank.rank % len(one.uuids)]
        for one in mine
        if one.rank.rank is not None
    }
    binding = [one for one in wrong if _binds_by_number(one)]
    users = Counter(by_number[one.rank.seat]["uuid"] for one in mine if _binds_by_number(one))
    twice = {uuid for uuid, count in users.items() if count > 1}
    if binding and twice:
        sharers = [
            one.rank
            for one in mine
            if _binds_by_number(one) and by_number[one.rank.seat]["uuid"] in twice
        ]
        yield Finding(
            GPU_SHARED,
            f"torch {public(binding[0].facts['torch'])} takes GPU RANK modulo the number of GPUs "
            "where LOCAL_RANK is not set, so several ranks get the same GPU",
            Where(devices=tuple(sorted(twice))) | place_of(sharers),
            {"ranks": [rank.rank for rank in sharers]},
            _LOCAL_RANK,
            Severity.INFO if sharing_is_meant(sharers) else None,
        )
    elif binding:
        yield _guess(binding, by_number, "init_process_group binds to", None)
    else:
        # A barrier that is too early takes the GPU of another rank.
        own = {one.uuid: one.rank.seat for one in mine}
        early = [
            one
            for one in wrong
            if not _binds(one)
            and own.get(by_number[one.rank.seat]["uuid"], one.rank.seat) != one.rank.seat
        ]
        if early:
            yield _guess(early, by_number, "a barrier() before it would take", Severity.INFO)


def _guess(
    ranks: Sequence[SeenByRank],
    by_number: Mapping[int, Mapping[str, Any]],
    words: str,
    severity: Severity | None,
) -> Finding:
    shown = [
        f"rank {one.rank.rank} GPU {by_number[one.rank.seat]['index']}, its own is "
        f"{'unknown' if one.facts['device'] is None else one.facts['device']}"
        for one in ranks[:4]
    ]
    shown += [f"and {len(ranks) - 4} more ranks"] if len(ranks) > 4 else []
    where = place_of(one.rank for one in ranks)
    return Finding(GPU_GUESSED, f"{words}: {'; '.join(shown)}", where, severity=severity)


def _binds(one: SeenByRank) -> bool:
    """True if init_process_group("nccl") chooses a GPU by itself."""
    return process_group(one.facts["torch"], one.rank.env.get(USE_NCCL2)) == "nccl2"


def _binds_by_number(one: SeenByRank) -> bool:
    return not one.has_local_rank and _binds(one)


def _shared(mps: Mapping[int, bool], seen: Iterable[SeenByRank]) -> Iterator[Finding]:
    """Findings on GPUs that several ranks take; `mps`: from `hosts_with_mps`."""
    taken = [one for one in seen if one.uuid]
    if len({one.uuid for one in taken}) == len(taken):
        return
    users: dict[tuple[str, str], list[SeenByRank]] = defaultdict(list)
    for one in taken:
        if one.own is not None and one.uuid:
            users[one.uuid, one.own["name"]].append(one)
    for (uuid, model), sharers in users.items():
        if len(sharers) == 1:
            continue
        ranks = [one.rank for one in sharers]
        # Two hosts with one GPU are two containers of a machine: NCCL may take them for two hosts.
        severity = Severity.FAIL if len({rank.host.id for rank in ranks}) == 1 else Severity.WARN
        served = mps.get(ranks[0].host.id)
        own = sharers[0].own or {}
        alone = own.get("compute_mode") == EXCLUSIVE_PROCESS and served is False
        text, fix = f"{len(ranks)} ranks use the same {model}", ""
        if alone:
            text += "; its compute mode is Exclusive Process, and there is no MPS here"
            fix = Fix(text=GPU_SHARED.fix, alternatives=[_MEANT])
        elif sharing_is_meant(ranks):
            fix = "nothing, if it is meant, as NCCL_MULTI_RANK_GPU_ENABLE or NCCL_HOSTID says"
        elif len({rank.host.id for rank in ranks}) > 1:
            fix = _EACH_ITS_OWN
        elif served:
            text += "; that MPS is here changes nothing for NCCL"
            fix = _SHARE
        yield Finding(
            GPU_SHARED,
            text,
            Where(devices=(uuid,)) | place_of(ranks),
            {
                "local_ranks": [rank.local_rank for rank in ranks],
                "visible": [one.facts["visible"] for one in sharers],
            },
            fix=fix,
            severity=Severity.INFO if sharing_is_meant(ranks) and not alone else severity,
        )


def _parts(cluster: Cluster, seen: Mapping[int, SeenByRank]) -> Iterator[Finding]:
    """Findings on ranks with different UUIDs at one PCI address: MIG instances of one GPU."""
    placed = [
        ((rank.host.id, facts["address"]), one)
        for rank, facts in cluster.facts("gpu_affinity")
        if (one := seen.get(rank.seat)) is not None and one.own is not None and facts.get("address")
    ]
    if len({at for at, _ in placed}) == len(placed):
        return
    loaded = loaded_nccl(cluster)
    users: dict[tuple[int, str], list[SeenByRank]] = defaultdict(list)
    for at, one in placed:
        users[at].append(one)
    for (_, address), sharers in users.items():
        uuids = {one.uuid or "" for one in sharers}
        if len(uuids) < 2 or "" in uuids:
            continue
        nccl = [loaded.get(one.rank.seat) or one.facts["nccl"] for one in sharers]
        oldest = min(nccl, key=release)
        if release(oldest) >= _KNOWS_PARTS_SINCE:
            continue
        ranks = [one.rank for one in sharers]
        yield Finding(
            GPU_SHARED,
            f"{len(ranks)} ranks use parts (MIG instances) of the GPU at {address}; NCCL "
            f"{oldest or 'of unknown version'} takes them for the same GPU",
            Where(devices=tuple(sorted(uuids))) | place_of(ranks),
            fix=Fix(
                text="install NCCL 2.30.3 or newer",
                alternatives=[
                    "take instances of different GPUs",
                    Fix(
                        Step(
                            shell("nvidia-smi -mig 0"),
                            undo=shell("nvidia-smi -mig 1"),
                            note="as root",
                        )
                    ),
                ],
            ),
            severity=Severity.INFO if sharing_is_meant(ranks) else None,
        )
