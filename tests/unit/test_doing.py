"""The evidence of a hang: what is the same for many ranks is said once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from nccl_doctor.model.cluster import Evidence, Outcome, OutcomeStatus
from nccl_doctor.toolkit.groups.attempts import Attempt
from nccl_doctor.toolkit.groups.culprits import judge_groups
from nccl_doctor.toolkit.groups.doing import MOST_ENTRIES, what_they_did
from nccl_doctor.toolkit.groups.stacks import main_stack, signature
from tests.support.clusters import make_cluster
from tests.support.rows import each_row

CRUMBS = (
    {"step": "connect to the store", "at_s": 0.1, "group": "world"},
    {"step": "init_process_group", "at_s": 0.2, "group": "world"},
    {"step": "all_reduce", "at_s": 0.3, "group": "world", "sequence": 3, "bytes": 8},
)
FORMING = CRUMBS[:2]


def stack(number: int = 0, inner: str = "all_reduce", package: str = "/opt/venv") -> str:
    """As faulthandler writes it; the main thread comes last."""
    torch = f"{package}/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    return f"""\
Thread 0x{0x7F00 + number:016x} (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/srv/nccl_doctor/mailbox.py", line 223 in _serve

Thread 0x{0x7E00 + number:016x} (most recent call first):
  File "/srv/nccl_doctor/tools/groups/witness.py", line 40 in _testify

Current thread 0x{0x7D00 + number:016x} (most recent call first):
  File "{torch}", line {3000 + number} in {inner}
  File "/srv/checks/collectives.py", line 100 in observe
  File "/srv/nccl_doctor/child.py", line 300 in _result
  File "/srv/nccl_doctor/{"coordinator" if number == 0 else "supervisor"}.py", line 5 in conduct"""


def group(
    enqueued: int, completed: int, name: str = "gloo:all_reduce", **fields: Any
) -> dict[str, Any]:
    told = {"collective": name, "sequence": enqueued, "sizes": [[1]], "state": "scheduled"}
    return {
        "group": "0",
        "description": "default_pg",
        "entries": enqueued,
        "enqueued": enqueued,
        "started": None,
        "completed": completed,
        "last_enqueued": told,
        "pending": told if enqueued > completed else None,
        **fields,
    }


def hung(*groups: dict[str, Any], **fields: Any) -> Outcome:
    return replace(
        Outcome(
            OutcomeStatus.HUNG,
            breadcrumbs=CRUMBS,
            stack=stack(),
            state="S",
            wchan="ep_poll",
            duration_s=20.0,
            witness={"recorder": {"groups": list(groups)}} if groups else {},
        ),
        **fields,
    )


def attempt(outcomes: list[Outcome], name: str = "world") -> Attempt:
    cluster = make_cluster(("nd0",), len(outcomes))
    members = zip(cluster.ranks, outcomes, strict=True)
    return Attempt(name, tuple(Evidence(rank, name, outcome) for rank, outcome in members))


def size(evidence: dict[str, Any]) -> int:
    return len(json.dumps(evidence))


def test_a_thousand_ranks_with_one_stack_are_one_line() -> None:
    evidence = what_they_did(
        attempt(
            [
                hung(
                    group(3, 2),
                    stack=stack(n, package=f"/home/user{n}/venv"),
                    log_tail=f"nd{n}:{n}:{n + 1} [{n % 8}] NCCL WARN Connect to 10.0.0.{n} failed",
                )
                for n in range(1000)
            ]
        )
    )
    (entry,) = evidence["doing"]
    assert (entry["ranks"], entry["count"]) == ("0–999", 1000)
    assert (
        entry["stack"]
        .splitlines()[0]
        .startswith("all_reduce (torch/distributed/distributed_c10d.py:")
    )
    assert "witness" not in entry["stack"]
    assert [each["ranks"] for each in evidence["recorder"]] == ["0–999"]
    assert [each["ranks"] for each in evidence["log"]] == ["0–999"]
    assert (evidence["collective"], evidence["sequence"]) == ("all_reduce", 3)
    assert size(evidence) < 4000


def test_stacks_end_at_the_check_in_new_and_old_reports() -> None:
    old = stack()
    new = old
    for before, now in (
        ("nccl_doctor/mailbox.py", "nccl_doctor/gather/store.py"),
        ("nccl_doctor/tools/groups", "nccl_doctor/toolkit/groups"),
        ("checks/collectives.py", "checks/collectives/__init__.py"),
        ("nccl_doctor/child.py", "nccl_doctor/observe/child.py"),
        ("nccl_doctor/coordinator.py", "nccl_doctor/gather/coordinator.py"),
    ):
        assert before in new
        new = new.replace(before, now)
    for text in (old, new):
        ((call, check),) = signature(text)
        assert (call[0], check[0]) == ("all_reduce", "observe")
        assert main_stack(text).count("\n") == 1


def test_two_kinds_of_stacks_are_two_lines_the_larger_first() -> None:
    evidence = what_they_did(
        attempt([hung(stack=stack(n, "broadcast" if n == 500 else "wait")) for n in range(1000)])
    )
    assert [each["ranks"] for each in evidence["doing"]] == ["0–499, 501–999", "500"]
    assert size(evidence) < 4000


def test_ranks_that_all_differ_are_cut_and_counted() -> None:
    outcomes = [
        hung(
            group(n + 1, 0),
            stack=stack(n, f"call_{n}") * 50,
            log_tail=(f"line {'x' * n}\n" * 500)[-4000:],
            wchan=f"wait_{n}",
        )
        for n in range(1000)
    ]
    evidence = what_they_did(attempt(outcomes))
    assert len(evidence["doing"]) == MOST_ENTRIES
    assert evidence["left_out"] == 1000 - MOST_ENTRIES
    assert size(evidence) < 50_000


def test_ranks_in_many_pieces_are_cut() -> None:
    evidence = what_they_did(attempt([hung(state="S" if n % 2 else "R") for n in range(2000)]))
    assert all(len(each["ranks"]) < 200 for each in evidence["doing"])
    assert [each["count"] for each in evidence["doing"]] == [1000, 1000]


def test_who_entered_finished_and_never_came() -> None:
    ok = Outcome(OutcomeStatus.OK, facts={"steps": []}, breadcrumbs=CRUMBS)
    late = hung(breadcrumbs=CRUMBS[:1])
    evidence = what_they_did(attempt([ok, hung(), late, hung(breadcrumbs=FORMING)]))
    assert (evidence["entered"], evidence["finished"]) == ("0–1, 3", "0")
    assert evidence["never_came"] == "2"
    assert evidence["collective"] == {
        "all_reduce": "1",
        "connect to the store": "2",
        "init_process_group": "3",
    }


def test_sequences_that_differ_are_said_by_rank() -> None:
    ahead = (*CRUMBS, {"step": "barrier", "group": "world", "sequence": 4})
    evidence = what_they_did(attempt([hung(), hung(breadcrumbs=ahead), hung()]))
    assert evidence["sequence"] == {"3": "0, 2", "4": "1"}


def test_errors_that_differ_in_a_port_are_one_and_have_a_meaning() -> None:
    outcomes = [
        Outcome(
            OutcomeStatus.RAISED,
            breadcrumbs=CRUMBS,
            reason=f"Traceback\nDistBackendError: socketProgress: Connection closed by remote peer "
            f"nd1<{n}>",
        )
        for n in range(40000, 40008)
    ]
    (entry,) = what_they_did(attempt(outcomes))["errors"]
    assert entry["ranks"] == "0–7"
    assert "only a victim" in entry["means"]
    assert entry["ask"]


def test_nccl_speaks_for_itself_and_its_warnings_are_kept() -> None:
    log = ["some banner", "nd0:1:2 [0] enqueue.cc:1 NCCL WARN the cause"]
    log += [f"nd0:1:2 [0] NCCL INFO step {n}" for n in range(50)]
    (entry,) = what_they_did(attempt([hung(log_tail="\n".join(log))]))["log"]
    lines = entry["text"].splitlines()
    assert (lines[0], lines[-1]) == ("NCCL WARN the cause", "NCCL INFO step 49")
    assert "banner" not in entry["text"]


def test_what_ras_says_is_said_once() -> None:
    ras = {"answer": "json", "communicators": [{"behind": "1"}]}
    found = what_they_did(attempt([hung(witness={"ras": ras}) for _ in range(4)]))["ras"]
    assert found == [{"ranks": "0–3", "count": 4, **ras}]


@each_row(
    "fields",
    [
        {"breadcrumbs": ({"step": "all_reduce", "sequence": [1], "group": {"a": 1}},)},
        {"witness": {"recorder": "x", "ras": [1]}},
        {"witness": {"recorder": {"groups": [1, {"pending": {"sequence": "x"}}, None]}}},
        {"witness": {"recorder": {"groups": {"a": 1}}}},
        {"witness": {"recorder": {"groups": [{"pending": 5, "enqueued": "x", "completed": []}]}}},
        {"stack": "no frames here"},
        {"stack": "Thread 0x1 (most recent call first):\n"},
        {"log_tail": "\x1b[31m\ud800"},
    ],
)
def test_a_damaged_report_breaks_nothing(fields: dict[str, Any]) -> None:
    made = attempt([hung(group(3, 2)), hung(**fields)])
    told = json.loads(json.dumps(what_they_did(made)))
    assert (told["collective"], told["sequence"], told["entered"]) == ("all_reduce", 3, "0–1")
    assert sum(each["count"] for each in told["doing"]) == 2
    (found,) = judge_groups({"world": [made]})
    assert (found.code, found.where.ranks) == ("collective-hang", (0, 1))


def test_one_that_left_no_breadcrumb_never_came() -> None:
    made = attempt([hung(group(3, 2)), hung(breadcrumbs=())])
    told = what_they_did(made)
    assert (told["entered"], told["never_came"]) == ("0", "1")
    (found,) = judge_groups({"world": [made]})
    assert (found.code, found.where.ranks) == ("rank-frozen", (1,))


# --- who lags ---


def lags(*outcomes: Outcome) -> list[int]:
    return [m.rank.rank or 0 for m in attempt(list(outcomes)).lagging]


def test_one_that_never_entered_the_others_collective_lags_and_is_blamed() -> None:
    made = attempt([hung(group(3, 2)), hung(group(2, 2)), hung(group(3, 2))])
    assert what_they_did(made)["lagging"] == "1"
    (found,) = judge_groups({"world": [made]})
    assert (found.code, found.where.ranks) == ("rank-frozen", (1,))
    assert "never entered" in found.message
    assert found.confidence.value == "likely"


def test_one_that_waits_inside_a_collective_is_not_blamed_however_far_behind() -> None:
    assert lags(hung(group(3, 2)), hung(group(2, 1)), hung(group(3, 2))) == []


def test_nobody_lags_where_all_wait_or_nothing_is_recorded() -> None:
    assert lags(hung(group(3, 2)), hung(group(3, 2))) == []
    assert lags(hung(), hung()) == []
    assert lags(hung(group(3, 2)), hung()) == []
    assert lags(hung(group(2, 2)), hung(group(2, 2))) == []


def test_one_that_still_forms_a_group_does_not_lag() -> None:
    assert (
        lags(hung(group(1, 0)), hung(breadcrumbs=FORMING, witness={"recorder": {"groups": []}}))
        == []
    )


def test_first_collective_tells_with_gloo_and_not_with_nccl_that_forms_in_it() -> None:
    none = hung(witness={"recorder": {"groups": []}})
    assert lags(hung(group(1, 0)), none) == [1]
    assert lags(hung(group(1, 0, "nccl:all_reduce")), none) == []
    assert lags(hung(group(2, 1, "nccl:all_reduce")), hung(group(1, 1, "nccl:all_reduce"))) == [1]


def test_no_member_of_the_group_does_not_lag_in_it() -> None:
    other = {"group": "7", "description": "evens"}
    assert lags(hung(group(2, 2), group(3, 2, **other)), hung(group(2, 2))) == []


def test_a_dead_or_stopped_member_is_to_blame_before_one_that_lags() -> None:
    dead = Outcome(OutcomeStatus.DIED, signal="SIGKILL", breadcrumbs=CRUMBS)
    assert lags(hung(group(3, 2)), hung(group(2, 2)), dead) == []
    assert lags(hung(group(3, 2)), hung(group(2, 2)), hung(state="T")) == []
