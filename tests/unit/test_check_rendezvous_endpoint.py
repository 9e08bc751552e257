"""Who serves the c10d rendezvous."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Launch, Severity, Skip
from nccl_doctor.checks.rendezvous_endpoint import RendezvousEndpoint
from nccl_doctor.gather.run import is_endpoint
from nccl_doctor.launch.identity import is_this_host
from nccl_doctor.model.job import Job, Rendezvous
from nccl_doctor.toolkit.c10d import (
    endpoint_host,
    is_host_of,
    matches_machine,
    read_timeout,
    recognise,
    rendezvous_of,
)
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.rows import each_row

pytestmark = pytest.mark.xdist_group("torch")

CHECK = RendezvousEndpoint()


def view(serves: bool = False, host: str = "head", *resolved: str) -> dict[str, Any]:
    return {
        "endpoint": f"{host}:29400",
        "host": host,
        "own_name": "x",
        "resolved": list(resolved),
        "own": [],
        "told": None,
        "serves": serves,
    }


def cluster(*views: dict[str, Any], **fields: Any) -> Cluster:
    names = [f"nd{i}" for i in range(len(views))]
    seen = dict(zip(names, views, strict=True))
    return make_cluster(names, check="rendezvous_endpoint", by_host=seen, **fields)


def test_one_host_that_serves_is_right() -> None:
    assert judge(CHECK, cluster(view(True), view(), view())) == []


def test_nobody_serves_and_the_host_that_has_the_address_is_told_to() -> None:
    views = [view(False, "head", "192.168.77.2")] * 3
    found = only(CHECK, cluster(*views), "rdzv-endpoint-unhosted", hosts=["nd1"])
    assert found.confidence is Confidence.CERTAIN
    assert found.fix.startswith("on nd1: # --rdzv-conf is_host=true --local-addr=192.168.77.2")


def test_nobody_serves_and_nobody_has_the_address() -> None:
    found = only(CHECK, cluster(view(), view()), "rdzv-endpoint-unhosted")
    assert found.confidence is Confidence.LIKELY
    assert "is_host=true" in found.to_json()["fix"]


def test_everybody_serves() -> None:
    views = [view(True, "localhost")] * 2
    found = only(CHECK, cluster(*views), "rdzv-endpoint-ambiguous", hosts=["nd0", "nd1"])
    assert "# --rdzv-endpoint 192.168.77.1:" in found.fix


def test_torchrun_ends_where_the_host_does_not_know_its_own_name() -> None:
    error = {"own_error": "Name or service not known"}
    found = only(
        CHECK,
        cluster(view(True), {**view(), **error}, absent_nodes=()),
        "agent-name-unresolvable",
        hosts=["nd1"],
    )
    assert "x does not resolve" in found.message
    assert found.level is Severity.FAIL
    for knows in ({"told": False}, {"serves": True}, {"own": ["10.0.0.2"]}):
        assert judge(CHECK, cluster(view(), {**view(), **error, **knows}, nnodes=3)) == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "nd1", "other"])
def test_when_torch_needs_the_name_of_the_host(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own function: it raises, or it does not."""
    utils = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")

    def no_answer(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_answer)
    monkeypatch.setattr(socket, "gethostname", lambda: "nd1")
    try:
        utils._matches_machine_hostname(host)
        dies = False
    except socket.gaierror:
        dies = True
    job = Job(rendezvous=Rendezvous("c10d", f"{host}:29400"))
    facts = CHECK.observe(Context(launch=Launch(), env={}, job=job))
    found = judge(CHECK, cluster(view(True), facts, nnodes=3))
    assert [each.code for each in found] == ["agent-name-unresolvable"] * dies


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "nd1", "other"])
def test_a_silent_name_server_ends_torchrun_where_it_asks(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up of the own name does not return: after its time-outs, torch gets EAI_AGAIN."""
    unasked = threading.Event()

    def silence(*_: object, **__: object) -> None:
        unasked.wait(5.0)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", silence)
    monkeypatch.setattr(socket, "gethostname", lambda: "nd1")
    job = Job(rendezvous=Rendezvous("c10d", f"{host}:29400"))
    soon = time.monotonic() + 0.7
    facts = CHECK.observe(Context(launch=Launch(), env={}, job=job, deadline=soon))
    unasked.set()
    found = judge(CHECK, cluster(view(True), facts, view()))
    if host != "other":
        assert "agent-name-unresolvable" not in [each.code for each in found]
        return
    assert [(each.code, each.where.hosts) for each in found] == [
        ("agent-name-unresolvable", ("nd1",))
    ]
    assert (found[0].level, found[0].confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert "no answer from the resolver" in found[0].message
    for conf in ("is_host=true", "is_host=false"):
        assert judge(CHECK, cluster(view(True), {**facts, "told": is_host_of(conf)}, view())) == []


def test_a_host_that_cannot_look_up_its_name_may_be_the_one_that_is_meant() -> None:
    silent = {**view(), "own_silent": True}
    only(CHECK, cluster(silent, view()), "agent-name-unresolvable", hosts=["nd0"])


def test_who_sent_no_report_may_be_the_one_that_serves() -> None:
    assert judge(CHECK, cluster(view(), view(), absent_nodes=(1,))) == []
    assert judge(CHECK, cluster(view(), nnodes=2, complete=False)) == []


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("head", "head"),
        ("head:29400", "head"),
        ("10.0.0.1:1", "10.0.0.1"),
        ("[fe80::1]:29400", "fe80::1"),
        ("[::1]", "::1"),
        (" ", "localhost"),
    ],
)
def test_the_host_of_an_endpoint(text: str, host: str) -> None:
    assert endpoint_host(text) == host


@pytest.mark.parametrize(
    ("conf", "told"),
    [
        ("", None),
        ("is_host=true", True),
        ("read_timeout=5,is_host=0", False),
        ("is_host=maybe", None),
        ("join_timeout=9", None),
    ],
)
def test_what_the_configuration_says(conf: str, told: bool | None) -> None:
    assert is_host_of(conf) is told


@each_row(
    ("host", "resolved", "own", "canonical", "serves"),
    [
        ("localhost", [], [], "", True),
        ("127.0.0.1", [], [], "", True),
        ("nd1", [], [], "", True),
        ("nd1.example.org", [], [], "nd1.example.org", True),
        ("10.0.0.2", [], ["10.0.0.2"], "", True),
        ("alias", ["10.0.0.2"], ["10.0.0.2"], "", True),
        ("alias", ["10.0.0.2"], ["127.0.1.1"], "nd1", False),
        ("192.168.1.2", ["192.168.1.2"], ["10.0.0.2"], "nd1", False),  # its second interface
        ("other", [], [], "", False),
    ],
)
def test_the_rule_of_torch(
    host: str, resolved: list[str], own: list[str], canonical: str, serves: bool
) -> None:
    assert matches_machine(host, "nd1", resolved, own, canonical) is serves


def test_torch_agrees_on_this_machine() -> None:
    utils = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")
    own = socket.gethostname()
    for host in ("localhost", "127.0.0.1", own, "255.255.255.255"):
        env = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{host}:29400"}
        found = json.loads(json.dumps(CHECK.observe(Context(launch=Launch(), env=env))))
        assert found["serves"] == utils._matches_machine_hostname(host), host


def test_the_host_that_serves_the_run_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name resolves to an address that no interface has, as behind an address translation."""

    def answer(name: object, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert not is_this_host("203.0.113.7")
    assert is_endpoint("203.0.113.7")
    assert recognise("head.example.org", 1.0).serves


def test_the_options_of_the_command_reach_it() -> None:
    """`run -- torchrun --rdzv-backend=c10d …`, where no variable says so."""
    own = socket.gethostname()
    for conf, serves in (("", True), ("is_host=false", False)):
        job = Job(launcher="torchrun", rendezvous=Rendezvous("c10d", f"{own}:29400", conf))
        found = CHECK.observe(Context(launch=Launch(), env={}, job=job))
        assert (found["endpoint"], found["serves"]) == (f"{own}:29400", serves)
    static = Job(launcher="torchrun", rendezvous=Rendezvous("static"))
    with pytest.raises(Skip):
        CHECK.observe(Context(launch=Launch(), env={"PET_RDZV_BACKEND": "c10d"}, job=static))
    in_file = Job(rendezvous=Rendezvous("c10d", "/shared/meet", "store_type=file"))
    with pytest.raises(Skip):
        CHECK.observe(Context(launch=Launch(), env={}, job=in_file))


@pytest.mark.parametrize(
    "env",
    [{}, {"PET_RDZV_ENDPOINT": "head:1"}, {"PET_RDZV_BACKEND": "c10d"}],
)
def test_without_c10d_there_is_nothing_to_ask(env: dict[str, str]) -> None:
    with pytest.raises(Skip):
        CHECK.observe(Context(launch=Launch(), env=env))


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({}, None),
        ({"PET_RDZV_BACKEND": "static", "PET_RDZV_CONF": "read_timeout=5"}, None),
        ({"PET_RDZV_BACKEND": "c10d"}, 60.0),
        ({"PET_RDZV_BACKEND": "C10D", "PET_RDZV_CONF": "is_host=1,read_timeout=200"}, 200.0),
        ({"PET_RDZV_BACKEND": "c10d", "PET_RDZV_CONF": "read_timeout=soon"}, 60.0),
    ],
)
def test_how_long_a_c10d_rendezvous_may_take_to_connect(
    env: dict[str, str], seconds: float | None
) -> None:
    assert read_timeout(rendezvous_of(Job(), env)) == seconds
