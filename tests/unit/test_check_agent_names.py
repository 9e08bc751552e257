"""The name of torchrun's first agent, as every host looks it up."""

from __future__ import annotations

import socket
import time
from collections import Counter
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Job, Launch, Severity, Skip
from nccl_doctor.checks.agent_names import ROUND, AgentNames, others_of
from nccl_doctor.model.job import Rendezvous
from tests.support.clusters import make_cluster
from tests.support.findings import calls, judge, only

CHECK = AgentNames()
C10D = Job(launcher="torchrun", rendezvous=Rendezvous("c10d", "nd0:29400"))


def view(name: str, *answers: str, first: str = "nd0") -> dict[str, Any]:
    error = "" if answers else "Name or service not known"
    return {"name": name, "first": first, "answers": list(answers), "error": error}


def cluster(*views: dict[str, Any], **fields: Any) -> Cluster:
    names = [f"nd{i}" for i in range(len(views))]
    seen = dict(zip(names, views, strict=True))
    return make_cluster(names, check=CHECK.name, by_host=seen, round_name=ROUND, **fields)


def test_a_name_that_leads_to_its_host_from_everywhere_is_right() -> None:
    views = (view("nd0", "127.0.1.1"), view("nd1", "192.168.77.1"), view("nd2", "192.168.77.1"))
    assert judge(CHECK, cluster(*views)) == []


def test_a_name_that_one_host_does_not_know_is_wrong_there() -> None:
    views = (view("nd0", "192.168.77.1"), view("nd1", "192.168.77.1"), view("nd2"))
    found = only(CHECK, cluster(*views), "agent-name-misleads", hosts=["nd2"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
    assert "MASTER_ADDR will be nd0" in found.message
    assert found.fix.startswith("on nd0: # --local-addr 192.168.77.1 ")


def test_a_name_that_nobody_else_knows_is_wrong_on_its_own_host() -> None:
    views = (view("nd0", "192.168.77.1"), view("nd1"), view("nd2"))
    only(CHECK, cluster(*views), "agent-name-misleads", hosts=["nd0"])


def test_localhost_leads_every_host_to_itself() -> None:
    """`127.0.0.1 localhost nd0` in /etc/hosts: getfqdn() says localhost."""
    views = [view(name, "127.0.0.1", first="localhost") for name in ("localhost", "nd1", "nd2")]
    found = only(CHECK, cluster(*views), "agent-name-misleads", hosts=["nd0"])
    assert "is 127.0.0.1, which is each host itself" in found.message
    assert found.level is Severity.FAIL


def test_a_host_that_missed_the_first_name_says_nothing_of_it() -> None:
    """It never heard of nd0, and looked up nd1."""
    views = [view(name, "192.168.77.1") for name in ("nd0", "nd1", "nd2")]
    views[2] = view("nd2", "192.168.77.2", first="nd1")
    assert judge(CHECK, cluster(*views)) == []


def test_a_name_server_that_is_silent_makes_a_likely_failure() -> None:
    views = [view(name, "192.168.77.1") for name in ("nd0", "nd1", "nd2")]
    views[2] = {**view("nd2"), "error": "no answer from the resolver", "silent": True}
    found = only(CHECK, cluster(*views), "agent-name-misleads", hosts=["nd2"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert "gets no answer from the resolver" in found.message
    views[1] = view("nd1")  # and this one knows that there is no such name
    found = only(CHECK, cluster(*views), "agent-name-misleads", hosts=["nd0"])
    assert found.confidence is Confidence.CERTAIN


def test_an_address_that_no_interface_has_may_be_translated() -> None:
    views = (view("nd0", "203.0.113.7"), view("nd1", "203.0.113.7"))
    found = only(CHECK, cluster(*views), "agent-name-misleads", hosts=["nd0"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)


def test_a_later_name_that_misleads_is_worth_knowing_for_a_restart() -> None:
    """nd0 comes first, and is right; were it lost, nd1 would be MASTER_ADDR, which nd2 has not."""
    names = ("nd0", "nd1", "nd2")
    nd1, nd2 = ({"name": f"nd{i}", "answers": [f"192.168.77.{i + 1}"], "error": ""} for i in (1, 2))
    none = {"answers": [], "error": "Name or service not known"}
    views = [{**view(name, "192.168.77.1"), "later": [nd1, nd2]} for name in names]
    assert judge(CHECK, cluster(*views)) == []
    views[2]["later"] = [{**nd1, **none}, nd2]
    found = only(CHECK, cluster(*views), "agent-name-misleads", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert found.message == (
        "after a restart without nd0, MASTER_ADDR may be the name of nd1: on nd2 it does not "
        "resolve (Name or service not known)"
    )
    assert "after a restart" in found.kind.title
    views[2]["later"] = [{**nd1, "answers": ["203.0.113.7"]}, nd2]  # it may be translated
    assert judge(CHECK, cluster(*views)) == []
    views[1] = {**view("nd1"), "later": [nd1, {**nd2, **none}]}  # the first name is the fault here
    only(CHECK, cluster(*views), "agent-name-misleads", hosts=["nd1"])


NONE = {"answers": [], "error": "Name or service not known"}


def many(hosts: int, unknown: str = "") -> Cluster:
    """Hosts that look up each other, of which none knows the name `unknown`."""
    names = [f"nd{i:03}" for i in range(hosts)]
    answers = {name: f"192.168.77.{i + 1}" for i, name in enumerate(names)}
    views = {
        name: {
            **view(name, answers[names[0]], first=names[0]),
            "later": [
                {"name": each, "answers": [answers[each]], "error": ""}
                | (NONE if each == unknown else {})
                for each in others_of(name, names)
            ],
        }
        for name in names
    }
    return make_cluster(names, check=CHECK.name, by_host=views, round_name=ROUND, nproc=1)


def test_each_name_is_looked_up_by_all_or_by_enough() -> None:
    for count, fewest in ((2, 2), (64, 64), (65, 15), (100, 15), (2048, 15)):
        names = [f"nd{i:04}" for i in range(count)]
        chosen = [others_of(name, names) for name in names]
        assert max(map(len, chosen)) == min(count - 1, 63 if count <= 64 else 15)
        assert all(len(set(each)) == len(each) for each in chosen)
        asked = Counter(each for some in chosen for each in some)
        assert set(asked) == set(names[1:])
        assert min(asked.values()) >= fewest


def test_a_name_far_behind_that_nobody_knows_is_named_in_a_large_cluster() -> None:
    assert judge(CHECK, many(100)) == []
    found = only(CHECK, many(100, "nd077"), "agent-name-misleads", hosts=["nd077"])
    assert found.level is Severity.INFO
    assert " and 12 more it does not resolve" in found.message


def test_a_large_cluster_is_judged_quickly() -> None:
    small, large = many(100, "nd077"), many(200, "nd077")
    assert calls(lambda: judge(CHECK, large)) < 2.5 * calls(lambda: judge(CHECK, small))


def agents(**fields: Any) -> Cluster:
    """Hosts whose ranks nccl-doctor itself started."""
    return make_cluster(**fields)


def test_it_is_asked_where_agents_are_to_meet() -> None:
    (planned,) = CHECK.plan(agents(job=C10D))
    assert planned.groups == ((0, 2),), "one of each host"
    for other in (agents(), agents(hosts=["nd0"], job=C10D)):
        with pytest.raises(Skip):
            CHECK.plan(other)


class Others:
    """The other hosts of a round, which have said their names."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def post(self, tag: str, value: Any) -> None:
        assert tag == "name"
        self.names.append(value)

    def collect(self, tag: str, timeout_s: float, of: Any = None) -> dict[int, Any]:
        return dict(enumerate(self.names))

    def store(self) -> Any:
        raise AssertionError


def test_the_first_of_all_names_is_looked_up() -> None:
    context = Context(Launch(), {}, job=C10D, peers=Others("localhost", "zz"))
    facts = CHECK.observe(context)
    assert facts["name"] == socket.getfqdn()
    assert facts["first"] == min(socket.getfqdn(), "localhost")
    assert facts["answers"]
    given = Job(rendezvous=Rendezvous("c10d", "nd0", local_addr="127.0.0.9"))
    facts = CHECK.observe(Context(Launch(), {}, job=given, peers=Others("localhost")))
    assert {key: facts[key] for key in facts if key != "later"} == {
        "name": "127.0.0.9",
        "first": "127.0.0.9",
        "answers": ["127.0.0.9"],
        "error": "",
        "silent": False,
        "left_out": 0,
    }
    assert [each["name"] for each in facts["later"]] == ["localhost"]
    assert facts["later"][0]["answers"]


def test_names_for_which_the_time_is_not_enough_are_left_out() -> None:
    given = Job(rendezvous=Rendezvous("c10d", "nd0", local_addr="127.0.0.1"))
    peers = Others("localhost", "127.0.0.9")
    deadline = time.monotonic() + 3.0
    facts = CHECK.observe(Context(Launch(), {}, job=given, peers=peers, deadline=deadline))
    assert (facts["first"], facts["answers"]) == ("127.0.0.1", ["127.0.0.1"])
    assert (facts["later"], facts["left_out"]) == ([], 2)
