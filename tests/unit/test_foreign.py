"""Rules of plug-ins run in children; what they yield is ours, or an error that names them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from nccl_doctor.api import (
    Check,
    Cluster,
    Effect,
    Figure,
    Finding,
    HostLink,
    Kind,
    Layer,
    Setup,
    Severity,
    Where,
    shell,
)
from nccl_doctor.judge.checks import broken_sections
from nccl_doctor.judge.history.figures import sheet_of
from nccl_doctor.model.fixes import Fix, On, Step
from nccl_doctor.toolkit.foreign import guarded
from tests.support.clusters import make_cluster

CLUSTER = make_cluster(("nd0", "nd1"), 1)
MOST_WORDS = 200
NUMBERS = itertools.count()


def plugin(yields: Callable[[Cluster], Any]) -> Check:
    """A plug-in, as the registry makes it, that yields the same by each of its rules."""

    class Moon(Check):
        name = f"moon{next(NUMBERS)}"  # one that blocked once is not asked again
        layer = Layer.HOST
        kinds = (Kind("moon-down", Layer.HOST, "title", "why", "fix"),)

        def observe(self, ctx: Any) -> Any:
            return {}

        def judge(self, cluster: Cluster) -> Any:
            return yields(cluster)

        def figures(self, cluster: Cluster) -> Any:
            return yields(cluster)

        def sections(self, cluster: Cluster) -> Any:
            return yields(cluster)

    return guarded(Moon)()


def raises(cluster: Cluster) -> Any:
    yield Setup("torch", "2.9", 0) if cluster is None else Figure("speed", 1.0, better="higher")
    raise KeyError("lost")


FIGURES: dict[str, tuple[Callable[[Cluster], Any], str]] = {
    "None": (lambda cluster: None, "NoneType"),
    "text": (lambda cluster: "speed", "yields a str, not a Figure"),
    "text for a number": (
        lambda cluster: [Figure("speed", "fast", better="higher")],
        "a Figure with a direction whose value is text",
    ),
    "a number for a name": (
        lambda cluster: [Figure(7, 1.0)],  # type: ignore[arg-type]
        "a Figure whose name is a int, not str",
    ),
    "text for a place": (
        lambda cluster: [Figure("speed", 1.0, where="nd0")],  # type: ignore[arg-type]
        "a Figure whose where is a str, not Where",
    ),
    "another direction": (
        lambda cluster: [Figure("speed", 1.0, better="up")],  # type: ignore[arg-type]
        "a Figure whose better is 'up'",
    ),
    "raises": (raises, "KeyError: 'lost'"),
    "ten million": (
        lambda cluster: (Figure("speed", 1.0, Where()) for _ in range(10_000_000)),
        "yields more than 20000 records",
    ),
    "very long": (lambda cluster: [Figure("version", "x" * (65 << 20))], "more than 64 MiB"),
}
SECTIONS: dict[str, tuple[Callable[[Cluster], Any], str]] = {
    "None": FIGURES["None"],
    "figures": (lambda cluster: [Figure("speed", 1.0)], "not a HostLink or Setup"),
    "names for ids": (
        lambda cluster: [HostLink("nd0", "nd1")],  # type: ignore[arg-type]
        "a HostLink whose start is a str, not int",
    ),
    "text for a time": (
        lambda cluster: [HostLink(0, 1, rtt_us="12 us")],  # type: ignore[arg-type]
        "a HostLink whose rtt_us is a str",
    ),
    "a list for a value": (
        lambda cluster: [Setup("gpus", ["H100"], 0)],  # type: ignore[arg-type]
        "a Setup whose value is a list",
    ),
    "ten million": (
        lambda cluster: (HostLink(0, 1) for _ in range(10_000_000)),
        "yields more than 20000 records",
    ),
}


@pytest.mark.parametrize(("yields", "words"), FIGURES.values(), ids=FIGURES)
def test_figures_that_nobody_can_compare(yields: Callable[[Cluster], Any], words: str) -> None:
    sheet = sheet_of(CLUSTER, [plugin(yields)])
    (said,) = sheet.broken.values()
    assert words in said
    assert len(said) < MOST_WORDS


@pytest.mark.parametrize(("yields", "words"), SECTIONS.values(), ids=SECTIONS)
def test_sections_that_nobody_can_show(yields: Callable[[Cluster], Any], words: str) -> None:
    (finding,) = broken_sections(CLUSTER, [plugin(yields)])
    assert finding.code == "check-broke"
    assert "`sections` of check moon" in finding.message
    assert words in finding.message


def test_a_finding_comes_with_all_ways_of_its_fix() -> None:
    typed = Step(shell("rm {}", "a b"), ("nd0",), undo=shell("true"), note="one", persists=True)
    fix = Fix(typed, Step(shell("ls"), On.OTHERS), alternatives=[Fix(typed, text="own"), "wait"])
    kind = Kind("moon-down", Layer.HOST, "title", "why", fix, effects=(Effect.DRAINS,))
    links = Where(("nd0",), (1,), (("nd0", "nd1"),))
    for each in (fix, Fix(typed, text="own words"), "words"):
        finding = Finding(kind, "no light", links, {"lux": [1, None]}, each, Severity.WARN)
        assert list(plugin(lambda cluster, told=finding: [told]).judge(CLUSTER)) == [finding]


def test_good_ones_are_taken() -> None:
    good = plugin(lambda cluster: [Figure("speed", 1.0, better="higher"), Figure("torch", None)])
    assert sheet_of(CLUSTER, [good]).broken == {}
    shown = plugin(lambda cluster: [HostLink(0, 1, "ok", rtt_us=1.5), Setup("gpus", {"a": 1}, 0)])
    assert broken_sections(CLUSTER, [shown]) == []
