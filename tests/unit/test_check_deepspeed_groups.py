"""Rules on DeepSpeed's groups, on made-up clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Job, Level, Outcome, OutcomeStatus, Severity, Skip
from nccl_doctor.checks.deepspeed_groups import IMPORT, OWN, WRAPS, DeepspeedGroups
from tests.support.clusters import change_rank, make_cluster
from tests.support.findings import judge, only

CHECK = DeepspeedGroups()
RANKS = (0, 1, 2, 3)
USES = Job(deepspeed=True)
WEIGHT_SYNC = Job(deepspeed=True, groups="weight-sync")


def stack(deepspeed: str = "0.18.0", torch: str = "2.13.0+cu130", **more: Any) -> dict[str, Any]:
    return {
        "import_s": 1.0,
        "deepspeed": deepspeed,
        "torch": torch,
        "accelerator": "cuda",
        "use_nccl2": None,
        **more,
    }


def cluster_of(
    rounds: Mapping[str, Sequence[Mapping[str, Any] | Outcome]], job: Job = USES, **fields: Any
) -> Cluster:
    """Two hosts of two ranks; of each round the outcome of each rank."""
    fields = {"backend": "nccl", "job": job, **fields}
    cluster = make_cluster(("nd0", "nd1"), 2, **fields)
    for seat in RANKS:
        facts = {}
        for name, outcomes in rounds.items():
            value = outcomes[seat]
            if not isinstance(value, Outcome):
                value = Outcome(OutcomeStatus.OK, facts=dict(value))
            facts[name] = replace(value, group=0)
        cluster = change_rank(cluster, seat, facts={CHECK.name: facts})
    return cluster


def seen(
    own: bool, wrapped: bool = False, job: Job = WEIGHT_SYNC, kept: bool = True, **versions: str
) -> Cluster:
    """All rounds were good; whether the default groups were bound."""
    facts = stack(**versions)

    def of(bound: bool, **more: Any) -> list[dict[str, Any]]:
        devices = [f"cuda:{seat % 2}" if bound else None for seat in RANKS]
        return [{**facts, "bound_device_id": device, "size": 4, **more} for device in devices]

    return cluster_of({IMPORT: [facts] * 4, WRAPS: of(wrapped, kept=kept), OWN: of(own)}, job)


EVERYWHERE = {"hosts": ["nd0", "nd1"], "ranks": [0, 1, 2, 3]}


class TestBinding:
    def test_a_side_group_beside_a_group_that_deepspeed_binds(self) -> None:
        found = only(CHECK, seen(own=True), "device-id-multi-group-hang", **EVERYWHERE)
        assert found.level is Severity.WARN
        assert found.confidence is Confidence.LIKELY
        assert "DeepSpeed 0.18.0 and torch 2.13.0+cu130" in found.message
        assert "seen on the group itself" in found.message
        assert "without device_id, before deepspeed.init_distributed()" in found.fix
        assert "was seen here" in found.fix
        assert found.evidence["by"] == ["deepspeed"]

    def test_torch_that_binds_by_itself_gets_another_advice(self) -> None:
        cluster = seen(own=True, wrapped=True, torch="2.15.0+cu132")
        found = only(CHECK, cluster, "device-id-multi-group-hang", **EVERYWHERE)
        assert found.level is Severity.WARN
        assert found.confidence is Confidence.POSSIBLE
        assert "bound_device_id to None" in found.fix
        assert "not run on a GPU" in found.fix
        assert found.evidence["by"] == ["deepspeed", "torch"]

    def test_versions_alone_where_nothing_was_seen(self) -> None:
        cluster = cluster_of({IMPORT: [stack()] * 4}, WEIGHT_SYNC)
        found = only(CHECK, cluster, "device-id-multi-group-hang", **EVERYWHERE)
        assert "read in the source" in found.message
        assert found.evidence["seen"] is None

    @pytest.mark.parametrize(
        "job", [Job(groups="many", deepspeed=True), Job(mesh=(("dp", 2), ("tp", 2)))]
    )
    def test_groups_that_all_ranks_make_are_only_told(self, job: Job) -> None:
        (found,) = judge(CHECK, seen(own=True, job=job))
        assert found.level is Severity.INFO
        assert "unless every rank calls new_group" in found.message

    @pytest.mark.parametrize("groups", ["auto", "one"])
    def test_one_group_is_fine(self, groups: str) -> None:
        assert judge(CHECK, seen(own=True, job=Job(deepspeed=True, groups=groups))) == []

    @pytest.mark.parametrize(
        ("deepspeed", "torch"),
        [("0.17.2", "2.13.0"), ("0.18.0", "2.7.0+cu126"), ("0.18.0", "2.2.0")],
    )
    def test_versions_that_bind_nothing_are_fine(self, deepspeed: str, torch: str) -> None:
        assert judge(CHECK, seen(own=False, deepspeed=deepspeed, torch=torch)) == []

    def test_gloo_splits_nothing(self) -> None:
        assert judge(CHECK, replace(seen(own=True), backend="gloo")) == []

    def test_what_is_seen_wins_over_the_table_and_says_so(self) -> None:
        (free,) = judge(CHECK, seen(own=False))
        assert free.level is Severity.INFO
        assert "is not bound" in free.message
        assert free.kind.title.startswith("Whether a further group hangs")
        assert "though by the table of versions it would be bound" in free.message
        assert free.fix.startswith("nothing")

        found = only(
            CHECK, seen(own=True, deepspeed="0.17.2"), "device-id-multi-group-hang", **EVERYWHERE
        )
        assert found.level is Severity.WARN
        assert "it would not be" in found.message

    def test_a_group_that_was_not_kept_changes_the_advice(self) -> None:
        (found,) = judge(CHECK, seen(own=True, kept=False))
        assert "before deepspeed.init_distributed()" not in found.fix
        assert found.confidence is Confidence.POSSIBLE

    def test_a_world_of_one_says_nothing_of_a_world_of_four(self) -> None:
        facts = stack(deepspeed="0.19.8", bound_device_id=None, size=1)
        cluster = make_cluster(("nd0",), 1, backend="nccl", job=WEIGHT_SYNC, world_size=4)
        rounds = {
            name: Outcome(OutcomeStatus.OK, facts=facts, group=0) for name in (IMPORT, WRAPS, OWN)
        }
        (found,) = judge(CHECK, change_rank(cluster, 0, facts={CHECK.name: rounds}))
        assert found.level is Severity.WARN
        assert found.evidence["seen"] is None

    def test_a_build_between_releases_is_not_guessed_at(self) -> None:
        cluster = cluster_of({IMPORT: [stack("0.17.3+abc1234")] * 4}, WEIGHT_SYNC)
        (found,) = judge(CHECK, cluster)
        assert found.level is Severity.INFO
        assert "may or may not be bound" in found.message
        assert "build between two releases" in found.evidence["why"]

    def test_a_side_group_that_worked_here_is_no_warning(self) -> None:
        cluster = seen(own=True)
        good = Outcome(OutcomeStatus.OK, facts={"bound_device_id": "cuda:0"}, group=0)
        for rank in cluster.ranks:
            facts = {**rank.facts, "side_group": {"bound": good}}
            cluster = change_rank(cluster, rank.seat, facts=facts)
        (found,) = judge(CHECK, cluster)
        assert found.level is Severity.INFO
        assert "side_group formed a side group here" in found.message

    def test_deepspeed_that_nobody_said_is_used_is_only_possible(self) -> None:
        (found,) = judge(CHECK, seen(own=True, job=Job(groups="weight-sync")))
        assert (found.level, found.confidence) == (Severity.WARN, Confidence.POSSIBLE)


class TestHang:
    def hung(self, group: str, device: str | None) -> Outcome:
        crumbs = (
            {"step": "init_process_group", "at_s": 1.0, "group": "own"},
            {"step": "new_group", "at_s": 2.0, "group": group},
        )
        witness = {"default_group": {"bound_device_id": device, **stack()}}
        return Outcome(
            OutcomeStatus.HUNG,
            breadcrumbs=crumbs,
            state="S",
            duration_s=20.0,
            witness=witness,
        )

    def cluster(self, stuck: Outcome, wrapped: str | None = None) -> Cluster:
        control = stack(bound_device_id=wrapped, size=4, kept=True)
        rounds = {
            IMPORT: [stack()] * 4,
            WRAPS: [control] * 4,
            OWN: [stuck] * 4,
            OWN + "-again": [stuck] * 4,
        }
        return cluster_of(rounds, USES)

    def test_a_further_group_beside_a_bound_one_only(self) -> None:
        cluster = self.cluster(self.hung("evens", "cuda:0"))
        found = only(CHECK, cluster, "device-id-multi-group-hang", **EVERYWHERE)
        assert found.level is Severity.FAIL
        assert found.confidence is Confidence.LIKELY
        assert "not bound it finished" in found.message

    @pytest.mark.parametrize(
        ("group", "device", "wrapped"),
        [
            ("default", "cuda:0", None),  # not in a further group
            ("evens", None, None),  # not bound
            ("evens", "cuda:0", "cuda:0"),  # the other was bound as well
        ],
    )
    def test_any_other_hang_is_one_of_the_group(
        self, group: str, device: str | None, wrapped: str | None
    ) -> None:
        cluster = self.cluster(self.hung(group, device), wrapped)
        only(CHECK, cluster, "group-init-hang", **EVERYWHERE)


class TestMissing:
    LACKS: Mapping[str, Any] = {"error": "not installed"}

    def test_ranks_without_it_beside_ranks_with_it(self) -> None:
        cluster = cluster_of({IMPORT: [stack(), stack(), self.LACKS, self.LACKS]})
        found = only(CHECK, cluster, "deepspeed-missing", hosts=["nd1"], ranks=[2, 3])
        assert found.level is Severity.FAIL

    def test_nobody_has_it_so_the_job_may_have_another_environment(self) -> None:
        found = only(
            CHECK, cluster_of({IMPORT: [self.LACKS] * 4}), "deepspeed-missing", **EVERYWHERE
        )
        assert (found.level, found.confidence) == (Severity.WARN, Confidence.POSSIBLE)

    def test_nobody_has_it_though_its_launcher_started_them(self) -> None:
        cluster = cluster_of({IMPORT: [self.LACKS] * 4})
        for seat in RANKS:
            cluster = change_rank(cluster, seat, launch={"launcher": "deepspeed"})
        found = only(CHECK, cluster, "deepspeed-missing", **EVERYWHERE)
        assert found.level is Severity.FAIL

    def test_one_that_is_installed_and_broken(self) -> None:
        crumbs = ({"step": "import deepspeed", "at_s": 0.1},)
        words = 'Traceback …\n  File "x.py"\nImportError: libcudart.so.12: not there\n'
        broken = Outcome(OutcomeStatus.RAISED, reason=words, breadcrumbs=crumbs)
        dead = Outcome(OutcomeStatus.DIED, signal="SIGILL", breadcrumbs=crumbs)
        cluster = cluster_of({IMPORT: [stack(), broken, stack(), dead]})
        found = {f.where.ranks: f for f in judge(CHECK, cluster)}
        assert set(found) == {(1,), (3,)}
        assert "libcudart.so.12" in found[(1,)].message
        assert "SIGILL" in found[(3,)].message
        # A job that does not use it does not care.
        assert judge(CHECK, replace(cluster, job=Job())) == []


class TestPlan:
    def names(self, cluster: Cluster) -> list[str]:
        return [round_.name for round_ in CHECK.plan(cluster)]

    def test_a_job_without_it_is_not_examined_but_for_a_full_run(self) -> None:
        with pytest.raises(Skip, match="no sign that the job uses DeepSpeed"):
            CHECK.plan(cluster_of({}, Job()))
        assert self.names(cluster_of({}, Job(), level=Level.FULL)) == [IMPORT]

    def test_the_groups_come_after_the_import_with_time_for_another(self) -> None:
        assert self.names(cluster_of({})) == [IMPORT]
        cluster = cluster_of({IMPORT: [stack(), stack(import_s=9.0), stack(), stack()]})
        rounds = CHECK.plan(cluster)
        assert [round_.name for round_ in rounds] == [IMPORT, WRAPS, OWN]
        assert rounds[-1].groups == (RANKS,)
        assert rounds[-1].deadline_s > cluster.collective_timeout_s + 2 * 9
        assert rounds[-1].params["groups"] == {"evens": [0, 2], "odds": [1, 3]}

    def test_no_group_is_tried_where_some_cannot_import_it(self) -> None:
        lacks = {"error": "not installed"}
        assert self.names(cluster_of({IMPORT: [stack(), lacks, stack(), stack()]})) == [IMPORT]
        skipped = [Outcome(OutcomeStatus.SKIPPED, reason="DeepSpeed is not installed")] * 4
        assert self.names(cluster_of({IMPORT: skipped}, Job(groups="many"))) == [IMPORT]
        raised = Outcome(OutcomeStatus.RAISED, reason="ImportError: x")
        assert self.names(cluster_of({IMPORT: [stack(), raised, stack(), stack()]})) == [IMPORT]

    def test_what_some_ranks_lack_is_not_passed_off_as_tested(self) -> None:
        skipped = Outcome(OutcomeStatus.SKIPPED, reason="DeepSpeed is not installed")
        cluster = cluster_of({IMPORT: [stack(), skipped, stack(), skipped]}, Job(groups="many"))
        rounds = CHECK.plan(cluster)
        assert [round_.name for round_ in rounds] == [IMPORT, WRAPS, OWN]
        assert rounds[-1].params["lacking"] == "1, 3"


def test_nobody_is_blamed_where_not_all_were_called() -> None:
    assert judge(CHECK, replace(seen(own=True), complete=False)) == []
