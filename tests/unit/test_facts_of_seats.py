"""Facts that grow from round to round, below hosts and ranks that stay the same."""

from __future__ import annotations

from nccl_doctor.gather.evidence import EvidenceLog, FactsOfSeats
from nccl_doctor.launch.ranks import host_launch
from nccl_doctor.model.cluster import ALONE, Cluster, Outcome, OutcomeStatus
from nccl_doctor.model.findings import Scope
from nccl_doctor.model.options import Flags, Options
from tests.unit.test_evidence_log import sign_in

SCOPES = {"link": Scope.HOST, "groups": Scope.RANK}


def outcome(words: str, status: OutcomeStatus = OutcomeStatus.OK) -> Outcome:
    return Outcome(status, {"said": words}, breadcrumbs=({"step": words, "at_s": 0.0},))


def test_what_a_host_is_said_to_have_grows() -> None:
    facts = FactsOfSeats(SCOPES)
    facts.record(7, "link", ALONE, outcome("early"))
    here = facts.of_hosts({"nd0": [7], "nd1": [8]})
    assert here == {"nd0": {"link": {ALONE: outcome("early")}}, "nd1": {}}
    facts.record(7, "link", "late", outcome("late"))
    facts.record(8, "link", "late", outcome("of another host"))
    facts.record(8, "groups", "all", outcome("of a rank"))
    facts.grow()
    assert here["nd0"]["link"] == {ALONE: outcome("early"), "late": outcome("late")}
    assert here["nd1"] == {"link": {"late": outcome("of another host")}}
    assert facts.of_rank(8) == {"groups": {"all": outcome("of a rank")}}
    assert facts.of_rank(7) == {}


def test_the_rank_that_speaks_for_a_host_is_heard() -> None:
    facts = FactsOfSeats(SCOPES)
    for seat in (1, 2):
        facts.record(seat, "link", ALONE, outcome(f"of {seat}"))
        facts.record(seat, "link", f"round {seat}", outcome(f"of {seat}"))
    here = facts.of_hosts({"nd0": [2, 1]})
    assert here["nd0"]["link"] == {
        ALONE: outcome("of 1"),
        "round 1": outcome("of 1"),
        "round 2": outcome("of 2"),
    }
    facts.record(2, "link", ALONE, outcome("once more"))
    facts.grow()
    assert here["nd0"]["link"][ALONE] == outcome("of 1")
    facts.forget(1)
    assert facts.of_hosts({"nd0": [2]})["nd0"]["link"][ALONE] == outcome("once more")


def test_the_last_step_is_that_of_what_ended_badly() -> None:
    facts = FactsOfSeats(SCOPES)
    assert facts.last_step(1) is None
    for words, status in (
        ("first", OutcomeStatus.OK),
        ("stuck", OutcomeStatus.HUNG),
        ("afterwards", OutcomeStatus.OK),
    ):
        facts.record(1, "groups", words, outcome(words, status))
    assert facts.last_step(1) == "stuck"


def log_of(hosts: int) -> EvidenceLog:
    launch = host_launch(Flags(nnodes=hosts, node_rank=0, master_addr="nd0"), 1)
    log = EvidenceLog(launch, SCOPES, {})
    for seat in range(hosts):
        log.sign_in(seat, sign_in(seat, 1), 0.0)
    return log


def seen(cluster: Cluster, check: str) -> list[str]:
    return [facts["said"] for _, facts in cluster.facts(check)]


def test_a_round_makes_no_new_ranks_and_hides_nothing_that_was_asked_before() -> None:
    log, options = log_of(3), Options()
    log.record(0, "link", ALONE, outcome("one"))
    log.record(0, "groups", ALONE, outcome("rank 0"))
    before = log.cluster(options, "gloo", steps=False)
    assert (seen(before, "link"), seen(before, "groups")) == (["one"], ["rank 0"])
    assert log.cluster(options, "gloo", steps=False) is before
    log.record(1, "link", ALONE, outcome("two"))
    after = log.cluster(options, "gloo", steps=False)
    assert after is not before
    assert all(a is b for a, b in zip(after.ranks, before.ranks, strict=True))
    assert seen(after, "link") == ["one", "two"]
    assert seen(after, "groups") == ["rank 0"]
    log.record(2, "groups", ALONE, outcome("rank 2"))
    assert seen(log.cluster(options, "gloo", steps=False), "groups") == ["rank 0", "rank 2"]


def test_who_signs_in_later_is_one_of_the_cluster() -> None:
    log, options = log_of(2), Options()
    log.record(1, "link", ALONE, outcome("one"))
    before = log.cluster(options, "gloo", steps=False)
    log.sign_in(2, sign_in(2, 1), 1.0)
    log.record(2, "link", ALONE, outcome("two"))
    after = log.cluster(options, "gloo", steps=False)
    assert (seen(before, "link"), seen(after, "link")) == (["one"], ["one", "two"])
    assert len(after.present) == 3


def test_only_a_report_says_what_each_rank_did_last() -> None:
    log, options = log_of(1), Options()
    log.record(0, "groups", ALONE, outcome("all_reduce", OutcomeStatus.HUNG))
    assert log.cluster(options, "gloo", steps=False).ranks[0].last_breadcrumb is None
    assert log.cluster(options, "gloo", run_id="id").ranks[0].last_breadcrumb == "all_reduce"
    assert log.cluster(options, "gloo", run_id="id").run_id == "id"
