"""Do all ranks draw the same random numbers from the same seed?

What it checks
--------------
Every rank seeds torch with the same number and draws some thousand numbers: on the CPU, and on its
GPU if the job will use NCCL. For each it makes two digests: one of numbers that are integers or
made from them exactly (randint, rand, randperm), and one of normally distributed numbers (randn).

Why it matters
--------------
Jobs rely on one seed giving all ranks the same initial weights, the same order of the data, or the
same dropout in a tensor-parallel group. If it does not, nothing fails: the job computes wrong
results.

How to fix
----------
The same torch, the same GPU model and the same CPU capability on all hosts. If hosts must differ,
let rank 0 draw, and broadcast. ATEN_CPU_CAPABILITY=default on all ranks makes CPUs equal, but
slower.

When it is wrong
----------------
torch does not promise equal numbers across versions or GPU models; if these differ it is a warning,
and if only randn differs between CPUs or GPU models it is information: as measured, torch 2.13
draws 16 and more normal numbers with AVX2 instructions, and they differ in the last bits from what
a CPU without AVX2 draws. A job that broadcasts its weights from rank 0 needs none of this. The
GPU's generator: Not validated on hardware.

References
----------
PyTorch documentation, notes on reproducibility; PyTorch source,
aten/src/ATen/native/cpu/DistributionTemplates.h (normal_fill_AVX2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Kind,
    Layer,
    Level,
    Odd,
    Rank,
    Scope,
    Severity,
    Skip,
    Untested,
    odd_ones_out,
    place_of,
)
from nccl_doctor.toolkit.gpu.devices import own_device
from nccl_doctor.toolkit.hosts import WHO, who_has_what

SEED_DIFFERS = Kind(
    "seed-differs",
    Layer.GROUP,
    "The same seed gives different random numbers on different ranks",
    "Initial weights, the order of the data or dropout then differ between ranks that should have "
    "the same, and the job silently computes wrong results.",
    "use the same torch and the same hardware on all ranks, or let rank 0 draw and broadcast",
    effects=(Effect.JOB_ONLY,),
)

_SEED = 20240229
_COUNT = 4096
"""Enough for vectorised code, and too few to depend on the number of a GPU's processors."""


class Seeds(Check):
    """Draws random numbers on every rank, and compares digests."""

    name = "seeds"
    layer = Layer.DEVICE
    scope = Scope.RANK
    cost = "seconds"
    instant_without_gpu = True
    level = Level.STANDARD
    kinds = (SEED_DIFFERS,)

    def deadline(self, ctx: Context) -> float:
        """Seconds for one rank; more with NCCL, because creating a CUDA context takes seconds."""
        return 40.0 if ctx.backend == "nccl" else 15.0

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`torch`: its version. `cpu`, `gpu`: `{"is", "exact", "normal"}`, the device and the two
        digests; `gpu` is None without NCCL.
        """
        if ctx.launch.world_size == 1:
            raise Skip("one rank: there is no other rank to compare with")
        ctx.breadcrumb("drawing random numbers on the CPU")
        import torch

        facts: dict[str, Any] = {
            "torch": str(torch.__version__),
            "cpu": {"is": _capability(torch), **_draw(torch, "cpu")},
            "gpu": None,
        }
        if ctx.backend == "nccl":
            ctx.breadcrumb("drawing random numbers on the GPU")
            try:
                device = own_device(ctx.launch.local_rank)
                name = str(torch.cuda.get_device_name(device))
                facts["gpu"] = {"is": name, **_draw(torch, device)}
            except (RuntimeError, AssertionError) as error:
                words = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise Untested(f"the GPU cannot draw: {words}") from error
        return facts

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on exact numbers, then on normal ones of ranks that agree; CPU before GPU."""
        seen = list(cluster.facts(self.name))
        odd: set[int] = set()
        for unit in ("cpu", "gpu"):
            for part in ("exact", "normal"):
                here = [(r, f) for r, f in seen if f[unit] is not None and r.seat not in odd]
                found, blamed = _compare(unit, part, here)
                yield from found
                odd |= blamed


# Observing ----------------------------------------------------------------------------------------


def _draw(torch: Any, device: Any) -> dict[str, str]:
    """Digests of the numbers that one device draws."""
    torch.manual_seed(_SEED)
    exact = [
        torch.randint(0, 2**31 - 1, (_COUNT,), device=device),
        torch.rand(_COUNT, device=device),
        torch.randperm(_COUNT, device=device),
    ]
    torch.manual_seed(_SEED)
    normal = [torch.randn(_COUNT, device=device)]
    return {"exact": _digest(torch, exact), "normal": _digest(torch, normal)}


def _digest(torch: Any, tensors: Iterable[Any]) -> str:
    # numpy may not be installed.
    data = hashlib.sha256()
    for tensor in tensors:
        data.update(bytes(tensor.cpu().contiguous().view(torch.uint8).tolist()))
    return data.hexdigest()[:16]


def _capability(torch: Any) -> str:
    backend = getattr(torch.backends, "cpu", None)
    ask = getattr(backend, "get_cpu_capability", None)
    return str(ask()) if ask is not None else "unknown"


# Judging ------------------------------------------------------------------------------------------

_WORDS = {"exact": "whole and uniform", "normal": "normal"}
_UNITS = {"cpu": "CPU", "gpu": "GPU"}
_LOOK_FOR = (
    "find what changes torch's seed there (sitecustomize, a patched torch), or broken hardware"
)


def _compare(
    unit: str, part: str, seen: list[tuple[Rank, Mapping[str, Any]]]
) -> tuple[list[Finding], set[int]]:
    """Findings on what differs, and the seats of the odd ranks.

    First among ranks that have the same torch and the same hardware: these must agree.
    """
    if len({facts[unit][part] for _, facts in seen}) < 2:
        return [], set()
    draws = [_Draw(rank, str(f["torch"]), str(f[unit]["is"]), f[unit][part]) for rank, f in seen]
    numbers = f"{_WORDS[part]} random numbers of the {_UNITS[unit]}"
    findings: list[Finding] = []
    odd: set[int] = set()
    for maker in sorted({draw.maker for draw in draws}):
        alike = [draw for draw in draws if draw.maker == maker]
        found = odd_ones_out({draw.rank.seat: draw.digest for draw in alike})
        if found is not None:
            odd |= set(found.places)
            words = f"the ranks are equally divided, all with {maker}"
            if not found.tie:
                words = f"though all have {maker}"
            findings.append(
                _finding(numbers, alike, found, words, severity=Severity.FAIL, fix=_LOOK_FOR)
            )
    rest = [draw for draw in draws if draw.rank.seat not in odd]
    found = odd_ones_out({draw.rank.seat: draw.digest for draw in rest})
    if found is not None:
        odd |= set(found.places)
        there = {draw.maker for draw in rest if draw.rank.seat in found.places}
        most = {draw.maker for draw in rest} - there
        words = f"{'; '.join(sorted(there))}, where the others have {'; '.join(sorted(most))}"
        if found.tie:
            words = f"the ranks are equally divided ({'; '.join(sorted(there))})"
        expected = part == "normal" and len({draw.torch for draw in rest}) == 1
        severity = Severity.INFO if expected else Severity.WARN
        findings.append(_finding(numbers, rest, found, words, severity=severity))
    return findings, odd


class _Draw(NamedTuple):
    """The numbers that one device drew; `what` is its model, or the capability of the CPU."""

    rank: Rank
    torch: str
    what: str
    digest: str

    @property
    def maker(self) -> str:
        return f"torch {self.torch} on {self.what}"


def _finding(
    numbers: str,
    draws: list[_Draw],
    odd: Odd[int, str],
    words: str,
    *,
    severity: Severity,
    fix: str = "",
) -> Finding:
    return Finding(
        SEED_DIFFERS,
        f"{numbers} differ from those of other ranks with the same seed: {words}",
        place_of(draw.rank for draw in draws if draw.rank.seat in odd.places),
        {
            "digests": {str(draw.rank.rank): draw.digest for draw in draws},
            WHO: who_has_what((draw.rank.host.label, draw.digest) for draw in draws),
        },
        fix=fix,
        severity=severity,
        confidence=Confidence.LIKELY if odd.tie else Confidence.CERTAIN,
    )
