"""Rates of GPUs: as a table, and who is slow beside its like or beside what is published. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from nccl_doctor.cluster import Rank
from nccl_doctor.model import Confidence, Figure, Finding, Where
from nccl_doctor.tools.machine.gputables import MEASURES, peaks_of
from nccl_doctor.tools.shared_kinds import GPU_SLOW
from nccl_doctor.tools.speed.outliers import slow_ones
from nccl_doctor.tools.versions import place_of

_TIMES = {"half": 1.2, "copy": 1.2, "to_device": 2.0, "to_host": 2.0}
_LEAST_SHARE = {"half": 0.35, "copy": 0.6}
"""Of what the vendor publishes; a healthy GPU at its power limit stays above. Copies to the host
share switches and memory with other GPUs, so they have no such limit.
"""
_UNITS = {"half": (1e12, "TFLOP/s"), "copy": (1e9, "GB/s")}


def judge_gpu_rates(seen: Iterable[tuple[Rank, Mapping[str, Any]]]) -> Iterator[Finding]:
    """First beside GPUs of the same model, then the rest beside what is published.

    Args:
        seen: of each rank `device`, `uuid`, `model` and `tries`, a list of what
            `DeviceWork.measure` returned, each. GPUs that several ranks worked on are left out.
    """
    models: dict[str, list[_Gpu]] = defaultdict(list)
    for gpu in _measured(seen):
        models[gpu.model].append(gpu)
    for model, alike in models.items():
        blamed = set()
        for gpu, words in _outliers(alike):
            blamed.add(gpu.rank.seat)
            yield Finding(
                GPU_SLOW,
                f"{'; '.join(words)}, measured twice",
                gpu.where,
                {"model": model, "tries": [dict(one) for one in gpu.tries]},
                confidence=Confidence.LIKELY,
            )
        yield from _below_peak(model, [gpu for gpu in alike if gpu.rank.seat not in blamed])


def rates_table(model: str, tries: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What was measured, beside what is published, as a fact that is shown as a table."""
    peaks = peaks_of(model)
    rows = []
    for measure, words in MEASURES.items():
        scale, unit = _unit(measure)
        each = [round(one[measure] / scale, 1) for one in tries]
        peak = None if peaks is None else round(peaks.of(measure) / scale, 1)
        share = None if peak is None else f"{100 * max(each) / peak:.0f} %"
        rows.append([words, unit, *each, peak, share])
    return {"columns": [model, "unit", "first", "second", "published", "reached"], "rows": rows}


def rate_figures(seen: Iterable[tuple[Rank, Mapping[str, Any]]]) -> Iterator[Figure]:
    """Rates to compare with other runs, by GPU. `seen` is as in `judge_gpu_rates`."""
    for gpu in _measured(seen):
        for measure, words in MEASURES.items():
            scale, unit = _unit(measure)
            rate = round(gpu.best[measure] / scale, 3)
            yield Figure(words, rate, gpu.where, unit, better="higher")


class _Gpu(NamedTuple):
    """A rank's own GPU, and the better of its measurements."""

    rank: Rank
    model: str
    uuid: str | None
    best: Mapping[str, float]
    tries: Sequence[Mapping[str, float]]

    @property
    def where(self) -> Where:
        return place_of([self.rank]) | Where(devices=(self.uuid,) if self.uuid else ())


def _measured(seen: Iterable[tuple[Rank, Mapping[str, Any]]]) -> list[_Gpu]:
    """GPUs that were measured, without those that several ranks worked on at once."""
    known = list(seen)
    users = Counter(_identity(rank, facts) for rank, facts in known)
    return [
        _Gpu(
            rank,
            facts["model"],
            facts["uuid"],
            {each: max(one[each] for one in facts["tries"]) for each in MEASURES},
            facts["tries"],
        )
        for rank, facts in known
        if facts["tries"] and users[_identity(rank, facts)] == 1
    ]


def _identity(rank: Rank, facts: Mapping[str, Any]) -> Any:
    return facts["uuid"] or (rank.host.id, facts["device"])


def _outliers(alike: Sequence[_Gpu]) -> Iterator[tuple[_Gpu, list[str]]]:
    """GPUs that stand out in the cluster, or among those of their host, and in what."""
    by_host: dict[int, list[_Gpu]] = defaultdict(list)
    for gpu in alike:
        by_host[gpu.rank.host.id].append(gpu)
    words: dict[int, list[str]] = defaultdict(list)
    for measure in MEASURES:
        for among, others in (
            ("equal GPUs", [alike]),
            ("equal GPUs of the host", by_host.values()),
        ):
            for group in others:
                # Times, for whom less is better; a rate of 0 cannot be measured.
                times = {gpu.rank.seat: 1 / gpu.best[measure] for gpu in group}
                for seat in slow_ones(times, _TIMES[measure]):
                    rate = 1 / times[seat]
                    usual = median(gpu.best[measure] for gpu in group)
                    if not any(said.startswith(MEASURES[measure]) for said in words[seat]):
                        words[seat].append(
                            f"{MEASURES[measure]} {_in_units(measure, rate)}, the median of "
                            f"{len(group)} {among} is {_in_units(measure, usual)}"
                        )
    for gpu in alike:
        if words.get(gpu.rank.seat):
            yield gpu, words[gpu.rank.seat]


def _below_peak(model: str, gpus: Sequence[_Gpu]) -> Iterator[Finding]:
    peaks = peaks_of(model)
    if peaks is None:
        return
    for measure, share in _LEAST_SHARE.items():
        peak = peaks.of(measure)
        low = [gpu for gpu in gpus if gpu.best[measure] < share * peak]
        if not low:
            continue
        where = Where()
        for gpu in low:
            where |= gpu.where
        best = max(gpu.best[measure] for gpu in low)
        yield Finding(
            GPU_SLOW,
            f"{MEASURES[measure]} of {model} at most {_in_units(measure, best)}, measured twice; "
            f"the vendor publishes {_in_units(measure, peak)}",
            where,
            {"model": model, "source": peaks.source, "share": round(best / peak, 3)},
            confidence=Confidence.LIKELY,
        )


def _unit(measure: str) -> tuple[float, str]:
    return _UNITS.get(measure, _UNITS["copy"])


def _in_units(measure: str, rate: float) -> str:
    scale, unit = _unit(measure)
    return f"{rate / scale:.0f} {unit}" if rate >= 10 * scale else f"{rate / scale:.2g} {unit}"
