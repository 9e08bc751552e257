"""SECURITY.md against the source: every module that opens a port has its row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nccl_doctor

ROOT = Path(nccl_doctor.__file__).parent.parent
PAGE = (ROOT / "SECURITY.md").read_text("utf-8")


def opens(call: ast.Call) -> bool:
    """True if a call binds or listens, or has torch do so."""
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
    if name in ("listen", "bind"):
        return len(call.args) == 1 and not call.keywords
    if name == "TCPStore":
        return any(
            key.arg == "is_master" and getattr(key.value, "value", None) is not False
            for key in call.keywords
        )
    if name == "ncclGetUniqueId":
        return True
    return name in ("create_server", "init_process_group", "HTTPServer", "start_server")


MAY_OPEN = re.compile(
    r"\b(listen|bind|TCPStore|ncclGetUniqueId|create_server|init_process_group|HTTPServer"
    r"|start_server)\b"
)
"""The names that `opens` knows: a text without one needs not be parsed."""


def test_every_listener_is_in_the_table() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("nccl_doctor", "checks")
        for path in (ROOT / folder).rglob("*.py")
        if MAY_OPEN.search(text := path.read_text("utf-8"))
        and any(isinstance(node, ast.Call) and opens(node) for node in ast.walk(ast.parse(text)))
    }
    assert len(found) > 5
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and ".py`" in line]
    named = [
        name for row in rows for name in re.findall(r"`((?:nccl_doctor|checks)/\S+\.py)`", row)
    ]
    assert sorted(named) == sorted(found), "each module once, with a row of its own"
    for row in rows:
        assert row.count("|") == 7, row


def test_every_test_that_holds_a_rule_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 5
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for text in texts for name in re.findall(r"def (test_\w+)\(", text)}
    assert named <= there


def test_the_page_is_linked() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        assert "(SECURITY.md)" in (ROOT / name).read_text("utf-8"), name
