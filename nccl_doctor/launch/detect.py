"""Launch record of this process, from whatever started it.

`detect` recognises the launcher by variables that only it sets, reads that launcher's table (field
→ variables, first one set wins), compares what several sources say, and derives what is safe.
What is wrong becomes a `LaunchProblem`, never an exception.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from nccl_doctor.launch.launchers import (
    LAUNCHERS,
    LEADERS,
    MASTER_ADDR_LINES,
    ONCE_PER_HOST,
    PRTERUN,
    SRUN,
    TORCH,
    TORCHRUN_WORDS,
    Launcher,
    meeting_of,
    number,
    tasks_on_node,
)
from nccl_doctor.model.codec import MAX_RANKS
from nccl_doctor.model.commands import unknown_in
from nccl_doctor.model.launch import DERIVED, Launch, LaunchProblem
from nccl_doctor.toolkit.relaunch import STARTERS

_NUMBERS = {  # field: lowest and highest sensible value
    "rank": (0, MAX_RANKS),
    "world_size": (1, MAX_RANKS),
    "local_rank": (0, MAX_RANKS),
    "local_world_size": (1, MAX_RANKS),
    "node_rank": (0, MAX_RANKS),
    "nnodes": (1, MAX_RANKS),
    "master_port": (1, 65535),
}
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"

_OF = "ADDRESS is that of rank 0's host"
"""A note beside a command."""


def detect(environ: Mapping[str, str]) -> Launch:
    """Read rank, world size and address of this process from its environment; never raises.

    Returns: an empty record with launcher `none` where nothing has launched us. That includes the
    only task of an srun or mpirun (an interactive shell, say): it says nothing about a job.
    """
    launcher = next((row for row in LAUNCHERS if _started_us(row, environ)), None)
    if launcher is None:
        return Launch()
    reading = _EnvironmentPass(launcher, environ)
    reading.read()
    reading.compare()
    reading.derive()
    reading.check_ranges()
    reading.name_missing()
    return Launch(
        launcher=launcher.name,
        **reading.values,
        restart_count=max(0, launcher.own_number(environ, "restart_count") or 0),
        agent_store=launcher.serves or environ.get(_AGENT_STORE) == "True",  # as torch compares it
        sources=reading.sources,
        problems=tuple(reading.problems),
    )


def _started_us(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    if not launcher.is_marked(environ) or not launcher.tasks:
        return launcher.is_marked(environ)
    world = number(environ.get("WORLD_SIZE", ""))
    size = launcher.own_number(environ, "world_size")
    if launcher is PRTERUN and world is None:  # how many tasks there are is told by nobody
        by_prrte = environ.get("PMIX_NAMESPACE", "").startswith("prte")  # and not by Slurm
        return by_prrte or "PRTE_LAUNCHED" in environ
    if "RANK" in environ and world is not None and size is not None and world > size:
        return False  # the tasks are per-host scripts, which then numbered their own ranks
    return (size or world or 1) > 1


class _EnvironmentPass:
    """One pass over the environment: values, where each came from, and what is wrong."""

    def __init__(self, launcher: Launcher, environ: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.environ = environ
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.problems: list[LaunchProblem] = []

    def problem(self, code: str, message: str, names: tuple[str, ...], fix: str, **kw: Any) -> None:
        """Note a problem; by default it is fatal if torch or torchrun reads one of the names."""
        found = {name: self.environ.get(name) for name in names}
        torch = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
        fatal = kw.get("fatal", any(n in torch or n.startswith("PET_") for n in names))
        self.problems.append(LaunchProblem(code, message, found, fix, fatal))

    def read(self) -> None:
        """Fill every field from the first of its variables that is set."""
        for name in (*_NUMBERS, "master_addr", "run_id"):
            variable = next((v for v in self.launcher.variables(name) if v in self.environ), None)
            if variable is None:
                continue
            if name in _NUMBERS:
                value: Any = self._read_number(name, variable)
            else:
                value = self._read_text(name, variable)
            if value is not None:
                self.values[name], self.sources[name] = value, variable

    def _read_number(self, name: str, variable: str) -> int | None:
        text = self.environ[variable]
        value = number(text)
        low, high = _NUMBERS[name]
        to = f"from {low} to {high}" if name == "master_port" else f"of at least {low}"
        fix = f"set {variable} to a whole number {to}"
        if value is None:
            if not (variable.startswith("PET_") and TORCHRUN_WORDS.fullmatch(text)):
                message = f"{variable}={text[:80]!r} is not a whole number"
                self.problem("launch-bad-value", message, (variable,), fix)
            return None
        if not low <= value <= high:
            message = f"{variable}={text[:80].strip()} is outside {low}–{high}"
            self.problem("launch-bad-value", message, (variable,), fix)
            return None
        if text != text.strip():
            message = f"{variable}={text!r} has white space around the number"
            fix = f"`export {variable}={value}`"
            self.problem("launch-bad-value", message, (variable,), fix, fatal=False)
        return value

    def _read_text(self, name: str, variable: str) -> str | None:
        text = self.environ[variable]
        if name != "master_addr" or (text and not re.search(r"\s", text)):
            return text
        what = "contains white space" if text.strip() else "is empty"
        address = shlex.quote(text.strip()) if text.strip() else ""
        message = f"{variable}={text[:80]!r} {what}"
        fix = f"`export {variable}={address}`"
        if not address:
            fix = f"`# export {variable}=ADDRESS` ({_OF})"
        self.problem("launch-bad-value", message, (variable,), fix)
        return None

    def compare(self) -> None:
        """Find sources that contradict each other, among those that mean the same thing.

        LOCAL_RANK is not compared: it is rightly 0 in every task that sees one GPU only.
        """
        if self.launcher.tasks:
            for name in ("rank", "world_size"):
                numbers = {v: number(self.environ.get(v, "")) for v in self._rivals(name)}
                known = {v: n for v, n in numbers.items() if n is not None}
                if len(set(known.values())) > 1:
                    message = " but ".join(f"{v}={n}" for v, n in known.items())
                    wrong, right = next(iter(known)), list(known)[1]
                    fix = f"`export {wrong}=${right}` (in each task); or `unset {wrong}`"
                    self.problem(
                        "launch-sources-disagree",
                        message,
                        tuple(known),
                        fix,
                        fatal=name == "world_size",  # any order of ranks will do, a count will not
                    )
        elif not self.launcher.per_host:
            self._compare_with_outer()
        self._compare_sizes()

    def _rivals(self, name: str) -> tuple[str, ...]:
        own = tuple(v for v in self.launcher.own.get(name, ()) if v in self.environ)
        # srun numbers its PMI ranks itself. Elsewhere a second one may be inherited from the srun
        # that started the daemons, as SLURM_NTASKS may be from the batch job.
        return TORCH[name] + (own if self.launcher is SRUN and name == "rank" else own[:1])

    def _compare_with_outer(self) -> None:
        """A launcher that starts ranks must itself run once per host, not once per GPU."""
        nnodes = self.values.get("nnodes")
        outer = next((row for row in ONCE_PER_HOST if row.is_marked(self.environ)), None)
        if outer is None or nnodes is None or self.launcher.name == "env":
            return
        tasks, here = outer.own_number(self.environ, "world_size"), self._tasks_here(outer)
        if tasks is None or tasks == nnodes:
            return
        names = (*outer.own["world_size"][:1], *self.launcher.own["nnodes"])
        on_host = f", {here} on this host" if here is not None else ""
        said = f"{outer.name} started {tasks} tasks{on_host}, and each ran {self.launcher.name} for"
        once = f"start the launcher once per host in {STARTERS[outer.name]}"
        if outer is SRUN:
            once = "`# srun --ntasks-per-node=1` (starts the launcher once per host)"
        if nnodes == 1:  # each of them is whole: `torchrun --standalone`, once for each task
            self.problem(
                "launch-runs-independent",
                f"{said} one host",
                names,
                f"nothing, if that is meant, and not one job of all tasks; or {once}",
                fatal=False,
            )
        elif here is not None and here > 1:
            self.problem(
                "launch-sources-disagree", f"{said} {nnodes} nodes", names, once, fatal=True
            )

    def _tasks_here(self, outer: Launcher) -> int | None:
        if outer is not SRUN:
            return outer.own_number(self.environ, "local_world_size")
        per_node = self.environ.get("SLURM_STEP_TASKS_PER_NODE")
        if per_node is None:
            return number(self.environ.get("SLURM_NTASKS_PER_NODE", ""))
        return tasks_on_node(per_node, SRUN.own_number(self.environ, "node_rank") or 0)

    def _compare_sizes(self) -> None:
        """More ranks on the hosts than in the world, or one host that is not the whole world.

        A world that differs from nnodes × local size is no contradiction: hosts may be uneven.
        """
        world, local, nnodes = map(self.values.get, ("world_size", "local_world_size", "nnodes"))
        if world is None or nnodes is None:
            return
        least = (local or 1) + nnodes - 1
        if world < least or (nnodes == 1 and local is not None and world != local):
            names = tuple(
                self.sources[name]
                for name in ("world_size", "nnodes", "local_world_size")
                if name in self.sources
            )
            said = [f"{name}={self.environ[name].strip()}" for name in names]
            self.problem(
                "launch-sources-disagree",
                " and ".join(said).replace(" and ", " but ", 1),
                names,
                "set WORLD_SIZE to the number of processes on all hosts together",
                fatal=False,
            )

    def derive(self) -> None:
        """Fill what follows from the rest, and say so in `sources`."""
        for name, value, variable in meeting_of(self.launcher, self.environ):
            self._derive(name, value, variable)
        if self.launcher is SRUN and "local_world_size" not in self.values:
            here = self._tasks_here(SRUN)
            if here is not None and 0 < here <= self.values.get("world_size", MAX_RANKS):
                self._derive("local_world_size", here, "SLURM_STEP_TASKS_PER_NODE")
        self._number_by_node()
        rank, world = self.values.get("rank"), self.values.get("world_size")
        if rank is None or world is None or rank >= world:
            return
        if world == 1 or self.values.get("nnodes") == 1:
            reason = "WORLD_SIZE" if world == 1 else self.sources["nnodes"]
            for name, value in (
                ("local_world_size", world),
                ("local_rank", rank),
                ("nnodes", 1),
                ("node_rank", 0),
            ):
                self._derive(name, value, reason)
            return
        local = self.values.get("local_world_size")
        if local is None or world % local:
            return  # hosts are uneven: nobody can tell from here
        self._derive("nnodes", world // local, "WORLD_SIZE and LOCAL_WORLD_SIZE")
        follows = self.values.get("local_rank", rank % local) == rank % local
        if follows and (self.launcher.packed or local == world):
            self._derive("node_rank", rank // local, "RANK and LOCAL_WORLD_SIZE")

    def _number_by_node(self) -> None:
        """Rank of a process that knows its host and its place there, as Lightning numbers it."""
        node, world = self.values.get("node_rank"), self.values.get("world_size")
        here, nnodes = self.values.get("local_rank"), self.values.get("nnodes")
        if None in (node, here, world) or self.launcher.name != "env":
            return
        if nnodes and world % nnodes == 0:
            by = f"WORLD_SIZE and {self.sources['nnodes']}"
            self._derive("local_world_size", world // nnodes, by)
        local = self.values.get("local_world_size")
        if local and here < local and node < world // local and world % local == 0:
            self._derive("rank", node * local + here, "NODE_RANK and LOCAL_RANK")

    def _derive(self, name: str, value: int | str, reason: str) -> None:
        is_set = any(variable in self.environ for variable in self.launcher.variables(name))
        if name not in self.values and not is_set:
            self.values[name], self.sources[name] = value, DERIVED + reason

    def check_ranges(self) -> None:
        """Each number against the size that bounds it."""
        for code, name, size in (
            ("rank-out-of-range", "rank", "world_size"),
            ("local-rank-out-of-range", "local_rank", "local_world_size"),
            ("launch-bad-value", "node_rank", "nnodes"),
        ):
            if name not in self.values or size not in self.values:
                continue
            sources = (self.sources[name], self.sources[size])
            value, limit = self.values[name], self.values[size]
            if value >= limit and not any(source.startswith(DERIVED) for source in sources):
                message = f"{sources[0]}={value} with {sources[1]}={limit}"
                last = f"0–{limit - 1}" if limit > 1 else "0"
                fix = f"{sources[0]} counts from 0: set it to {last}, or raise {sources[1]}"
                self.problem(code, message, sources, fix)

    def name_missing(self) -> None:
        """Add one problem for all values that torch needs and no variable gives."""
        needed = ["rank", "world_size", "master_addr", "master_port"]
        if self.launcher.per_host:
            one = self.values.get("nnodes") == 1 or "PET_RDZV_ENDPOINT" in self.environ
            needed = [] if one else ["master_addr", "master_port"]
        tables = {name: self.launcher.variables(name) for name in needed}
        missing = tuple(
            names[0]
            for name, names in tables.items()
            if name not in self.values and not any(v in self.environ for v in names)
        )
        if missing:
            is_or_are = "is" if len(missing) == 1 else "are"
            message = f"{' and '.join(missing)} {is_or_are} not set"
            self.problem("launch-missing-variable", message, missing, self._export(missing))

    def _export(self, missing: tuple[str, ...]) -> str:
        """The shell line that sets what is missing."""
        if missing == ("RANK",) and {"node_rank", "local_rank"} <= self.values.keys():
            line = "export RANK=$((NODE_RANK * NUMBER + LOCAL_RANK))"
            return f"`# {line}` (NUMBER is that of the ranks of a host)"
        if not all("MASTER_" in name for name in missing):
            return "start the processes with torchrun, or set " + ", ".join(missing)
        if self.launcher.name == "ray":  # its store is there, at a port that no variable tells
            return 'TorchConfig(init_method="env"), which is its default'
        known = {"MASTER_PORT": "MASTER_PORT=29500"}
        name = self.launcher.name
        leader = next((f"${each}" for each in LEADERS if self.environ.get(each)), "ADDRESS")
        known["MASTER_ADDR"] = MASTER_ADDR_LINES.get(name, f"MASTER_ADDR={leader}")
        line = "export " + " ".join(known.get(n.removeprefix("PET_"), n) for n in missing)
        if unknown_in(line):
            return f"`# {line}` ({_OF})"
        if name == "mpirun":
            return f"`{line}`; `# mpirun {' '.join(f'-x {each}' for each in missing)}`"
        return f"`{line}`" + (" (before the launch)" if name in STARTERS else "")
