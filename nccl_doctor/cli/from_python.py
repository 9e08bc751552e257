"""`nccl_doctor.check()`: an examination from inside a rank, a driver or a notebook.

The examination is `nccl-doctor run` in a process of its own, with the environment of this one: it
is the participant that a launcher would start, and neither its threads nor its forks, nor a check
that crashes, touch the process of the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nccl_doctor.cli.examination import run
from nccl_doctor.cli.help import PROGRAM
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import Finding, Level
from nccl_doctor.model.report import Report, RunRecord

_VERDICTS = {0: "pass", 1: "fail", 3: "unknown"}
_ERROR = f"{PROGRAM}: error: "
_LOOK_S = 0.2
"""Time between two looks at what the process has said."""


@dataclass(frozen=True)
class Examined(Report):
    """Report of an examination; on a rank that is not rank 0 only its verdict and exit code."""

    @property
    def causes(self) -> tuple[Finding, ...]:
        """The root causes, the most important first."""
        return self.root_causes

    def __str__(self) -> str:
        from nccl_doctor.report.text import render

        return render(self)

    def _repr_html_(self) -> str:
        """The page of the report, as a notebook shows it."""
        from nccl_doctor.registry import installed
        from nccl_doctor.report.formats import html

        return html.render(self, installed)


def check(level: str = "standard", **options: Any) -> Examined:
    """Examine the cluster from inside a rank, before `init_process_group`; see `nccl-doctor run`.

    Every rank of the job calls it, with the same arguments: it waits for the others, as the
    examination under a launcher does, and at most `timeout` seconds. Without a launcher's variables
    it examines this host.

    Args:
        level: `quick`, `standard` or `full`.
        options: options of `nccl-doctor run`, with `_` for `-`: True for one without a value, a
            list for one that is given several times or takes names.

    Returns: the report on rank 0; on the other ranks its verdict, as all agree on the exit code.

    Raises:
        ValueError: an option or the launch variables are wrong; says what, as the command does.
        TypeError: there is no such option.
    """
    words = [sys.executable, "-m", "nccl_doctor", "run", *_words({"level": level, **options})]
    with tempfile.TemporaryDirectory(prefix="nccl-doctor-") as folder:
        file = Path(folder, "report.json")
        code, error = _run([*words, f"--json={file}"], Path(folder, "stderr"))
        if code == 2:
            raise ValueError(error or f"{PROGRAM} run ended with exit code 2")
        if file.exists():
            report = Report.from_json(json.loads(file.read_bytes()))
            return Examined(**{each.name: getattr(report, each.name) for each in fields(report)})
    nobody = Cluster(1, 1, "", Level(level), (), ())
    said = error or "the report is on rank 0"
    return Examined(_VERDICTS.get(code, "unknown"), code, said, RunRecord(), nobody)


def _words(given: dict[str, Any]) -> list[str]:
    """Options as words of the command line.

    Raises:
        TypeError: there is no such option.
    """
    known = {param.name: param for param in run.params}
    words = []
    for name, value in given.items():
        if name not in known or name in ("relay", "json", "retry", "pause"):
            raise TypeError(f"check() got an unexpected keyword argument {name!r}")
        option = f"--{name.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True:
            words.append(option)
        elif isinstance(value, (list, tuple)) and known[name].multiple:
            words += [f"{option}={each}" for each in value]
        elif isinstance(value, (list, tuple)):
            words.append(f"{option}={','.join(map(str, value))}")
        else:
            words.append(f"{option}={value}")
    return words


def _run(words: list[str], said: Path) -> tuple[int, str]:
    """Exit code and error of the process; what it says on stderr is said on ours meanwhile.

    It holds its own time limit. Nothing is read from a pipe, which a process that it left behind
    might keep open.
    """
    home = Path(__file__).parents[2]
    paths = [] if home.name in ("site-packages", "dist-packages") else [str(home)]
    paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    env = {**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}
    error, rest = "", ""
    with said.open("wb") as into, said.open(encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=into, env=env
        )
        try:
            code = None
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_LOOK_S)
                *lines, rest = (rest + out.read()).splitlines(keepends=True) or [""]
                if rest.endswith("\n") or code is not None:
                    lines, rest = [*lines, rest], ""
                for line in lines:
                    if line.startswith(_ERROR):
                        error = line.removeprefix(_ERROR).strip()
                    elif not error:  # a usage line would follow it
                        sys.stderr.write(line)
            return code, error
        finally:  # of an interrupted cell of a notebook, too
            process.terminate()
