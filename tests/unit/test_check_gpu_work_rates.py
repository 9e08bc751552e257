"""Rates of GPUs on made-up clusters: who is slow, and what holds it back."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor.api import Severity
from nccl_doctor.checks.gpu_work import GpuWork
from nccl_doctor.checks.gpu_work.rates import rates_table
from nccl_doctor.report.lines import is_table
from tests.support.findings import judge, only
from tests.support.gpu_facts import H200, cluster, measured, rates, worked
from tests.support.rows import each_row

CHECK = GpuWork()


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ({"half": 400}, "bf16 matrix product 400 TFLOP/s, the median of 8 equal GPUs is 703"),
        ({"copy": 3000}, "copy within the GPU 3000 GB/s"),
        ({"to_device": 13}, "copy to the GPU 13 GB/s"),
        ({"to_host": 6}, "copy to the host 6 GB/s"),
    ],
)
def test_a_slow_gpu_stands_out(slow: dict[str, float], words: str) -> None:
    one = rates(**slow)
    found = only(
        CHECK,
        measured({6: worked(6, one, one)}),
        "gpu-slow",
        hosts=["nd1"],
        ranks=[6],
        devices=["GPU-6"],
    )
    assert words in found.message
    assert found.level is Severity.WARN


def test_slow_once_is_not_slow() -> None:
    assert judge(CHECK, measured({6: worked(6, rates(half=300), rates())})) == []
    assert judge(CHECK, measured({6: worked(6, rates(), rates(half=300))})) == []


def test_a_little_slower_is_not_worth_a_word() -> None:
    one = rates(half=600, to_host=30)
    assert judge(CHECK, measured({6: worked(6, one, one)})) == []


def test_a_slow_host_is_all_its_gpus() -> None:
    slow = rates(half=450)
    made = measured({rank: worked(rank, slow, slow) for rank in range(8, 12)}, hosts=3)
    found = judge(CHECK, made)
    assert [one.where.ranks for one in found] == [(8,), (9,), (10,), (11,)]
    assert {one.code for one in found} == {"gpu-slow"}


def test_a_slow_gpu_stands_out_on_its_host_where_hosts_differ() -> None:
    """Two halves of a cluster are unlike; within its half, one GPU is slow."""
    made: dict[int, Any] = {}
    for rank in range(16):
        one = rates(half=(800 if rank < 8 else 500) * (1 + 0.004 * (rank % 4)))
        made[rank] = worked(rank, one, one)
    one = rates(half=560)
    made[1] = worked(1, one, one)
    found = only(CHECK, cluster(made, 4), "gpu-slow", hosts=["nd0"], ranks=[1], devices=["GPU-1"])
    assert "the median of 4 equal GPUs of the host is 80" in found.message


def test_gpus_of_another_model_are_not_compared() -> None:
    one = rates(half=120, copy=1300)
    assert judge(CHECK, measured({6: worked(6, one, one, model="NVIDIA A30")})) == []


def test_ranks_that_share_a_gpu_are_not_compared() -> None:
    one = rates(half=350, copy=2000)
    shared = {rank: worked(rank, one, one, uuid="GPU-x") for rank in (5, 6)}
    assert judge(CHECK, measured(shared)) == []


def test_two_gpus_are_held_against_what_is_published() -> None:
    one, bad = rates(), rates(half=200)
    made = {0: worked(0, one, one), 1: worked(1, bad, bad)}
    found = only(CHECK, cluster(made), "gpu-slow", hosts=["nd0"], ranks=[1], devices=["GPU-1"])
    assert "bf16 matrix product of NVIDIA H200 at most 200 TFLOP/s" in found.message
    assert "publishes 989 TFLOP/s" in found.message


def test_all_slow_together_is_one_finding() -> None:
    found = only(
        CHECK,
        measured({}, copy=2000),
        "gpu-slow",
        hosts=["nd0", "nd1"],
        ranks=range(8),
        devices=[f"GPU-{rank}" for rank in range(8)],
    )
    assert "copy within the GPU" in found.message


def test_a_model_nobody_knows_is_held_against_nothing() -> None:
    one = rates(half=1, copy=1)
    made = {rank: worked(rank, one, one, model="Toy") for rank in range(8)}
    assert judge(CHECK, cluster(made)) == []


def test_the_rates_are_a_table() -> None:
    table = rates_table(H200, [rates(half=700), rates(half=710)])
    assert is_table(table)
    first = table["rows"][0]
    assert first == ["bf16 matrix product", "TFLOP/s", 700.0, 710.0, 989.0, "72 %"]
    assert [row[-1] for row in rates_table("Toy", [rates(), rates()])["rows"]] == [None] * 4


# Under load ---------------------------------------------------------------------------------------

HOT = {
    "throttle": 0x20,
    "sm_clock_mhz": 1200,
    "max_sm_clock_mhz": 1980,
    "power_mw": 412_000,
    "power_limit_mw": 700_000,
    "temperature": 88,
    "pcie_generation": 5,
    "pcie_width": 16,
}
FINE = {**HOT, "throttle": 4, "sm_clock_mhz": 1755, "power_mw": 699_000, "temperature": 61}


def test_a_slow_gpu_says_what_holds_it_back() -> None:
    one = rates(half=400)
    found = only(
        CHECK,
        measured({6: worked(6, one, one, under_load=[FINE, HOT])}),
        "gpu-slow",
        hosts=["nd1"],
        ranks=[6],
        devices=["GPU-6"],
    )
    words = "under load: thermal slowdown by the driver, SM clock 1200 of 1980 MHz, 412 of 700 W"
    assert words in found.message
    assert found.evidence["under_load"] == {"GPU-6": HOT}


def test_gpus_that_are_slow_together_say_so_too() -> None:
    one = rates(half=420)
    made = {rank: worked(rank, one, one, under_load=[HOT, {}]) for rank in range(8)}
    devices = [f"GPU-{rank}" for rank in range(8)]
    found = only(
        CHECK, cluster(made), "gpu-slow", hosts=["nd0", "nd1"], ranks=range(8), devices=devices
    )
    assert "thermal slowdown by the driver" in found.message
    assert len(found.evidence["under_load"]) == 8


def test_half_the_speed_everywhere_does_not_pass() -> None:
    assert len(judge(CHECK, measured({}, half=490))) == 1
    assert len(judge(CHECK, measured({}, copy=3300))) == 1
    assert judge(CHECK, measured({}, half=510, copy=3400)) == []


def copied(to_device: float, to_host: float, hosts: int, per_host: int, link: Any) -> Any:
    one = rates(to_device=to_device, to_host=to_host)
    ranks = [4 * node + local for node in range(hosts) for local in range(per_host)]
    made = {rank: worked(rank, one, one, under_load=[link, link]) for rank in ranks}
    return cluster(made, hosts)


@each_row(
    ("to_device", "to_host", "link", "is_slow"),
    [
        (18.0, 55.0, (5, 16), True),  # 0.3 x 63 GB/s
        (54.0, 18.0, (5, 16), True),
        (20.0, 20.0, (5, 16), False),
        (6.0, 6.0, (3, 16), False),
        (4.0, 4.0, (3, 16), True),
        (4.0, 4.0, (3, 8), False),  # what is narrow is another check's to say
        (0.5, 0.5, (None, 16), False),
        (0.5, 0.5, (7, 16), False),  # of which nobody here knows the rate
    ],
)
def test_copies_are_held_against_the_link(
    to_device: float, to_host: float, link: Any, is_slow: bool
) -> None:
    load = {**FINE, "pcie_generation": link[0], "pcie_width": link[1]}
    found = judge(CHECK, copied(to_device, to_host, 2, 1, load))
    assert [each.code for each in found] == ["gpu-slow"] * (2 if is_slow else 0)
    if is_slow:
        assert f"(generation {link[0]} x{link[1]}) carries" in found[0].message
        assert "numactl" in found[0].fix
        assert found[0].where.ranks == (0,)


def test_gpus_that_copy_at_once_may_share_one_link() -> None:
    """Four of them behind one switch have a quarter each, and none of them is at fault."""
    assert judge(CHECK, copied(14.0, 14.0, 1, 4, FINE)) == []
    assert len(judge(CHECK, copied(4.0, 4.0, 1, 4, FINE))) == 4


def test_clock_heat_and_link_are_compared_with_other_runs() -> None:
    seen = cluster({0: worked(0, rates(), rates(), under_load=[FINE, HOT])})
    figures = {figure.name: figure for figure in CHECK.figures(seen)}
    assert figures["SM clock under load"].value == 1200
    assert figures["SM clock under load"].better == "higher"
    assert figures["temperature under load"].better == "lower"
    assert figures["PCIe link under load"].value == "generation 5 x16"
    old = cluster({0: worked(0, rates(), rates())})  # a report of an older version
    assert not [each for each in CHECK.figures(old) if "under load" in each.name]


def test_what_was_read_is_in_the_table() -> None:
    table = rates_table(H200, [rates(), rates()], [HOT, FINE])
    assert is_table(table)
    rows = {row[0]: row[1:] for row in table["rows"]}
    assert rows["SM clock under load"] == ["MHz", 1200.0, 1755.0, 1980.0, None]
    assert rows["held back by"][1:3] == ["thermal slowdown by the driver", "power limit"]
    assert rows["temperature under load"] == ["°C", 88.0, 61.0, None, None]
    assert len(rates_table(H200, [rates(), rates()], [{}, {}])["rows"]) == 4
    halved = rates_table(H200, [rates(), rates()], [{}, {"temperature": 50}])
    assert next(row for row in halved["rows"] if row[0].startswith("temp"))[2:4] == [None, 50.0]
