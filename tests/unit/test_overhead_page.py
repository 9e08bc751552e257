"""The page about what a run costs: ratios of pairs, bars, and what was said of faults."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.overhead import OWN, TORCHRUN, Measured, _size, faults_of, page


def test_ratios_are_of_pairs_and_are_held_against_the_bar() -> None:
    taken = {TORCHRUN: [2.0, 3.0, 12.0], OWN: [1.0, 6.0, 2.0]}
    small = Measured(2, 2, doctor_s=taken, bare_s=[2.0, 3.0, 4.0])
    assert (small.ratio(TORCHRUN), small.ratio(OWN), small.is_met) == (1.0, 0.5, True)
    written = page([small])
    assert "| 2 × 2 | healthy, 3 turns | under torchrun | 3.0 | 3.0 | 1.00 | 1.15 |" in written
    assert "| 2 × 2 | healthy, 3 turns | in front of torchrun | 2.0 | 3.0 | 0.50 | – |" in written
    for own, met in ((2.0, False), (1.0, True)):
        large = Measured(24, 1, doctor_s={TORCHRUN: [3.0], OWN: [own]}, bare_s=[2.0])
        assert large.is_met is met, "the bar of 24 hosts is of the own launcher"


def test_a_fault_that_is_not_named_misses() -> None:
    firewall, variable = faults_of(8, 4)
    assert [str(*case.expect) for case in (firewall, variable)] == [
        "peer-blocked or peer-one-way (nd4)",
        "env-unknown-variable (nd4)",
    ]
    taken = {TORCHRUN: [30.0], OWN: [25.0]}
    large = Measured(8, 4, doctor_s=taken, bare_s=[20.0], faults=[(firewall, 40.0, True)])
    assert large.is_met
    large.faults.append((variable, 10.0, False))
    assert not large.is_met
    row = "a misspelt variable of NCCL: **wrong** | under torchrun | 10.0 | 20.0 | 0.50 | – |"
    assert row in page([large])


@pytest.mark.parametrize("text", ["", "2", "2x", "x2", "0x4", "2x0", "100x1", "2 x 2"])
def test_a_size_that_is_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not HOSTSxRANKS"):
        _size(text)
