"""Rates of GPUs: as a table, and compared with equal GPUs and with published rates. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from nccl_doctor.api import Confidence, Figure, Finding, Fix, Rank, Where, look, place_of, shell
from nccl_doctor.toolkit.gpu.tables import MEASURES, pcie_rate, peaks_of
from nccl_doctor.toolkit.outliers import slow_ones
from nccl_doctor.toolkit.shared_kinds import GPU_SLOW

from .under_load import held_back, in_words

_TIMES = {"half": 1.2, "copy": 1.2, "to_device": 2.0, "to_host": 2.0}
_LEAST_SHARE = {"half": 0.5, "copy": 0.7}
"""Share of the published rate. GPUs of the table reach 0.75 to 0.87 of it in such products, by
public measurements (0.6 and more if the power limit of the model is low), and about 0.9 in copies:
half the speed on all GPUs must not count as good.
"""
_LEAST_OF_LINK = 0.3
"""Share of the rate of the PCIe link to the host, with its width and generation under load. All
GPUs of a host copy at once, and may share one link to it: each has its share of that.
"""
_PCIE = ("to_device", "to_host")
_COPIES_FIX = Fix(
    look(shell("numactl --hardware")),
    look(shell("nvidia-smi topo -m"), "are the rank's CPUs beside its GPU?"),
    alternatives=[
        "look for other copies on the same PCIe switch, and for IOMMU and ACS (check gpu_direct)"
    ],
)
_LOADS = (
    ("sm_clock_mhz", 1, "SM clock under load", "MHz", "max_sm_clock_mhz"),
    ("power_mw", 1000, "power under load", "W", "power_limit_mw"),
    ("temperature", 1, "temperature under load", "°C", ""),
)
_UNITS = {"half": (1e12, "TFLOP/s"), "copy": (1e9, "GB/s")}


def judge_gpu_rates(seen: Iterable[tuple[Rank, Mapping[str, Any]]]) -> Iterator[Finding]:
    """Findings on GPUs slower than others of their model; for the rest, than published rates.

    Args:
        seen: for each rank `device`, `uuid`, `model`, `tries`, a list of results of
            `DeviceWork.measure`, and `under_load`, for each the result of `LoadReader.read` (not in
            reports of older versions). GPUs that several ranks worked on are left out.
    """
    models: dict[str, list[_Gpu]] = defaultdict(list)
    sharing: Counter[int] = Counter()
    for gpu in _measured(seen):
        models[gpu.model].append(gpu)
        sharing[gpu.rank.host.id] += 1
    for model, alike in models.items():
        blamed = set()
        for gpu, words in _outliers(alike):
            blamed.add(gpu.rank.seat)
            yield Finding(
                GPU_SLOW,
                f"{'; '.join(words)}, measured twice{_under_load(gpu)}",
                gpu.where,
                {"model": model, "tries": [dict(one) for one in gpu.tries], **_load_of([gpu])},
                confidence=Confidence.LIKELY,
            )
        rest = [gpu for gpu in alike if gpu.rank.seat not in blamed]
        yield from _below_peak(model, rest)
        yield from _below_link(rest, sharing)


def rates_table(
    model: str,
    tries: Sequence[Mapping[str, float]],
    loads: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A table of measured and published rates, as a fact for reports.

    Args:
        model: the GPU's name.
        tries: two measurements.
        loads: the readings under load, one for each of them.
    """
    peaks = peaks_of(model)
    rows = []
    for measure, words in MEASURES.items():
        scale, unit = _unit(measure)
        each = [round(one[measure] / scale, 1) for one in tries]
        peak = None if peaks is None else round(peaks.of(measure) / scale, 1)
        share = None if peak is None else f"{100 * max(each) / peak:.0f} %"
        rows.append([words, unit, *each, peak, share])
    if any(loads):
        for field, scale, words, unit, most in _LOADS:
            seen = [None if field not in one else round(one[field] / scale, 1) for one in loads]
            limit = next((one[most] / scale for one in loads if one.get(most)), None)
            rows.append([words, unit, *seen, limit, None])
        held = [", ".join(held_back(one)) or None for one in loads]
        rows.append(["held back by", None, *held, None, None])
    return {"columns": [model, "unit", "first", "second", "published", "reached"], "rows": rows}


def rate_figures(seen: Iterable[tuple[Rank, Mapping[str, Any]]]) -> Iterator[Figure]:
    """Rates to compare with other runs, by GPU. `seen` is as for `judge_gpu_rates`."""
    for gpu in _measured(seen):
        for measure, words in MEASURES.items():
            scale, unit = _unit(measure)
            rate = round(gpu.best[measure] / scale, 3)
            yield Figure(words, rate, gpu.where, unit, better="higher")
        load = gpu.load
        if load.get("sm_clock_mhz"):
            clock = float(load["sm_clock_mhz"])
            yield Figure("SM clock under load", clock, gpu.where, "MHz", better="higher", least=60)
        if load.get("temperature") is not None:
            heat = float(load["temperature"])
            yield Figure("temperature under load", heat, gpu.where, "°C", better="lower", least=10)
        if load.get("pcie_generation") and load.get("pcie_width"):
            link = f"generation {load['pcie_generation']} x{load['pcie_width']}"
            yield Figure("PCIe link under load", link, gpu.where)


class _Gpu(NamedTuple):
    """A rank's own GPU, and the better of its measurements."""

    rank: Rank
    model: str
    uuid: str | None
    best: Mapping[str, float]
    tries: Sequence[Mapping[str, float]]
    loads: Sequence[Mapping[str, Any]]

    @property
    def load(self) -> Mapping[str, Any]:
        """The driver's last reading under load; empty if there is none."""
        return next((one for one in reversed(self.loads) if one), {})

    @property
    def where(self) -> Where:
        return place_of([self.rank]) | Where(devices=(self.uuid,) if self.uuid else ())


def _measured(seen: Iterable[tuple[Rank, Mapping[str, Any]]]) -> list[_Gpu]:
    """GPUs that were measured, without those that several ranks worked on at once."""
    known = list(seen)
    if not any(facts["tries"] for _, facts in known):
        return []
    users = Counter(_identity(rank, facts) for rank, facts in known)
    return [
        _Gpu(
            rank,
            facts["model"],
            facts["uuid"],
            {each: max(one[each] for one in facts["tries"]) for each in MEASURES},
            facts["tries"],
            facts.get("under_load") or (),
        )
        for rank, facts in known
        if facts["tries"] and users[_identity(rank, facts)] == 1
    ]


def _identity(rank: Rank, facts: Mapping[str, Any]) -> Any:
    return facts["uuid"] or (rank.host.id, facts["device"])


def _outliers(alike: Sequence[_Gpu]) -> Iterator[tuple[_Gpu, list[str]]]:
    """GPUs that are outliers in the cluster or on their host, with a text for each measure."""
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
                # Times, so that less is better; a rate of 0 cannot be measured.
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
        fastest = max(low, key=lambda gpu: gpu.best[measure])
        best = fastest.best[measure]
        yield Finding(
            GPU_SLOW,
            f"{MEASURES[measure]} of {model} at most {_in_units(measure, best)}, measured twice; "
            f"the vendor publishes {_in_units(measure, peak)}{_under_load(fastest)}",
            where,
            {
                "model": model,
                "source": peaks.source,
                "share": round(best / peak, 3),
                **_load_of(low),
            },
            confidence=Confidence.LIKELY,
        )


def _below_link(gpus: Iterable[_Gpu], sharing: Mapping[int, int]) -> Iterator[Finding]:
    """Findings on copies that are slow for their PCIe link, whatever GPUs share it.

    Args:
        gpus: to be judged.
        sharing: host → number of its GPUs that were measured at once.
    """
    for gpu in gpus:
        link = pcie_rate(gpu.load.get("pcie_generation"), gpu.load.get("pcie_width"))
        if link is None:
            continue
        least = _LEAST_OF_LINK * link / sharing[gpu.rank.host.id]
        low = [measure for measure in _PCIE if gpu.best[measure] < least]
        if low:
            rates = ", ".join(f"{MEASURES[m]} {_in_units(m, gpu.best[m])}" for m in low)
            yield Finding(
                GPU_SLOW,
                f"{rates}, measured twice; its PCIe link (generation "
                f"{gpu.load['pcie_generation']} x{gpu.load['pcie_width']}) carries "
                f"{_in_units(low[0], link)}",
                gpu.where,
                {"model": gpu.model, "gpus_of_the_host": sharing[gpu.rank.host.id]}
                | _load_of([gpu]),
                fix=_COPIES_FIX,
                confidence=Confidence.LIKELY,
            )


def _under_load(gpu: _Gpu) -> str:
    words = in_words(gpu.load)
    return f"; under load: {words}" if words else ""


def _load_of(gpus: Iterable[_Gpu]) -> dict[str, Any]:
    """Evidence: the driver's readings of each GPU under load, by UUID."""
    said = {gpu.uuid or f"rank {gpu.rank.rank}": dict(gpu.load) for gpu in gpus if gpu.load}
    return {"under_load": said} if said else {}


def _unit(measure: str) -> tuple[float, str]:
    return _UNITS.get(measure, _UNITS["copy"])


def _in_units(measure: str, rate: float) -> str:
    scale, unit = _unit(measure)
    return f"{rate / scale:.0f} {unit}" if rate >= 10 * scale else f"{rate / scale:.2g} {unit}"
