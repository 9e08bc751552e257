"""Real NCCL: the interface that it takes and the variables that it reads are those of our rules.

`make test-nccl` asks all rows and six releases; here one release is asked a few.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nccl_doctor.system.helpers import send_foreign
from nccl_doctor.toolkit.nccl.answer import ask_nccl
from nccl_doctor.toolkit.variables.table import table
from tests.lab.lab import Lab
from tests.lab.nccl.binary import compare as compare_table
from tests.lab.nccl.rows import HOSTS, ROWS
from tests.lab.nccl.trials import build, compare
from tests.lab.nccl.wheels import QUICK, library
from tests.support.wheels import NoWheel, leave


@pytest.fixture(scope="module")
def nccl() -> Path:
    """A real libnccl. Where no index has it, the tests are skipped; in CI, too, since an index may
    be a mirror without it. NCCL_REQUIRED=1 makes that a failure.
    """
    try:
        return library(QUICK)
    except NoWheel as error:
        if os.environ.get("NCCL_REQUIRED", "") == "1":
            pytest.fail(str(error), pytrace=False)
        leave(error)


def test_nccl_does_what_the_rules_say(make_lab: Callable[..., Lab], nccl: Path) -> None:
    rows = [row for row in ROWS if row.quick]
    names = [name for name in HOSTS if any(row.host == name for row in rows)]
    lab = make_lab(*(f"nd{number}" for number in range(len(names))))
    results = compare(lab, build(lab, names), nccl, rows)
    assert {each.row.text: each.differences for each in results if each.differences} == {}
    assert len({each.said for each in results}) > 4, "each row has the same answer"
    assert lab.hosts[0].listeners() == []


def test_every_name_that_nccl_lists_is_in_the_table(nccl: Path) -> None:
    def names() -> bytes:  # in a child: the test process would keep the library for later tests
        answer = ask_nccl(str(nccl), {}, patience_s=30)
        assert answer is not None
        return json.dumps(answer.names).encode()

    listed = set(json.loads(send_foreign("names", names, 60)))
    assert "NCCL_DEBUG_TIMESTAMP_LEVELS" in listed
    assert listed <= table().variables.keys()


def test_the_table_has_the_names_and_the_defaults_of_its_code(nccl: Path) -> None:
    found = compare_table(QUICK, nccl)
    assert found.differences == ()
    assert found.names > 230
    assert found.defaults > 200


def test_nccl_says_how_it_reads_its_variables(nccl: Path) -> None:
    env = {
        "NCCL_SET_THREAD_NAME": "true",
        "NCCL_WARN_ENABLE_DEBUG_INFO": "yes",
        "NCCL_DEBUG": "ATTN",  # since 2.32
        "NCCL_DEBUG_SUBSYS": "init, net",
    }

    def readings() -> bytes:
        answer = ask_nccl(str(nccl), env, patience_s=30)
        assert answer is not None
        return json.dumps(answer.readings).encode()

    found = json.loads(send_foreign("readings", readings, 60))
    assert {name: found[name] for name in env} == {
        "NCCL_SET_THREAD_NAME": ["TRUE", True],
        "NCCL_WARN_ENABLE_DEBUG_INFO": ["FALSE", False],
        "NCCL_DEBUG": ["<unknown>", False],
        "NCCL_DEBUG_SUBSYS": ["INIT,NET", True],
    }


def test_the_program_asks_the_library_that_it_has_loaded(
    make_lab: Callable[..., Lab], nccl: Path
) -> None:
    lab = make_lab("nd0")
    folder = lab.new_folder()
    conf = lab.folder / "nccl.conf"
    conf.write_text("NCCL_SOCKET_IFNAME==eth7\n")
    env = {
        "LD_PRELOAD": str(nccl),  # in place of a torch that is built for GPUs
        "NCCL_CONF_FILE": str(conf),
        "NCCL_DEBUG_FILE": str(folder / "of-the-user"),
        "TMPDIR": str(folder / "tmp"),
    }
    options = ("--select", "interfaces", "--backend", "nccl", "--nproc-per-node", "1")
    command = [sys.executable, "-m", "nccl_doctor", "run", *options, "--json", "report.json"]
    process = lab.hosts[0].run(command, env, folder)
    assert process.wait(60) == 1, process.stderr
    report = json.loads((folder / "report.json").read_text())
    (root,) = report["findings"]
    assert (root["code"], root["where"]["hosts"]) == ("interface-missing", ["nd0"])
    assert f"NCCL_SOCKET_IFNAME==eth7 (in {conf})" in root["message"]
    asked = report["hosts"][0]["facts"]["interfaces"]["alone"]["facts"]["asked"]
    assert (asked["version"], asked["interface"], asked["differs"]) == (QUICK, "", False)
    assert asked["error"] == "Bootstrap : no socket interface found"
    assert asked["from_files"] == {"NCCL_SOCKET_IFNAME": str(conf)}
    assert lab.leftovers(folder) == []


def test_each_row_is_asked_once() -> None:
    texts = [(row.host, row.text) for row in ROWS]
    assert len(set(texts)) == len(texts)
    assert {row.host for row in ROWS} == set(HOSTS)
