"""The name of torchrun's first agent, as every host looks it up."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Job, Launch, Severity, Skip
from nccl_doctor.checks.agent_names import ROUND, AgentNames
from nccl_doctor.model.job import Rendezvous
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only

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
    assert found.fix.startswith("on nd0: torchrun --local-addr=192.168.77.1,")


def test_a_name_that_nobody_else_knows_is_wrong_on_its_own_host() -> None:
    views = (view("nd0", "192.168.77.1"), view("nd1"), view("nd2"))
    only(CHECK, cluster(*views), "agent-name-misleads", hosts=["nd0"])


def test_localhost_leads_every_host_to_itself() -> None:
    """`127.0.0.1 localhost nd0` in /etc/hosts: getfqdn() says localhost."""
    views = [view(name, "127.0.0.1", first="localhost") for name in ("localhost", "nd1", "nd2")]
    found = only(CHECK, cluster(*views), "agent-name-misleads", hosts=["nd0"])
    assert "is 127.0.0.1, which is each host itself" in found.message
    assert found.level is Severity.FAIL


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

    def collect(self, tag: str, timeout_s: float) -> dict[int, Any]:
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
    }
    assert [each["name"] for each in facts["later"]] == ["localhost"]
    assert facts["later"][0]["answers"]
