"""One host on one screen: what it is, without a line for each of many that are alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor.api import Figure, Layer, Scope, Where
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.report import facts
from nccl_doctor.report.lines import MIN_WIDTH
from tests.support.clusters import change_rank, make_cluster
from tests.support.reports import RUN, made_check, through_json

HERE = Where(hosts=("nd0",))
SERIAL = "GPU-{}0000000-0000-4000-8000-000000000000"
ENV = {"NCCL_DEBUG": "INFO", "RANK": "0", "NCCL_IB_HCA": "mlx5_0", "NCCL_NET": ""}


def lists(name: str, layer: Layer, *figures: tuple[str, object], error=None, **more):
    """A check that lists these figures."""
    check = made_check(name, layer=layer)
    check.scope = more.pop("scope", Scope.HOST)

    def hook(cluster):
        yield from (Figure(what, value, HERE, **more) for what, value in figures)
        if error:
            raise error

    check.figures = hook
    return check


def report(**changes):
    cluster = change_rank(make_cluster(("nd0",)), 0, env=ENV, **changes)
    return through_json(conclude(cluster, [], run=replace(RUN, alone=True)))


def screen(*checks, **how) -> list[str]:
    how.setdefault("width", 100)
    return facts.render_host(report(launch={"sources": {"rank": "RANK"}}), lambda: checks, **how)


def rows(*checks, **how) -> dict[str, str]:
    lines = screen(*checks, **how).splitlines()
    return {name: value for name, _, value in (line.partition("  ") for line in lines) if value}


def test_the_whole_screen():
    gpus = [(f"GPU 0000:{i}", f"H100, {SERIAL.format(i)}, ECC on") for i in range(8)]
    checks = (
        lists("limits", Layer.HOST, ("limit of open files", "1024")),
        lists("gpu_state", Layer.DEVICE, *gpus, ("GPU 0000:8", "H100, ECC off")),
        lists("software", Layer.DEVICE, ("torch", "2.13.0"), ("ROCm", None), scope=Scope.RANK),
        lists("links", Layer.SPEED, ("round-trip time", 80.0), better="lower"),
        lists("environment", Layer.ENV, ("NCCL_DEBUG", "INFO"), ("NCCL_FROM_FILE", "1")),
    )
    assert screen(*checks).splitlines() == [
        "host                 nd0",
        "addresses            192.168.77.1",
        "launcher             torchrun",
        "rank                 0  (RANK)",
        "",
        "torch                2.13.0",
        "8 x GPU              H100, ECC on",
        "GPU 0000:8           H100, ECC off",
        "not here             ROCm",
        "",
        "limit of open files  1024",
        "",
        "NCCL_FROM_FILE       1",
        "NCCL_DEBUG           INFO",
        "NCCL_IB_HCA          mlx5_0",
        "NCCL_NET             (empty)",
        "",
        "All facts: nccl-doctor env -v; as data: nccl-doctor env --json -",
    ]


def test_pairs_of_two_kinds_keep_their_names():
    ports = [("port a", "up"), ("port b", "up"), ("port c", "down"), ("port d", "down")]
    said = {name: value.strip() for name, value in rows(lists("p", Layer.ROUTE, *ports)).items()}
    assert said["2 x port"] == "up"
    assert said["port c"] == said["port d"] == "down"


def test_many_rows_are_counted():
    text = screen(lists("env", Layer.ENV, *((f"NCCL_{i}", "1") for i in range(30))))
    assert "and 17 more" in text
    assert len(text.splitlines()) < 30


@pytest.mark.parametrize("width", [20, 80, 200])
def test_no_line_is_too_long_and_nothing_reaches_the_terminal(width):
    bad = lists("bad", Layer.HOST, ("x\033[2J" * 9, "y\u202e" * 99), error=RuntimeError("no"))
    screen(bad, width=width, ascii=True).encode("ascii")
    text = screen(bad, width=width)
    lines = text.splitlines()
    assert all(line.isprintable() and len(line) <= max(width, MIN_WIDTH) for line in lines[:-1])
    assert "\\x1b[2J" in text, "what a check listed before it broke is shown"


def test_a_host_that_nothing_is_known_of():
    empty = conclude(make_cluster(absent_nodes=(0, 1)), [], run=RUN)
    assert "All facts" in facts.render_host(empty, lambda: ())
