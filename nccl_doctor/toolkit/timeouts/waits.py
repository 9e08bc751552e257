"""Time-outs of each layer with the settings of one host, and their sources. Pure.

Defaults that torch's Python does not hold are by version: that of NCCL's process group became 10
minutes in 2.2 (30 before), that of the heartbeat 600 s in 2.3 and 480 s in 2.5, in
ProcessGroupNCCL.cpp; the process group `nccl2` has no heartbeat in 2.15. DeepSpeed's became 10
minutes after 0.19.5 (30 before). Of NCCL nothing here was measured on a GPU.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nccl_doctor.toolkit.relaunch import STARTERS
from nccl_doctor.toolkit.tables import read_table
from nccl_doctor.toolkit.variables.table import table
from nccl_doctor.toolkit.variables.values import number_of
from nccl_doctor.toolkit.versions import USE_NCCL2, process_group, public, release

COLUMNS = ("layer", "seconds", "set by", "clock starts", "then")
ENDLESS = "NCCL has no time-out"
_DEEPSPEED, _HEARTBEAT = "DEEPSPEED_TIMEOUT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_WANDB = "WANDB__SERVICE_WAIT"
_TORCHRUN = ("torchrun", "accelerate", "fabric", "kubeflow")
"""Launchers by which torchrun's agents meet first."""
_OTHERS = (*STARTERS, "submitit", "deepspeed", "ray", "vllm", "sglang")
_LONGEST = 20
"""Characters of a value: more make no number of seconds."""
_STATIC_S, _JOIN_S = 900.0, 600.0
_WANDB_S = 30.0
CLOCKS = ("load", "launch", "stuck", "own", "never")
"""The times at which a clock runs, seen from rank 0 that works alone; see `layers.toml`."""


@dataclass(frozen=True)
class Waiter:
    """One row of `layers.toml`, where the fields are explained."""

    name: str
    clock: str
    starts: str
    ends: str
    misses: str
    fix: str


@functools.cache
def waiters() -> tuple[Waiter, ...]:
    """All rows, outermost first, read once."""
    return tuple(Waiter(**row) for row in read_table(__package__, "layers.toml")["layer"])


@dataclass(frozen=True)
class Value:
    """Seconds, or None if there is no time-out or it is unknown; and the source.

    `variable` is the one that set it, empty for a default; `key` that of torchrun's rendezvous.
    """

    seconds: float | None
    source: str
    variable: str = ""
    key: str = ""


@dataclass(frozen=True)
class Wait:
    """One layer with its value."""

    waiter: Waiter
    value: Value

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self.waiter.name

    @property
    def seconds(self) -> float | None:
        """Seconds that it waits; None for no time-out, or an unknown one."""
        return self.value.seconds

    def fix(self, least_s: float) -> str:
        """The command that sets at least so many seconds."""
        minutes = max(1, math.ceil(least_s / 60))
        seconds = minutes * 60
        keys = [self.value.key] + (["read_timeout"] if self.value.key == "join_timeout" else [])
        conf = ",".join(f"{key}={seconds}" for key in keys)
        return self.waiter.fix.format(minutes=minutes, seconds=seconds, conf=conf)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `clock` is explained in `layers.toml`."""
        row = self.waiter
        return {
            "layer": row.name,
            "seconds": self.seconds,
            "set_by": self.value.source,
            "clock": row.clock,
            "starts": row.starts,
            "ends": row.ends,
            "misses": row.misses,
        }


def waits(facts: Mapping[str, Any], backend: str, *, deepspeed: bool) -> tuple[Wait, ...]:
    """Every layer, outermost first, whether or not it has a time-out here.

    Args:
        facts: of one host, from `gather_timeouts`.
        backend: what the job will use, `nccl` or `gloo`.
        deepspeed: whether the user stated that the job uses DeepSpeed.
    """
    settings = Settings(facts, backend, deepspeed=deepspeed)
    values = {
        "rendezvous": settings.rendezvous,
        "store": settings.given,
        "process group": settings.collective,
        "new groups": settings.new_groups,
        "watchdog": settings.watchdog,
        "heartbeat": settings.heartbeat,
        "NCCL": Value(None, ENDLESS if settings.over_nccl else "not used"),
        "DeepSpeed": settings.deepspeed,
        "W&B": settings.wandb,
    }
    return tuple(Wait(row, values[row.name]) for row in waiters())


def waits_table(found: tuple[Wait, ...]) -> dict[str, Any]:
    """The waits as a table for reports; a clock that does not exist has only name and source."""
    return {"columns": list(COLUMNS), "rows": [_cells(each) for each in found]}


def _cells(wait: Wait) -> list[Any]:
    source = wait.value.source
    is_shown = wait.seconds is not None or source.startswith(("unknown", ENDLESS))
    row = wait.waiter
    return [row.name, wait.seconds, source, *((row.starts, row.ends) if is_shown else (None, None))]


class Settings:
    """The effective time-outs of one host."""

    def __init__(self, facts: Mapping[str, Any], backend: str, *, deepspeed: bool) -> None:
        self._facts = facts
        self._backend = backend
        self._variables: Mapping[str, str] = facts["variables"]
        self._torch: str = facts["torch"]
        self._version = release(self._torch)
        self.over_nccl = "nccl" in backend
        installed = facts["deepspeed"] is not None
        # If the variable is set and DeepSpeed is installed, the job uses DeepSpeed.
        self.uses_deepspeed = (
            deepspeed
            or facts["launcher"] == "deepspeed"
            or (installed and _DEEPSPEED in self._variables)
        )

    @property
    def connects_at_once(self) -> bool:
        """True if init_process_group itself connects NCCL, so that no later call needs the store
        for that.
        """
        return self._process_group == "nccl2"

    @cached_property
    def given(self) -> Value:
        """The time-out of init_process_group if the job's code passes none."""
        return self.deepspeed if self.uses_deepspeed else self._of_torch()

    @property
    def collective(self) -> Value:
        """The time-out of a collective that was started."""
        off = self._no_handling
        if off and not self._blocking_wait:
            return Value(None, f"no effect: {off} ends no process")
        return self.given

    @property
    def new_groups(self) -> Value:
        """The time-out of groups beside the default one if the job's code passes none: torch's, not
        that of init_process_group. Measured with torch 2.13.
        """
        return self._of_torch()

    @property
    def watchdog(self) -> Value:
        """The time-out of the thread that watches collectives over NCCL."""
        if not self.over_nccl:
            return Value(None, f"{self._backend} has none: each call has its own time-out")
        if self._blocking_wait:
            said = self._blocking_wait
            return Value(None, f"off: {said} starts none, wait() has its own time-out")
        if self._no_handling:
            return Value(None, f"off: {self._no_handling} ends no process")
        return Value(self.given.seconds, "the process group's", self.given.variable)

    @property
    def heartbeat(self) -> Value:
        """The time-out of the thread that watches the watchdog."""
        if not self.over_nccl:
            return Value(None, f"{self._backend} has none")
        if self._process_group == "nccl2" and self._version < (2, 16):
            return Value(None, f"none in nccl2, the process group of torch {public(self._torch)}")
        if self._version < (2, 2):
            return Value(None, f"torch {public(self._torch)} has none")
        if self._blocking_wait:
            return Value(None, f"off: {self._blocking_wait} starts no watchdog")
        if self._number("TORCH_NCCL_ENABLE_MONITORING")[1] == 0:
            return Value(None, "off: TORCH_NCCL_ENABLE_MONITORING=0")
        by_version = 480.0 if self._version >= (2, 5) else 600.0
        default = by_version if self._version >= (2, 3) else None
        return self._variable(_HEARTBEAT, default, f"default of torch {public(self._torch)}")

    @cached_property
    def deepspeed(self) -> Value:
        """The time-out of deepspeed.init_distributed."""
        found = self._facts["deepspeed"]
        if found is None:
            said = "unknown: it is not installed here"
            return self._variable(_DEEPSPEED, None, said if self.uses_deepspeed else "not used", 60)
        version = public(found["version"])
        minutes = found["minutes"]
        if minutes is None and not (0, 19, 5) < release(version) < (0, 19, 8):
            minutes = 30 if release(version) <= (0, 19, 5) else 10
        default = None if minutes is None else minutes * 60.0
        said = f"default of DeepSpeed {version}"
        if not self.uses_deepspeed:
            said += ", if the job uses it"
        if not found["reads_variable"]:
            return Value(default, said)
        return self._variable(_DEEPSPEED, default, said, 60)

    @property
    def wandb(self) -> Value:
        """The time-out of wandb.init for its service process."""
        text = self._variables.get(_WANDB)
        if self._facts["wandb"] is None and text is None:
            return Value(None, "not used")
        version = self._facts["wandb"]
        default = f"default of wandb {version}" if version else "default of wandb"
        if text is None:
            return Value(_WANDB_S, default)
        seconds = _float(text)
        if seconds is None:
            return Value(_WANDB_S, f"unknown: {_WANDB}={text[:_LONGEST]} is no number; {default}")
        return Value(seconds, f"{_WANDB}={text}", _WANDB)

    @property
    def rendezvous(self) -> Value:
        """The time-out of torchrun's agents for each other."""
        launcher = self._facts["launcher"]
        if launcher not in _TORCHRUN:
            who = f"{launcher} has none" if launcher in _OTHERS else "no launcher was recognised"
            return Value(None, f"{who}: ranks meet in the store")
        backend, conf = self._facts["rdzv"]["backend"], self._facts["rdzv"]["conf"]
        if backend not in ("", "static", "c10d"):
            return Value(None, f"unknown: the rendezvous is {backend}")
        elastic = backend == "c10d"
        key = "join_timeout" if elastic else "timeout"
        seconds = _float(conf.get(key, ""))
        if seconds is not None:
            said = self._facts["rdzv"].get("conf_from") or "PET_RDZV_CONF"
            variable = said if said.startswith("PET_") else ""
            return Value(seconds, f"{said} {key}={conf[key]}", variable, key)
        if elastic:
            return Value(_JOIN_S, "default of torchrun's c10d rendezvous", "", key)
        other = "" if backend else f"; {_JOIN_S:.0f} with --rdzv-backend=c10d"
        return Value(_STATIC_S, f"default of torchrun's static rendezvous{other}", "", key)

    # --- parts ---

    @cached_property
    def _process_group(self) -> str:
        if not self.over_nccl:
            return self._backend
        return process_group(self._torch, self._variables.get(USE_NCCL2))

    def _of_torch(self) -> Value:
        kind = "nccl" if self._backend == "nccl" else "other"
        seconds = self._facts["defaults"][kind]
        if seconds is None and self._version:  # a torch that was built without NCCL
            seconds = 600.0 if kind == "nccl" and self._version >= (2, 2) else 1800.0
        return Value(seconds, f"default of torch {public(self._torch)} for {self._backend}")

    @cached_property
    def _blocking_wait(self) -> str:
        """`NAME=value` if it is on, else the empty string."""
        name, number = self._number(*self._spellings("BLOCKING_WAIT"))
        return f"{name}={self._variables[name]}" if self.over_nccl and number == 1 else ""

    @cached_property
    def _no_handling(self) -> str:
        """`NAME=value` if a late collective ends no process, else the empty string."""
        name, number = self._number(*self._spellings("ASYNC_ERROR_HANDLING"))
        return f"{name}={self._variables[name]}" if self.over_nccl and number == 0 else ""

    def _spellings(self, name: str) -> tuple[str, ...]:
        """Names of a variable: the new one wins; before torch 2.2 there was only the old one."""
        old = (f"NCCL_{name}",)
        return old if (0,) < self._version < (2, 2) else (f"TORCH_NCCL_{name}", *old)

    def _number(self, *names: str) -> tuple[str, int | None]:
        """The first of these variables that is set, and the number that its library reads."""
        name = next((each for each in names if each in self._variables), "")
        row = table().variables.get(name)
        text = self._variables.get(name, "")
        return name, None if row is None or len(text) > _LONGEST else number_of(row, text)

    def _variable(self, name: str, default: float | None, said: str, unit: int = 1) -> Value:
        """The value of a variable, else the default with its source."""
        if name not in self._variables:
            if default is None and "unknown" not in said and said != "not used":
                said = f"unknown: {said}"
            return Value(default, said)
        text = self._variables[name]
        _, number = self._number(name)
        if number is None or number < 0:
            return Value(default, f"unknown: {name}={text[:_LONGEST]} is no number; {said}")
        in_minutes = " minutes" if unit == 60 else ""
        return Value(float(number * unit), f"{name}={text}{in_minutes}", name)


def _float(text: str) -> float | None:
    found = re.fullmatch(r"\s*\+?(\d+(?:\.\d*)?|\.\d+)\s*", text, re.ASCII)
    return float(found[1]) if found and len(text) <= _LONGEST else None
