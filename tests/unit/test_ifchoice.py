"""The interface choices of NCCL and gloo, on made-up hosts."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from nccl_doctor.toolkit.nccl.conf import Setting, conf_faults, conf_files, nccl_settings
from nccl_doctor.toolkit.nccl.interface_choice import (
    Filter,
    chosen,
    gloo_choice,
    has_infiniband,
    nccl_choices,
    resolve_own,
    subnet_prefixes,
)
from nccl_doctor.toolkit.nccl.release import NcclRelease
from nccl_doctor.toolkit.net.interfaces import Interface
from tests.support import fabrics
from tests.support.rows import each_row


def nic(name: str, *addresses: str, running: bool = True) -> Interface:
    return Interface(name, addresses, True, running, name == "lo", 1500)


LO = nic("lo", "127.0.0.1", "::1")
ETH0 = nic("eth0", "192.168.77.1", "fe80::1")
ETH10 = nic("eth10", "192.168.88.1")
DOCKER = nic("docker0", "172.17.0.1")
BRIDGE = nic("br-1f", "172.18.0.1")
VIRBR = nic("virbr0", "192.168.122.1")
IB0 = nic("ib0", "10.9.0.1")
BARE = nic("eth9")
DOWN = nic("eth5", "192.168.99.1", running=False)
V6 = nic("eth6", "2001:db8::6", "fe80::6")
CALI = nic("cali1", "fe80::ecee:eeff:feee:eeee")
NICS = (LO, ETH0, ETH10, DOCKER, VIRBR, DOWN, BARE)


def picked(value: str | None, nics: tuple[Interface, ...] = NICS, **env: str) -> list[str]:
    settings = {name: Setting(text, "environment") for name, text in env.items()}
    if value is not None:
        settings["NCCL_SOCKET_IFNAME"] = Setting(value, "environment")
    return [name for name, _ in nccl_choices(nics, settings)[1].picks]


@each_row(
    ("value", "names"),
    [
        (None, ["eth0", "eth10"]),
        ("", ["eth0", "eth10"]),
        ("e", ["eth0", "eth10"]),  # a single character is as good as none
        ("^", ["eth0", "eth10"]),
        ("eth", ["eth0", "eth10"]),
        ("eth1", ["eth10"]),
        ("=eth1", []),
        ("=eth0", ["eth0"]),
        ("eth0,docker0", ["eth0", "docker0"]),
        ("docker0,eth0", ["eth0", "docker0"]),  # the order is the kernel's
        ("eth0:4791", ["eth0"]),
        ("^docker0", ["lo", "eth0", "eth10", "virbr0"]),
        ("^docker,lo,virbr", ["eth0", "eth10"]),
        ("^=eth0,lo", ["eth10", "docker0", "virbr0"]),
        ("^=", []),
        ("eth5", []),
        ("eth9", []),
        ("wlan0", []),
    ],
)
def test_nccl_names(value: str | None, names: list[str]) -> None:
    assert picked(value) == names


@each_row(
    ("nics", "names"),
    [
        ((LO, ETH0, IB0), ["ib0"]),
        ((LO, ETH0, BRIDGE), ["eth0", "br-1f"]),
        ((LO, DOCKER, VIRBR), ["docker0"]),
        ((LO, VIRBR), ["lo"]),
        ((VIRBR,), ["virbr0"]),
        ((LO, V6, ETH0), ["eth0", "eth6"]),  # IPv4 addresses are told first
        ((LO, ETH0, CALI), ["eth0", "cali1"]),
        ((LO, DOWN), ["lo"]),
        ((), []),
    ],
)
def test_nccl_by_itself(nics: tuple[Interface, ...], names: list[str]) -> None:
    assert picked(None, nics) == names


def test_nccl_takes_no_more_than_sixteen() -> None:
    nics = tuple(nic(f"veth{i}", f"10.0.{i}.1") for i in range(20))
    assert len(picked(None, nics)) == 16


def test_nccl_family() -> None:
    settings = {"NCCL_SOCKET_FAMILY": Setting("AF_INET6", "environment")}
    bootstrap, sockets = nccl_choices((LO, ETH0, V6), settings)
    assert sockets.picks == (("eth0", "fe80::1"), ("eth6", "2001:db8::6"))
    assert bootstrap.picks == sockets.picks[:1]


def test_nccl_comm_id_gives_a_hint() -> None:
    settings = {"NCCL_COMM_ID": Setting("192.168.88.7:5000", "environment")}
    prefixes = {"192.168.77.1": 24, "192.168.88.1": 24}
    bootstrap, sockets = nccl_choices(NICS, settings, prefixes)
    assert bootstrap.picks == sockets.picks == (("eth10", "192.168.88.1"),)
    settings["NCCL_SOCKET_IFNAME"] = Setting("=eth0", "environment")
    bootstrap, sockets = nccl_choices(NICS, settings, prefixes)
    assert (bootstrap.picks, sockets.picks) == (
        (("eth10", "192.168.88.1"),),
        (("eth0", "192.168.77.1"),),
    )


PREFIXES = {
    "127.0.0.1": 8,
    "192.168.77.1": 24,
    "192.168.88.1": 24,
    "192.168.99.1": 24,
    "::1": 128,
    "2001:db8::6": 64,
    "fe80::6": 64,
    "fe80::1": 64,
}


def rooted(value: str, version: str = "2.30.7", **options: bool) -> tuple[list[str], str]:
    """What the bootstrap takes with an NCCL_COMM_ID, and the problem."""
    answers = {"head": ("192.168.88.9",), "other": ("10.9.9.9",), "six": ("2001:db8::9",)}
    bootstrap, _ = nccl_choices(
        (*NICS, V6),
        {"NCCL_COMM_ID": Setting(value, "environment")},
        PREFIXES,
        NcclRelease.parse(version, **options),
        lambda name: None if name == "silent" else answers.get(name, ()),
    )
    return [f"{nic} {address}" for nic, address in bootstrap.picks], bootstrap.problem


@each_row(
    ("value", "picks", "problem"),
    [
        ("192.168.99.7:1", ["eth5 192.168.99.1"], ""),  # running or not
        ("127.0.0.1:1", ["lo 127.0.0.1"], ""),
        ("head:1", ["eth10 192.168.88.1"], ""),
        ("head", ["eth10 192.168.88.1"], ""),
        (",head:1", ["eth10 192.168.88.1"], ""),
        ("other:1", [], "missing"),
        ("silent:1", [], ""),
        ("nobody:1", [], "invalid"),
        ("", [], "invalid"),  # set, though empty: NCCL refuses it
        ("1", [], "invalid"),
        ("fe80::1", [], "invalid"),  # a name up to the colon
        ("[2001:db8::9", [], "invalid"),
        ("[2001:db8::9]:1", ["eth6 2001:db8::6"], ""),
        ("six:1", ["eth6 2001:db8::6"], ""),
        ("[fe80::9]:1", [], "missing"),
        ("[fe80::9%eth6]:1", ["eth6 fe80::6"], ""),
        ("[fe80::9%eth0]:1", ["eth0 fe80::1"], ""),
        ("[2001:db8::9%eth0]:1", [], "missing"),
        ("[2001:db8::9%eth77]:1", ["eth6 2001:db8::6"], ""),
    ],
)
def test_the_bootstrap_listens_where_nccl_comm_id_says(
    value: str, picks: list[str], problem: str
) -> None:
    assert rooted(value) == (picks, problem)


@pytest.mark.parametrize(
    ("version", "picks"),
    [
        ("2.28.9", ["eth10 192.168.88.1"]),
        ("2.29.2", ["lo 127.0.0.1"]),
        ("2.29.7", ["lo 127.0.0.1"]),
        ("2.30.3", ["eth10 192.168.88.1"]),
        ("", ["eth10 192.168.88.1"]),
    ],
)
def test_some_releases_leave_the_subnet_of_nccl_comm_id(version: str, picks: list[str]) -> None:
    assert rooted("192.168.88.7:1", version) == (picks, "")
    assert rooted("192.168.88.7:1", version, rccl=True) == (["eth10 192.168.88.1"], "")
    assert rooted("[2001:db8::9]:1", version) == (["eth6 2001:db8::6"], "")


@pytest.mark.parametrize(
    ("version", "value", "names", "problem"),
    [
        ("2.27.7", "eth5", ["eth5"], "down"),
        ("2.28.3", "eth5", [], "down"),
        ("2.27.7", "eth5,eth0", ["eth0", "eth5"], ""),  # the bootstrap takes the first
        ("2.28.3", "eth5,eth0", ["eth0"], ""),
        ("2.27.7", None, ["eth0", "eth10", "virbr0", "eth5"], ""),
        ("2.28.3", None, ["eth0", "eth10"], ""),
    ],
)
def test_before_2_28_3_an_interface_need_not_run(
    version: str, value: str | None, names: list[str], problem: str
) -> None:
    settings = {"NCCL_SOCKET_IFNAME": Setting(value, "environment")} if value else {}
    release = NcclRelease.parse(version)
    bootstrap, sockets = nccl_choices(NICS, settings, None, release)
    assert ([name for name, _ in sockets.picks], sockets.problem) == (names, problem)
    assert bootstrap.picks == sockets.picks[:1]
    assert sockets.left_out == (("eth5",) if (version, value) == ("2.28.3", "eth5,eth0") else ())


def test_before_2_28_3_nccl_takes_one_of_libvirt() -> None:
    release = NcclRelease.parse("2.27.7")
    (bootstrap, _) = nccl_choices((LO, VIRBR, DOCKER), {}, None, release)
    assert bootstrap.picks == (("virbr0", "192.168.122.1"),)
    bootstrap, _ = nccl_choices((LO, DOWN), {}, None, release)
    assert (bootstrap.picks, bootstrap.problem) == ((("eth5", "192.168.99.1"),), "down")


def test_the_order_of_ipv6_is_that_of_the_kernel() -> None:
    settings = {"NCCL_SOCKET_FAMILY": Setting("AF_INET6", "environment")}
    bootstrap, _ = nccl_choices((ETH0, V6), settings, PREFIXES)
    assert bootstrap.picks == (("eth6", "2001:db8::6"),)


@pytest.mark.parametrize(
    ("value", "problem", "names"),
    [
        ("=eth0", "", ()),
        ("wlan0", "missing", ("wlan0",)),
        ("=eth1", "missing", ("eth1",)),
        ("eth5", "down", ("eth5",)),
        ("eth9", "down", ("eth9",)),
        ("eth0,wlan0", "", ()),  # one that is there is enough
    ],
)
def test_nccl_problems(value: str, problem: str, names: tuple[str, ...]) -> None:
    settings = {"NCCL_SOCKET_IFNAME": Setting(value, "/etc/nccl.conf")}
    for choice in nccl_choices(NICS, settings):
        assert (choice.problem, choice.names) == (problem, names)
        assert (choice.variable, choice.origin) == ("NCCL_SOCKET_IFNAME", "/etc/nccl.conf")


@pytest.mark.parametrize(
    ("value", "left_out"),
    [
        ("eth0,eth5", ("eth5",)),  # no carrier
        ("=eth9,eth0", ("eth9",)),  # no address
        ("eth", ()),  # a prefix names nobody
        ("^eth5", ()),
        ("eth0,wlan0", ()),  # a list for hosts of two kinds
        ("eth5", ()),  # nothing is left: a problem, not an omission
    ],
)
def test_what_nccl_skips_without_a_word(value: str, left_out: tuple[str, ...]) -> None:
    settings = {"NCCL_SOCKET_IFNAME": Setting(value, "environment")}
    assert [choice.left_out for choice in nccl_choices(NICS, settings)] == [left_out] * 2


def test_filter_reads_the_signs() -> None:
    assert Filter.parse("^=a,b:1,,") == Filter(True, True, ("a", "b"))
    # More signs are a part of the name: `NCCL_SOCKET_IFNAME===eth0` in a shell finds nothing.
    assert Filter.parse("=^a") == Filter(False, True, ("^a",))
    assert Filter.parse("==a") == Filter(False, True, ("=a",))
    assert Filter.parse("^^a") == Filter(True, False, ("^a",))


def test_a_list_holds_no_more_than_sixteen_names() -> None:
    names = ",".join(f"x{i}" for i in range(16))
    assert not Filter.parse(f"={names},eth0").admits("eth0")


@each_row(
    ("value", "picks", "problem", "names"),
    [
        ("eth0", [("eth0", "192.168.77.1")], "", ()),
        ("eth0,eth10", [("eth0", "192.168.77.1"), ("eth10", "192.168.88.1")], "", ()),
        ("lo", [("lo", "127.0.0.1")], "", ()),
        ("^lo", [], "missing", ("^lo",)),
        ("=eth0", [], "missing", ("=eth0",)),
        ("eth", [], "missing", ("eth",)),
        ("eth0,wlan0", [("eth0", "192.168.77.1")], "missing", ("wlan0",)),
        ("eth5", [("eth5", "192.168.99.1")], "down", ("eth5",)),
        ("eth9", [], "down", ("eth9",)),
    ],
)
def test_gloo_names(
    value: str, picks: list[tuple[str, str]], problem: str, names: tuple[str, ...]
) -> None:
    choice = gloo_choice(NICS, {"GLOO_SOCKET_IFNAME": value}, "nd0", ())
    assert (list(choice.picks), choice.problem, choice.names) == (picks, problem, names)


@pytest.mark.parametrize(
    ("resolved", "picks"),
    [
        (("192.168.77.1",), [("eth0", "192.168.77.1")]),
        (("192.168.99.99", "192.168.88.1"), [("eth10", "192.168.88.1")]),
        (("127.0.1.1",), [("lo", "127.0.1.1")]),
        ((), [("lo", "127.0.0.1")]),
        (("192.168.99.99",), [("lo", "127.0.0.1")]),
        (None, []),
    ],
)
def test_gloo_by_itself(resolved: tuple[str, ...] | None, picks: list[tuple[str, str]]) -> None:
    choice = gloo_choice(NICS, {}, "nd0", resolved)
    assert (list(choice.picks), choice.variable, choice.problem) == (picks, "", "")


def test_settings_come_from_three_places(tmp_path: Path) -> None:
    home, etc, other = tmp_path, tmp_path / "etc/nccl.conf", tmp_path / "other.conf"
    etc.parent.mkdir()
    (home / ".nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=eth1\n#X=1\n Y = 2\n")
    etc.write_text("NCCL_SOCKET_IFNAME=eth2\nNCCL_IB_DISABLE=1\nnonsense\n=3\n")
    other.write_text("NCCL_SOCKET_IFNAME=eth3")
    env = {"NCCL_DEBUG": "INFO"}
    assert nccl_settings(env, home, tmp_path) == {
        "NCCL_DEBUG": Setting("INFO", "environment"),
        "NCCL_SOCKET_IFNAME": Setting("eth1", str(home / ".nccl.conf")),
        " Y ": Setting(" 2", str(home / ".nccl.conf")),
        "NCCL_IB_DISABLE": Setting("1", str(etc)),
    }
    found = nccl_settings({"NCCL_CONF_FILE": str(other)}, home, tmp_path)
    assert found["NCCL_SOCKET_IFNAME"] == Setting("eth3", str(other))
    assert "NCCL_DEBUG" not in found
    assert found["NCCL_IB_DISABLE"].origin == str(etc)


OLD, NEW = NcclRelease((2, 29, 7)), NcclRelease((2, 30, 3))


def test_the_home_is_that_of_the_release(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring")
    env = {"HOME": str(tmp_path)}
    assert "NCCL_ALGO" in nccl_settings(env, root=tmp_path, release=NEW)
    assert "NCCL_ALGO" not in nccl_settings(env, root=tmp_path, release=OLD)
    assert conf_files({}, root=tmp_path, release=NEW) == (tmp_path / "etc/nccl.conf",)
    assert conf_files({"HOME": ""}, root=tmp_path, release=NEW)[0] == Path("/.nccl.conf")
    owner = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert conf_files(env, root=tmp_path, release=OLD)[0] == owner / ".nccl.conf"


def test_nccl_conf_file_is_read_since_2_23_4(tmp_path: Path) -> None:
    env = {"NCCL_CONF_FILE": str(tmp_path / "x.conf")}
    (tmp_path / "x.conf").write_text("NCCL_ALGO=Ring")
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Tree")
    for number, value in (((2, 22, 3), "Tree"), ((2, 23, 4), "Ring")):
        found = nccl_settings(env, tmp_path, tmp_path, NcclRelease(number))
        assert found["NCCL_ALGO"].value == value


def test_lines_of_windows_are_read_since_2_30_3(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_bytes(b"NCCL_ALGO=Ring\r\nNCCL_PROTO=LL\r\r\n")
    new = nccl_settings({}, tmp_path, tmp_path, NEW)
    assert (new["NCCL_ALGO"].value, new["NCCL_PROTO"].value) == ("Ring", "LL\r")
    assert nccl_settings({}, tmp_path, tmp_path, OLD)["NCCL_ALGO"].value == "Ring\r"
    assert [each.line for each in conf_faults({}, tmp_path, tmp_path, NEW)] == [2]
    assert [each.line for each in conf_faults({}, tmp_path, tmp_path, OLD)] == [1, 2]


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text(f"NCCL_ALGO={'x' * 2000}\n")
    assert len(nccl_settings({}, tmp_path, tmp_path)["NCCL_ALGO"].value) == 1023


def test_an_inactive_port_is_no_infiniband(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    assert not has_infiniband(tmp_path)
    (port / "state").write_text("1: DOWN\n")
    assert not has_infiniband(tmp_path)
    (port / "state").write_text("4: ACTIVE\n")
    assert has_infiniband(tmp_path)


def test_efa_is_no_infiniband(tmp_path: Path) -> None:
    assert not has_infiniband(fabrics.efa(tmp_path / "efa"))
    assert has_infiniband(fabrics.roce(tmp_path / "roce"))


def test_every_chosen_address_is_tested_once() -> None:
    bootstrap, sockets = nccl_choices(NICS, {})
    gloo = gloo_choice(NICS, {}, "nd0", ("192.168.77.1",))
    assert chosen((bootstrap, sockets, gloo), NICS) == [
        {
            "interface": "eth0",
            "address": "192.168.77.1",
            "roles": ["nccl-bootstrap", "nccl-sockets", "gloo"],
        },
        {"interface": "eth10", "address": "192.168.88.1", "roles": ["nccl-sockets"]},
    ]


def test_a_bad_choice_leaves_a_stand_in() -> None:
    gloo = gloo_choice(NICS, {}, "nd0", ("127.0.1.1",))
    assert chosen((gloo,), NICS) == [
        {"interface": "eth0", "address": "192.168.77.1", "roles": ["fallback"]}
    ]


def test_this_host() -> None:
    assert subnet_prefixes().get("127.0.0.1", 8) == 8
    name, addresses = resolve_own(20)
    assert name
    assert addresses is None or isinstance(addresses, tuple)
