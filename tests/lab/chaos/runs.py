"""One run from its plan to its record, in a lab of its own."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.lab.chaos import Plan
from tests.lab.chaos.judging import Ended, Outcome, accusations, judge
from tests.lab.chaos.records import Record
from tests.lab.chaos.strikes import Scene
from tests.lab.chaos.warden import Warden, Watch
from tests.lab.lab import Lab
from tests.lab.run import Run
from tests.support.forkserver import fork_server

JOIN_S = 15.0
COLLECTIVE_S = 8.0
LIMIT_S = 40.0
"""Time-outs of every run, times the patience that a busy machine needs: it makes healthy hosts
slow, and waiting costs nobody anything."""


def versions() -> dict[str, str]:
    """Versions that a record depends on."""
    return {
        "nccl-doctor": version("nccl-doctor"),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def run(
    plan: Plan, text_folder: Path | None = None, patience: float = 1.0, *, short: bool = False
) -> Record:
    """Carry out a plan. What a run that failed left is written as text into `text_folder`.

    `short`, for the test suite: at level quick, whatever the plan says, and with `LIMIT_S` as it
    is. The plan stays the same, and the strike comes as far into the run as at the plan's level.
    """
    level = "quick" if short else plan.level
    limit_s = LIMIT_S if short else LIMIT_S * patience
    fork_server().ask(python=True)  # it stands before anything has a time limit
    possible = Path("/proc/self/ns/time").exists()
    clocks = {plan.victim: plan.amount} if plan.strike == "clock" and possible else {}
    with Lab(plan.names, clocks=clocks) as lab:
        scene = Scene(plan, lab)
        try:
            before = _state_of(lab)
            with Warden(scene, limit_s, plan.births_at(level)) as seen:
                done = _start(scene, patience, limit_s, level)
            outcome = _outcome(scene, seen, done, before)
        finally:
            scene.close()
        judgement = judge(outcome)
        record = Record(
            plan=plan,
            judgement=judgement,
            struck=seen.struck,
            what=seen.what,
            seconds=round(done.seconds, 1),
            codes=tuple(done.codes),
            verdicts={name: each["verdict"] for name, each in outcome.reports.items()},
            causes=_causes(outcome),
            births=seen.births,
            lag_s=round(seen.lag_s, 2),
            patience=patience,
            day=datetime.now(timezone.utc).date().isoformat(),
            versions=versions(),
        )
        if text_folder is not None and (judgement.failed or judgement.unknown):
            done.report = outcome.reports.get("run")  # type: ignore[assignment]
            done.partial = {k: v for k, v in outcome.reports.items() if k != "run"}  # type: ignore
            text_folder.mkdir(parents=True, exist_ok=True)
            text = f"{plan}\n{json.dumps(record.to_json(), indent=1)}\n{done}\n"
            (text_folder / f"run-{plan.seed}-{plan.number}.txt").write_text(text)
        return record


def _start(scene: Scene, patience: float, limit_s: float, level: str) -> Run:
    plan, lab = scene.plan, scene.lab
    options = ["--json", str(scene.out / "report.json")]
    if plan.shared:
        options += ["--output-dir", str(scene.out)]
    limits = {"join-": JOIN_S * patience, "collective-": COLLECTIVE_S * patience, "": limit_s}
    for name, seconds in limits.items():
        options += [f"--{name}timeout", f"{seconds:g}"]
    options += ["--level", level]
    more: dict[str, Any] = {"nproc": plan.nproc, "timeout_s": 3 * limit_s}
    if plan.launcher == "plain":
        return lab.plain_doctor(*options, per_host=scene.env, **more)
    start = lab.own_doctor if plan.launcher == "own" else lab.torchrun_doctor
    return start(*options, per_host_env=scene.env, **more)


def _outcome(scene: Scene, seen: Watch, done: Run, before: Mapping[str, str]) -> Outcome:
    plan, lab = scene.plan, scene.lab
    reports = {}
    for path in sorted(scene.out.glob("*.json")) if scene.out.exists() else ():
        reports[_name(path)] = json.loads(path.read_text())
    file = scene.out / "report.json"
    written = file.stat().st_mtime if file.exists() else 0.0
    processes = []
    for each in done.done:
        rank = each.rank if plan.launcher == "plain" else None
        mine = rank is None or rank in seen.ranks
        ended = (each.code or 0) < 0 and any(host == each.host for host, _ in seen.ended)
        code = None if ended else each.code
        hit = bool(seen.processes) and each.host == plan.victim and mine
        processes.append(Ended(each.host, rank, code, each.stderr, hit))
    return Outcome(
        plan=plan,
        struck=seen.struck,
        ranks=seen.ranks,
        reported=seen.reported,
        processes=processes,
        reports=reports,
        after_s=max(0.0, written - seen.at - seen.lag_s) if seen.struck else 0.0,
        late=seen.late,
        leftovers=_leftovers(lab, scene, done, before),
    )


def _name(file: Path) -> str:
    """`run`, `nodeK` of a host that had to judge alone, `viewK` of any host in a shared folder."""
    if file.name == "report.json":
        return "run"
    own = file.stem.startswith("report.")
    return file.stem.removeprefix("report.") if own else file.stem.replace("node", "view")


def _leftovers(lab: Lab, scene: Scene, done: Run, before: Mapping[str, str]) -> list[str]:
    every = lab.leftovers(done.folder) + scene.leftovers()
    found = [each for each in every if not scene.is_others(each)]
    if scene.out.exists():
        found += [f"file {p.name}" for p in scene.out.iterdir() if p.suffix != ".json"]
    after = _state_of(lab)
    for what, text in after.items():
        if text != before[what]:
            new = sorted(set(text.splitlines()) - set(before[what].splitlines()))
            # The rules of the strike itself are nobody else's.
            if not what.startswith(_CHANGES.get(scene.plan.strike, "nothing")):
                found.append(f"{what}: {'; '.join(new) or 'something is gone'}")
    return found


_CHANGES = {"drop": "firewall", "reject": "firewall"}


def _state_of(lab: Lab) -> dict[str, str]:
    """What a run could change on a host for good: network, firewall, IPC, locks."""
    found = {}
    for host in lab.hosts:
        root = Path(f"/proc/{host.init}")
        cards = [line.partition(":")[0].strip() for line in _lines(root / "net/dev")[2:]]
        found[f"interfaces of {host.name}"] = "\n".join(sorted(cards))
        for what, path in {
            "addresses": "net/fib_trie",
            "routes": "net/route",
            "shared memory segments": "root/proc/sysvipc/shm",
            "semaphores": "root/proc/sysvipc/sem",
            "message queues": "root/proc/sysvipc/msg",
        }.items():
            found[f"{what} of {host.name}"] = "\n".join(_lines(root / path))
        locks = root / "root/run/lock"
        names = sorted(path.name for path in locks.iterdir()) if locks.is_dir() else []
        found[f"locks of {host.name}"] = "\n".join(names)
        found[f"firewall of {host.name}"] = host.call("nft", "list", "ruleset")
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _causes(outcome: Outcome) -> tuple[str, ...]:
    words = []
    for name, report in outcome.reports.items():
        for found in accusations(report):
            where = found["where"]
            places = [*where["hosts"], *(f"node {n}" for n in where["nodes"])]
            places += [f"rank {rank}" for rank in where["ranks"]]
            places += [f"{a} → {b}" for a, b in where["links"]]
            words.append(f"{name}: {found['code']} ({', '.join(places) or 'nowhere'})")
    return tuple(dict.fromkeys(words))
