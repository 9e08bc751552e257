"""The interface check: what it judges from made-up facts, and the choices of this host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nccl_doctor.api import ALONE, Confidence, Context, Launch, Severity
from nccl_doctor.checks.interfaces import Interfaces
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.nccl.survey import lacking_cards, survey
from nccl_doctor.toolkit.net.interfaces import Interface
from tests.support.clusters import on_one_machine, outcome, shut_out
from tests.support.findings import judge
from tests.support.peers import DROPPED, NO_ROUTE, World, choice, nic, only, pairs

NCCL = "NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_healthy_cluster_has_no_finding(count: int, backend: str) -> None:
    assert World(count, backend).judge() == []


@pytest.mark.parametrize(
    ("backend", "library", "severity"),
    [
        ("nccl", "nccl-sockets", Severity.FAIL),
        ("gloo", "nccl-sockets", Severity.WARN),
        ("gloo", "gloo", Severity.FAIL),
        ("nccl", "gloo", Severity.WARN),
    ],
)
@pytest.mark.parametrize(
    ("problem", "code"), [("missing", "interface-missing"), ("down", "interface-down")]
)
def test_a_variable_that_names_a_bad_interface(
    backend: str, library: str, severity: Severity, problem: str, code: str
) -> None:
    variable = "GLOO_SOCKET_IFNAME" if library == "gloo" else "NCCL_SOCKET_IFNAME"
    world = World(3, backend)
    world.facts["nd1"]["choices"][library] = choice(
        [], variable=variable, value="eth7", origin="environment", problem=problem, names=["eth7"]
    )
    found = only(world.judge(), code)
    assert (found.where.hosts, found.where.interfaces) == (("nd1",), ("eth7",))
    assert found.level is severity
    assert f"{variable}=eth7" in found.message
    assert ("='=eth0'" if "NCCL" in variable else "=eth0") in found.fix
    (step,) = found.fix.steps
    assert step.undo == f"export {variable}=eth7"


def test_nccl_syntax_in_the_variable_of_gloo() -> None:
    world = World(2, "gloo")
    world.facts["nd0"]["choices"]["gloo"] = choice(
        [], variable="GLOO_SOCKET_IFNAME", value="^lo", problem="missing", names=["^lo"]
    )
    found = only(world.judge(), "interface-missing")
    assert found.where.hosts == ("nd0",)
    assert "mean nothing to gloo" in found.fix


@pytest.mark.parametrize(
    ("problem", "picks", "code", "words"),
    [
        ("missing", [], "interface-missing", "no interface in its subnet"),
        ("invalid", [], "interface-missing", "neither an address nor a host name"),
        ("", [("lo", "127.0.0.1")], "interface-loopback", "the other hosts would get 127.0.0.1"),
    ],
)
def test_an_nccl_comm_id_that_leads_nowhere(
    problem: str, picks: list[tuple[str, str]], code: str, words: str
) -> None:
    world = World(3)
    world.facts["nd1"]["nccl_data"] = "InfiniBand"
    world.facts["nd1"]["choices"]["nccl-bootstrap"] = choice(
        picks,
        reason="the first interface outside of the subnet of NCCL_COMM_ID",
        variable="NCCL_COMM_ID",
        value="192.168.9.9:5000",
        origin="environment",
        problem=problem,
    )
    found = only(world.judge(), code)
    assert found.where.hosts == ("nd1",)
    assert words in found.message
    assert found.fix.startswith("on every host: unset NCCL_COMM_ID")
    assert found.fix.endswith("NCCL 2.30.3 or newer")
    assert found.kind.title.startswith("NCCL_COMM_ID leads") is (code == "interface-missing")


def test_a_host_without_any_interface_that_runs() -> None:
    world = World(3)
    down = choice([], reason="no interface is running", problem="down")
    world.facts["nd1"]["choices"] |= {"nccl-bootstrap": down, "nccl-sockets": down}
    found = only(world.judge(), "interface-down")
    assert (found.where.hosts, found.level) == (("nd1",), Severity.FAIL)
    assert found.kind.title.startswith("No interface of the host")
    assert (found.fix, "ip -br addr" in found.kind.fix) == ("", True)


def test_a_configuration_file_is_named() -> None:
    world = World(2)
    world.facts["nd1"]["choices"]["nccl-sockets"] = choice(
        [],
        variable="NCCL_SOCKET_IFNAME",
        value="ib0",
        origin="/etc/nccl.conf",
        problem="missing",
        names=["ib0"],
    )
    found = only(world.judge(), "interface-missing")
    assert "/etc/nccl.conf" in found.message
    assert "/etc/nccl.conf" in found.fix


def test_a_named_interface_without_carrier_is_skipped_without_a_word() -> None:
    world = World(3)
    skipped = choice(
        [("eth0", "192.168.77.2")],
        variable="NCCL_SOCKET_IFNAME",
        value="eth0,eth1",
        left_out=["eth1"],
    )
    world.facts["nd1"]["choices"].update({"nccl-sockets": skipped, "nccl-bootstrap": skipped})
    found = only(world.judge(), "interface-down")
    assert (found.where.hosts, found.where.interfaces) == (("nd1",), ("eth1",))
    assert found.level is Severity.WARN
    assert "would use eth0" in found.message


def test_a_list_that_lets_loopback_in() -> None:
    world = World(2)
    world.facts["nd1"]["choices"]["nccl-sockets"] = choice(
        [("lo", "127.0.0.1"), ("eth0", "192.168.77.2")],
        variable="NCCL_SOCKET_IFNAME",
        value="^docker0",
    )
    found = only(world.judge(), "interface-loopback")
    assert (found.where.hosts, found.where.interfaces) == (("nd1",), ("lo",))
    assert found.level is Severity.FAIL


@pytest.mark.parametrize("road", ["plugin", "sockets", ""])
def test_a_card_for_googles_plug_in_that_its_host_lacks(road: str) -> None:
    world = World(3)
    for name in world.names:
        world.facts[name]["lacking"] = {}
    world.facts["nd1"]["lacking"] = {"NCCL_FASTRAK_IFNAME": ["eth8", "eth9"]}
    made = world.cluster()
    for host in made.hosts if road else ():
        host.facts["rdma"] = {ALONE: outcome({"road": road})}
    found = judge(Interfaces(), made)
    if road != "plugin":
        assert found == []
        return
    one = only(found, "interface-missing")
    assert (one.where.hosts, one.where.interfaces) == (("nd1",), ("eth8", "eth9"))
    assert one.level is Severity.WARN
    assert one.message == "NCCL_FASTRAK_IFNAME names eth8, eth9: no such interface"
    assert "plug-in" in one.kind.why


def test_which_named_cards_a_host_lacks() -> None:
    nics = [Interface(name, (), True, True, False, 1500) for name in ("eth1", "eth20")]
    for value, lacking in (
        ("eth1,eth20", []),
        ("eth1, eth3,eth4", ["eth3", "eth4"]),
        ("=eth1,eth3", ["eth3"]),
        ("eth2", []),  # others begin with it
        ("^eth3", []),
        ("", []),
    ):
        settings = {"NCCL_FASTRAK_IFNAME": Setting(value, "environment")}
        expected = {"NCCL_FASTRAK_IFNAME": lacking} if lacking else {}
        assert lacking_cards(settings, nics) == expected, value
    other = {"NCCL_SOCKET_IFNAME": Setting("eth9", "environment")}
    assert lacking_cards(other, nics) == {}


@pytest.mark.parametrize(
    ("backend", "severity"), [("gloo", Severity.FAIL), ("nccl", Severity.INFO)]
)
def test_a_host_name_that_is_loopback_for_gloo(backend: str, severity: Severity) -> None:
    world = World(2, backend)
    reason = "the host name nd1 resolves to 127.0.1.1"
    world.facts["nd1"]["choices"]["gloo"] = choice([("lo", "127.0.1.1")], reason=reason)
    found = only(world.judge(), "interface-loopback")
    assert (found.where.hosts, found.level) == (("nd1",), severity)
    assert "GLOO_SOCKET_IFNAME=eth0" in found.fix


def test_loopback_is_right_on_one_host() -> None:
    world = World(1, "gloo")
    world.facts["nd0"]["choices"]["gloo"] = choice([("lo", "127.0.0.1")])
    assert world.judge() == []


def test_hosts_in_different_networks() -> None:
    world = World(3)
    facts = world.facts["nd2"]
    facts["interfaces"] = [nic("eth1", "10.5.0.1"), nic("lo", "127.0.0.1")]
    facts["listen"] = [{"interface": "eth1", "address": "10.5.0.1", "roles": ["nccl-bootstrap"]}]
    world.fail([("nd0", "nd2"), ("nd1", "nd2")], NO_ROUTE)
    found = {each.code: each for each in world.judge()}
    assert set(found) == {"peer-no-route", "interface-differs"}
    assert found["peer-no-route"].where.hosts == ("nd2",)
    assert found["interface-differs"].where.hosts == ("nd2",)
    assert found["interface-differs"].level is Severity.WARN
    assert found["interface-differs"].explained_by == "peer-no-route"


def test_different_networks_that_reach_each_other_are_fine() -> None:
    world = World(2)
    facts = world.facts["nd1"]
    facts["interfaces"] = [nic("eth1", "10.5.0.1"), nic("lo", "127.0.0.1")]
    facts["listen"] = [{"interface": "eth1", "address": "10.5.0.1", "roles": ["nccl-bootstrap"]}]
    assert world.judge() == []


def test_a_different_mtu() -> None:
    world = World(3)
    world.facts["nd1"]["interfaces"][0]["mtu"] = 9000
    found = only(world.judge(), "mtu-differs")
    assert (found.where.hosts, found.where.interfaces) == (("nd1",), ("eth0",))
    assert found.level is Severity.WARN
    (step,) = found.fix.steps
    assert (step.on, step.command) == (("nd1",), "ip link set dev eth0 mtu 1500")
    assert step.undo == "ip link set dev eth0 mtu 9000"


def test_of_two_mtus_neither_is_the_wrong_one() -> None:
    world = World(2)
    world.facts["nd1"]["interfaces"][0]["mtu"] = 9000
    found = only(world.judge(), "mtu-differs")
    assert (found.where.hosts, found.confidence) == (("nd0", "nd1"), Confidence.POSSIBLE)
    (step,) = found.fix.steps  # nobody knows which is wrong; the smaller one works with both
    assert (step.on, step.command) == (("nd1",), "ip link set dev eth0 mtu 1500")
    assert step.undo == "ip link set dev eth0 mtu 9000"
    assert found.fix.alternatives == ("the larger one on every host, if the switch ports carry it",)
    assert found.evidence["mtu"] == {"nd0": 1500, "nd1": 9000}


def test_a_host_that_uses_another_network_decides_which_of_two_mtus_is_the_wrong_one() -> None:
    world = World(3)
    world.facts["nd1"]["interfaces"][0]["mtu"] = 1400
    other = world.facts["nd2"]
    other["interfaces"].append(nic("ext0", "10.9.9.1"))
    other["listen"] = [{"interface": "ext0", "address": "10.9.9.1", "roles": ["nccl-bootstrap"]}]
    found = only(world.judge(), "mtu-differs")
    assert (found.where.hosts, found.confidence) == (("nd1",), Confidence.LIKELY)
    assert found.fix == "on nd1: ip link set dev eth0 mtu 1500"
    assert "1500 on nd0, nd2; 1400 on nd1" in found.message
    other["interfaces"][0]["mtu"] = 9000  # says nothing of the other two
    assert only(world.judge(), "mtu-differs").where.hosts == ("nd0", "nd1")


def alone(world: World, **gateways: str) -> World:
    """The hosts with addresses of /32 behind a gateway, as in GCE and in pods of Calico."""
    for name in world.names:
        entry = world.facts[name]["interfaces"][0]
        entry["subnets"] = [f"{world.address(name)}/32"]
        entry["gateways"] = [gateways.get(name, "169.254.1.1")]
    return world


def test_addresses_that_stand_alone_are_compared_by_their_gateway() -> None:
    world = alone(World(3))
    assert world.judge() == []
    world.facts["nd1"]["interfaces"][0]["mtu"] = 8896
    found = only(world.judge(), "mtu-differs")
    assert found.where.hosts == ("nd1",)
    assert "in the network of eth0 behind 169.254.1.1: MTU" in found.message


def test_networks_of_other_gateways_and_addresses_without_one_have_mtus_of_their_own() -> None:
    world = alone(World(3), nd1="10.128.0.1")
    world.facts["nd1"]["interfaces"][0]["mtu"] = 8896
    assert world.judge() == []
    world = alone(World(3))
    for name in world.names:
        del world.facts[name]["interfaces"][0]["gateways"]  # a report of an older version
    world.facts["nd1"]["interfaces"][0]["mtu"] = 8896
    assert world.judge() == []


def test_a_bad_choice_is_not_why_a_host_did_not_come_in() -> None:
    """A failure of this layer would explain the port's, which it is not the cause of."""
    world = World(2, "gloo")
    world.facts["nd1"]["choices"]["gloo"] = choice(
        [], variable="GLOO_SOCKET_IFNAME", value="eth7", problem="missing", names=["eth7"]
    )
    found = only(world.judge(complete=False), "interface-missing")
    assert (found.where.hosts, found.level) == (("nd1",), Severity.WARN)


def test_in_a_merged_report_too() -> None:
    world = World(2, "gloo")
    for name in world.names:
        world.facts[name]["choices"]["gloo"] = choice(
            [], variable="GLOO_SOCKET_IFNAME", value="eth7", problem="missing", names=["eth7"]
        )
    found = judge(Interfaces(), shut_out(world.cluster(), "nd1"))
    levels = {each.where.hosts: each.level for each in found}
    assert levels == {("nd0",): Severity.FAIL, ("nd1",): Severity.WARN}


def test_node_ranks_of_one_machine_may_meet_at_a_loopback_address() -> None:
    world = World(2, "gloo")
    for name in world.names:
        world.facts[name]["choices"]["gloo"] = choice([("lo", "127.0.1.1")])
    made = world.cluster()
    assert {f.code for f in judge(Interfaces(), made)} == {"interface-loopback"}
    assert judge(Interfaces(), on_one_machine(made, "nd0", "nd1")) == []


def test_the_own_name_explains_what_gloo_makes_of_it() -> None:
    world = World(2, "gloo")
    world.facts["nd1"]["choices"]["gloo"] = choice([("lo", "127.0.1.1")])
    assert only(world.judge(), "interface-loopback").explained_by == "addr-loopback"
    world.facts["nd1"]["choices"]["gloo"] = choice(
        [("lo", "127.0.0.1")], variable="GLOO_SOCKET_IFNAME", value="lo"
    )
    assert only(world.judge(), "interface-loopback").explained_by is None


def test_without_calls_only_the_choices_are_judged() -> None:
    """As on a host that never signed in."""
    world = World(2)
    world.facts["nd1"]["interfaces"][0]["mtu"] = 9000
    made = world.fail(pairs(world), DROPPED).cluster(complete=False)
    for host in made.hosts:
        del host.facts["firewall"]
    only(judge(Interfaces(), made), "mtu-differs")


def test_the_choices_of_this_host() -> None:
    """The variables keep the host's own name, and with it the resolver, out of it."""
    env = {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "NCCL_CONF_FILE": "/nonexistent",
    }
    facts = json.loads(json.dumps(Interfaces().observe(Context(launch=Launch(), env=env))))
    assert facts["choices"]["gloo"]["variable"] == "GLOO_SOCKET_IFNAME"
    assert facts["choices"]["nccl-sockets"]["picks"][0][0] == "lo"
    assert any(nic["name"] == "lo" for nic in facts["interfaces"])


def test_the_fix_says_that_a_good_file_is_hidden_by_the_environment() -> None:
    world = World(2)
    wrong = choice(
        [], variable=NCCL, value="eth7", origin="environment", problem="missing", names=["eth7"]
    )
    world.facts["nd1"]["choices"]["nccl-sockets"] = wrong
    world.facts["nd1"]["by_file"] = {
        "value": "^docker0,lo",
        "origin": "/etc/nccl.conf",
        "picks": [["ens6", "192.168.77.2"]],
    }
    assert only(world.judge(), "interface-missing").fix == (
        "unset NCCL_SOCKET_IFNAME (it hides /etc/nccl.conf, which has "
        "NCCL_SOCKET_IFNAME=^docker0,lo and so takes ens6; in a container: take its ENV out of the "
        "image)"
    )
    world.facts["nd1"]["by_file"]["picks"] = [["lo", "127.0.0.1"]]
    assert only(world.judge(), "interface-missing").fix == "export NCCL_SOCKET_IFNAME='=eth0'"


@pytest.mark.parametrize(
    ("env", "line", "value"),
    [
        ({NCCL: "eth7"}, f"{NCCL}=^docker0", "^docker0"),
        ({}, f"{NCCL}=^docker0", None),  # it counts
        ({NCCL: "eth7"}, f"{NCCL}=eth8", None),  # no better
        ({NCCL: "eth7"}, "NCCL_DEBUG=INFO", None),
    ],
)
def test_a_file_behind_the_environment_is_read(
    env: dict[str, str], line: str, value: str | None, tmp_path: Path
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text(line + "\n")
    given = {"HOME": str(tmp_path), **env}
    told = survey(given, root=tmp_path)["by_file"]
    assert (told and told["value"]) == value
