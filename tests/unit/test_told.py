"""What node 0 tells at the end, as a host has it that is no part of the run."""

from __future__ import annotations

from nccl_doctor import registry
from nccl_doctor.api import Confidence, Where
from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.gather.messages import MOST_REASONS, Finish, Reason
from nccl_doctor.gather.refusals import Refusals
from nccl_doctor.gather.told import findings_of, reasons_of
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.kinds import COORDINATOR_LOST
from nccl_doctor.toolkit.shared_kinds import PORT_BLOCKED
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster
from tests.support.reports import RUN
from tests.unit.test_check_master_addr import ND0, facts
from tests.unit.test_check_master_addr_alone import NO_RANK, lone

TWICE = Reason("node-rank-duplicate", "2 hosts claim\nnode rank 0", ("nd0", "nd1"))


def test_two_hosts_with_one_node_rank_have_one_answer_on_both_screens() -> None:
    made = make_cluster(nproc=1)
    for node in (0, 1):
        made = change_rank(made, node, rank=0, launch={"rank": 0, "node_rank": 0})
    first = conclude(made, [CHECKS["ranks"]], run=RUN)
    assert [each.code for each in first.root_causes] == ["node-rank-duplicate"]
    end = Finish(1, "fail", 1, "nd0", reasons_of(first))
    told = findings_of(end, registry.load(), "nd1")
    lost = Finding(COORDINATOR_LOST, "ended", Where(hosts=("nd1",)), explained_by=told[0].code)
    seen = lone("nd1", facts("nd1"), node=0, store=ND0, **NO_RANK)
    second = conclude(seen, [CHECKS["master_addr"]], run=RUN, problems=[*told, lost])
    (cause,) = second.root_causes
    assert (cause.code, cause.where.hosts) == ("node-rank-duplicate", ("nd1",))
    assert cause.message == 'node 0 (nd0) says: "2 hosts claim the same ranks"'
    assert cause.fix.startswith("see node 0's report"), "one of the two keeps its number"
    assert {f.explained_by for f in second.findings} == {None, "node-rank-duplicate"}


def test_only_what_is_known_and_meant_for_this_host_is_taken() -> None:
    end = Finish(1, "fail", 9, "", (TWICE, TWICE._replace(hosts=("nd0",)), Reason("none", "x")))
    (found,) = findings_of(end, registry.load(), "nd1")
    assert found.message == 'node 0 says: "2 hosts claim node rank 0"'
    assert (found.confidence, found.check) == (Confidence.LIKELY, "ranks")
    assert findings_of(Finish(3), registry.load(), "nd1") == []


def test_what_is_told_is_small() -> None:
    hosts = tuple(f"nd{i:05}" for i in range(5000))
    many = [Finding(PORT_BLOCKED, f"{i} " * 5000, Where(hosts=hosts)) for i in range(9)]
    report = conclude(make_cluster(), [], run=RUN, problems=many)
    told = reasons_of(report)
    assert len(told) == MOST_REASONS
    assert all(len(each.message) <= 300 and len(each.hosts) <= 64 for each in told)


def test_each_seat_is_told_why_its_sign_in_was_not_taken() -> None:
    refusals = Refusals()
    refusals.sign_in("seat/7", BadMessage("seat 7: sign-in.pid is not an integer"))
    refusals.sign_in("seats", BadMessage("the number is none"))
    assert refusals.reasons() == {
        7: Reason("message-refused", "seat 7: sign-in.pid is not an integer")
    }
    for seat in range(200):
        refusals.sign_in(f"seat/{seat}", BadMessage("no"))
    assert len(refusals.reasons()) == 64
