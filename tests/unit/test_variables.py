"""The table of environment variables, and how libraries read what is set."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.checks.environment.gather import closest, gather_variables
from nccl_doctor.system.masking import MASK
from nccl_doctor.toolkit import variables as package
from nccl_doctor.toolkit.nccl.conf import ConfFault, Setting, conf_faults, nccl_settings
from nccl_doctor.toolkit.nccl.release import NcclRelease
from nccl_doctor.toolkit.tables import read_table
from nccl_doctor.toolkit.variables.recorded import allowed
from nccl_doctor.toolkit.variables.table import (
    AUTO,
    FILES,
    KINDS,
    Variable,
    rail_variables,
    table,
)
from nccl_doctor.toolkit.variables.values import as_strtoll, canonical, misread
from tests.support.rows import each_row

ROWS = table().variables
RAW = {name: read_table(package.__name__, f"{name}.toml") for name in FILES}


def rows_of(library: str) -> list[Variable]:
    return [row for row in ROWS.values() if row.library == library]


# --- the table ---


def test_every_name_that_nccl_reads_is_there() -> None:
    read = [row for row in rows_of("nccl") if not row.gone]
    assert len(read) == 286
    assert all(row.name.startswith("NCCL_") and row.since for row in read)
    assert ROWS["NCCL_ALGO"].since == "2.5.6"
    assert ROWS["NCCL_IB_TIMEOUT"].default == "20"
    assert ROWS["NCCL_WORK_FIFO_BYTES"].default == AUTO
    assert ROWS["NCCL_P2P_NVL_CHUNKSIZE"].default == str(1 << 19)
    assert len([row for row in read if row.does]) > 100


def test_names_up_to_nccl_2_32_are_known() -> None:
    assert RAW["nccl"]["library"]["known_to"] == "2.32.3"
    since = {"NCCL_SOCKET_MAGIC": "2.30.7", "NCCL_RUN_DIAGNOSTICS": "2.31.2",
             "NCCL_RUN_RAS_DIAGNOSTICS": "2.31.2", "NCCL_PROGRESS_COUNTERS": "2.32.3",
             "NCCL_DEBUG_LEVELS": "2.32.3", "NCCL_NVLS_UB_SIZE": "2.32.3",
             "NCCL_PAT_NDIMS": "2.31.2", "NCCL_GIN_CONNECTION_CUSTOM_STRIDE": "2.31.2"}  # fmt: skip
    assert {name: ROWS[name].since for name in since} == since
    assert ROWS["NCCL_RUN_DIAGNOSTICS"].is_aid
    gone = {name for name, row in ROWS.items() if row.gone == "2.32.3"}
    assert {"NCCL_NET_GDR_MLOPART", "NCCL_TOPO_SCATTER_START_NET"} <= gone


@pytest.mark.parametrize(
    "name",
    ["NCCL_TUNER_CONFIG_PATH", "NCCL_GPUDIRECTTCPX_CTRL_DEV", "NCCL_FASTRAK_IFNAME",
     "NCCL_DYNAMIC_CHUNK_SIZE", "NCCL_USE_SNAP"],
)  # fmt: skip
def test_names_of_googles_plug_ins_are_no_question(name: str, tmp_path: Path) -> None:
    assert gathered({name: "1"}, tmp_path)["unknown"] == []


def test_no_name_stands_in_two_files() -> None:
    names = [
        name for raw in RAW.values() for part in ("variables", "gone") for name in raw.get(part, ())
    ]
    assert len(names) == len(set(names)) == len(ROWS)


def faults_of(row: Variable) -> Iterator[str]:
    """What is not as a row of the table should be."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", row.name):
        yield "name"
    if row.kind not in KINDS:
        yield f"kind {row.kind}"
    for version in (row.since, row.gone.removeprefix("<="), row.raises):
        if not re.fullmatch(r"(\d+(\.\d+)*)?", version):
            yield f"version {version}"
    if not row.values and row.kind in ("enum", "words"):
        yield "no values"
    yield from {row.differs, row.inside} - {"fail", "warn", "info", "free"}
    for other in (row.deprecated_by, row.instead):
        if other and (other not in ROWS or ROWS[other].gone):
            yield f"{other} is not there"
    for leftover in row.leftovers:
        if leftover.severity not in ("warn", "info"):
            yield f"severity {leftover.severity} of a leftover"
        if leftover.needs not in ("", "local peers", "infiniband", "three gloo ranks"):
            yield f"a leftover needs {leftover.needs}"
        if not leftover.why:
            yield "no reason for a leftover"
    if (limit := row.limit) is not None:
        if not limit.note or limit.severity not in ("warn", "info"):
            yield f"limit {limit}"
        if limit.longest is not None and not limit.shortest < limit.longest:
            yield f"limit {limit}"
    if row.does and len(row.does) >= 100:
        yield "what it does is not short"
    if row.default not in (None, AUTO):
        if misread(row, row.default or "") is not None:
            yield f"its default is misread: {row.default}"
        if canonical(row, None) != canonical(row, row.default):
            yield f"its default is not its default: {row.default}"


def test_every_row_is_well_formed() -> None:
    wrong = [f"{name}: {fault}" for name, row in ROWS.items() for fault in faults_of(row)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", FILES)
def test_every_section_speaks_of_variables_that_are_there(library: str) -> None:
    raw = RAW[library]
    names = set(raw["variables"])
    lists = [raw["differs"].get(level, []) for level in ("fail", "warn", "info", "free")]
    mentioned = [name for each in lists for name in each]
    assert len(mentioned) == len(set(mentioned)), "one variable differs in two ways"
    for section in ("values", "leftover", "limits"):
        mentioned += raw.get(section, {})
    for part in ("inside", "only"):
        mentioned += raw["differs"].get(part, {})
    reading = raw.get("reading", {})
    for part in ("cased", "whole", "always", "mixed", "rails", "raises"):
        mentioned += reading.get(part, [])
    assert set(mentioned) <= names
    assert set(raw) <= {
        *("library", "variables", "values", "reading", "differs", "leftover"),
        *("limits", "unread", "excludes", "files", "gone"),
    }
    assert set(raw["differs"]) <= {*("fail", "warn", "info", "free"), "default", "inside", "only"}
    assert not names & {*raw.get("unread", {}), *raw.get("excludes", {})}
    assert set(raw.get("excludes", {}).values()) <= names


def test_the_variables_of_rails_are_known_without_the_table() -> None:
    assert rail_variables() == tuple(sorted(row.name for row in ROWS.values() if row.rails))


def test_what_was_asked_for_is_in_the_table() -> None:
    assert ROWS["NCCL_BLOCKING_WAIT"].deprecated_by == "TORCH_NCCL_BLOCKING_WAIT"
    assert ROWS["TORCH_NCCL_TRACE_BUFFER_SIZE"].deprecated_by == "TORCH_FR_BUFFER_SIZE"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG_FILE"):
        assert ROWS[name].differs == "free"
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_IB_DISABLE"):
        assert ROWS[name].differs == "fail"
    assert ROWS["NCCL_DEBUG"].is_aid
    assert not ROWS["NCCL_IB_HCA"].is_aid
    for name in ("WANDB__SERVICE_WAIT", "HYDRA_FULL_ERROR", "DEEPSPEED_TIMEOUT", "DS_ENV_FILE"):
        assert ROWS[name].differs != "fail"


def test_an_old_name_means_what_the_new_one_means() -> None:
    old, new = ROWS["NCCL_BLOCKING_WAIT"], ROWS["TORCH_NCCL_BLOCKING_WAIT"]
    assert (old.leftovers, old.differs) == (new.leftovers, new.differs)
    assert ROWS["NCCL_ASYNC_ERROR_HANDLING"].values == ("0", "1", "2", "3")


def test_no_value_of_the_table_escapes_the_mask_of_reports() -> None:
    for name in ROWS:
        if name not in allowed({name: "value"}):
            assert not re.search("TOKEN|KEY|SECRET|PASS", name), name


def test_a_default_that_moved() -> None:
    row = ROWS["NCCL_SYM_TMA_ENABLE"]
    defaults = [row.at(version).default for version in ((), (2, 30, 7), (2, 31, 2), (2, 32, 3))]
    assert defaults == ["0", "0", "1", "1"]
    assert canonical(row.at((2, 32, 3)), None) == canonical(row, "1")
    for each in ROWS.values():
        assert [since for since, _ in each.moved] == sorted(since for since, _ in each.moved)


# --- reading values ---


@each_row(
    ("text", "number"),
    [
        ("1", 1), (" 12 ", 12), ("-2", -2), ("0x10", 16), ("010", 8), ("08", 0), ("4M", 4),
        ("1.5", 1), ("true", 0), ("", 0), ("+3", 3), ("--1", 0),
    ],
)  # fmt: skip
def test_numbers_as_strtoll_reads_them(text: str, number: int) -> None:
    assert as_strtoll(text) == number


@pytest.mark.parametrize("name", ["NCCL_BUFFSIZE", "DEEPSPEED_TIMEOUT", "TORCH_NCCL_BLOCKING_WAIT"])
@pytest.mark.parametrize("digit", ["7", "0"])
def test_thousands_of_digits_are_no_number(name: str, digit: str) -> None:
    text = digit * 5000  # more than Python turns into a number
    wrong = misread(ROWS[name], text)
    assert wrong is not None
    assert wrong.says == "is longer than any number"
    assert canonical(ROWS[name], text) == text


@each_row(
    ("name", "text", "says", "meant"),
    [
        ("NCCL_IB_DISABLE", "true", "is read as 0", "1"),
        ("NCCL_IB_DISABLE", "YES", "is read as 0", "1"),
        ("NCCL_IB_DISABLE", "on", "is read as 0", "1"),
        ("NCCL_BUFFSIZE", "4M", "is read as 4", "4194304"),
        ("NCCL_BUFFSIZE", "8 MiB", "is read as 8", "8388608"),
        ("NCCL_IB_TIMEOUT", "022", "is read as 18", "22"),
        ("NCCL_IB_TIMEOUT", "long", "is read as 0", ""),
        ("NCCL_CROSS_NIC", "7", "is not one of 0, 1, 2", ""),
        ("NCCL_P2P_LEVEL", "nvl", "is not one of LOC, NVL, PIX, PXB, PHB, SYS (upper case", "NVL"),
        ("NCCL_SOCKET_FAMILY", "4", "is not one of AF_INET, AF_INET6", ""),
        ("NCCL_DEBUG", "DEBUG", "is not one of VERSION, WARN, ATTN, INFO, ABORT, TRACE", ""),
        ("NCCL_DEBUG", '"INFO"', "has quotes that are part of the value", "INFO"),
        ("NCCL_IB_DISABLE", "'true'", "has quotes that are part of the value", "1"),
        ("NCCL_SOCKET_IFNAME", "'eth0'", "has quotes that are part of the value", "eth0"),
        ("NCCL_DEBUG_SUBSYS", "INIT,NETT", "has 'NETT', which", ""),
        ("NCCL_ALGO", "Rng", "has 'Rng', which", ""),
        ("NCCL_ALGO", "allreuce:ring", "names an unknown function 'allreuce'", ""),
        ("TORCH_NCCL_BLOCKING_WAIT", "on", "is not a yes-or-no value", "1"),
        ("TORCH_NCCL_BLOCKING_WAIT", "2", "is not a yes-or-no value", ""),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "", "is not a whole number", ""),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "8m", "is read as 8", ""),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "7", "is not one of 0, 1, 2, 3", ""),
        ("TORCH_DIST_INIT_BARRIER", "yes", "is not a whole number", "1"),
        ("TORCH_DIST_INIT_BARRIER", "1x", "is not a whole number", ""),
        ("TORCH_DISTRIBUTED_DEBUG", "TRACE", "is not one of OFF, INFO, DETAIL", ""),
        ("TORCH_DISTRIBUTED_DEBUG", "", "is not one of OFF, INFO, DETAIL", ""),
        ("TORCH_WATCHDOG_POLL_INTERVAL_SECS", "500ms", "is not a number", ""),
        ("TORCH_WATCHDOG_STUCK_ACTION", "kill", "is not one of log, abort, exit", ""),
        ("TORCH_SYMMMEM", "cuda", "is not one of CUDA, NVSHMEM, NCCL (upper case", "CUDA"),
        ("DEEPSPEED_TIMEOUT", "30m", "is not a whole number", ""),
        ("GLOO_SOCKET_IFNAME", "^lo", "has a ^", ""),
        ("GLOO_SOCKET_IFNAME", "=eth0", "has a =", "eth0"),
        ("GLOO_DEVICE_TRANSPORT", "tls", "is not one of", ""),
        ("GLOO_DEVICE_TRANSPORT", "UV", "is not one of", ""),
    ],
)  # fmt: skip
def test_a_value_that_is_misread(name: str, text: str, says: str, meant: str) -> None:
    wrong = misread(ROWS[name], text)
    assert wrong is not None
    assert wrong.says.startswith(says)
    assert wrong.meant == meant


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GLOO_DEVICE_TRANSPORT", "TCP"),
        ("GLOO_DEVICE_TRANSPORT", "LINUX"),  # GlooDeviceFactory.cpp registers tcp by this name, too
        ("TORCHELASTIC_ETCD_BINARY_PATH", "/usr/bin/etcd"),  # elastic/rendezvous/etcd_server.py
    ],
)
def test_a_value_that_is_read_as_it_stands(name: str, text: str) -> None:
    assert misread(ROWS[name], text) is None


@each_row(
    ("name", "text"),
    [
        ("NCCL_IB_DISABLE", "false"),  # read as 0, and that was meant
        ("NCCL_IB_DISABLE", "0x1"),
        ("NCCL_IB_DISABLE", ""),
        ("NCCL_BUFFSIZE", "8388608 "),
        ("NCCL_P2P_LEVEL", "NVL"),
        ("NCCL_P2P_LEVEL", "3"),
        ("NCCL_DEBUG", "info"),
        ("NCCL_DEBUG_SUBSYS", "^init,NET"),
        ("NCCL_ALGO", "ring,collnetdirect;allreduce:tree;broadcast:^Ring"),
        ("NCCL_PROTO", "^LL128;allreduce:LL128"),
        ("NCCL_SOCKET_IFNAME", "^=docker0,lo"),
        ("NCCL_HOSTID", "anything"),
        ("TORCH_NCCL_BLOCKING_WAIT", "No"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail"),
        ("TORCH_FR_DUMP_TEMP_FILE", "/tmp/x"),
        ("TORCH_WATCHDOG_POLL_INTERVAL_SECS", ".5"),
        ("TORCH_WATCHDOG_STUCK_ACTION", "ABORT"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1"),
        ("OMP_NUM_THREADS", "4,2"),
        ("http_proxy", "'"),
    ],
)
def test_a_value_that_is_read_as_it_was_meant(name: str, text: str) -> None:
    assert misread(ROWS[name], text) is None


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("NCCL_IB_DISABLE", "0", None),
        ("NCCL_IB_DISABLE", "false", "0x0"),
        ("NCCL_IB_DISABLE", "", None),
        ("NCCL_ALGO", "Ring", "RING"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "true", None),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("TORCH_WATCHDOG_HEALTH_INTERVAL_SECS", "30", None),
        ("NCCL_CTA_POLICY", None, None),
    ],
)
def test_values_that_mean_the_same(name: str, one: str | None, other: str | None) -> None:
    assert canonical(ROWS[name], one) == canonical(ROWS[name], other)


def test_capitals_count_where_the_library_counts_them() -> None:
    assert canonical(ROWS["NCCL_P2P_LEVEL"], "NVL") != canonical(ROWS["NCCL_P2P_LEVEL"], "nvl")


# --- NCCL's files ---

CONF = """# NCCL_ALGO=Ring
NCCL_DEBUG=WARN
NCCL_PROTO = LL
export NCCL_IB_DISABLE=1
NCCL_IB_TC=106\r
nonsense

  # also a comment, if not for NCCL
NCCL_IB_PKEY=3
TORCH_NCCL_BLOCKING_WAIT=1
OMP_NUM_THREADS=3
MY_SECRET =hunter2
NCCL_BUFFSIZE=4M
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "etc/nccl.conf"
    path.parent.mkdir()
    path.write_text(CONF)
    return path


def test_lines_that_do_not_set_what_they_seem_to_set(conf: Path) -> None:
    old = NcclRelease((2, 29, 7))  # carriage returns are a fault of theirs
    found = list(conf_faults({"NCCL_CONF_FILE": str(conf)}, root=conf.parent, release=old))
    assert {(each.line, each.name) for each in found} == {
        *((3, "NCCL_PROTO"), (4, "NCCL_IB_DISABLE"), (5, "NCCL_IB_TC"), (6, ""), (12, "MY_SECRET")),
    }
    assert all("hunter2" not in each.fault for each in found)
    assert {each.path for each in found} == {str(conf)}


def test_a_named_file_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing.conf"
    assert [
        (f.path, f.line, f.name)
        for f in conf_faults({"NCCL_CONF_FILE": str(missing)}, root=tmp_path)
    ] == [(str(missing), 0, "NCCL_CONF_FILE")]
    assert list(conf_faults({}, home=tmp_path, root=tmp_path)) == []


def test_a_setting_knows_its_line(conf: Path) -> None:
    found = nccl_settings(
        {"NCCL_CONF_FILE": str(conf), "NCCL_DEBUG": "INFO"}, root=conf.parent.parent
    )
    assert found["NCCL_DEBUG"] == Setting("INFO", "environment")
    assert (found["NCCL_BUFFSIZE"].origin, found["NCCL_BUFFSIZE"].line) == (str(conf), 13)
    assert found["NCCL_DEBUG"].line == 0


def test_a_fault_keeps_nothing_of_a_value() -> None:
    assert set(ConfFault.__dataclass_fields__) == {"path", "line", "name", "fault"}


# --- gathering ---


def gathered(env: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(json.dumps(gather_variables(env, tmp_path, tmp_path)))
    return facts


def test_the_environment_wins_over_files_and_each_value_has_its_origin(
    conf: Path, tmp_path: Path
) -> None:
    env = {"NCCL_CONF_FILE": str(conf), "NCCL_DEBUG": "INFO"}
    facts = gathered(env, tmp_path)
    found = facts["variables"]
    assert found["NCCL_DEBUG"] == {"value": "INFO", "origin": "environment", "line": 0}
    assert found["NCCL_BUFFSIZE"] == {"value": "4M", "origin": str(conf), "line": 13}
    assert "NCCL_PROTO" not in found
    assert found["NCCL_IB_PKEY"]["value"] == MASK
    # torch has read its own before; OpenMP never reads a file of NCCL's.
    assert "TORCH_NCCL_BLOCKING_WAIT" not in found
    assert "OMP_NUM_THREADS" not in found
    told = {(fault["line"], fault["name"]) for fault in facts["faults"]}
    assert {(10, "TORCH_NCCL_BLOCKING_WAIT"), (11, "OMP_NUM_THREADS")} < told
    assert (12, "MY_SECRET") not in told
    assert "hunter2" not in json.dumps(facts)


def test_the_home_and_the_host_have_a_file_each(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=Ring\nNCCL_PROTO=LL\n")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_ALGO=Tree\nNCCL_IB_TC=106\n")
    found = gathered({"NCCL_PROTO": "Simple"}, tmp_path)["variables"]
    assert {name: (each["value"], each["line"]) for name, each in found.items()} == {
        "NCCL_ALGO": ("Ring", 1),
        "NCCL_IB_TC": ("106", 2),
        "NCCL_PROTO": ("Simple", 0),
    }


def test_other_variables_and_secrets_are_left_alone(tmp_path: Path) -> None:
    env = {
        "PATH": "/bin",
        "HOME": "/root",
        "WANDB_API_KEY": "hunter2",
        "HF_TOKEN": "hunter2",
        "http_proxy": "http://me:hunter2@proxy:3128",
        "NCCL_MY_TOKEN": "hunter2",
        "BASH_FUNC_x%%": "hunter2",
        "UCX_TLS": "rc,cuda",
    }
    facts = gathered(env, tmp_path)
    assert "hunter2" not in json.dumps(facts)
    assert set(facts["variables"]) == {"http_proxy", "UCX_TLS"}
    assert facts["unknown"] == ["NCCL_MY_TOKEN"]


@pytest.mark.parametrize(
    "name",
    ["NCCL_VERSION", "NCCL_HOME", "NCCL_ROOT", "NCCL_INCLUDE_DIR", "NCCL_LIB_DIR",
     "NCCL_TESTS_DEVICE", "NCCL_OFI_RDMA", "NCCL_DEBUG", "NCCL_BLOCKING_WAIT", "RCCL_X",
     "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ETCD_BINARY_PATH", "CNCL_DEBUG", "PATH", "HTTP_PROXY",
     "NV_LIBNCCL_PACKAGE"],
)  # fmt: skip
def test_names_that_are_no_question(name: str, tmp_path: Path) -> None:
    assert gathered({name: "1"}, tmp_path)["unknown"] == []


@each_row(
    ("name", "meant"),
    [("NCLL_DEBUG", "NCCL_DEBUG"), ("NNCL_ALGO", "NCCL_ALGO"), ("nccl_debug", "NCCL_DEBUG"),
     ("Gloo_Socket_Ifname", "GLOO_SOCKET_IFNAME"), ("RCCL_DEBUG", ""), ("CNCL_DEBUG", ""),
     ("NCCL_DEBUG", ""), ("http_proxy", ""), ("NCLL_NONSENSE", "")],
)  # fmt: skip
def test_a_slip_in_capitals_or_in_the_first_word(name: str, meant: str) -> None:
    assert closest(name) == meant
