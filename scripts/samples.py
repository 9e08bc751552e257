"""Record docs/samples: reports of runs in the lab, from which `make docs` prints the samples.

Without arguments all of them; with names, those. Paths of this machine are replaced. What is
printed from a recording is judged anew, by the rules and in the words of today; so recording again
is needed only where what is observed changes, or what a sample shows.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nccl_doctor.autopsy.examine import examine  # noqa: E402
from nccl_doctor.report.formats import renderer  # noqa: E402
from tests.lab import faults  # noqa: E402
from tests.lab.hosts import trouble  # noqa: E402
from tests.lab.lab import PATIENT, Lab  # noqa: E402
from tests.lab.run import Run  # noqa: E402
from tests.support.deaths import Death, consoles_of  # noqa: E402

SAMPLES = ROOT / "docs" / "samples"


def _alone(lab: Lab) -> Run:
    return lab.own_doctor(*PATIENT)


def _healthy(lab: Lab) -> Run:
    return lab.own_doctor(*PATIENT)


def _one_way(lab: Lab) -> Run:
    """Let the firewall of node 0 pass MASTER_PORT only. gloo's ranks on the other host must reach
    node 0 on new ports: plain torchrun waits for its whole time-out.
    """
    faults.drop_ephemeral(lab["nd0"])
    return lab.own_doctor(*PATIENT)


def _pair(lab: Lab) -> Run:
    faults.break_pair(lab, lab["nd1"], lab["nd2"])
    return lab.own_doctor(*PATIENT, nproc=1)


def _slow_host(lab: Lab) -> Run:
    faults.slow_port(lab, lab["nd2"])
    return lab.own_doctor(*PATIENT, nproc=1)


def _unresolved(lab: Lab) -> Run:
    """The report of rank 0, which has heard of it from the other host by a shared folder."""
    lab["nd1"].set_hosts(lab.names_text(nd0=""))
    views = lab.folder / "views"
    views.mkdir()
    return lab.own_doctor("--output-dir", str(views))


def _no_time(lab: Lab) -> Run:
    short = [f"--{each}timeout=5" for each in ("", "join-", "collective-")]
    return lab.own_doctor(*short, "--select", "interfaces,seeds,groups")


def _host(lab: Lab) -> Run:
    """What `nccl-doctor env` says of one host."""
    folder = lab.new_folder()
    words = [sys.executable, "-m", "nccl_doctor", "env", "--json", str(folder / "report.json")]
    process = lab["nd0"].run(words, folder=folder)
    lab.wait([process], 60.0)
    return Run.read(folder, {0: [process]})


HOSTS = ("nd0", "nd1", "nd2")
RUNS: dict[str, tuple[int, Callable[[Lab], Run], str]] = {
    "alone": (1, _alone, "pass"),
    "healthy": (2, _healthy, "pass"),
    "one-way": (2, _one_way, "fail"),
    "pair": (3, _pair, "fail"),
    "slow-host": (3, _slow_host, "warn"),
    "unresolved": (2, _unresolved, "fail"),
    "no-time": (1, _no_time, "unknown"),
    "host": (1, _host, "pass"),
}
"""Name → number of hosts, what is done with them, and the verdict that it must give."""


def report_of(name: str) -> str:
    """The report that a run gives, as JSON.

    Raises:
        SystemExit: it gives another verdict, as a busy machine may.
    """
    size, does, verdict = RUNS[name]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Lab(HOSTS[:size], Path(folder)) as lab,
    ):
        run = does(lab)
        if run.report is None or run.report["verdict"] != verdict:
            raise SystemExit(f"samples: {name}: not {verdict}: {run}")
        return without_places(json.dumps(run.report, separators=(",", ":")), folder)


def autopsy_of() -> str:
    """The report of an autopsy, as JSON, of what torchrun and four ranks of gloo print of which one
    is killed.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        left = consoles_of(Death("killed", 1, 1, 4, "torchrun"), Path(folder))
        started = "2026-11-28T00:00:00+00:00"
        report = examine([str(path) for path in left], io.BytesIO(), started=started)
        return without_places(renderer("json")(report), folder)


def without_places(text: str, folder: str) -> str:
    """Without the paths of this machine."""
    for place, name in ((folder, "/tmp/run"), (sys.prefix, "/opt/job"), (str(ROOT), "/opt/src")):
        text = text.replace(place, name)
    return text


def main(names: list[str]) -> int:
    """Record; 1 where no lab can be built."""
    if reason := trouble():
        sys.stderr.write(f"samples: {reason}\n")
        return 1
    SAMPLES.mkdir(exist_ok=True)
    for name in names or [*RUNS, "killed"]:
        path = SAMPLES / f"{name}.json.gz"
        text = autopsy_of() if name == "killed" else report_of(name)
        data = gzip.compress(text.encode(), mtime=0)
        path.write_bytes(data)
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}, {len(data) >> 10} KiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
