"""What a run of the doctor in the lab left behind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.processes import Line, Process


@dataclass(frozen=True)
class Done:
    """How one process of a run ended. `code` is None where the lab had to kill it."""

    host: str
    rank: int | None
    code: int | None
    seconds: float
    stdout: str
    stderr: str
    lines: tuple[Line, ...]


@dataclass
class Run:
    """What a run of the doctor left behind.

    `report` is the coordinator's; `partial` maps node rank (or what stands for it) to the report of
    a participant that never got in; `leftovers` says what was not cleaned up: nothing, if all is
    well.
    """

    folder: Path
    done: list[Done] = field(default_factory=list)
    report: dict[str, Any] | None = None
    partial: dict[int | str, dict[str, Any]] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, started: Mapping[int | None, Sequence[Process]]) -> Run:
        """What processes that have ended, by rank or node, left in the folder of their run."""
        run = cls(folder)
        for rank, processes in started.items():
            for process in processes:
                run.done.append(
                    Done(
                        process.host.name,
                        rank,
                        process.returncode,
                        process.seconds or 0.0,
                        process.stdout,
                        process.stderr,
                        tuple(sorted(process.lines, key=lambda line: line.seconds)),
                    )
                )
        if (folder / "report.json").exists():
            run.report = json.loads((folder / "report.json").read_text())
        for path in folder.glob("report.node*.json"):
            number = path.stem.rpartition("node")[2]
            run.partial[int(number) if number.isdigit() else number] = json.loads(path.read_text())
        return run

    @property
    def seconds(self) -> float:
        """Wall time of the slowest process."""
        return max(done.seconds for done in self.done)

    @property
    def codes(self) -> list[int | None]:
        """Exit codes, in the order in which the processes were started."""
        return [done.code for done in self.done]

    def __str__(self) -> str:
        """Everything that a person would want to see when a test fails."""
        parts = []
        for done in self.done:
            parts.append(
                f"--- {done.host} rank {done.rank}: exit {done.code}, {done.seconds:.1f} s"
            )
            parts += [f"{line.seconds:7.2f} {line.stream[3:]} {line.text}" for line in done.lines]
        for name, report in {"coordinator": self.report, **self.partial}.items():
            if report is not None:
                parts.append(f"--- report of {name}: {report.get('verdict')}")
                parts += [
                    f"{found['severity']} {found['code']} {found['where']}"
                    f" by {found['explained_by']}: {found['message']}"
                    for found in report.get("findings", ())
                ]
                parts += [
                    f"check {check['name']}: {check['status']} {check['reason']}"
                    for check in report.get("checks", ())
                ]
        return "\n".join([*parts, f"leftovers: {self.leftovers}"])
