"""A plug-in that misbehaves in a real run costs its own answer, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.ranks import Ranks

OPTIONS = ("--join-timeout=8", "--timeout=60", "--collective-timeout=5")
PAGE = '''
"""Does the plug-in behave?"""
from nccl_doctor.api import *

KIND = Kind("plugin-misbehaves", Layer.HOST, "title", "why", "fix")

class Bad(Check):
    name = "bad"
    layer = Layer.HOST
    scope = Scope.RANK
    kinds = (KIND,)
    deadline_s = 2.0
'''
FINE = """
    def observe(self, ctx):
        return {}
    def judge(self, cluster):
        return ()
"""
MISTAKES = {
    "plan raised": "    together = True\n    def plan(self, cluster): raise KeyError('lost')\n"
    + FINE,
    "KeyError": FINE.replace("return ()", "raise KeyError('lost')"),
    "raised": FINE.replace("return {}", "raise KeyError('lost')"),
    "hung": FINE.replace("return {}", "import time; time.sleep(1000)"),
    "died of SIGSEGV": FINE.replace("return {}", "import os; os.kill(os.getpid(), 11)"),
    "": FINE + "    def deadline(self, ctx): raise KeyError('lost')\n",
}


def install(folder: Path, body: str) -> Path:
    (folder / "bad_plugin.py").write_text(PAGE + body)
    info = folder / "bad_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nccl_doctor.checks]\nbad = bad_plugin\n")
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_of_a_plugin(tmp_path: Path, mistake: str) -> None:
    (tmp_path / "plugin").mkdir()
    path = str(install(tmp_path / "plugin", MISTAKES[mistake]))
    ranks = Ranks(tmp_path, 2, OPTIONS, changes={rank: {"PYTHONPATH": path} for rank in range(2)})
    ended = ranks.wait(40)
    report = ranks.report()
    status = {c["name"]: (c["status"], c["reason"]) for c in report["checks"]}
    if mistake:
        assert status["bad"][0] == "unknown"
        assert mistake in status["bad"][1]
        assert {e.code for e in ended.values()} == {3}
    else:
        assert status["bad"][0] == "pass"
        assert {e.code for e in ended.values()} == {0}
    del status["bad"]
    assert {s for s, _ in status.values()} == {"pass", "skipped"}
