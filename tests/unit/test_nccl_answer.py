"""NCCL's own answer, by made-up libraries; `tests/nccl` asks real ones."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Check, Context, Launch, Severity
from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.checks.interfaces import Interfaces
from nccl_doctor.checks.links import Links
from nccl_doctor.system.helpers import send_foreign
from nccl_doctor.toolkit.nccl.answer import OURS, LibraryAnswer, ReadValue, ask_nccl, said
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.nccl.interface_choice import BOOTSTRAP, SOCKETS, InterfaceChoice
from nccl_doctor.toolkit.nccl.survey import by_answer, given_answer, survey
from tests.support.libraries import compiled
from tests.support.observing import observe
from tests.support.peers import World, only

SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int ncclGetVersion(int *version) { *version = %(version)d; return 0; }
int ncclGetUniqueId(void *id) { %(body)s }
"""
SAYS = """
    setenv("NCCL_ALGO", "Ring", 0);
    setenv("NCCL_DEBUG_FILE", "/tmp/of-the-file", 0);
    setenv("MY_SECRET", "hunter2", 0);
    printf("nd0:7:7 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ours%s\\n",
           getenv("NCCL_SOCKET_IFNAME") ? getenv("NCCL_SOCKET_IFNAME") : "");
    printf("nd0:7:7 [0] NCCL INFO Bootstrap: Using ours0:192.0.2.9<0>\\n");
    return 0;
"""
REFUSES = """
    printf("\\n[2026-01-01 00:00:00] nd0:7:7 [0] bootstrap.cc:1 NCCL WARN Bootstrap : no socket "
           "interface found\\n");
    return 5;
"""


def library(folder: Path, body: str, version: int = 23007) -> str:
    source = SOURCE % {"body": body, "version": version}
    return str(compiled(folder / "libnccl.so.2", source))


def test_nccl_is_asked_in_a_child(tmp_path: Path) -> None:
    before = dict(os.environ)
    steps: list[str] = []
    path = library(tmp_path, SAYS)
    answer = ask_nccl(path, {"NCCL_SOCKET_IFNAME": "e"}, steps.append)
    assert answer == LibraryAnswer(
        path,
        "2.30.7",
        0,
        "ours0",
        "192.0.2.9",
        used=("NCCL_SOCKET_IFNAME",),
        from_files={"NCCL_ALGO": "Ring", "MY_SECRET": "hunter2"},  # our NCCL_DEBUG_FILE won
    )
    assert steps == [f"ncclGetUniqueId of {path}"]
    assert dict(os.environ) == before


def test_the_names_that_nccl_lists_are_asked_for(tmp_path: Path) -> None:
    lists = """
const char *keys[] = {"NCCL_NEW", "NCCL_DEBUG"};
int ncclParamGetAllParameterKeys(const char ***table, int *count) {
    *table = keys; *count = 2; return 0;
}
"""
    source = SOURCE % {"body": SAYS, "version": 23303} + lists
    path = str(compiled(tmp_path / "libnccl.so.2", source))
    answer = ask_nccl(path, {})
    assert answer is not None
    assert answer.names == ("NCCL_DEBUG", "NCCL_NEW")
    assert answer.interface == "ours0"
    assert observed(path, "nccl")["asked"]["names"] == ["NCCL_DEBUG", "NCCL_NEW"]


DUMPS = """
const char *text(const char *name, const char *without) {
    return getenv(name) ? getenv(name) : without;
}
void ncclParamDumpAll(void) {
    printf("=== ncclParam Registry Dump ===\\n");
    printf("NCCL_DEBUG (ncclDebugLogLevel) [%(flags)s] Set (the) [level]\\n"
           "    Current value=%%s set_by=%%s default=<unknown>\\n    Accepted value: String\\n\\n",
           text("NCCL_DEBUG", "<unknown>"), getenv("NCCL_DEBUG") ? "EnvPlugin" : "Default");
    printf("NCCL_DEBUG_FILE (const char*) [None] A file\\n"
           "    Current value=%%s set_by=EnvPlugin default=<unset>\\n\\n",
           text("NCCL_DEBUG_FILE", "<unset>"));
    printf("NCCL_SET_THREAD_NAME (bool) [Cached] Names\\n"
           "    Current value=FALSE set_by=Default default=FALSE\\n\\n");
    printf("NCCL_HOSTID (const char*) [None] From elsewhere\\n"
           "    Current value=mine set_by=EnvPlugin default=<unset>\\n\\n");
    printf("NCCL_PARAM_DUMP_ALL (bool) [Private] All\\n"
           "    Current value=%%s set_by=EnvPlugin default=FALSE\\n",
           text("NCCL_PARAM_DUMP_ALL", "FALSE"));
}
"""


def dumping(folder: Path, flags: str = "NoEnvPluginInit") -> str:
    source = SOURCE % {"body": SAYS, "version": 23003} + DUMPS % {"flags": flags}
    (folder / flags).mkdir()  # of its own: a path that was loaded before is not loaded again
    return str(compiled(folder / flags / "libnccl.so.2", source))


def test_the_values_that_nccl_dumps_are_asked_for(tmp_path: Path) -> None:
    env = {"NCCL_SET_THREAD_NAME": "yes", "NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/tmp/of-job"}
    answer = ask_nccl(dumping(tmp_path), env)
    assert answer is not None
    assert answer.readings == {
        "NCCL_DEBUG": ReadValue("WARN", True),  # the job's, not that of the child
        "NCCL_SET_THREAD_NAME": ReadValue("FALSE", False),
        "NCCL_HOSTID": ReadValue("mine", True),
    }
    assert answer.interface == "ours0", "the log is not the dump"
    settings = {name: Setting(value, "environment") for name, value in env.items()}
    settings |= {name: Setting(value, "f") for name, value in answer.from_files.items()}
    assert answer.read_otherwise(settings) == ["NCCL_HOSTID"]
    settings["NCCL_SET_THREAD_NAME"] = Setting("1", "environment")
    assert answer.read_otherwise(settings) == ["NCCL_HOSTID", "NCCL_SET_THREAD_NAME"]


@pytest.mark.parametrize(
    ("env", "flags"), [({}, "NoEnvPluginInit"), ({"NCCL_DEBUG": "WARN"}, "Cached")]
)
def test_a_value_that_is_not_the_jobs_is_no_reading(
    tmp_path: Path, env: dict[str, str], flags: str
) -> None:
    answer = ask_nccl(dumping(tmp_path, flags), env)
    assert answer is not None
    assert "NCCL_DEBUG" not in answer.readings


def test_secrets_in_what_nccl_reads_are_masked(tmp_path: Path) -> None:
    env = {"NCCL_SET_THREAD_NAME": "http://me:hunter2@host", "NCCL_HOSTID": "mine"}
    facts = observed(dumping(tmp_path), "nccl", env)
    reading = {"text": "http://***@host", "value": "FALSE", "taken": False}
    assert facts["asked"]["readings"] == {
        "NCCL_HOSTID": {"text": "mine", "value": "mine", "taken": True},
        "NCCL_SET_THREAD_NAME": reading,
    }
    assert "hunter2" not in json.dumps(facts)


def test_a_refusal_is_an_answer(tmp_path: Path) -> None:
    answer = ask_nccl(library(tmp_path, REFUSES), {})
    assert answer is not None
    assert (answer.result, answer.interface) == (5, "")
    assert answer.error == "Bootstrap : no socket interface found"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("abort();", "ended its process (SIGABRT)"),
        ("_exit(7);", "ended its process (exit code 7)"),
        ("sleep(60); return 0;", "no answer within 0.5 s"),
    ],
)
def test_nccl_may_crash_or_hang(tmp_path: Path, body: str, words: str) -> None:
    started = time.monotonic()
    answer = ask_nccl(library(tmp_path, body), {}, patience_s=0.5 if "sleep" in body else 20)
    assert answer is not None
    assert (answer.result, answer.error) == (None, words)
    assert time.monotonic() - started < 20


def test_an_old_release_is_not_asked(tmp_path: Path) -> None:
    assert ask_nccl(library(tmp_path, "abort();", version=22105), {}) is None


def test_rccl_is_not_asked(tmp_path: Path) -> None:
    path = Path(library(tmp_path, "abort();"))
    assert ask_nccl(str(path.rename(tmp_path / "librccl.so.1")), {}) is None


@pytest.mark.parametrize(
    ("text", "interface", "address"),
    [
        ("Bootstrap: Using eth0:192.0.2.2<0>", "eth0", "192.0.2.2"),
        ("Bootstrap : Using eth0:192.0.2.2<0>", "eth0", "192.0.2.2"),
        ("Bootstrap: Using eth0:1:192.0.2.2<0>", "eth0:1", "192.0.2.2"),
        ("Bootstrap: Using eth0:fe80::fc:1%eth0<0>", "eth0", "fe80::fc:1"),
        ("Bootstrap: Using eth0:2001:db8::2<0>", "eth0", "2001:db8::2"),
        ("Bootstrap: Using mlx5_0:1", "", ""),
        ("something else", "", ""),
    ],
)
def test_lines_of_the_log(text: str, interface: str, address: str) -> None:
    found = said(f"nd0:7:7 [0] NCCL INFO {text}\n")
    assert (found["interface"], found["address"]) == (interface, address)


def test_the_plugin_is_named() -> None:
    line = "nd0:7:7 [0] NCCL INFO Successfully loaded external env plugin libnccl-env-x.so"
    assert said(line)["plugin"] == "libnccl-env-x.so"


def test_variables_that_were_read_otherwise() -> None:
    settings = {
        "NCCL_ALGO": Setting("Ring", "/etc/nccl.conf"),
        "NCCL_PROTO": Setting("LL", "/etc/nccl.conf"),
        "NCCL_NET": Setting("IB", "environment"),
        "NCCL_DEBUG": Setting("WARN", "/etc/nccl.conf"),
    }
    assert "NCCL_DEBUG" in OURS
    same = LibraryAnswer("", from_files={"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"})
    assert same.read_otherwise(settings) == []
    other = LibraryAnswer("", from_files={"NCCL_ALGO": "Tree", "NCCL_IB_TC": "1"})
    assert other.read_otherwise(settings) == ["NCCL_ALGO", "NCCL_IB_TC", "NCCL_PROTO"]


RULES = tuple(
    InterfaceChoice(each, (("eth0", "192.0.2.1"),), "a rule") for each in (BOOTSTRAP, SOCKETS)
)
NOTHING = tuple(
    InterfaceChoice(each, (), "a rule", problem="down", names=("eth0",))
    for each in (BOOTSTRAP, SOCKETS)
)


@pytest.mark.parametrize(
    ("answer", "rules", "expected"),
    [
        (LibraryAnswer("", "2.30.7", 0, "eth0", "192.0.2.1"), RULES, "as before"),
        (LibraryAnswer("", "2.30.7", None, error="no answer"), RULES, "as before"),
        (LibraryAnswer("", "2.30.7", 5, error="none found"), NOTHING, "as before"),
        (
            LibraryAnswer("", "2.30.7", 0, "eth1", "192.0.3.1"),
            RULES,
            ((("eth1", "192.0.3.1"),), ""),
        ),
        (
            LibraryAnswer("", "2.30.7", 0, "eth1", "192.0.3.1"),
            NOTHING,
            ((("eth1", "192.0.3.1"),), ""),
        ),
        (LibraryAnswer("", "2.30.7", 5, error="none found"), RULES, ((), "refused")),
    ],
)
def test_the_answer_counts(
    answer: LibraryAnswer, rules: tuple[InterfaceChoice, InterfaceChoice], expected: Any
) -> None:
    bootstrap, sockets = by_answer(answer, *rules)
    if expected == "as before":
        assert (bootstrap, sockets) == rules
    else:
        assert (bootstrap.picks, bootstrap.problem) == expected
        assert (sockets.picks, sockets.problem) == expected
    assert (bootstrap.library, sockets.library) == (BOOTSTRAP, SOCKETS)


def observed(path: str, backend: str, more: Mapping[str, str] = {}) -> dict[str, Any]:
    """Facts of check `interfaces` in a process that has loaded this library."""

    def work() -> bytes:
        import ctypes

        ctypes.CDLL(path)
        env = {"NCCL_CONF_FILE": "/nonexistent", **more}
        return json.dumps(observe(Interfaces, env, backend=backend)).encode()

    return dict(json.loads(send_foreign("loads", work, 30)))


def test_the_answer_is_a_fact_of_the_check(tmp_path: Path) -> None:
    path = library(tmp_path, SAYS)
    facts = observed(path, "nccl")
    asked = facts["asked"]
    assert (asked["library"], asked["version"], asked["result"]) == (path, "2.30.7", 0)
    assert facts["choices"]["nccl-bootstrap"]["picks"] == [["ours0", "192.0.2.9"]]
    assert {"interface": "ours0", "address": "192.0.2.9"}.items() <= facts["listen"][0].items()
    assert asked["differs"]
    assert (asked["read_otherwise"], asked["from_files"]) == (["NCCL_ALGO"], {"NCCL_ALGO": ""})
    assert "hunter2" not in json.dumps(facts)
    assert "MY_SECRET" not in json.dumps(facts)
    assert observed(path, "gloo")["asked"] is None


def asked_otherwise(**fields: Any) -> dict[str, Any]:
    return {
        "library": "/opt/libnccl.so.2",
        "version": "2.30.7",
        "result": 0,
        "interface": "eth1",
        "address": "192.168.88.2",
        "error": "",
        "plugin": "",
        "used": [],
        "from_files": {},
        "expected": ["eth0", "192.168.77.2"],
        "differs": True,
        "read_otherwise": [],
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "NCCL 2.30.7 takes eth1 192.168.88.2, not eth0 192.168.77.2"),
        ({"expected": []}, "NCCL 2.30.7 takes eth1 192.168.88.2, not none"),
        (
            {"plugin": "libnccl-env.so"},
            "NCCL 2.30.7 with plug-in libnccl-env.so takes eth1 192.168.88.2, not eth0 "
            "192.168.77.2",
        ),
        (
            {"differs": False, "read_otherwise": ["NCCL_ALGO", "NCCL_PROTO"]},
            "NCCL 2.30.7 reads NCCL_ALGO, NCCL_PROTO otherwise",
        ),
    ],
)
def test_a_difference_is_a_note_about_us(fields: dict[str, Any], message: str) -> None:
    world = World(3)
    world.facts["nd1"]["asked"] = asked_otherwise(**fields)
    world.facts["nd2"]["asked"] = asked_otherwise(differs=False)
    found = only(world.judge(), "nccl-answer-differs")
    assert (found.where.hosts, found.level) == (("nd1",), Severity.INFO)
    assert found.message == message


@pytest.mark.parametrize(
    ("variable", "code"), [("NCCL_SOCKET_IFNAME", "interface-missing"), ("", "interface-down")]
)
@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("none found", "NCCL 2.30.7 refuses: none found"),
        ("", "NCCL 2.30.7 refuses: ncclGetUniqueId returned 5"),
    ],
)
def test_a_refusal_of_nccl_itself_fails_the_host(
    variable: str, code: str, error: str, words: str
) -> None:
    world = World(3)
    world.facts["nd1"]["asked"] = asked_otherwise(result=5, interface="", address="", error=error)
    for library in ("nccl-bootstrap", "nccl-sockets"):
        world.facts["nd1"]["choices"][library].update(
            picks=[], problem="refused", variable=variable, value="eth0"
        )
    found = {each.code: each for each in world.judge()}
    assert set(found) == {code, "nccl-answer-differs"}
    assert found[code].level is Severity.FAIL
    assert found[code].message.endswith(words)
    assert "takes no interface, not eth0" in found["nccl-answer-differs"].message
    assert {each.where.hosts for each in found.values()} == {("nd1",)}


@pytest.mark.parametrize("check", [Firewall(), Links()], ids=lambda check: str(check.name))
def test_hosts_call_each_other_where_nccl_itself_would(check: Check) -> None:
    world = World(3)
    world.facts["nd1"]["asked"] = asked_otherwise()
    world.facts["nd2"]["asked"] = asked_otherwise(differs=False)
    first = check.plan(world.cluster())[0]
    params = json.loads(json.dumps(first.params))
    given = [given_answer(Context(Launch(), {}, seat=seat, params=params)) for seat in (0, 2, 4)]
    asked = asked_otherwise()
    assert given[1] is not None
    assert (given[1].interface, given[1].address) == (asked["interface"], asked["address"])
    assert (given[0], given[2]) == (None, None)


def test_what_is_listened_on_goes_by_the_answer() -> None:
    answer = LibraryAnswer("libnccl.so.2", "2.30.7", 0, "ours0", "192.0.2.9")
    expected = {
        "interface": "ours0",
        "address": "192.0.2.9",
        "roles": ["nccl-bootstrap", "nccl-sockets"],
    }
    assert expected in survey({}, ask=lambda: answer)["listen"]
    assert expected not in survey({})["listen"]
