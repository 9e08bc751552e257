"""Plug-ins that misbehave in a real run cost their own answer, and nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import nccl_doctor
from tests.cli.program import program
from tests.ranks.ranks import Ranks
from tests.support.forkserver import quick_python_path

OPTIONS = ("--join-timeout=8", "--timeout=60", "--collective-timeout=5")
PAGE = '''
"""Does the plug-in behave?"""
from nccl_doctor.api import *

KIND = Kind("{code}-misbehaves", Layer.HOST, "title", "why", "fix")

class Bad(Check):
    name = "{name}"
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
    "cannot_plan": (
        "    together = True\n    def plan(self, cluster): raise KeyError('lost')\n" + FINE,
        "plan raised",
    ),
    "cannot_judge": (FINE.replace("return ()", "raise KeyError('lost')"), "KeyError"),
    "leaves": (FINE.replace("return ()", "raise SystemExit(0)"), "SystemExit: 0"),
    "ends_us": (FINE.replace("return ()", "import os; os._exit(0)"), "ended its process"),
    "cannot_look": (FINE.replace("return {}", "raise KeyError('lost')"), "raised"),
    "hangs": (FINE.replace("return {}", "import time; time.sleep(1000)"), "hung"),
    "dies": (FINE.replace("return {}", "import os; os.kill(os.getpid(), 11)"), "died (SIGSEGV)"),
}
"""Body of the check, and what is said of it."""
DRAWS_WRONGLY = FINE + "    def sections(self, cluster): yield HostLink('nd0', 'nd1')\n"
FORGIVEN = FINE + "    def deadline(self, ctx): raise KeyError('lost')\n"


NO_TIME = (
    "    together = True\n"
    "    def plan(self, cluster): return [Round('r', ((0, 1),), deadline_s='soon')]\n" + FINE
)
BREAKS_US = (
    "    @property\n    def together(self): raise KeyError('lost')\n" + FINE
)  # asked for while the facts are judged, too


def install(folder: Path, bodies: dict[str, str]) -> Path:
    info = folder / "bad_plugins-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-plugins\nVersion: 1.0\n")
    entries = "".join(f"{name} = bad_{name}\n" for name in bodies)
    (info / "entry_points.txt").write_text(f"[nccl_doctor.checks]\n{entries}")
    for name, body in bodies.items():
        page = PAGE.format(name=name, code=name.replace("_", "-"))
        (folder / f"bad_{name}.py").write_text(page + body)
    return folder


def test_mistakes_of_plugins(tmp_path: Path) -> None:
    bodies = {name: body for name, (body, _) in MISTAKES.items()} | {"forgiven": FORGIVEN}
    bodies["draws_wrongly"] = DRAWS_WRONGLY
    path = str(install(tmp_path / "plugins", bodies))
    (tmp_path / "plugins" / "bad_leaves_early.py").write_text("import os; os._exit(0)")
    with (tmp_path / "plugins/bad_plugins-1.0.dist-info/entry_points.txt").open("a") as file:
        file.write("leaves_early = bad_leaves_early\n")
    path += f"{os.pathsep}{Path(nccl_doctor.__file__).parents[1]}"
    options = (*OPTIONS, "--level=quick")
    changes = {rank: {"PYTHONPATH": path} for rank in range(2)}
    ranks = Ranks(tmp_path, 2, options, changes=changes)
    ended = ranks.wait(40)
    report = ranks.report()
    status = {c["name"]: (c["status"], c["reason"]) for c in report["checks"]}
    for name, (_, said) in MISTAKES.items():
        assert status[name][0] == "unknown"
        assert said in status.pop(name)[1]
    assert status["forgiven"] == ("pass", "")
    assert {s for s, _ in status.values()} == {"pass", "skipped"}
    drawn = [f for f in report["findings"] if "`sections`" in f["message"]]
    assert [f["code"] for f in drawn] == ["check-broke"]
    assert "check draws_wrongly" in drawn[0]["message"]
    assert "HostLink whose start is a str, not int" in drawn[0]["message"]
    (unusable,) = (f for f in report["findings"] if f["code"] == "check-unusable")
    assert "leaves_early" in unusable["message"]
    assert "ended its process (exit code 0)" in unusable["message"]
    assert {e.code for e in ended.values()} == {3}


def test_a_plan_of_wrong_types_costs_its_own_check_only(tmp_path: Path) -> None:
    here = os.environ.get("PYTHONPATH", "")
    path = f"{install(tmp_path / 'plugins', {'no_time': NO_TIME})}{os.pathsep}{here}"
    options = (*OPTIONS, "--select=no_time,launch_record")
    changes = {rank: {"PYTHONPATH": path} for rank in range(2)}
    ranks = Ranks(tmp_path, 2, options, changes=changes)
    ended = ranks.wait(40)
    report = ranks.report()
    assert [(each["name"], each["status"], each["reason"]) for each in report["checks"]] == [
        ("launch_record", "pass", ""),
        ("no_time", "unknown", "plan raised ValueError: Round.deadline_s is a text, not a number"),
    ]
    assert (report["verdict"], report["findings"]) == ("unknown", [])
    assert "Traceback" not in ended[0].stderr
    assert {each.code for each in ended.values()} == {3}


def test_own_launcher_imports_a_plugin_once_for_all_ranks(tmp_path: Path) -> None:
    seen = tmp_path / "imported"
    body = f"{FINE}\nopen({str(seen)!r}, 'a').write('x')\n"
    path = f"{install(tmp_path / 'plugins', {'counts': body})}{os.pathsep}"
    path += str(Path(nccl_doctor.__file__).parents[1])
    command = [quick_python_path(), "-m", "nccl_doctor", "run", "--nproc-per-node=3", *OPTIONS]
    done = subprocess.run(
        [*command, "--select=counts,ranks"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "2 checks passed for 3 ranks on 1 host; the others were not run" in said
    assert "fit to train" not in said
    assert seen.read_text().count("x") == 2  # tried in a child, then used


def test_a_report_that_cannot_be_made_is_a_report_that_says_so(tmp_path: Path) -> None:
    here = os.environ.get("PYTHONPATH", "")
    path = f"{install(tmp_path / 'plugins', {'breaks_us': BREAKS_US})}{os.pathsep}{here}"
    options = (*OPTIONS, "--select=breaks_us,launch_record")
    changes = {rank: {"PYTHONPATH": path} for rank in range(2)}
    ranks = Ranks(tmp_path, 2, options, changes=changes)
    ended = ranks.wait(40)
    report = ranks.report()
    said = [f["message"] for f in report["findings"] if f["code"] == "run-interrupted"]
    assert said[-1].startswith("judging failed: KeyError: 'lost' (bad_breaks_us.py:")
    assert (report["verdict"], report["exit_code"]) == ("unknown", 3)
    assert {check["status"] for check in report["checks"]} == {"unknown"}
    assert not [f for f in report["findings"] if f["severity"] == "fail"]
    for each in ended.values():
        assert "Traceback" not in each.stderr
        assert each.code == 3
    assert "judging failed" in " ".join(ended[0].stdout.split())


def test_env_has_a_report_too_where_none_can_be_made(tmp_path: Path) -> None:
    path = f"{install(tmp_path / 'plugins', {'breaks_us': BREAKS_US})}"
    path += f"{os.pathsep}{Path(nccl_doctor.__file__).parents[1]}"
    arguments = ("env", "--select=breaks_us,limits", "--json", "report.json")
    done = program(*arguments, cwd=tmp_path, env={"PYTHONPATH": path})
    report = json.loads((tmp_path / "report.json").read_text())
    assert (done.returncode, report["verdict"]) == (3, "unknown")
    assert "Traceback" not in done.stderr
    assert "bad_breaks_us.py" in json.dumps(report["root_causes"])
