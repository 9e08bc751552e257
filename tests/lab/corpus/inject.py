"""What a record may do to a cluster before (or while) it is examined: one function for each `do`.

A function changes the hosts of the lab, or notes in the scene how they are to be started. `steps`
breaks them, and `shapes` makes clusters that look odd.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.lab.corpus import Case
from tests.lab.lab import Lab


@dataclass(frozen=True)
class Strike:
    """What comes as soon as a check is examined on a host: a signal to the process that does it, or
    else `act`.
    """

    host: str
    check: str
    signal: int = 0
    act: Callable[[], None] | None = None


@dataclass
class Scene:
    """A lab that a case is set up in, and how its hosts are to be started.

    `flags`, `env` and `wrap` are by host: options of the launcher, variables, and words before the
    command. `late_s` is how much later a host starts; `absent` hosts do not start. `strikes` come
    during the run.
    """

    lab: Lab
    flags: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    env: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    wrap: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    late_s: dict[str, float] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    strikes: list[Strike] = field(default_factory=list)

    @property
    def started(self) -> list[str]:
        """Names of the hosts that start."""
        return [name for name in self.lab.names if name not in self.absent]

    @contextmanager
    def striking(self) -> Iterator[set[str]]:
        """Let the strikes come, each when it is due, while the body runs. Yields a set that has the
        hosts whose strike was never due, after that.
        """
        unstruck: set[str] = set()
        with ExitStack() as stack:
            begun = [
                stack.enter_context(
                    self.lab.strike(
                        None, each.signal, f"ncd:{each.check}", hosts=[each.host], act=each.act
                    )
                )
                for each in self.strikes
            ]
            yield unstruck
            came = zip(self.strikes, begun, strict=True)
            unstruck |= {each.host for each, strike in came if strike.pid is None}


Step = Callable[..., None]
STEPS: dict[str, Step] = {}


def prepare(case: Case, lab: Lab) -> Scene:
    """Set a case up in a fresh lab of its hosts."""
    scene = Scene(lab)
    for step in case.inject:
        call(scene, step)
    return scene


def call(scene: Scene, step: Mapping[str, Any]) -> None:
    """Take one step of a record.

    Raises:
        ValueError: there is no such step, or its arguments are others.
    """
    check(step)
    place = [scene.lab[step["on"]]] if "on" in step else []
    take = partial(STEPS[step["do"]], scene, *place, **_arguments(step))
    if "at" in step:
        where = step.get("on") or step["source"]
        scene.strikes.append(Strike(where, step["at"], act=take))
    else:
        take()


def check(step: Mapping[str, Any]) -> None:
    """See that a step can be taken, without a lab.

    Raises:
        ValueError: as in `call`.
    """
    function = STEPS.get(step.get("do", ""))
    if function is None:
        raise ValueError(f"corpus: no step is called {step.get('do')!r}; known: {sorted(STEPS)}")
    try:
        inspect.signature(function).bind(
            None, *([None] if "on" in step else []), **_arguments(step)
        )
    except TypeError as error:
        raise ValueError(f"corpus: step {step['do']}: {error}") from error


def _arguments(step: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name not in ("do", "on", "at")}


def step(function: Step) -> Step:
    """Register a step under its name."""
    STEPS[function.__name__] = function
    return function


from tests.lab.corpus import shapes, steps  # noqa: E402, F401 - they register their steps
