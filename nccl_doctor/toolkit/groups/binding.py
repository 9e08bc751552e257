"""The table of versions: whether a job's default process group is bound to a device; the fix.

A bound default group makes every later group by a split (ncclCommSplit) that all its ranks must
join. The table is data, in `binding.toml` beside this file. Pure but for reading it, once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nccl_doctor.model.findings import Confidence
from nccl_doctor.toolkit.releases import ONE_RANK, KnownFault, known_faults
from nccl_doctor.toolkit.tables import read_table

DEEPSPEED, TORCH = "deepspeed", "torch"
_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?P<pre>[-_.]?(?:alpha|a|beta|b|preview|pre|c|rc)[-_.]?\d*)?"
    r"(?P<post>[-_.]?(?:post|rev|r)[-_.]?\d*|-\d+)?"
    r"(?P<dev>[-_.]?dev[-_.]?\d*)?"
    r"(?P<local>\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?",
    re.IGNORECASE,
)
_DIGITS = 4
"""Number of parts of a release that are compared; missing parts are 0."""


@dataclass(frozen=True)
class Binding:
    """True if the default group is bound to a device, by the versions.

    Attributes:
        binds: None where it is not known.
        by: who binds: `deepspeed`, which passes device_id, `torch`, or both.
        why: the rows of the table, in words.
        since: the first version of the row that decides, as `DeepSpeed 0.17.3`; empty where none.
        how: how this is known.
    """

    binds: bool | None
    by: tuple[str, ...]
    why: str
    since: str
    how: str


@dataclass(frozen=True)
class Advice:
    """The fix for exactly these versions, how it is known, and its confidence."""

    text: str
    how: str
    confidence: Confidence


class _Behaviour(NamedTuple):
    """Behaviour of one of the two libraries."""

    binds: bool | None
    why: str
    since: str = ""


class _Version(NamedTuple):
    release: tuple[int, ...]
    rank: int
    """-1 before the release itself (alpha, rc, dev), 1 after it (post, local part), else 0."""
    is_early: bool
    """True if it is a pre-release or a development version, with or without a local part."""
    is_local: bool
    """True if it has a local part: of DeepSpeed, a build from a commit; of torch, any wheel."""


def binds(
    deepspeed: str | None,
    torch: str,
    backend: str,
    accelerator: str,
    world_size: int,
    *,
    use_nccl2: str | None = None,
) -> Binding:
    """True if `deepspeed.init_distributed()` leaves the default group bound to a device.

    Args:
        deepspeed: its version, or None where torch alone forms the group.
        torch: its whole `__version__`: DeepSpeed looks at the local part too.
        backend: as given to init_process_group: `nccl`, `gloo`, `cpu:gloo,cuda:nccl`, ….
        accelerator: DeepSpeed's name of it: `cuda` (ROCm too), `cpu`, `xpu`, …; empty if unknown.
        world_size: ranks of the default group.
        use_nccl2: value of TORCH_DIST_USE_NCCL2, None where it is not set.
    """
    known = _table()["known_to"]
    claims = {
        DEEPSPEED: _by_deepspeed(deepspeed, torch, accelerator, world_size),
        TORCH: _by_torch(torch, backend, {"TORCH_DIST_USE_NCCL2": use_nccl2}),
    }
    yes = {name: claim for name, claim in claims.items() if claim.binds}
    open_ = {name: claim for name, claim in claims.items() if claim.binds is None}
    decide = yes or open_ or claims
    newer = [
        f"{_NAMES[name]} {version} is newer than {known[name]}, the newest version in the table"
        for name, version in ((DEEPSPEED, deepspeed), (TORCH, torch))
        if name in decide and version and _is_newer(version, known[name])
    ]
    return Binding(
        True if yes else None if open_ else False,
        tuple(yes),
        "; ".join(f"{_NAMES[name]} {claim.why}" for name, claim in decide.items()),
        next((claim.since for claim in yes.values()), ""),
        "; ".join(["read in the source", *newer]),
    )


def binding_advice(
    binding: Binding,
    deepspeed: str | None,
    torch: str,
    world_size: int,
    *,
    kept: bool | None = None,
) -> Advice:
    """The fix for exactly these versions, where groups have foreign or only some members.

    Args:
        binding: what `binds` said, or what was observed: `by` decides which advice is right.
        deepspeed: as for `binds`.
        torch: as for `binds`.
        world_size: as for `binds`.
        kept: whether DeepSpeed was seen to keep a default group that torch had formed, None where
            unknown.
    """
    known = _fault_of_one_rank(deepspeed) if world_size == 1 else None
    name = _advice_name(binding, known)
    if kept is False and name in ("unbound-first", "one-rank", "both-bind"):
        name = "not-kept"
    row = _table()["advice"][name]
    words = {"deepspeed": deepspeed or "(none)", "torch": torch}
    how = row["how"].format(**words)
    if kept and name in ("unbound-first", "one-rank"):
        how += "; that DeepSpeed keeps such a group was seen here"
    sure = Confidence(row["confidence"])
    if "newer than" in binding.how:
        sure = Confidence.POSSIBLE
    text = known.fix if known and name == "one-rank" else row["text"].format(**words)
    return Advice(text, how, sure)


def _fault_of_one_rank(deepspeed: str | None) -> KnownFault | None:
    """The row of the table of known faults, if this release has it."""
    rows = [row for row in known_faults(DEEPSPEED) if row.condition == ONE_RANK]
    return next((row for row in rows if deepspeed and row.has(deepspeed)), None)


def _advice_name(binding: Binding, known: KnownFault | None) -> str:
    if binding.binds is False:
        return "none"
    if not binding.by:
        return "unknown"
    if TORCH in binding.by:
        return "both-bind" if DEEPSPEED in binding.by else "torch-binds"
    return "one-rank" if known else "unbound-first"


def as_observed(expected: Binding, own: bool, wrapped: bool | None) -> Binding:
    """The binding seen on the group itself, which outweighs versions; `how` notes a difference.

    Args:
        expected: what `binds` says of these versions.
        own: whether the group that DeepSpeed formed was bound.
        wrapped: whether the one that torch formed without device_id was, and so torch binds by
            itself; None where it was not seen.
    """
    by = expected.by if expected.binds else ()
    if own and wrapped is not None:
        by = (
            *([DEEPSPEED] if DEEPSPEED in by or not wrapped else []),
            *([TORCH] if wrapped else []),
        )
    how = "seen on the group itself"
    if expected.binds is not own:
        table = {True: "it would be bound", False: "it would not be bound", None: "it is not known"}
        how += f", though by the table of versions {table[expected.binds]}"
        if expected.binds is None:
            how = how.replace(", though", ";")
    return Binding(own, by if own else (), expected.why, expected.since if own else "", how)


_NAMES: Mapping[str, str] = {DEEPSPEED: "DeepSpeed", TORCH: "torch"}


def _by_deepspeed(
    deepspeed: str | None, torch: str, accelerator: str, world_size: int
) -> _Behaviour:
    """True if DeepSpeed passes device_id."""
    table = _table()
    gate = table["gate"]
    if deepspeed is None:
        return _Behaviour(False, "is not used")
    mine, its_torch = _parse(deepspeed), _parse(torch)
    if mine is None:
        return _Behaviour(None, f"has a version that cannot be read: {deepspeed}")
    rows = list(_rows(mine, table["deepspeed"], between=mine.is_early or mine.is_local))
    answers = [_passes(row, accelerator, world_size) for row in rows]
    if set(answers) == {False}:
        return _Behaviour(False, rows[0]["why"])
    if its_torch is None:
        return _Behaviour(None, f"looks at a version of torch that cannot be read: {torch}")
    if _before(its_torch, gate["argument"]):
        return _Behaviour(False, gate["argument_why"])
    if _after(its_torch, gate["after"]) and _before(its_torch, gate["before"]):
        return _Behaviour(False, gate["why"])
    if len(set(answers)) > 1:
        either = "; or ".join(row["why"] for row in rows)
        return _Behaviour(None, f"{deepspeed} is a build between two releases: it either {either}")
    since = f"{_NAMES[DEEPSPEED]} {rows[0]['since']}" if answers[0] else ""
    return _Behaviour(answers[0], rows[0]["why"], since)


def _passes(row: Mapping[str, Any], accelerator: str, world_size: int) -> bool | None:
    if row["accelerators"] == "none" or (world_size == 1 and not row["alone"]):
        return False
    if not accelerator:
        return None
    if row["accelerators"] == "any" and accelerator not in ("cuda", "cpu"):
        return None  # the device of other accelerators was not read in the sources
    return accelerator == "cuda"  # the CPU's device is None: as if it were not passed


def _by_torch(torch: str, backend: str, env: Mapping[str, str | None]) -> _Behaviour:
    """True if torch binds by itself."""
    mine = _parse(torch)
    if mine is None:
        return _Behaviour(None, f"has a version that cannot be read: {torch}")
    rows = list(_rows(mine, _table()["torch"], between=mine.is_early))
    name = _backend_of_cuda(backend)
    answers = [
        row["binds"]
        and name in row["names"]
        and not (name == "nccl" and any(env.get(k) == v for k, v in row["unless"].items()))
        for row in rows
    ]
    if len(set(answers)) > 1:
        return _Behaviour(None, f"{torch} is a build between two releases: it may bind by itself")
    if answers[0] and "rocm" in torch:
        return _Behaviour(None, f"{torch} is built for ROCm, which the table does not cover")
    row = rows[0]
    if answers[0]:
        return _Behaviour(True, row["why"], f"{_NAMES[TORCH]} {row['since']}")
    return _Behaviour(False, _table()["torch"][0]["why"])


def _backend_of_cuda(backend: str) -> str:
    """`nccl` of `nccl`, or of `cpu:gloo,cuda:nccl`."""
    pairs = [part.partition(":") for part in backend.lower().split(",")]
    return next((name for device, _, name in pairs if device == "cuda"), pairs[0][0])


# --- versions, as PEP 440 orders them ---


def _parse(version: str) -> _Version | None:
    found = _VERSION.fullmatch(version.strip())
    if found is None:
        return None
    numbers = [int(part) for part in found["release"].split(".")][:_DIGITS]
    early = bool(found["pre"]) or (bool(found["dev"]) and not found["post"])
    late = bool(found["post"] or found["local"])
    return _Version(
        (*numbers, *[0] * (_DIGITS - len(numbers))),
        -1 if early else 1 if late else 0,
        bool(found["pre"] or found["dev"]),
        bool(found["local"]),
    )


def _order(version: _Version, release: str) -> int:
    """Below 0 where a version is before a release, above 0 where it is after it."""
    other = _parse(release)
    assert other is not None
    if version.release != other.release:
        return 1 if version.release > other.release else -1
    return version.rank


def _before(version: _Version, release: str) -> bool:
    return _order(version, release) < 0


def _after(version: _Version, release: str) -> bool:
    return _order(version, release) > 0


def _is_newer(version: str, minor: str) -> bool:
    """True if a version is newer than a release, or than all of a minor version."""
    mine, other = _parse(version), _parse(minor)
    assert other is not None
    numbers = len(minor.split("."))
    return mine is not None and mine.release[:numbers] > other.release[:numbers]


def _rows(
    version: _Version, rows: Sequence[Mapping[str, Any]], *, between: bool
) -> Iterator[Mapping[str, Any]]:
    """The row of a version; of a build on the way to a row's first release, the one before too."""
    at = max(i for i, row in enumerate(rows) if version.release >= _release(row["since"]))
    yield rows[at]
    if at and between and version.release == _release(rows[at]["since"]):
        yield rows[at - 1]


def _release(text: str) -> tuple[int, ...]:
    parsed = _parse(text)
    assert parsed is not None
    return parsed.release


@functools.cache
def _table() -> Mapping[str, Any]:
    return read_table(__package__, "binding.toml")
