"""Exact products, copies and rates, with torch on the CPU; and the tables of what is known."""

from __future__ import annotations

import ctypes
import functools
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Outcome, OutcomeStatus, Untested
from nccl_doctor.checks.gpu_work import GpuWork
from nccl_doctor.checks.gpu_work.work import (
    GPU_STEPS,
    DeviceWork,
    differences,
    is_gpu_error,
    operands,
    sizes,
)
from nccl_doctor.observe import probe
from nccl_doctor.toolkit.gpu.devices import compute_mode, has_multicast
from nccl_doctor.toolkit.gpu.tables import MEASURES, gpu_error, peaks_of
from tests.support.clusters import make_cluster
from tests.support.findings import only
from tests.support.gpu_facts import worked
from tests.support.lazy import Lazy
from tests.support.rows import each_row

torch = Lazy("torch")
pytestmark = pytest.mark.xdist_group("torch")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def work(said: list[str]) -> DeviceWork:
    return DeviceWork(lambda step, **details: said.append(step), torch.device("cpu"))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [32, 100, 258])
def test_the_product_is_known_exactly(name: str, size: int) -> None:
    dtype = getattr(torch, name)
    left, right, product = operands(size, dtype)
    whole = left.to(torch.int64) @ right.to(torch.int64)
    assert torch.equal(whole, product.to(torch.int64))
    assert product.abs().max() == 192
    assert torch.equal(product.to(dtype).to(torch.float32), product)
    assert (product != 0).all()


def test_work_on_the_cpu_is_exact_and_says_every_step(work: DeviceWork, said: list[str]) -> None:
    assert work.context() >= 0
    assert work.products(128) == []
    assert work.copies(1 << 12) == []
    rates = work.measure(0.2)
    assert list(dict.fromkeys(said)) == list(GPU_STEPS)
    assert work.step == GPU_STEPS[-1]
    assert set(rates) == set(MEASURES)
    assert all(rate > 0 for rate in rates.values())


def test_a_copy_to_another_device_is_exact_and_says_so(work: DeviceWork, said: list[str]) -> None:
    assert work.peer_copy(torch.device("cpu"), "GPU-1", 1 << 12) == []
    assert said == ["copying to another GPU"]


def test_one_gpu_that_hangs_costs_its_deadline_and_the_others_go_on() -> None:
    """The real children of four ranks; in one of them a product never returns."""
    deadline_s = 3.0

    def rank(number: int) -> probe.ProbeJob:
        def observe(line: probe.Line) -> dict[str, Any]:
            torch.set_num_threads(1)
            crumb = functools.partial(line.breadcrumb, uuid=f"GPU-{number}")
            work = DeviceWork(crumb, torch.device("cpu"))
            facts = {**worked(number), "context_s": work.context()}
            if number == 2:
                signal.signal(signal.SIGALRM, lambda *_: signal.pause())
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                while True:
                    work.products(64)
            facts["wrong"] = work.products(64) + work.copies(1 << 12)
            return facts

        return probe.ProbeJob("gpu_work", observe, time.monotonic() + deadline_s)

    started = time.monotonic()
    outcomes = [Outcome.from_json(one.to_json()) for one in probe.run(map(rank, range(4)))]
    assert time.monotonic() - started < deadline_s + 2.5
    statuses = [one.status for one in outcomes]
    assert statuses == [OutcomeStatus.HUNG if n == 2 else OutcomeStatus.OK for n in range(4)]
    assert [one.facts["wrong"] for one in outcomes if one.facts] == [[], [], []]
    made = make_cluster(
        ["nd0"], 4, check="gpu_work", by_rank=dict(enumerate(outcomes)), backend="nccl"
    )
    found = only(GpuWork(), made, "gpu-unhealthy", hosts=["nd0"], ranks=[2], devices=["GPU-2"])
    assert found.message.startswith("stuck in multiplying matrices on the GPU: no end within 3 s")


def test_a_measurement_keeps_to_its_time(work: DeviceWork) -> None:
    started = time.monotonic()
    work.measure(1.0)
    assert 0.5 < time.monotonic() - started < 10.0


@pytest.mark.parametrize("free", [2 << 30, 3 << 30, (7 << 30) + 3, 8 << 30, 140 << 30])
def test_no_copy_is_larger_than_the_buffer_that_it_is_taken_from(free: int) -> None:
    size, within, across = sizes("cuda", free)
    assert size == 8192
    assert 256 << 20 <= across <= within <= free // 8
    assert 3 * 2 * size * size <= free // 4


@pytest.mark.parametrize("free", [0, 1 << 20, 1900 << 20, (2 << 30) - 1])
def test_with_too_little_memory_nothing_is_measured(free: int) -> None:
    """Smaller matrices would make a good GPU look slow, smaller buffers its cache its memory."""
    with pytest.raises(Untested, match=r"GiB of the GPU's memory are free; .* needs 2 GiB"):
        sizes("cuda", free)


def test_what_is_asked_meanwhile_is_asked_once_and_not_timed(work: DeviceWork) -> None:
    asked: list[float] = []

    def look() -> None:
        asked.append(time.monotonic())
        time.sleep(0.2)

    started = time.monotonic()
    rate = work._rate(lambda: time.sleep(0.01), 5.0, 0.4, look)
    assert len(asked) == 1
    assert asked[0] - started >= 0.2  # after half of the time
    assert rate <= 5.0 / 0.01
    work._rate(lambda: time.sleep(0.01), 5.0, 0.0, look)  # however little time there is
    assert len(asked) == 2


@pytest.fixture
def libcuda(tmp_path: Path) -> Path:
    """A driver of two GPUs: the first has multicast, the second lets one process in at a time."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) to build a stand-in for libcuda")
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(
        "int cuDeviceGet(int *d, int n) { *d = n; return n > 1 ? 101 : 0; }\n"
        "int cuDeviceGetAttribute(int *v, int a, int d) {\n"
        "    if (a == 132) { *v = d == 0; return 0; }\n"
        "    if (a != 20) return 1;\n"
        "    *v = d == 1 ? 3 : 0;\n"
        "    return 0;\n"
        "}\n"
    )
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source]
    subprocess.run(command, check=True, timeout=60)
    return library


def test_the_driver_says_how_many_processes_a_gpu_lets_in(libcuda: Path) -> None:
    def look(line: probe.Line) -> dict[str, Any]:
        ctypes.CDLL(str(libcuda))  # the same soname then leads to it
        return {
            "modes": [compute_mode(index) for index in range(3)],
            "multicast": [has_multicast(index) for index in range(3)],
        }

    (outcome,) = probe.run([probe.ProbeJob("gpus", look, time.monotonic() + 10)])
    assert outcome.facts["modes"] == [0, 3, None]
    assert outcome.facts["multicast"] == [True, False, None]


def test_a_rate_is_work_over_time(work: DeviceWork) -> None:
    times: list[float] = []

    def once() -> None:
        started = time.perf_counter()
        time.sleep(0.01)
        times.append(time.perf_counter() - started)

    rate = work._rate(once, 5.0, 0.3)
    assert 5.0 / max(times) * 0.9 < rate <= 5.0 / min(times)


def test_one_wrong_element_is_named() -> None:
    _, _, product = operands(64, torch.float32)
    got = product.clone()
    got[3, 5] += 1
    found = differences("product in float32", got, product)
    assert [(each["count"], each["of"]) for each in found] == [(1, 4096)]
    assert "element (3, 5) is " in found[0]["example"]
    got[3, 5] = float("nan")
    assert "is nan, not" in differences("x", got, product)[0]["example"]
    assert differences("x", product, product) == []


@each_row(
    ("text", "words", "healthy"),
    [
        ("CUDA error: system not yet initialized", "fabric", False),
        (
            "Error 803: system has unsupported display driver combination",
            "803",
            False,
        ),
        ("CUDA error: uncorrectable ECC error encountered", "ECC", False),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", "Xid 79", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "memory is used", True),
        ("CUDA error: out of memory", "memory is used", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "another process", True),
        ("CUDA error: no kernel image is available for execution on the device", "code", True),
        ("CUDA error: unspecified launch failure", "kernel", False),
    ],
)
def test_errors_have_a_meaning(text: str, words: str, healthy: bool) -> None:
    meaning = gpu_error(text)
    assert meaning is not None
    assert words in meaning.means
    assert meaning.healthy is healthy
    assert meaning.ask


def test_an_unknown_error_has_none() -> None:
    assert gpu_error("CUDA error: 8021 gremlins") is None
    assert gpu_error("") is None


@pytest.mark.parametrize(
    ("text", "of_gpu"),
    [
        ("CUDA error: unspecified launch failure", True),
        ("CUDA out of memory. Tried to allocate", True),
        ("CUDA driver error: invalid argument", True),
        ("HIP error: out of memory", True),
        ("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx", True),
        ("Expected all tensors to be on the same device, but found cuda:0 and cpu!", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_a_mistake_in_a_call_is_not_the_gpus(text: str, of_gpu: bool) -> None:
    assert is_gpu_error(RuntimeError(text)) is of_gpu


def test_peaks_are_of_the_whole_name() -> None:
    found: Any = peaks_of("NVIDIA H200")
    assert (found.half, found.copy, found.pcie) == (989e12, 4800e9, 63e9)
    assert found.of("half") == found.half
    assert found.of("to_host") == found.pcie
    assert "nvidia.com" in found.source
    found = peaks_of("NVIDIA H100 NVL")
    assert (found.half, found.copy) == (835e12, 3900e9)
    assert peaks_of("NVIDIA H200 NVL") is None
    assert peaks_of("NVIDIA H200 MIG 1g.18gb") is None
    assert peaks_of("") is None
