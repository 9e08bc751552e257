"""Troubles between the GPUs of one host: pairs, NVSwitches, the fabric manager. Pure."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.api import Confidence, Fix, Kind, Severity, Step, shell
from nccl_doctor.toolkit.gpu.kinds import STATE_UNREAD
from nccl_doctor.toolkit.gpu.lost import manager_is_down
from nccl_doctor.toolkit.gpu.unread import is_unread, why_unread
from nccl_doctor.toolkit.shared_kinds import FABRIC_MANAGER_DOWN
from nccl_doctor.toolkit.tables import read_table

from .drift import NEAREST
from .gpu_kinds import NVSWITCH_ERROR, P2P_UNAVAILABLE, P2P_UNSUPPORTED, PERSISTENCE_OFF
from .nvlinks import is_cut_off, is_registered
from .peers import HostGpus

_WHY = {
    "CHIPSET_NOT_SUPPORED": "the chipset does not support it",  # as older bindings spell it
    "CHIPSET_NOT_SUPPORTED": "the chipset does not support it",
    "GPU_NOT_SUPPORTED": "the GPU does not support it",
    "IOH_TOPOLOGY_NOT_SUPPORTED": "the link between the sockets does not support it",
    "DISABLED_BY_REGKEY": "an option of the driver's module turns it off",
    "NOT_SUPPORTED": "it is not supported",
    "UNKNOWN": "unknown",
}
_DAY_S, _HOUR_S = 86_400, 3_600


@dataclass(frozen=True)
class Between:
    """One trouble of a host that is not the fault of a single GPU.

    `gpus` are indices of the GPUs concerned, `pairs` the pairs of them; `devices` are names of
    other devices.
    """

    kind: Kind
    text: str
    gpus: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    devices: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str = ""
    severity: Severity | None = None
    confidence: Confidence = Confidence.CERTAIN


@dataclass(frozen=True)
class Copying:
    """Facts about direct copies: indices of the GPUs that ranks use, pairs with a copy between
    them, and pairs where the data did not arrive unchanged.
    """

    used: frozenset[int]
    made: frozenset[tuple[int, int]]
    bad: frozenset[tuple[int, int]]


def troubles_between(
    host: HostGpus,
    *,
    cuda_starts: bool,
    hints: Callable[[], Sequence[str]],
    copying: Callable[[], Copying | None],
) -> Iterator[Between]:
    """Troubles of one host besides those of its single GPUs.

    Args:
        host: its GPUs.
        cuda_starts: whether a rank of the host can still use a GPU.
        hints: asked for clauses that may explain why GPUs do not reach each other.
        copying: asked for what NCCL would copy directly; None where it would not.
    """
    yield from _unread(host.facts)
    yield from _unreachable(host.facts, hints)
    yield from _unsupported(host, copying)
    yield from _asleep(host)
    yield from _switches(host)
    yield from _fabric_manager(host, cuda_starts)


# Pairs --------------------------------------------------------------------------------------------


def _unreachable(facts: Mapping[str, Any], hints: Callable[[], Sequence[str]]) -> Iterator[Between]:
    """Pairs that cannot reach each other's memory, where most equally near pairs can."""
    if facts["p2p"].keys() <= {"OK"}:
        return
    why = {_pair(pair): reason for reason, pairs in facts["p2p"].items() for pair in pairs}
    bad: dict[tuple[int, int], str] = {}
    for level, pairs in facts["nearest"].items():
        known = [pair for pair in map(_pair, pairs) if pair in why]
        cannot = [pair for pair in known if why[pair] != "OK"]
        if 2 * len(cannot) < len(known):
            bad |= dict.fromkeys(cannot, level)
    # A GPU that reaches none of the others is the culprit, not each of its pairs.
    every = {index for pair in why for index in pair}
    alone = [
        index
        for index in sorted(every)
        if len(every) > 2 and all(pair in bad for pair in why if index in pair)
    ]
    if alone:
        pairs = [pair for pair in bad if set(pair) & set(alone)]
        who = _listed("GPU", alone)
        text = f"no direct access between {who} and any other GPU of the host"
        yield _cannot(text, pairs, why, hints(), tuple(alone))
    left = [pair for pair in bad if not set(pair) & set(alone)]
    by_level: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for pair in left:
        by_level[bad[pair]].append(pair)
    for level, pairs in by_level.items():
        who = ", ".join(f"GPU {one} and GPU {other}" for one, other in pairs[:8])
        who += f", and {len(pairs) - 8} more pairs" if len(pairs) > 8 else ""
        near = NEAREST.get(level, level)
        gpus = tuple(sorted({index for pair in pairs for index in pair}))
        text = f"no direct access between {who}; most pairs {near} have it"
        yield _cannot(text, pairs, why, hints(), gpus)


def _cannot(
    text: str,
    pairs: Sequence[tuple[int, int]],
    why: Mapping[tuple[int, int], str],
    hints: Sequence[str],
    gpus: tuple[int, ...],
) -> Between:
    reasons = sorted({_WHY.get(why[pair], why[pair]) for pair in pairs})
    return Between(
        P2P_UNAVAILABLE,
        "; ".join([f"{text} (the driver: {', '.join(reasons)})", *hints]),
        gpus,
        tuple(pairs),
        evidence={"pairs": [list(pair) for pair in pairs]},
    )


def _unsupported(host: HostGpus, copying: Callable[[], Copying | None]) -> Iterator[Between]:
    """Pairs that reach each other over PCIe though NVIDIA's driver does not support this."""
    boards = {
        gpu["index"]: name
        for name, peers in host.by_model.items()
        if name and _is_without(name)
        for gpu in peers.gpus
        if not sum(gpu["nvlinks"])
    }
    copied = copying() if len(boards) > 1 else None
    if copied is None:
        return
    able = [_pair(pair) for pair in host.facts["p2p"].get("OK", ())]
    used = boards.keys() & copied.used
    pairs = [pair for pair in able if used.issuperset(pair)]
    if not pairs:
        return
    gpus = tuple(sorted({index for pair in pairs for index in pair}))
    models = ", ".join(sorted({boards[index] for index in gpus}))
    text = f"{models}: the driver reports that {len(pairs)} "
    text += "pair reaches" if len(pairs) == 1 else "pairs reach"
    text += " each other's memory over PCIe; NVIDIA's own driver does not support this"
    tried = copied.made & set(pairs)
    arrived = bool(tried) and not copied.bad & set(pairs)
    yield Between(
        P2P_UNSUPPORTED,
        text + ("; the data sent between neighbours arrived" if arrived else ""),
        gpus,
        tuple(pairs),
        evidence={"pairs": [list(pair) for pair in pairs], "tried": sorted(map(list, tried))},
        severity=Severity.INFO if arrived else None,
        confidence=Confidence.LIKELY,
    )


@functools.lru_cache
def _is_without(model: str) -> bool:
    """True if a model is in the table of those without P2P over PCIe."""
    return any(name.fullmatch(model) for name in _without())


@functools.cache
def _without() -> tuple[re.Pattern[str], ...]:
    rows = read_table(__package__, "p2p.toml")["gpu"]
    return tuple(re.compile(row["name"]) for row in rows)


def _pair(pair: Sequence[int]) -> tuple[int, int]:
    return min(pair), max(pair)


def _listed(noun: str, numbers: Iterable[int]) -> str:
    return ", ".join(f"{noun} {number}" for number in numbers)


# What was not read, and what sleeps ---------------------------------------------------------------

_ASKED = {
    "p2p": "which GPUs reach each other's memory",
    "nearest": "how near GPUs are to each other",
}


_READ_LOG = Fix(
    Step(
        shell("sysctl -w kernel.dmesg_restrict=0"),
        undo=shell("sysctl -w kernel.dmesg_restrict=1"),
        note="as root; then run it again",
    ),
    alternatives=["run it as root", "in a container: allow it to read /dev/kmsg"],
)


def _unread(facts: Mapping[str, Any]) -> Iterator[Between]:
    """Facts that could not be read, so that no rule judged them."""
    gaps, fixes = [], []
    log = facts["kernel_log"]
    if log["source"] is None:
        first = str(log["reason"]).split("; ", 1)[0]
        gaps.append(f"the kernel log with its Xids and SXids ({first})")
        fixes.append(_READ_LOG)
    unread = why_unread(facts)
    gaps += unread
    error = facts.get("pairs_error")
    if error:
        gaps.append(f"{_ASKED['p2p']} ({error['call']}: {error['name']})")
    for field_name, refused in (facts.get("pairs_refused") or {}).items():
        for name, count in refused.items():
            if name != "NOT_SUPPORTED":  # a driver without that call: no trouble
                pairs = f"{count} {'pair' if count == 1 else 'pairs'}"
                gaps.append(f"{_ASKED.get(field_name, field_name)} ({pairs}: {name})")
    if gaps:
        yield Between(
            STATE_UNREAD,
            f"not read: {'; '.join(gaps)}",
            tuple(gpu["index"] for gpu in facts["gpus"] if is_unread(gpu)),
            fix=fixes[0] if fixes else "",
            severity=Severity.WARN if unread else None,
        )


def _asleep(host: HostGpus) -> Iterator[Between]:
    """All GPUs without persistence mode; `drift` reports where only some have it."""
    modes = [gpu["persistence"] for gpu in host.readable]
    if len(modes) > 1 and not any(mode != 0 for mode in modes):
        yield Between(PERSISTENCE_OFF, f"persistence mode is off on all {len(modes)} GPUs")


# NVSwitches ---------------------------------------------------------------------------------------


def _switches(host: HostGpus) -> Iterator[Between]:
    """Fatal errors of NVSwitches; one may be older than a reset, so alone it is only a warning.

    It is certain where the NVLink fabric says right now that a GPU of this host does not get what
    it should.
    """
    fatal = [seen for seen in host.facts["kernel_log"].get("sxids", ()) if seen["fatal"]]
    if not fatal:
        return
    now = sorted(gpu["index"] for gpu in host.readable if is_cut_off(gpu["fabric"]))
    words = [_in_words(seen) for seen in fatal[-4:]]
    words += [f"and {len(fatal) - 4} more"] if len(fatal) > 4 else []
    words += [f"the NVLink fabric gives {_listed('GPU', now)} less than it should"] if now else []
    yield Between(
        NVSWITCH_ERROR,
        f"kernel log: {'; '.join(words)}",
        tuple(now),
        devices=tuple(sorted({str(seen["bus"]) for seen in fatal})),
        evidence={"sxids": [dict(seen) for seen in fatal]},
        severity=Severity.FAIL if now else None,
        confidence=Confidence.CERTAIN if now else Confidence.LIKELY,
    )


def _in_words(seen: Mapping[str, Any]) -> str:
    link = "" if seen["link"] is None else f" on link {seen['link']}"
    times = f", {seen['count']} times" if seen["count"] > 1 else ""
    ago = "" if seen["age_s"] is None else f", {_age(seen['age_s'])} ago"
    said = f": {seen['text']}" if seen["text"] else ""
    return f"SXid {seen['sxid']} of NVSwitch {seen['switch']}{link}{said}{times}{ago}"


def _age(seconds: int) -> str:
    if seconds >= 2 * _DAY_S:
        return f"{seconds // _DAY_S} days"
    return f"{seconds // _HOUR_S} h" if seconds >= _HOUR_S else f"{seconds // 60} min"


# The fabric manager -------------------------------------------------------------------------------


def _fabric_manager(host: HostGpus, cuda_starts: bool) -> Iterator[Between]:
    seen = host.facts.get("fabric_manager") or {"switches": 0}
    if not seen["switches"] or seen["running"]:
        return
    severity = Severity.WARN if cuda_starts else None
    # A log line about another driver is older than an upgrade.
    if seen["misfit"] and seen["misfit"][1] == host.facts["driver"]:
        its, driver = seen["misfit"]
        # GPUs that it had registered before the driver changed can still be used.
        registered = any(is_registered(gpu["fabric"]) for gpu in host.readable)
        sure = manager_is_down(seen) and not (cuda_starts or registered)
        yield Between(
            FABRIC_MANAGER_DOWN,
            f"fabric manager {its} does not fit driver {driver} and did not start",
            fix=Fix(
                Step(
                    shell("systemctl restart nvidia-fabricmanager"),
                    note=f"after fabric manager {driver} was installed",
                    persists=True,
                )
            ),
            severity=severity,
            confidence=Confidence.CERTAIN if sure else Confidence.LIKELY,
        )
    elif seen["running"] is False:
        yield Between(
            FABRIC_MANAGER_DOWN,
            f"{seen['switches']} NVSwitches, but no process nv-fabricmanager",
            severity=severity,
            confidence=Confidence.LIKELY,
        )
