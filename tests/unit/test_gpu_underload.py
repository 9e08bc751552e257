"""What a GPU says of itself under load: read by the real nvidia-ml-py from the stand-in library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Outcome, OutcomeStatus
from nccl_doctor.checks.gpu_work.under_load import LoadReader, held_back, in_words
from nccl_doctor.checks.gpu_work.work import STRESS, DeviceWork
from tests.nvml.stand_in import build, described, observe, uuid, write

pytestmark = pytest.mark.xdist_group("torch")

HOT = 5
"""The GPU of the machine `throttled` that is too hot."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("old-nvml"), "-DOLD_DRIVER")


def measure(
    library: Path, folder: Path, own: str | None, deadline_s: float = 20.0, **calls: Any
) -> Outcome:
    """One measurement, on the CPU, of a machine on which the GPU's own calls may be changed."""
    machine = described("throttled")
    machine[str(HOT)].update(calls)

    def look(crumb: Any) -> dict[str, Any]:
        import torch

        torch.set_num_threads(1)
        work, seen = DeviceWork(crumb, torch.device("cpu")), []
        load = LoadReader(own, crumb)
        rates = work.measure(0.4, lambda: seen.append(load.read()))
        return {"rates": rates, "seen": seen, "step": work.step}

    return observe(library, write(machine, folder / "machine"), look, deadline_s)


def test_it_is_read_once_in_the_midst_of_the_products(library: Path, tmp_path: Path) -> None:
    outcome = measure(library, tmp_path, uuid(HOT))
    assert outcome.status is OutcomeStatus.OK, outcome
    (seen,) = outcome.facts["seen"]
    assert seen == {
        "throttle": 72,
        "sm_clock_mhz": 345,
        "max_sm_clock_mhz": 1980,
        "power_mw": 70000,
        "power_limit_mw": 700000,
        "temperature": 93,
        "pcie_generation": 5,
        "pcie_width": 16,
    }
    assert all(rate > 0 for rate in outcome.facts["rates"].values())
    steps = [crumb["step"] for crumb in outcome.breadcrumbs]
    asked = [number for number, step in enumerate(steps) if step == "asking the GPU driver"]
    assert steps[asked[-1] + 1] == STRESS  # what hangs after it is not taken for the library


def test_an_old_driver_is_asked_by_the_old_name(old_library: Path, tmp_path: Path) -> None:
    (seen,) = measure(old_library, tmp_path, uuid(HOT)).facts["seen"]
    assert seen["throttle"] == 72


def test_what_is_refused_is_left_out(library: Path, tmp_path: Path) -> None:
    calls = {"throttle": "!NO_PERMISSION", "nvmlDeviceGetPowerUsage": "!NOT_SUPPORTED"}
    (seen,) = measure(library, tmp_path, uuid(HOT), **calls).facts["seen"]
    assert not {"throttle", "power_mw"} & set(seen)
    assert seen["temperature"] == 93


@pytest.mark.parametrize("own", [None, "GPU-of-another-host", ""])
def test_a_gpu_that_is_not_found_is_measured_all_the_same(
    own: str | None, library: Path, tmp_path: Path
) -> None:
    outcome = measure(library, tmp_path, own)
    assert outcome.facts["seen"] == [{}]
    assert outcome.facts["rates"]["half"] > 0


def test_a_library_that_does_not_start_costs_no_rate(library: Path, tmp_path: Path) -> None:
    machine = described("h100x8")
    machine["-"]["nvmlInitWithFlags"] = "!DRIVER_NOT_LOADED"

    def look(crumb: Any) -> dict[str, Any]:
        return {"seen": LoadReader(uuid(0), crumb).read()}

    outcome = observe(library, write(machine, tmp_path / "machine"), look)
    assert outcome.facts["seen"] == {}


def test_a_call_that_never_returns_is_the_last_step(library: Path, tmp_path: Path) -> None:
    calls = {"nvmlDeviceGetPowerUsage": "!wedge"}
    outcome = measure(library, tmp_path, uuid(HOT), 4.0, **calls)
    assert outcome.status is OutcomeStatus.HUNG
    crumb = outcome.breadcrumbs[-1]
    assert (crumb["step"], crumb["call"]) == ("asking the GPU driver", "nvmlDeviceGetPowerUsage")


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({}, ""),
        ({"throttle": 1, "temperature": 0}, "0 °C"),
        (
            {"throttle": 0x48, "sm_clock_mhz": 1200, "max_sm_clock_mhz": 1980, "temperature": 84},
            "thermal slowdown by the hardware, SM clock 1200 of 1980 MHz, 84 °C",
        ),
        ({"throttle": 0x08}, "hardware slowdown"),
        ({"throttle": 0x88}, "power brake"),
        ({"throttle": 4, "power_mw": 698_400, "power_limit_mw": 700_000},
         "power limit, 698 of 700 W"),
        ({"power_mw": 350_000}, "350 W"),
    ],
)  # fmt: skip
def test_it_is_said_in_words(load: dict[str, int], words: str) -> None:
    assert in_words(load) == words


def test_what_is_not_known_holds_nothing_back() -> None:
    assert held_back({"throttle": None}) == held_back({}) == held_back({"throttle": 1}) == []
