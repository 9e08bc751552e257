"""Rules about flight-recorder dumps, on made-up jobs of which it is known who holds them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from nccl_doctor.autopsy.flight import Collective, Dump, Group, is_dump, read_dump
from nccl_doctor.autopsy.flight_rules import findings_of_dumps
from nccl_doctor.model.findings import Confidence, Finding

SAMPLES = Path(__file__).parents[3] / "shared" / "samples" / "flight-recorder"
Step = tuple[str, str]
"""Name of a group, and an operation in it."""


@dataclass
class Cluster:
    """A job that is simulated: each rank runs its steps in order on its GPU.

    `ahead` is how many calls a process makes before the first of them has ended. `stopped` are
    ranks that make no more calls than that; `dead` ones whose GPU ends no more than that. `sizes`
    are those of calls that differ from the usual one.
    """

    steps: dict[int, list[Step]]
    groups: Mapping[str, Sequence[int]]
    backend: str = "nccl"
    ahead: int = 4
    stopped: Mapping[int, int] = field(default_factory=dict)
    dead: Mapping[int, int] = field(default_factory=dict)
    sizes: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def dumps(self) -> list[Dump]:
        """Dumps of all ranks once nothing moves any more."""
        done = dict.fromkeys(self.steps, 0)
        while self._advance(done):
            pass
        return [self._dump(rank, done[rank]) for rank in self.steps]

    def _called(self, rank: int, done: int) -> int:
        steps = len(self.steps[rank])
        if self.backend == "gloo":  # a process waits for each call
            return min(done + 1, self.stopped.get(rank, steps), steps)
        return min(done + self.ahead, self.stopped.get(rank, steps), steps)

    def _at(self, rank: int, place: int) -> tuple[object, ...]:
        """The call of a rank at this place, so that those who meet in it have the same."""
        group, operation = self.steps[rank][place]
        before = Counter(name for name, _ in self.steps[rank][: place + 1])
        size = self.sizes.get((rank, place), 1024)
        if operation.startswith(("send", "recv")):
            _, own, other = operation.replace("->", " ").replace("<-", " ").split()
            ends = (own, other) if operation.startswith("send") else (other, own)
            same = [o for g, o in self.steps[rank][: place + 1] if (g, o) == (group, operation)]
            return (group, *ends, len(same))
        return (group, before[group], operation, size)

    def _advance(self, done: dict[int, int]) -> bool:
        at = {
            rank: self._at(rank, place)
            for rank, place in done.items()
            if place < self._called(rank, place)
        }
        moved = False
        for rank, call in at.items():
            group, operation = self.steps[rank][done[rank]]
            ranks = self.groups[group]
            if operation.startswith(("send", "recv")):
                ranks = [ranks[int(call[1])], ranks[int(call[2])]]  # type: ignore[call-overload]
            there = all(
                at.get(of) == call or (of in self.dead and self._passed(of, done[of], call))
                for of in ranks
            )
            if there and done[rank] < self.dead.get(rank, 1 << 30):
                done[rank] += 1
                moved = True
        return moved

    def _passed(self, rank: int, done: int, call: tuple[object, ...]) -> bool:
        """True of a dead GPU that takes part in what it was given, and tells of no end."""
        return any(self._at(rank, i) == call for i in range(done, self._called(rank, done)))

    def _dump(self, rank: int, done: int) -> Dump:
        numbers: Counter[tuple[str, bool]] = Counter()
        entries = []
        for i, (group, operation) in enumerate(self.steps[rank][: self._called(rank, done)]):
            p2p = operation.startswith(("send", "recv"))
            numbers[group, p2p] += 1
            entries.append(
                Collective(
                    group=group,
                    number=numbers[group, False],
                    p2p_number=numbers[group, True],
                    is_p2p=p2p,
                    operation=operation,
                    backend=self.backend,
                    input_sizes=((self.sizes.get((rank, i), 1024),),),
                    input_dtypes=("Float",),
                    state="completed" if i < done and self.backend == "nccl" else "scheduled",
                    retired=i < done,
                    created_ns=1000 * i + rank,
                )
            )
        nccl = self.backend == "nccl"  # gloo's dumps do not tell this of a group
        told = {
            name: Group(name.upper(), tuple(ranks), numbers[name, False] or numbers[name, True])
            if nccl
            else Group(name.upper())
            for name, ranks in self.groups.items()
            if rank in ranks
        }
        return Dump(rank, "2.9", told, tuple(entries))


def grid(pipe: int, data: int, tensor: int, rounds: int = 3) -> Cluster:
    """A job of pipe × data × tensor ranks: each has a group of each kind."""
    groups: dict[str, list[int]] = {}
    steps: dict[int, list[Step]] = {}
    for rank in range(pipe * data * tensor):
        stage, copy, part = rank // (data * tensor), rank // tensor % data, rank % tensor
        tp, dp, pp = f"tp{stage}-{copy}", f"dp{stage}-{part}", f"pp{copy}-{part}"
        for name in (tp, dp, pp, "world"):
            groups.setdefault(name, []).append(rank)
        way: list[Step] = [(pp, f"recv {stage}<-{stage - 1}")] if stage else []
        way += [(tp, "_all_gather_base"), (tp, "_reduce_scatter_base")]
        way += [(pp, f"send {stage}->{stage + 1}")] if stage + 1 < pipe else []
        steps[rank] = [*way, (dp, "all_reduce")] * rounds + [("world", "barrier")]
    return Cluster(steps, groups)


def named(findings: Iterable[Finding]) -> dict[str, tuple[int, ...]]:
    return {each.code: each.where.ranks for each in findings}


SHAPES = [(1, 4, 1), (1, 1, 4), (1, 4, 4), (2, 2, 2), (4, 2, 2), (4, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_found_in_a_job_that_does_not_hang(shape: tuple[int, int, int]) -> None:
    assert findings_of_dumps(grid(*shape).dumps()) == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_the_rank_that_stopped_is_named_wherever_it_stops(shape: tuple[int, int, int]) -> None:
    cluster = grid(*shape)
    for rank in sorted({0, 1, len(cluster.steps) // 2, len(cluster.steps) - 1}):
        for step in range(len(cluster.steps[rank])):
            found = findings_of_dumps(replace(cluster, stopped={rank: step}).dumps())
            assert named(found) == {"collective-missing": (rank,)}, (rank, step)
            assert found[0].confidence is not Confidence.POSSIBLE
            assert "its process stopped" in found[0].message


def test_two_that_stopped_are_both_named() -> None:
    found = findings_of_dumps(replace(grid(2, 2, 4), stopped={5: 6, 6: 6}).dumps())
    assert named(found) == {"collective-missing": (5, 6)}
    assert len(found) == 1


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_a_gpu_that_ends_nothing_any_more_is_named(shape: tuple[int, int, int]) -> None:
    cluster = grid(*shape)
    for rank in (0, 1, len(cluster.steps) - 1):
        at = next(i for i, (group, _) in enumerate(cluster.steps[rank]) if group.startswith("tp"))
        for ahead in (1, 4, 50):
            dead = replace(cluster, dead={rank: at + 1}, ahead=ahead)
            found = findings_of_dumps(dead.dumps())
            if shape[2] > 1:
                assert named(found) == {"collective-unfinished": (rank,)}, (rank, ahead)
                assert "ended it; this one did not" in found[0].message


def pair(*calls: Mapping[int, Collective], group: Group | None = None) -> list[Dump]:
    """Dumps of ranks, each of the given calls by rank, all in a group of their own."""
    ranks = sorted({rank for each in calls for rank in each})
    known = group or Group("default_pg", tuple(ranks))
    return [
        Dump(rank, "2.9", {"0": known}, tuple(each[rank] for each in calls if rank in each))
        for rank in ranks
    ]


USUAL = Collective(
    "0", 7, 0, False, "all_reduce", "nccl", ((1024,),), ("Float",), state="scheduled"
)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"operation": "broadcast"}, "broadcast 7 of 1024 Float by 1 rank, all_reduce"),
        ({"input_sizes": ((512, 4),)}, "all_reduce 7 of 512×4 Float by 1 rank"),
        ({"input_dtypes": ("Half",)}, "all_reduce 7 of 1024 Half by 1 rank"),
    ],
)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_fewest_that_call_something_else_are_named(
    backend: str, other: Mapping[str, object], words: str
) -> None:
    usual = replace(USUAL, backend=backend)
    odd = replace(usual, **other)  # type: ignore[arg-type]
    found = findings_of_dumps(pair({0: usual, 1: usual, 2: odd, 3: usual}))
    assert named(found) == {"collective-mismatch": (2,)}
    assert found[0].confidence is Confidence.CERTAIN
    assert words in found[0].message
    assert "by 3 ranks" in found[0].message


def test_a_tie_names_nobody_alone() -> None:
    odd = replace(USUAL, operation="broadcast")
    found = findings_of_dumps(pair({0: USUAL, 1: odd}))
    assert named(found) == {"collective-mismatch": (0, 1)}
    assert found[0].confidence is Confidence.POSSIBLE


def test_the_larger_part_may_be_less_than_half() -> None:
    odd, odder = replace(USUAL, operation="broadcast"), replace(USUAL, input_sizes=((3,),))
    found = findings_of_dumps(pair({0: USUAL, 1: odd, 2: USUAL, 3: odder}))
    assert named(found) == {"collective-mismatch": (1, 3)}
    assert found[0].confidence is Confidence.LIKELY


@pytest.mark.parametrize("operation", ["all_to_all", "gather", "scatter", "_broadcast_oop"])
def test_some_operations_may_have_another_size_on_each_rank(operation: str) -> None:
    calls = {
        rank: replace(USUAL, operation=operation, input_sizes=((rank + 1,),), backend="gloo")
        for rank in range(4)
    }
    assert findings_of_dumps(pair(calls)) == []


def test_another_shape_of_as_many_elements_is_no_difference() -> None:
    flat = replace(USUAL, backend="gloo")
    assert findings_of_dumps(pair({0: flat, 1: replace(flat, input_sizes=((32, 32),))})) == []


def test_a_difference_in_a_call_of_nccl_that_ended_does_no_harm() -> None:
    ended = replace(USUAL, state="completed")
    assert findings_of_dumps(pair({0: ended, 1: replace(ended, input_sizes=((9,),))})) == []


def test_those_who_wait_because_of_a_different_call_are_not_named() -> None:
    cluster = replace(grid(1, 4, 4), sizes={(6, 2): 999})  # its first all_reduce with four
    found = findings_of_dumps(cluster.dumps())
    assert named(found) == {"collective-mismatch": (6,)}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_two_groups_in_another_order_on_each_rank(backend: str) -> None:
    first, second = ("a", "all_reduce"), ("b", "all_reduce")
    steps = {0: [first, second, first, second], 1: [first, second, second, first]}
    for ahead in (1, 4):
        cluster = Cluster(steps, {"a": [0, 1], "b": [0, 1]}, backend, ahead)
        found = findings_of_dumps(cluster.dumps())
        assert named(found) == {"collective-order": (0, 1)}
        assert "in A" in found[0].message
        assert "in B" in found[0].message


def test_those_outside_a_circle_are_not_in_it() -> None:
    cluster = grid(1, 2, 4)
    for rank, order in ((1, ("tp0-0", "dp0-1")), (5, ("dp0-1", "tp0-1"))):
        cluster.steps[rank] = [(name, "all_reduce") for name in order]
    cluster.steps[1][0], cluster.steps[1][1] = ("dp0-1", "all_reduce"), ("x", "all_reduce")
    cluster.steps[5][0], cluster.steps[5][1] = ("x", "all_reduce"), ("dp0-1", "all_reduce")
    cluster = replace(cluster, groups={**cluster.groups, "x": [1, 5]}, ahead=1)
    assert named(findings_of_dumps(cluster.dumps())) == {"collective-order": (1, 5)}


def test_a_transfer_that_both_came_to_stands_still() -> None:
    send = replace(USUAL, is_p2p=True, p2p_number=3, operation="send 0->1")
    found = findings_of_dumps(pair({0: send, 1: replace(send, operation="recv 1<-0")}))
    assert named(found) == {"collective-unfinished": (0, 1)}
    assert found[0].confidence is Confidence.POSSIBLE


def test_two_that_both_receive_wait_for_each_other() -> None:
    receive = replace(USUAL, is_p2p=True, p2p_number=3, operation="recv 0<-1")
    found = findings_of_dumps(pair({0: receive, 1: replace(receive, operation="recv 1<-0")}))
    assert named(found) == {"collective-order": (0, 1)}


def test_a_rank_without_a_dump_is_only_possible() -> None:
    cluster = replace(grid(2, 2, 2), stopped={6: 4})
    dumps = [dump for dump in cluster.dumps() if dump.rank != 6]
    found = findings_of_dumps(dumps)
    assert named(found) == {"collective-missing": (6,)}
    assert found[0].confidence is Confidence.POSSIBLE
    assert found[0].evidence["without_dump"] == "6"
    assert "it has no dump" in found[0].message


def test_a_lost_dump_of_somebody_else_does_not_make_him_a_culprit() -> None:
    cluster = replace(grid(2, 2, 4), stopped={6: 4})
    for lost in set(cluster.steps) - {6}:
        dumps = [dump for dump in cluster.dumps() if dump.rank != lost]
        found = findings_of_dumps(dumps)
        assert named(found) == {"collective-missing": (6,)}, lost
        assert found[0].evidence["without_dump"] == str(lost)


def test_a_call_that_nobody_ends_names_all_who_are_in_it_and_nobody_for_sure() -> None:
    found = findings_of_dumps(pair(dict.fromkeys(range(4), USUAL)))
    assert named(found) == {"collective-unfinished": (0, 1, 2, 3)}
    assert found[0].confidence is Confidence.POSSIBLE


def test_a_gpu_that_has_not_begun_what_the_others_have_is_likely() -> None:
    begun = replace(USUAL, state="started")
    found = findings_of_dumps(pair({0: begun, 1: begun, 2: USUAL, 3: begun}))
    assert named(found) == {"collective-unfinished": (2,)}
    assert found[0].confidence is Confidence.LIKELY


def test_a_rank_whose_gpu_is_still_at_an_earlier_call_is_followed_to_it() -> None:
    other = replace(USUAL, group="1", number=3, created_ns=1)
    group = {"0": Group("A", (0, 1)), "1": Group("B", (1, 2))}
    waiting = replace(USUAL, created_ns=5)
    dumps = [
        Dump(0, "2.9", group, (waiting,)),
        Dump(1, "2.9", group, (other, waiting)),
        Dump(2, "2.9", {"1": replace(group["1"], enqueued=2)}, ()),
    ]
    assert named(findings_of_dumps(dumps)) == {"collective-missing": (2,)}


def test_calls_that_torch_puts_together_end_with_the_whole() -> None:
    single = [replace(USUAL, operation="all_gather", number=n) for n in (1, 2)]
    whole = [replace(USUAL, operation="coalesced", number=n, state="completed") for n in (1, 2)]
    calls = (single[0], whole[0], single[1], whole[1])
    assert findings_of_dumps(pair(*({0: call, 1: call} for call in calls))) == []


def test_calls_put_together_are_not_compared_as_a_dump_need_not_have_them_all() -> None:
    whole = replace(USUAL, operation="coalesced")
    dumps = pair(
        {0: replace(USUAL, input_sizes=((3,),)), 1: USUAL}, {1: whole}, {0: whole, 1: whole}
    )
    assert "collective-mismatch" not in named(findings_of_dumps(dumps))


def test_a_dump_that_does_not_hold_all_open_calls_blames_no_other() -> None:
    """Rank 1 ended nothing; rank 0 waits at a call that is not kept of the many of rank 1."""
    many = [replace(USUAL, number=n, created_ns=n) for n in (*range(1, 9), *range(33, 41))]
    own = [replace(USUAL, number=n, created_ns=n) for n in range(21, 29)]
    group = {"0": Group("TP", (0, 1))}
    dumps = [Dump(0, "2.9", group, tuple(own)), Dump(1, "2.9", group, tuple(many))]
    assert named(findings_of_dumps(dumps)) == {"collective-unfinished": (1,)}


def test_groups_of_one_name_are_told_apart_by_their_ranks() -> None:
    ended = replace(USUAL, number=3, state="completed")
    groups = [Group("TP", (0, 1)), Group("TP", (2, 3))]
    dumps = [Dump(rank, "2.9", {"0": groups[rank // 2]}, (USUAL,)) for rank in (0, 1)]
    dumps += [Dump(rank, "2.9", {"0": groups[rank // 2]}, (ended,)) for rank in (2, 3)]
    assert named(findings_of_dumps(dumps)) == {"collective-unfinished": (0, 1)}


def test_gloo_says_retired_of_calls_that_failed() -> None:
    cluster = replace(grid(1, 1, 4), backend="gloo", stopped={1: 3})
    dumps = [
        replace(dump, entries=tuple(replace(e, retired=dump.rank == 1) for e in dump.entries))
        for dump in cluster.dumps()
    ]
    found = findings_of_dumps(dumps)
    assert named(found) == {"collective-missing": (1,)}
    assert "its own last call there is 2" in found[0].message
    assert "its process" not in found[0].message


def test_a_victim_in_another_group_of_gloo_is_not_named() -> None:
    for rank in range(8):
        cluster = replace(grid(1, 2, 4), backend="gloo", stopped={rank: 4})
        assert named(findings_of_dumps(cluster.dumps())) == {"collective-missing": (rank,)}


def test_dumps_without_a_rank_and_none_at_all_say_nothing() -> None:
    assert findings_of_dumps([]) == []
    assert findings_of_dumps([Dump(None, "2.9", {}, (USUAL,))]) == []


def test_the_same_dump_in_both_forms_counts_once() -> None:
    dumps = replace(grid(1, 1, 4), stopped={2: 3}).dumps()
    assert findings_of_dumps([*dumps, *dumps]) == findings_of_dumps(dumps)


def test_the_order_of_the_dumps_does_not_matter() -> None:
    dumps = replace(grid(2, 2, 2), stopped={2: 3}).dumps()
    assert findings_of_dumps(dumps[::-1]) == findings_of_dumps(dumps)


def of_sample(folder: str, pattern: str) -> list[Finding]:
    dumps = []
    for path in sorted((SAMPLES / folder).glob(pattern)):
        data = path.read_bytes()
        assert is_dump(data[:300])
        dumps.append(read_dump(data, path.name))
    assert len(dumps) in {4, 16}
    return findings_of_dumps(dumps)


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the samples are not here")
@pytest.mark.parametrize(
    ("folder", "code", "ranks"),
    [
        ("gpu_error_1st", "collective-unfinished", (12, 14)),
        ("lock_gil_1st", "collective-missing", (9, 14)),
        ("gloo/fr-208-gloo-skip", "collective-missing", (2,)),
        ("gloo/fr-213-gloo-op", "collective-mismatch", (2,)),
        ("gloo/fr-213-gloo-ok", "", ()),
        ("gloo/fr-215-gloo-skip", "collective-missing", (2,)),
    ],
)
def test_real_jobs(folder: str, code: str, ranks: tuple[int, ...]) -> None:
    gloo = folder.startswith("gloo")
    for pattern in ("_dump_fr_trace_[0-9]*", "_dump_fr_trace_json_*") if gloo else ("_dump_*",):
        assert named(of_sample(folder, pattern)) == ({code: ranks} if code else {})
