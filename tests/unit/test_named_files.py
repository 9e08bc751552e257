"""Files that variables name: as NCCL reads them, looked at on a host, and judged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nccl_doctor.api import Confidence, Severity
from nccl_doctor.checks.environment.gather import gather_variables
from nccl_doctor.checks.environment.named_files import look_at_files
from nccl_doctor.toolkit.nccl.release import NcclRelease
from nccl_doctor.toolkit.nccl.xml_files import GRAPHS, TOPOLOGY, fault_in
from tests.support.environments import Env, judge, only
from tests.support.rows import each_row

NCCL = NcclRelease((2, 30, 7))
GOOD = b"""<!-- of a virtual machine -->
<system version="1">
  <cpu numaid="0" affinity="0000ffff" arch='x86_64'>
    <pci busid="0000:0f:00.0" class="0x060400">
      <pci busid="0000:10:00.0"><gpu dev="0" sm="90"><nvlink target="x"/></gpu></pci>
      <odd><thing/></odd>
    </pci>
  </cpu>
</system>
"""


def many(number: int) -> bytes:
    """A topology with so many elements that count."""
    return b'<system version="1"><cpu>' + b"<pci/>" * (number - 2) + b"</cpu></system>"


# --- NCCL's reader: src/graph/xml.cc ---


@each_row(
    ("form", "text", "words"),
    [
        (TOPOLOGY, b'<?xml version="1.0"?>\n' + GOOD, "has no > where NCCL needs one, in line 1"),
        (TOPOLOGY, GOOD[:200], "ends within"),
        (TOPOLOGY, GOOD[:-10], "ends within <system>"),
        (TOPOLOGY, b"<!-- never", "ends within a comment"),
        (TOPOLOGY, GOOD.replace(b"  <cpu", b"\t<cpu"), "something else than an element in line 3"),
        (TOPOLOGY, GOOD.replace(b'sm="90"', b"sm=90"), "a value without quotes in line 5"),
        (TOPOLOGY, GOOD.replace(b"</cpu>", b"</gpu>"), "closes </gpu>"),
        (TOPOLOGY, b"<system><cpu/></system>", "no version"),
        (TOPOLOGY, b'<system version="2"></system>', "version 2"),
        (TOPOLOGY, b"version=1", "something else"),
        (TOPOLOGY, many(256), "256 elements or more"),
        (GRAPHS, b'<graphs version="1"><graph><channel></graph></graphs>', "closes </graph>"),
        (TOPOLOGY, b'<system version="1' + b"1" * 300 + b'"/>', "too long"),
        (TOPOLOGY, b"<" + b"a" * 10_000, "too long"),
    ],
)  # fmt: skip
def test_what_nccl_cannot_read_ends_it(form: str, text: bytes, words: str) -> None:
    fault = fault_in(text, form, NCCL)
    assert fault is not None
    assert fault.fatal
    assert words in fault.says


def test_what_nccl_reads_or_does_without() -> None:
    assert fault_in(GOOD, TOPOLOGY, NCCL) is None
    assert fault_in(many(255), TOPOLOGY, NCCL) is None
    assert fault_in(many(1000), TOPOLOGY, NcclRelease((2, 20, 5))) is None
    graph = b'<graphs version="1"><graph id="0"><channel><gpu dev="0"/></channel></graph></graphs>'
    assert fault_in(graph, GRAPHS, NCCL) is None
    for other in (b"", b"\n", graph):
        lost = fault_in(other, TOPOLOGY, NCCL)
        assert lost is not None
        assert (lost.says, lost.fatal) == ("has no <system>", False)
    old = fault_in(GOOD, TOPOLOGY, NcclRelease((2, 26, 2)))
    assert old is not None
    assert "quotes" in old.says


# --- this host ---


def looked(env: Env, root: Path) -> list[dict[str, Any]]:
    settings = gather_variables(env, home=root, root=root)["variables"]
    found: list[dict[str, Any]] = json.loads(json.dumps(look_at_files(settings, root)))
    return found


def test_what_is_there_is_opened_as_its_reader_opens_it(tmp_path: Path) -> None:
    topology = tmp_path / "topo.xml"
    topology.write_bytes(GOOD)
    (tmp_path / "logs").mkdir()
    env = {
        "NCCL_TOPO_FILE": "/topo.xml",
        "NCCL_GRAPH_FILE": "",
        "NCCL_TUNER_CONFIG_PATH": "/logs",
        "NCCL_DEBUG_FILE": "/logs/%h/nccl.%p",
        "NCCL_TOPO_DUMP_FILE": "/none/dump.xml",
        "TORCH_FR_DUMP_TEMP_FILE": "/logs/rank_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/none/rank_",
        "NCCL_INSPECTOR_DUMP_DIR": "/none/inspector",
        "UCX_LOG_FILE": "stderr",
        "UCX_CONFIG_DIR": "/logs",
    }
    found = {each["name"]: each for each in looked(env, tmp_path)}
    errors = {name: each["error"]["text"] for name, each in found.items() if "error" in each}
    no_file = os.strerror(2)
    assert errors == {
        "NCCL_GRAPH_FILE": no_file,
        "NCCL_TUNER_CONFIG_PATH": os.strerror(21),
        "NCCL_DEBUG_FILE": no_file,
        "NCCL_TOPO_DUMP_FILE": no_file,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": no_file,
        "NCCL_INSPECTOR_DUMP_DIR": no_file,
        "UCX_CONFIG_DIR": no_file,
    }
    assert found["NCCL_TOPO_FILE"].keys() == {"name", "path", "use", "digest"}
    assert set(found) == {*errors, "NCCL_TOPO_FILE", "TORCH_FR_DUMP_TEMP_FILE"}
    topology.write_bytes(GOOD[:200])
    (cut,) = looked({"NCCL_TOPO_FILE": "/topo.xml"}, tmp_path)
    assert cut["fatal"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["logs", "topo.xml"]


def test_an_empty_name_counts_where_it_hides_the_default_file(tmp_path: Path) -> None:
    assert looked({"NCCL_TOPO_FILE": "", "NCCL_DEBUG_FILE": ""}, tmp_path) == []
    default = tmp_path / "var/run/nvidia-topologyd/virtualTopology.xml"
    default.parent.mkdir(parents=True)
    default.write_bytes(GOOD)
    (found,) = looked({"NCCL_TOPO_FILE": ""}, tmp_path)
    assert (found["name"], found["error"]["step"]) == ("NCCL_TOPO_FILE", "read")


def test_a_file_that_never_answers_is_a_fact(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (found,) = looked({"NCCL_TOPO_FILE": "/pipe"}, tmp_path)
    assert found["error"]["text"] == "it is no file"


# --- rules ---


MISSING = {"error": {"step": "read", "errno": 2, "text": "No such file or directory"}}


@each_row(
    ("env", "facts", "level", "words"),
    [
        ({"NCCL_TOPO_FILE": "/t.xml"}, MISSING, "warn", "goes on with what it detects itself"),
        ({"NCCL_TOPO_FILE": "/t.xml"}, {"fault": "ends within <cpu>", "fatal": True}, "fail",
         "it ends within <cpu>; NCCL ends with an internal error"),
        ({"NCCL_TOPO_FILE": "/t.xml"}, {"fault": "has no <system>", "fatal": False}, "warn",
         "it has no <system>; NCCL goes on"),
        ({"NCCL_GRAPH_FILE": "/g.xml"}, MISSING, "fail", "NCCL ends with a system error"),
        ({"NCCL_GRAPH_FILE": ""}, MISSING, "fail", "NCCL_GRAPH_FILE= (empty, which counts as set)"),
        ({"NCCL_TUNER_CONFIG_PATH": "/c"}, MISSING, "warn", "the tuner plug-in"),
        ({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/p/x"}, MISSING, "fail", "Error creating named pipe"),
        ({"UCX_CONFIG_DIR": "/etc/x"}, MISSING, "warn", "(ucx.conf there)"),
        ({"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/l/x"}, MISSING, "warn", "output of the job"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_found_on_its_host(
    env: Env, facts: dict[str, Any], level: str, words: str
) -> None:
    name = list(env)[-1]
    said = {"files": [{"name": name, "path": env[name], "use": "read", **facts}]}
    found = only(judge([env], **said), "env-file-unusable")
    assert (found.level.value, found.where.hosts) == (level, ("nd0",))
    assert words in found.message
    assert [step.command for step in found.fix.steps] == [f"unset {name}"]
    if level == "fail":  # gloo reads none of them
        assert only(judge([env], backend="gloo", **said), found.code).level is Severity.WARN


def test_a_log_that_nobody_writes_needs_no_folder() -> None:
    files = [{"name": "NCCL_DEBUG_FILE", "path": "/l/x", "use": "write", **MISSING}]
    assert judge([{"NCCL_DEBUG_FILE": "/l/x"}], files=files) == []


def test_a_disk_that_does_not_answer() -> None:
    hung = {"hung": {"step": "read", "after_s": 4.0, "state": "D", "wchan": "nfs_wait"}}
    files = [{"name": "NCCL_GRAPH_FILE", "path": "/g", "use": "read", **hung}]
    found = only(judge([{"NCCL_GRAPH_FILE": "/g"}], files=files), "env-file-unusable")
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)


def test_the_host_with_another_content_is_named() -> None:
    def said(digest: str) -> list[dict[str, Any]]:
        return [{"name": "NCCL_TOPO_FILE", "path": "/t.xml", "use": "read", "digest": digest}]

    env = {"NCCL_TOPO_FILE": "/t.xml"}
    found = only(judge([env] * 3, of_rank={1: {"files": said("beef")}}, files=said("cafe")),
                 "env-file-differs")  # fmt: skip
    assert (found.level, found.where.hosts) == (Severity.WARN, ("nd1",))
    assert "sha256 beef…" in found.message
    assert judge([env] * 3, files=said("cafe")) == []
