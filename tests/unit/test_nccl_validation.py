"""The page of `make test-nccl`: what it says of a difference, and that the one in docs is whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from nccl_doctor.toolkit.variables.table import table
from tests.lab.nccl.binary import Asked, Tabled, calls, differences
from tests.lab.nccl.rows import ROWS
from tests.lab.nccl.trials import Result
from tests.lab.nccl.wheels import QUICK, TABLED, VERSIONS

ROOT = Path(__file__).parents[2]


TABLED_AS = {"1.2.3": Tabled(200, 150, ("NCCL_X: not in the table",))}
CODE = """
0000000000001000 <_Z17ncclParamBuffsizev>:
    1000:	mov    rdx,QWORD PTR [rip+0x2000]        # 4000 <cache>
    1007:	lea    rcx,[rip+0x52]        # 4000 <cache>
    100e:	mov    rsi,0xfffffffffffffffe
    1015:	lea    rdi,[rip+0x100]        # 2000 <_fini+0x10>
    101c:	jmp    3000 <_Z13ncclLoadParamPKcllPl>

0000000000001020 <_Z8settingsv>:
    1020:	xor    esi,esi
    1022:	call   3100 <malloc@plt>
    1027:	lea    rdi,[rip+0x100]        # 2010 <_fini+0x20>
    102e:	call   3200 <_Z10ncclGetEnvPKc>
    1033:	lea    rdi,[rip+0x100]        # 2020 <_fini+0x30>
    103a:	xor    esi,esi
    103c:	call   3000 <_Z13ncclLoadParamPKcllPl>
    1041:	or     rsi,0xffffffffffffffff
    1045:	lea    rdi,[rip+0x100]        # 2030 <_fini+0x40>
    104c:	call   3000 <_Z13ncclLoadParamPKcllPl>
    1051:	mov    rdi,rax
    1054:	call   3300 <getenv@plt>
"""
"""What objdump prints of a library: four calls with a name, and one without."""


def test_calls_of_a_library() -> None:
    assert calls(CODE.splitlines()) == [(0x2000, -2), (0x2010, None), (0x2020, 0), (0x2030, -1)]


def test_what_differs_from_the_table() -> None:
    rows = table().variables.values()
    texts = frozenset(row.name for row in rows if row.library == "nccl")
    numbers = {"NCCL_BUFFSIZE": "-2", "NCCL_IB_AR_THRESHOLD": "8192", "NCCL_MIN_CTAS": "4"}
    found = Asked(set(numbers), numbers, texts)
    assert differences("2.29.7", found, {}) == []
    assert differences("2.32.3", found, {"NCCL_DEBUG_TIMESTAMP_LEVELS": "WARN"}) == [
        "NCCL_DEBUG_TIMESTAMP_LEVELS: WARN, in the table WARN,ATTN",
        "NCCL_IB_AR_THRESHOLD: 8192, in the table -2",
    ]
    bare = Asked({"NCCL_NEW", "NCCL_PROGRESS_COUNTERS"}, {}, texts - {"NCCL_ALGO"})
    assert differences("2.27.7", bare, {}) == [
        "NCCL_NEW: not in the table",
        "NCCL_PROGRESS_COUNTERS: in the table since 2.32.3",
        "NCCL_ALGO: in the table since 2.5.6, and not in the library",
    ]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("v", ROOT / "scripts/nccl_validation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_difference_is_told_with_its_row(script: ModuleType) -> None:
    same = [Result(row, "eth0 192.0.2.1", ()) for row in ROWS]
    other = [Result(ROWS[0], "lo 127.0.0.1", ("by the rules: eth0 192.0.2.1",)), *same[1:]]
    page = script.page({"1.2.3": same, "1.2.4": same, "1.2.5": other}, TABLED_AS, "2026-01-02")
    count = 3 * len(ROWS)
    assert f"2026-01-02: {count - 1} of {count} answers are those of the rules." in page
    assert f"| 1.2.5 | {len(ROWS)} | {len(ROWS) - 1} |" in page
    row = "| 1.2.5 | many | nothing set | lo 127.0.0.1 | by the rules: eth0 192.0.2.1 |"
    assert row in page
    assert "| many | nothing set | lo 127.0.0.1 (1.2.5); eth0 192.0.2.1 |" in page
    assert "| 1.2.3 | 200 | 150 | 1 |\n\n- 1.2.3: NCCL_X: not in the table\n" in page
    assert "None." in script.page({"1.2.3": same}, {}, "2026-01-02")


def test_the_page_in_docs_has_every_row_of_every_version(script: ModuleType) -> None:
    page = (ROOT / "docs/nccl-validation.md").read_text("utf-8")
    assert QUICK in VERSIONS
    for version in VERSIONS:
        assert f"| {version} | {len(ROWS)} | {len(ROWS)} |" in page, "make test-nccl"
    tables = {tuple(line.split(" | ")[::3]) for line in page.splitlines() if line.count("|") == 5}
    assert {(f"| {version}", "0 |") for version in TABLED} <= tables, "make test-nccl"
    written = {line.rpartition(" | ")[0] for line in page.splitlines()}
    for row in ROWS:
        text = row.text.replace("|", "\\|")
        assert f"| {row.host} | {text}" in written, "make test-nccl"
