"""Watch over one run: strike at the planned moment, see who is late, and end what cannot end."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, field

from nccl_doctor.system.supervisor import LAST_S
from tests.lab.chaos import SIGNALS
from tests.lab.chaos.census import Census, Seen, below, chain, of_role, supervisors, tops
from tests.lab.chaos.strikes import Scene

GRACE_S = LAST_S
"""Time after the time-out in which a run may still end: what hangs is killed by then."""
_LOOK_S, _CALM_S = 0.03, 0.3
_FLAPS = 5
_AGENTS_S = 4.0
_START_S = 60.0


@dataclass
class Watch:
    """What was seen.

    Attributes:
        struck: whether the strike hit a living run.
        what: what it hit, or why it could not be done.
        ranks: ranks whose processes it hit.
        processes: (host, top process id) of what it hit and of everything above.
        at: `time.time()` of the strike.
        reported: whether there was a report then.
        late: processes that were there longer than they may.
        ended: (host, process id) of what the warden killed.
        lag_s: by how much the warden itself was late, at worst: this machine is that busy.
        births: processes and threads that the victim saw come.
    """

    struck: bool = False
    what: str = ""
    ranks: tuple[int, ...] = ()
    processes: tuple[tuple[str, int], ...] = ()
    at: float = 0.0
    reported: bool = False
    late: list[str] = field(default_factory=list)
    ended: set[tuple[str, int]] = field(default_factory=set)
    lag_s: float = 0.0
    births: int = 0


class Warden:
    """A context in which a run is watched, that is struck after so many `births`."""

    def __init__(self, scene: Scene, limit_s: float, births: int) -> None:
        self.seen = Watch()
        self._plan, self._lab, self._scene = scene.plan, scene.lab, scene
        self._limit_s, self._births = limit_s, births
        self._census = Census(scene.lab)
        self._over = threading.Event()
        self._first: dict[tuple[str, int], float] = {}
        self._base: int | None = None
        self._due: float | None = None
        self._stopped: Seen | None = None
        self._changes = 0
        self._next_change = 0.0
        self._quiet_since: float | None = None
        self._busy = False
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="warden", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self.seen

    def __exit__(self, *_: object) -> None:
        """Wait until all have left, also those that a launcher which is gone has left behind."""
        end = time.monotonic() + self._limit_s + GRACE_S
        while self._busy and time.monotonic() < end + self.seen.lag_s:  # which may grow meanwhile
            time.sleep(0.1)  # between two looks
        self._over.set()
        self._thread.join(10)

    def _watch(self) -> None:
        before = calm = time.monotonic()
        while not self._over.wait(pause := self._pause):
            now = time.monotonic()
            self.seen.lag_s = max(self.seen.lag_s, now - before - pause)
            before = now
            self._note_births()
            if not self.seen.struck and not self.seen.what and self._is_due():
                self._strike(self._census.take())
            self._go_on()
            self._scene.relieve()
            if now >= calm:  # whole tables cost a hundred times what a number costs
                calm = now + _CALM_S
                tables = self._census.take()
                self._end_the_late(tables)
                self._end_the_stuck(tables)

    @property
    def _pause(self) -> float:
        """Time between two looks: only the moments of a strike need a short one."""
        plan, seen = self._plan, self.seen
        if plan.strike == "memory" or not (
            seen.struck or seen.what or plan.strike in ("none", "clock")
        ):
            return _LOOK_S
        if plan.strike in ("flap", "stop-go"):
            return min(_CALM_S, max(_LOOK_S, self._next_change - time.monotonic()))
        return _CALM_S

    # -- the strike -------------------------------------------------------------------------------

    def _note_births(self) -> None:
        victim, launcher = self._plan.victim, self._plan.launcher
        newest = self._census.newest(victim)
        if self._base is None:
            if newest and any(s.alive for s in supervisors(launcher, self._census.of(victim))):
                self._base = newest
        else:
            self.seen.births = newest - self._base

    def _is_due(self) -> bool:
        if self._plan.strike == "none" or self._base is None:
            return False
        if self._due is None and self.seen.births >= self._births:
            self._due = time.monotonic() + self._plan.delay_s
        return self._due is not None and time.monotonic() >= self._due

    def _strike(self, tables: dict[str, list[Seen]]) -> None:
        plan, seen, table = self._plan, self.seen, tables[self._plan.victim]
        if not any(s.alive for each in tables.values() for s in supervisors(plan.launcher, each)):
            return
        seen.reported = (self._scene.out / "report.json").exists()
        if plan.strike in SIGNALS:
            candidates = of_role(plan.launcher, plan.role, table)
            if not candidates:
                return
            target = candidates[int(plan.pick * len(candidates))]
            if not self._census.send(target, getattr(signal, SIGNALS[plan.strike])):
                return
            seen.what = f"process {target.pid} {target.name} of {target.host}"
            seen.processes = tuple((each.host, each.pid) for each in chain(target, table))
            seen.ranks = self._ranks_of(target, table)
            if SIGNALS[plan.strike] == "SIGSTOP":
                self._stopped = target
        elif plan.strike == "clock":
            if not self._lab[plan.victim].clock_s:
                seen.what = "this kernel has no time namespaces"
                return
            seen.what = f"its uptime differs by {plan.amount} s, from the start"
            seen.ranks = plan.ranks_of(plan.victim)
        else:
            if why := self._scene.strike():
                seen.what = why
                return
            seen.what = plan.strike
            seen.ranks = () if plan.strike == "folder" else plan.ranks_of(plan.victim)
        seen.struck, seen.at = True, time.time()
        self._next_change = time.monotonic() + plan.for_s

    def _ranks_of(self, target: Seen, table: list[Seen]) -> tuple[int, ...]:
        """Ranks that depend on a process: all of the host, unless it is seen to be of one."""
        plan = self._plan
        every = plan.ranks_of(plan.victim)
        if plan.launcher == "torchrun":  # which ends all ranks of a host if one fails
            return every
        above = {each.pid for each in chain(target, table)}
        if plan.launcher == "plain":
            for process in self._lab.processes:
                if process.host.name == plan.victim and int(process.inner_pid or 0) in above:
                    return (int(process.env["RANK"]),)
            return every
        ranks = of_role("own", "rank", table)
        if len(ranks) == plan.nproc:  # they are forked in order
            for rank, process in zip(every, ranks, strict=True):
                if process.pid in above:
                    return (rank,)
        return every

    def _go_on(self) -> None:
        """Continue what was stopped for a while, move the cable once more."""
        if not self.seen.struck or time.monotonic() < self._next_change:
            return
        if self._plan.strike == "stop-go" and self._stopped is not None:
            self._census.send(self._stopped, signal.SIGCONT)
            self._stopped = None
        elif self._plan.strike == "flap" and self._changes < _FLAPS:
            self._changes += 1
            self._scene.plug_in(out=self._changes % 2 == 0)
            self._next_change = time.monotonic() + self._plan.for_s

    # -- the end ----------------------------------------------------------------------------------

    def _end_the_late(self, tables: dict[str, list[Seen]]) -> None:
        """Note and kill what is there longer than its time-out and `GRACE_S`.

        Nobody can leave while it is stopped, and torchrun has no time-out.
        """
        now = time.monotonic()
        for host, table in tables.items():
            for top in supervisors(self._plan.launcher, table):
                started = self._first.setdefault((host, top.pid), now)
                over = now - started - self._limit_s - GRACE_S - self.seen.lag_s
                if self._plan.strike == "stop-go" and self.seen.struck:
                    begin = self._next_change - (started + self._limit_s)
                    over -= max(0.0, begin)
                if over < 0:
                    continue
                for each in below(top, table):
                    if each.alive and each.state not in "tT":
                        name = f"{each.name} [{each.state}]"
                        self.seen.late.append(f"{host}: {name} after {now - started:.1f} s")
                        self._kill(each)

    def _end_the_stuck(self, tables: dict[str, list[Seen]]) -> None:
        """Kill what is stopped for good once all others have left, and then torchrun's agents."""
        alive = [each for table in tables.values() for each in table if each.alive]
        agents = set()
        if self._plan.launcher == "torchrun":
            agents = {(host, top.pid) for host, table in tables.items() for top in tops(table)[:1]}
        free = [e for e in alive if not (e.client or e.state in "tT" or (e.host, e.pid) in agents)]
        now = time.monotonic()
        self._busy = bool(free)
        if free or (self._base is None and now - self._began < _START_S):
            self._quiet_since = None
            return
        self._quiet_since = self._quiet_since or now
        for each in alive:
            waits = _AGENTS_S if each.client or (each.host, each.pid) in agents else 0.2
            stopped = each.state in "tT" and self._plan.strike != "stop-go"
            if (stopped or waits > 1) and now - self._quiet_since > waits:
                self._kill(each)

    def _kill(self, each: Seen) -> None:
        self._census.send(each, signal.SIGKILL)
        self.seen.ended.add((each.host, each.pid))
