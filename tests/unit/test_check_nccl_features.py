"""Features of NCCL that are turned off one at a time, on made-up clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Finding, Outcome, OutcomeStatus, Severity, Skip
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.findings import Round
from nccl_doctor.toolkit.groups.attempts import attempt_deadline
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.reports import RUN
from tests.support.rows import each_row

CHECK = CHECKS["nccl_features"]
LIMIT_S = 20.0
ENTERED = ({"step": "init_process_group", "at_s": 0.0}, {"step": "all_reduce", "at_s": 1.0})
WRONG = {"step": "all_reduce", "group": "world", "contributors": [], "example": "element 0 is 9"}

NVLS, CUMEM, P2P, IB = (
    "NCCL_NVLS_ENABLE=0",
    "NCCL_CUMEM_HOST_ENABLE=0",
    "NCCL_P2P_DISABLE=1",
    "NCCL_IB_DISABLE=1",
)
ROUND_OF = {NVLS: "without-nvls", CUMEM: "without-cumem-host", P2P: "without-p2p", IB: "without-ib"}


def good(seconds: float = 2.0) -> Outcome:
    return Outcome(OutcomeStatus.OK, facts={"steps": [], "wrong": []}, duration_s=seconds)


def hung(seconds: float = LIMIT_S, **changes: Any) -> Outcome:
    made = Outcome(OutcomeStatus.HUNG, breadcrumbs=ENTERED, state="S", duration_s=seconds)
    return replace(made, **changes)


def raised(text: str = "RuntimeError: NCCL error: unhandled cuda error") -> Outcome:
    return Outcome(OutcomeStatus.RAISED, reason=text, breadcrumbs=ENTERED, duration_s=1.0)


def died(signal: str = "SIGSEGV") -> Outcome:
    return Outcome(OutcomeStatus.DIED, signal=signal, breadcrumbs=ENTERED, duration_s=1.0)


def wrong() -> Outcome:
    return replace(good(), facts={"steps": [], "wrong": [WRONG]})


def with_round(
    cluster: Cluster, check: str, name: str, groups: Mapping[tuple[int, ...], Any]
) -> Cluster:
    """After one more round; each group with the outcome of all its members, or of each seat."""
    ranks = []
    for rank in cluster.ranks:
        facts = {key: dict(rounds) for key, rounds in rank.facts.items()}
        for seats, ends in groups.items():
            if rank.seat in seats:
                end = ends[rank.seat] if isinstance(ends, dict) else ends
                facts.setdefault(check, {})[name] = replace(end, group=min(seats))
        ranks.append(replace(rank, facts=facts))
    return replace(cluster, ranks=tuple(ranks))


def cluster(hosts: int = 1, nproc: int = 4, **fields: Any) -> Cluster:
    names = [f"nd{i}" for i in range(hosts)]
    return make_cluster(names, nproc, backend="nccl", collective_timeout_s=LIMIT_S, **fields)


def failed(end: Any, hosts: int = 1, nproc: int = 4, **fields: Any) -> Cluster:
    """All ranks ended so."""
    made = cluster(hosts, nproc, **fields)
    return with_round(made, "collectives", "world", {tuple(range(hosts * nproc)): end})


Ends = Callable[[Round, tuple[int, ...]], Any]


def held(made: Cluster, ends: Ends) -> tuple[Cluster, list[Round]]:
    """After all rounds that the check plans, and these rounds."""
    done: list[Round] = []
    while new := [r for r in CHECK.plan(made) if r.name not in {each.name for each in done}]:
        for round_ in new:
            done.append(round_)
            groups = {group: ends(round_, group) for group in round_.groups}
            made = with_round(made, CHECK.name, round_.name, groups)
    return made, done


def cured_by(setting: str, end: Any) -> Ends:
    """Everything ends so, unless this is set."""
    variable, _, value = setting.partition("=")
    return lambda round_, _: good() if round_.params["env"].get(variable) == value else end


def names(rounds: Sequence[Round]) -> list[str]:
    return [round_.name for round_ in rounds]


@each_row(("end", "setting"), product([hung(), raised(), died(), wrong()], [NVLS, CUMEM, P2P]))
def test_the_feature_without_which_a_host_is_good_is_named(setting: str, end: Outcome) -> None:
    made, rounds = held(failed(end), cured_by(setting, end))
    found = only(CHECK, made, "nccl-feature-broken", hosts=["nd0"], ranks=[0, 1, 2, 3])
    assert f"good with {setting}, fails again without it" in found.message
    assert f"export {setting}" in found.fix
    assert found.level is Severity.FAIL
    tried = [NVLS, CUMEM, P2P]
    tried = tried[: tried.index(setting) + 1]
    assert found.evidence["tried"] == tried
    assert names(rounds) == [*(ROUND_OF[each] for each in tried), "as-before"]
    assert all(round_.deadline_s <= attempt_deadline(made) for round_ in rounds)


def test_it_is_the_cause_of_what_the_other_checks_found() -> None:
    made, _ = held(failed(hung()), cured_by(P2P, hung()))
    report = conclude(made, [CHECKS["collectives"], CHECK], run=RUN)
    assert [found.code for found in report.root_causes] == ["nccl-feature-broken"]
    others = {(f.code, f.explained_by) for f in report.findings if f.code != "nccl-feature-broken"}
    assert others == {("collective-hang", "nccl-feature-broken")}


def test_across_hosts_it_is_rdma_and_not_copies_within_a_host() -> None:
    made = failed(hung(), hosts=2)
    made = with_round(
        made, "collectives", "each-host", {(0, 1, 2, 3): good(1.0), (4, 5, 6, 7): good(1.5)}
    )
    made, rounds = held(made, cured_by(IB, hung()))
    assert names(rounds) == [ROUND_OF[NVLS], ROUND_OF[CUMEM], ROUND_OF[IB], "as-before"]
    assert {round_.deadline_s for round_ in rounds[:3]} == {8 * 1.5}
    found = only(
        CHECK, made, "nccl-feature-broken", hosts=["nd0", "nd1"], ranks=[0, 1, 2, 3, 4, 5, 6, 7]
    )
    assert "InfiniBand or RoCE" in found.message


def test_the_host_that_fails_alone_is_tried_and_no_other() -> None:
    made = failed(hung(), hosts=2)
    made = with_round(
        made, "collectives", "each-host", {(0, 1, 2, 3): good(), (4, 5, 6, 7): hung()}
    )
    made, rounds = held(made, cured_by(NVLS, hung()))
    assert {round_.groups for round_ in rounds} == {((4, 5, 6, 7),)}
    only(CHECK, made, "nccl-feature-broken", hosts=["nd1"], ranks=[4, 5, 6, 7])


def test_the_same_on_every_host_is_one_finding_in_the_end() -> None:
    made = failed(raised(), hosts=2)
    made = with_round(
        made, "collectives", "each-host", {(0, 1, 2, 3): raised(), (4, 5, 6, 7): raised()}
    )
    made, rounds = held(made, cured_by(NVLS, raised()))
    assert {round_.groups for round_ in rounds} == {((0, 1, 2, 3), (4, 5, 6, 7))}
    report = conclude(made, [CHECK], run=RUN)
    (cause,) = report.root_causes
    assert cause.where.hosts == ("nd0", "nd1")


def test_the_smallest_ones_that_fail_are_tried() -> None:
    made = with_round(failed(hung()), "collectives", "isolate-1", {(0, 1): hung(), (2, 3): good()})
    made, rounds = held(made, cured_by(P2P, hung()))
    assert names(rounds) == [ROUND_OF[CUMEM], ROUND_OF[P2P], "as-before"]  # two use no NVLS
    only(CHECK, made, "nccl-feature-broken", hosts=["nd0"], ranks=[0, 1])


# Nothing is blamed --------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [hung(), raised(), died(), wrong()])
def test_what_helps_nothing_is_not_named(end: Outcome) -> None:
    made, rounds = held(failed(end), lambda *_: end)
    assert judge(CHECK, made) == []
    assert names(rounds) == [ROUND_OF[NVLS], ROUND_OF[CUMEM], ROUND_OF[P2P]]
    report = conclude(made, [CHECKS["collectives"], CHECK], run=RUN)
    status = {check.name: check.status.value for check in report.checks}["nccl_features"]
    assert status == ("pass" if end == wrong() else "unknown")


def test_what_fails_only_now_and_then_is_no_features_fault() -> None:
    made, rounds = held(failed(hung()), lambda *_: good())
    assert names(rounds) == [ROUND_OF[NVLS], "as-before"]
    assert judge(CHECK, made) == []


def test_what_was_good_when_tried_again_is_not_looked_into() -> None:
    made = with_round(failed(hung()), "collectives", "world-again", {(0, 1, 2, 3): good()})
    with pytest.raises(Skip, match="no group that fails every time"):
        CHECK.plan(made)


@pytest.mark.parametrize("seconds", [7.0, 19.0])
def test_a_control_that_was_cut_short_proves_nothing(seconds: float) -> None:
    def ends(round_: Round, _: tuple[int, ...]) -> Outcome:
        if round_.name == ROUND_OF[NVLS]:
            return good(4.0)
        return hung(seconds if round_.name == "as-before" else LIMIT_S)

    made, _ = held(failed(hung()), ends)
    assert len(judge(CHECK, made)) == (1 if seconds > 16 else 0)


@pytest.mark.parametrize(
    "ends",
    [
        {0: hung(), 1: hung(state="T"), 2: hung(), 3: hung()},
        {0: hung(), 1: died("SIGKILL"), 2: hung(), 3: hung()},
        {0: hung(), 1: hung(breadcrumbs=({"step": "start", "at_s": 0.0},)), 2: hung(), 3: hung()},
        {0: hung(), 1: Outcome(OutcomeStatus.SILENT), 2: hung(), 3: hung()},
        {rank: Outcome(OutcomeStatus.UNTESTED, reason="blocked") for rank in range(4)},
        good(),
    ],
)
def test_where_a_rank_is_the_cause_or_nothing_fails_no_round_is_held(ends: Any) -> None:
    with pytest.raises(Skip, match="no group that fails every time"):
        CHECK.plan(failed(ends))
    assert judge(CHECK, failed(ends)) == []


def test_gloo_and_views_of_one_host_are_left_alone() -> None:
    with pytest.raises(Skip, match="the backend is gloo"):
        CHECK.plan(replace(failed(hung()), backend="gloo"))
    with pytest.raises(Skip):
        CHECK.plan(failed(hung(), complete=False))
    with pytest.raises(Skip):
        CHECK.plan(cluster())


def test_what_the_user_has_turned_off_is_not_tried() -> None:
    env = {rank: {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"} for rank in range(4)}
    _, rounds = held(failed(hung(), env=env), lambda *_: hung())
    assert names(rounds) == [ROUND_OF[CUMEM]]


def test_a_round_that_was_not_held_for_lack_of_time_blames_nobody() -> None:
    none = Outcome(OutcomeStatus.UNTESTED, reason="no time was left")
    made, _ = held(
        failed(hung()), lambda round_, _: good() if round_.name == ROUND_OF[NVLS] else none
    )
    assert judge(CHECK, made) == []


def findings_of(made: Cluster) -> list[Finding]:
    return judge(CHECK, made)


def test_a_report_without_the_control_is_judged_all_the_same() -> None:
    made = failed(hung())
    world = {(0, 1, 2, 3): good()}
    assert findings_of(with_round(made, CHECK.name, "without-nvls", world)) == []
    assert findings_of(with_round(made, CHECK.name, "without-what-was", world)) == []
    assert findings_of(with_round(made, CHECK.name, "as-before", {(0, 1, 2, 3): hung()})) == []
