"""Rules of the device_mesh check on made-up clusters: which group, which hosts, and nobody else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Job, Layer, Severity, Skip, Where
from nccl_doctor.checks.device_mesh import DeviceMesh
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.model.findings import Finding, Status
from nccl_doctor.toolkit.groups.kinds import HANG
from nccl_doctor.toolkit.mesh import mesh_groups, own_groups
from tests.support.clusters import change_rank, make_cluster
from tests.support.findings import judge
from tests.support.reports import RUN, made_check
from tests.support.rows import each_row

CHECK = DeviceMesh()
MESH = (("dp", 2), ("tp", 2))
CUBE = (("dp", 2), ("sp", 2), ("tp", 2))
OK = {"steps": ["all_reduce"], "wrong": []}

Told = Mapping[int, Outcome | Mapping[str, Any]]


def of_job(mesh: Sequence[tuple[str, int]], **fields: Any) -> Job:
    return Job(mesh=tuple(mesh), **fields)


def bare(*counts: int, mesh: Sequence[tuple[str, int]] = MESH, **fields: Any) -> Cluster:
    """A cluster with this many ranks on each host, numbered host by host."""
    made = make_cluster([f"nd{i}" for i in range(len(counts))], max(counts), **fields)
    homes = [host for host, count in zip(made.hosts, counts, strict=True) for _ in range(count)]
    ranks = []
    for number, host in enumerate(homes):
        old = made.ranks[number]
        launch = old.launch and replace(old.launch, world_size=len(homes))
        ranks.append(
            replace(
                old, host=host, reported=host.reported, launch=launch if host.reported else None
            )
        )
    return replace(made, ranks=tuple(ranks), world_size=len(homes), job=of_job(mesh))


def at(
    mesh: Sequence[tuple[str, int]],
    rank: int,
    dimension: str,
    state: str = "S",
    *,
    status: OutcomeStatus = OutcomeStatus.HUNG,
    step: str = "all_reduce",
    **fields: Any,
) -> Outcome:
    """A rank that is stuck in its group of a dimension."""
    (name,) = (g.name for g in own_groups(mesh, rank) if g.dimension == dimension)
    crumbs = (
        {"step": "init_process_group", "group": "mesh"},
        {"step": "new_group", "group": "dp=2,tp=2"},
        {"step": step, "group": name},
    )
    return Outcome(status, breadcrumbs=crumbs, state=state, duration_s=8, group=0, **fields)


def with_round(cluster: Cluster, name: str, told: Told) -> Cluster:
    """The outcomes of one round of all ranks; who is not told of was good."""
    for rank in cluster.ranks:
        own = told.get(rank.seat, OK)
        outcome = own if isinstance(own, Outcome) else Outcome(OutcomeStatus.OK, facts=dict(own))
        rounds = {
            **rank.facts.get("device_mesh", {}),
            name: replace(outcome, group=0),
        }
        cluster = change_rank(cluster, rank.seat, facts={"device_mesh": rounds})
    return cluster


def loud(cluster: Cluster) -> list[Finding]:
    return [found for found in judge(CHECK, cluster) if found.level is not Severity.INFO]


def blamed(cluster: Cluster) -> list[tuple[str, tuple[int, ...]]]:
    return [(found.code, found.where.ranks) for found in loud(cluster)]


# --- the sizes ---


def test_sizes_that_do_not_multiply_to_the_world_and_the_nearest_that_do():
    cluster = bare(4, 4, mesh=(("dp", 5), ("tp", 2)))
    (found,) = judge(CHECK, cluster)
    assert (found.code, found.level) == ("mesh-does-not-divide", Severity.FAIL)
    assert found.kind.layer is Layer.GROUP
    assert found.message == (
        "dp=5,tp=2 needs 10 ranks, the job has 8; nearest meshes that fit: dp=4,tp=2 or "
        "dp=8,tp=1 or dp=2,tp=4"
    )
    assert "--mesh dp=4,tp=2" in found.fix
    assert "start 10 ranks" in found.fix
    assert not found.where
    assert CHECK.plan(cluster) == []


@each_row(
    ("mesh", "words"),
    [
        ((("dp", 3), ("tp", 2)), "has 8: ranks 6–7 in no group; nearest meshes that fit: dp=4,tp"),
        ((("dp", 7),), "the job has 8: rank 7 in no group; nearest meshes that fit: dp=8"),
    ],
)
def test_a_mesh_smaller_than_the_job_is_allowed_and_its_groups_are_tried(mesh, words):
    cluster = bare(4, 4, mesh=mesh)
    (round_,) = CHECK.plan(cluster)
    assert round_.groups == ((0, 1, 2, 3, 4, 5, 6, 7),)
    found = next(each for each in judge(CHECK, cluster) if each.code == "mesh-does-not-divide")
    assert found.level is Severity.WARN
    assert words in found.message
    assert not found.where
    (name, _), *_ = mesh
    stuck = {rank: at(mesh, rank, name) for rank in mesh_groups(mesh)[name][0].ranks}
    hung = with_round(cluster, "mesh", stuck)
    assert ("collective-hang", tuple(stuck)) in blamed(hung)


def test_it_is_told_by_the_claimed_size_while_ranks_are_absent():
    cluster = bare(2, 2, mesh=(("tp", 8),), absent_nodes=[1])
    (found,) = judge(CHECK, cluster)
    assert (found.code, found.level) == ("mesh-does-not-divide", Severity.FAIL)
    assert "the job has 4" in found.message
    assert loud(bare(2, 2, absent_nodes=[1])) == []


def test_one_hosts_own_view_says_it_only_where_the_size_was_told():
    cluster = bare(2, mesh=(("dp", 2), ("tp", 4)), complete=False)
    assert [found.code for found in judge(CHECK, cluster)] == ["mesh-does-not-divide"]
    for seat in (0, 1):
        cluster = change_rank(cluster, seat, launch={"world_size": None})
    assert judge(CHECK, cluster) == []


def test_a_mesh_that_does_not_fit_explains_no_hang_and_no_absent_host_explains_it():
    hang = made_check("other", Layer.COLLECTIVE, finds=[Finding(HANG, "m", Where(ranks=(0, 1)))])
    report = conclude(bare(2, 2, mesh=(("dp", 5),)), [CHECK, hang], run=RUN)
    assert {f.code for f in report.root_causes} == {"mesh-does-not-divide", "collective-hang"}


# --- what is held ---


def test_without_a_mesh_the_report_says_that_nobody_asked():
    cluster = bare(2, 2, mesh=())
    with pytest.raises(Skip, match="--mesh is not given"):
        CHECK.plan(cluster)
    (result,) = conclude(cluster, [CHECK], run=RUN).checks
    assert result.status is Status.SKIPPED
    assert result.reason.startswith("--mesh is not given")
    assert judge(CHECK, cluster) == []


def test_all_dimensions_at_once_only_after_each_was_good():
    cluster = bare(2, 2)
    (first,) = CHECK.plan(cluster)
    assert (first.name, first.groups, first.params) == ("mesh", ((0, 1, 2, 3),), {"mesh": MESH})
    good = with_round(cluster, "mesh", {})
    assert [each.name for each in CHECK.plan(good)] == ["mesh", "at-once"]
    hung = with_round(cluster, "mesh", {r: at(MESH, r, "tp") for r in (0, 1)})
    assert [each.name for each in CHECK.plan(hung)] == ["mesh", "mesh-again"]
    assert {each.params["mesh"] for each in CHECK.plan(hung)} == {MESH}


def test_nothing_is_held_while_ranks_are_absent_or_nobody_called_them():
    assert CHECK.plan(bare(2, 2, absent_nodes=[1])) == []
    assert CHECK.plan(bare(2, 2, complete=False)) == []


# --- hosts ---

PLACES = [
    # Tensor parallel inside hosts, data parallel across them: as it should be.
    ((2, 2), MESH, ""),
    ((8, 8), (("pp", 2), ("dp", 2), ("tp", 4)), ""),
    ((8, 8), (("dp", 16),), ""),
    ((4, 4), (("dp", 4), ("fsdp", 2)), ""),
    # Larger than a host: it cannot be inside.
    ((2, 2), (("tp", 4),), ""),
    ((4, 4), (("dp", 1), ("tp", 8)), ""),
    # Nobody expects these inside one.
    ((3, 3), (("tp", 3), ("dp", 2)), "dp=2,tp=3"),
    ((4, 4), (("TP", 2), ("dp", 4)), "dp=4,TP=2"),
    ((4, 2), (("dp", 3), ("fsdp", 2)), ""),
    ((6, 6), (("dp", 3), ("fsdp", 4)), ""),
    ((6, 6), (("dp", 3), ("tp", 4)), "4 does not divide the 6 ranks of a host"),
    ((4, 2), (("dp", 2), ("tp", 3)), "3 does not divide the 2 or 4 ranks of a host"),
    ((4, 2), (("dp", 3), ("tp", 2)), ""),
]


@each_row(("counts", "mesh", "words"), PLACES)
def test_a_dimension_that_crosses_hosts_without_need_is_a_warning(
    counts: Sequence[int], mesh: Sequence[tuple[str, int]], words: str
):
    (found,) = judge(CHECK, bare(*counts, mesh=mesh))
    assert found.code == "mesh-crosses-hosts"
    assert found.level is (Severity.WARN if words else Severity.INFO), found.message
    assert words in found.message
    assert not found.where
    assert set(found.evidence["dimensions"]) == {name for name, _ in mesh}


def test_the_finding_shows_how_each_dimension_lies():
    (found,) = judge(CHECK, bare(2, 2))
    assert found.message == "dp=2 across 2 hosts; tp=2 inside hosts"
    assert found.evidence["dimensions"]["dp"]["across_hosts"] == {
        "dp[0] (ranks 0, 2)": ["nd0", "nd1"],
        "dp[1] (ranks 1, 3)": ["nd0", "nd1"],
    }
    (found,) = judge(CHECK, bare(4, 4, mesh=(("tp", 2), ("dp", 4))))
    assert "--mesh dp=4,tp=2" in found.fix
    (found,) = judge(CHECK, bare(6, 6, mesh=(("dp", 3), ("tp", 4))))
    assert "tp=4 across up to 2 hosts in 1 of 3 groups" in found.message


def test_ranks_dealt_out_in_turn_put_the_innermost_dimension_across_hosts():
    cluster = bare(2, 2, mesh=(("replica", 2), ("shard", 2)))
    homes = [cluster.hosts[number % 2] for number in range(4)]
    dealt = replace(
        cluster,
        ranks=tuple(replace(r, host=h) for r, h in zip(cluster.ranks, homes, strict=True)),
    )
    (found,) = judge(CHECK, dealt)
    assert found.level is Severity.WARN
    assert "shard=2,replica=2" in found.message


def test_one_host_has_no_layout_to_show():
    assert judge(CHECK, bare(4)) == []


def test_hosts_of_one_name_are_told_apart():
    cluster = bare(2, 2)
    hosts = tuple(replace(host, name="gpu") for host in cluster.hosts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    (found,) = judge(CHECK, replace(cluster, hosts=hosts, ranks=ranks))
    assert "dp=2 across 2 hosts" in found.message


# --- who is to blame ---


def test_one_group_that_hangs_is_named_with_its_dimension_and_no_other():
    told = {rank: at(MESH, rank, "tp") for rank in (2, 3)}
    (found,) = loud(with_round(bare(2, 2), "mesh", told))
    assert (found.code, found.where.ranks) == ("collective-hang", (2, 3))
    assert "all_reduce of group tp[1] (ranks 2–3)" in found.message
    assert found.where.hosts == ("nd1",)
    assert found.evidence["mesh"] == "dp=2,tp=2"


def test_a_rank_that_stands_still_in_one_dimension_is_named_alone():
    told = {0: at(MESH, 0, "tp"), 1: at(MESH, 1, "tp", "T")}
    (found,) = loud(with_round(bare(2, 2), "mesh", told))
    assert (found.code, found.where.ranks) == ("rank-frozen", (1,))
    assert "tp[0] (ranks 0–1)" in found.message


def wait_behind(dimension: str, *ranks: int) -> dict[int, Outcome]:
    return {rank: at(CUBE, rank, dimension) for rank in ranks}


def test_groups_of_a_later_dimension_that_wait_for_it_are_victims():
    """dp[1] hangs; all others go on, until they need one of its members."""
    told = {
        **wait_behind("dp", 1, 5),
        **wait_behind("sp", 3, 7),
        **wait_behind("tp", 0, 2, 4, 6),
    }
    assert blamed(with_round(bare(4, 4, mesh=CUBE), "mesh", told)) == [("collective-hang", (1, 5))]


def test_a_dead_rank_is_blamed_and_not_those_who_lost_it():
    told = {
        **wait_behind("tp", 0, 2, 4, 6),
        3: at(CUBE, 3, "sp", status=OutcomeStatus.RAISED, reason="Connection closed by peer"),
        1: at(CUBE, 1, "dp", status=OutcomeStatus.DIED, signal="SIGSEGV"),
        5: at(CUBE, 5, "dp"),
        7: at(CUBE, 7, "sp"),
    }
    cluster = with_round(bare(4, 4, mesh=CUBE), "mesh", told)
    assert blamed(cluster) == [("rank-crashed", (1,))]
    assert "dp[1] (ranks 1, 5)" in loud(cluster)[0].message


def test_two_groups_at_fault_are_both_named_each_by_itself():
    told = {
        0: at(MESH, 0, "dp", status=OutcomeStatus.DIED, signal="SIGKILL"),
        2: at(MESH, 2, "dp"),
        1: at(MESH, 1, "tp"),
        3: at(MESH, 3, "tp"),
    }
    assert blamed(with_round(bare(2, 2), "mesh", told)) == [("rank-crashed", (0,))]
    cube = {**wait_behind("tp", 2, 3), 6: at(CUBE, 6, "tp", "D"), 7: at(CUBE, 7, "tp")}
    found = blamed(with_round(bare(4, 4, mesh=CUBE), "mesh", cube))
    assert sorted(found) == [("collective-hang", (2, 3)), ("rank-frozen", (6,))]


def test_a_dimension_of_which_every_group_hangs_is_one_finding():
    told = {rank: at(MESH, rank, "tp") for rank in range(4)}
    (found,) = loud(with_round(bare(2, 2), "mesh", told))
    assert (found.code, found.where.ranks) == ("collective-hang", (0, 1, 2, 3))
    assert "group tp (2 of its 2 groups)" in found.message


def test_at_once_names_the_dimension_too():
    step = "wait for all_reduce (async)"
    told = {rank: at(MESH, rank, "tp", step=step) for rank in (0, 1)}
    cluster = with_round(with_round(bare(2, 2), "mesh", {}), "at-once", told)
    (found,) = loud(cluster)
    assert (found.code, found.where.ranks) == ("collective-hang", (0, 1))
    assert "tp[0]" in found.message


def stuck_forming(ranks: Iterable[int]) -> dict[int, Outcome]:
    crumbs = (
        {"step": "init_process_group", "group": "mesh"},
        {"step": "new_group", "group": "dp=2,tp=2"},
    )
    return {r: Outcome(OutcomeStatus.HUNG, breadcrumbs=crumbs, duration_s=8) for r in ranks}


def test_a_mesh_that_never_forms_is_a_hang_of_all_its_ranks():
    cluster = with_round(bare(2, 2), "mesh", stuck_forming(range(4)))
    assert blamed(cluster) == [("group-init-hang", (0, 1, 2, 3))]


def test_what_raises_before_any_group_is_there_is_told_in_its_own_words():
    reason = "RuntimeError: DeviceMesh only support homogeneous hardware"
    raised = {
        rank: replace(outcome, status=OutcomeStatus.RAISED, reason=reason)
        for rank, outcome in stuck_forming(range(4)).items()
    }
    (found,) = loud(with_round(bare(2, 2), "mesh", raised))
    assert found.code == "group-init-failed"
    assert "homogeneous" in found.message


def test_a_hang_that_went_away_is_a_warning():
    told = {rank: at(MESH, rank, "tp") for rank in (0, 1)}
    once = with_round(bare(2, 2), "mesh", told)
    (found,) = loud(with_round(once, "mesh-again", {}))
    assert (found.code, found.level) == ("collective-hang", Severity.WARN)
    (found,) = loud(with_round(once, "mesh-again", told))
    assert (found.level, found.where.ranks) == (Severity.FAIL, (0, 1))


def test_those_who_waited_for_one_that_took_no_part_are_not_blamed():
    lacks = Outcome(OutcomeStatus.SILENT, reason="no word")
    told = {0: at(MESH, 0, "dp"), 2: lacks, 1: at(MESH, 1, "tp"), 3: at(MESH, 3, "tp")}
    assert blamed(with_round(bare(2, 2), "mesh", told)) == []


def bad(group: str, *contributors: int) -> dict[str, Any]:
    example = "element 1 is 9, not 2"
    return {"step": "all_reduce", "group": group, "contributors": contributors, "example": example}


def test_a_wrong_result_names_the_rank_that_gave_it_by_its_place_in_the_group():
    group = mesh_groups(MESH)["tp"][1]
    seen = {**OK, "wrong": [bad(group.name, 1)]}
    (found,) = loud(with_round(bare(2, 2), "mesh", {2: seen, 3: seen}))
    assert (found.code, found.where.ranks) == ("collective-wrong-result", (3,))
    assert group.name in found.message


def test_a_rank_that_alone_sees_wrong_results_in_all_its_groups_is_one_finding():
    seen = {**OK, "wrong": [bad(group.name, 0) for group in own_groups(MESH, 1)]}
    assert blamed(with_round(bare(2, 2), "mesh", {1: seen})) == [("collective-wrong-result", (1,))]


def test_one_hosts_own_view_blames_nobody():
    told = {rank: at(MESH, rank, "tp") for rank in (0, 1)}
    assert blamed(with_round(bare(2, 2, complete=False), "mesh", told)) == []
