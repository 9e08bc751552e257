"""torch that is missing or broken is named with its rank, and nobody else."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nccl_doctor import registry
from nccl_doctor.api import Context, Severity
from nccl_doctor.cli.reports import _chosen
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.report import Report
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, outcome, shut_out
from tests.support.knocks import facts, tried
from tests.support.reports import RUN

CHECK = CHECKS["torch_import"]
GOOD = {"python": "/opt/python", "version": "2.13.0", "error": None}


def test_torch_everywhere_gives_nothing() -> None:
    cluster = make_cluster(check="torch_import", by_rank=dict.fromkeys(range(4), GOOD))
    assert list(CHECK.judge(cluster)) == []


def test_rank_without_torch_is_named() -> None:
    bad = {**GOOD, "version": None, "error": "ModuleNotFoundError: No module named 'torch'"}
    cluster = make_cluster(check="torch_import", by_rank={0: GOOD, 1: GOOD, 2: GOOD, 3: bad})
    (found,) = CHECK.judge(cluster)
    assert (found.code, found.where.ranks, found.where.hosts) == ("torch-missing", (3,), ("nd1",))
    assert "No module named 'torch'" in found.message


def test_a_torch_that_is_there_and_broken_is_to_be_repaired() -> None:
    bad = {**GOOD, "error": "ImportError: libcudnn.so.9: cannot open shared object file"}
    cluster = make_cluster(check="torch_import", by_rank={0: GOOD, 1: GOOD, 2: GOOD, 3: bad})
    (found,) = CHECK.judge(cluster)
    assert "--force-reinstall" in found.fix


@pytest.mark.xdist_group("torch")
def test_observe_imports_for_real() -> None:
    facts = CHECK.observe(Context(launch=Launch(), env={}))
    assert facts["error"] is None
    assert facts["version"]


BROKEN = {
    "raise ImportError('libtorch_cpu.so: cannot open shared object')": "libtorch_cpu.so",
    "raise OSError('libcudart.so.13: not found')": "OSError: libcudart.so.13",
    "raise ValueError('numpy.dtype size changed')": "ValueError: numpy.dtype size changed",
    "raise AttributeError('no attribute _ARRAY_API')": "AttributeError: no attribute _ARRAY_API",
    "raise RuntimeError('function has a docstring')": "RuntimeError: function has a docstring",
    "raise KeyError('HOME')": "KeyError: 'HOME'",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "x = = 3": "SyntaxError: invalid syntax",
    "raise DeprecationWarning('imp is deprecated')": "DeprecationWarning: imp is deprecated",
    # The second attempt finds what the first has left, as that of torch itself.
    "import sys; words = sys.__dict__.setdefault('tried', [])\nwords.append(1)\n"
    "raise RuntimeError(f'attempt {len(words)}')": "RuntimeError: attempt 1",
}


def views(without: Sequence[str], *, merged: bool) -> list[tuple[str, str | None]]:
    """Code and explanation of each failure, where Python has no torch on some of two hosts; what
    nd1 says alone, or both together.
    """
    hosts, last = ("nd0", "nd1"), tried("refused", errno=errno.ECONNREFUSED)
    seen = {"nd0": facts(server="none"), "nd1": facts(last)}
    if "nd0" not in without:
        seen = {"nd0": facts(server="self"), "nd1": facts()}
    made = make_cluster(hosts, 1, check="port", by_host=seen, complete="nd0" not in without)
    for seat, rank in enumerate(made.present):
        bad = hosts[seat] in without
        error = "ModuleNotFoundError: No module named 'torch'" if bad else None
        known = {"torch_import": {"alone": outcome({**GOOD, "error": error})}}
        made = change_rank(made, rank.seat, facts=known)
    made = shut_out(made, *("nd1",) if "nd0" not in without else hosts)
    if not merged:
        made = replace(made, hosts=made.hosts[1:], ranks=made.present[1:], complete=False)
    checks = [CHECKS[name] for name in ("torch_import", "port", "ranks")]
    report = conclude(made, checks, run=RUN)
    return [(f.code, f.explained_by) for f in report.findings if f.level is Severity.FAIL]


def test_python_without_torch_is_one_cause_on_each_screen_and_in_the_merged_report() -> None:
    missing = ("torch-missing", None)
    refused = ("port-refused", "torch-missing")
    assert views(["nd0", "nd1"], merged=False) == [missing, refused]
    assert views(["nd0", "nd1"], merged=True) == [missing, refused]
    assert views(["nd0"], merged=True) == [missing, refused]
    assert views(["nd0"], merged=False) == [("port-refused", None)]  # it cannot know more
    assert views(["nd1"], merged=False) == [missing]
    absent = ("host-absent", "torch-missing")
    assert sorted(views(["nd1"], merged=True)) == [absent, missing]


def test_it_is_examined_where_it_is_missing_whatever_was_selected() -> None:
    chosen = registry.load(select=["port"])
    assert [check.name for check in chosen.checks] == ["port"]
    more = chosen.with_vital()
    assert [check.name for check in more.checks] == ["torch_import", "port"]
    assert more.wanted("torch-missing")
    assert not more.wanted("addr-differs")
    assert chosen.with_vital({"limits"}).checks == chosen.checks
    assert more.with_vital().checks == more.checks
    everything = registry.load()
    assert everything.with_vital().checks == everything.checks
    for name in ("torch_import", "torch-missing"):
        assert len(registry.load(ignore=[name], select=["port"]).with_vital().checks) == 1


def test_a_merge_of_runs_with_a_selection_knows_it_too() -> None:
    def report(*checks: str) -> Report:
        run = replace(RUN, options={"select": ["port"]})
        return conclude(make_cluster(), [CHECKS[name] for name in checks], run=run)

    assert _chosen([report("port"), report("port")])["select"] == ["port"]
    assert _chosen([report("port"), report("port", "torch_import")])["select"] == [
        "port",
        "torch_import",
    ]


def run_with(torch: str, folder: Path, *arguments: str, **env: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the program with another torch."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").write_text(torch)
    done = subprocess.run(
        [sys.executable, "-m", "nccl_doctor", *arguments, "--json", "report.json"],
        cwd=folder,
        env={**os.environ, **env, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("content", BROKEN)
def test_a_rank_whose_torch_breaks_says_so_at_once(tmp_path: Path, content: str) -> None:
    launch = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29977",
    }
    code, _, said = run_with(
        content,
        tmp_path,
        "run",
        "--join-timeout=3",
        "--timeout=30",
        "--select=torch_import",
        **launch,
    )
    assert code == 1, said
    assert "torch-missing" in said
    assert BROKEN[content] in " ".join(said.split())
    assert "Traceback" not in said
    (cause,) = json.loads((tmp_path / "report.rank1.json").read_text())["root_causes"]
    assert (cause["code"], cause["where"]["ranks"]) == ("torch-missing", [1])


@pytest.mark.parametrize("content", ["raise ValueError('numpy.dtype')", "import sys; sys.exit()"])
@pytest.mark.parametrize(
    "command",
    [
        "env --backend gloo",
        "run --nproc-per-node 2 --backend gloo",
        "run --nproc-per-node 2 --backend gloo --select=port,limits",
    ],
)
def test_a_host_whose_torch_breaks_has_this_one_cause(
    tmp_path: Path, command: str, content: str
) -> None:
    """Nobody serves the store then: that the port of this host refuses is no second cause."""
    code, out, said = run_with(content, tmp_path, *command.split())
    assert code == 1, said
    assert "Traceback" not in out + said
    assert "itself failed" not in out + said
    report = json.loads((tmp_path / "report.json").read_text())
    assert [cause["code"] for cause in report["root_causes"]] == ["torch-missing"]
