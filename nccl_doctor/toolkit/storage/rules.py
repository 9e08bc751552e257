"""Findings on the paths of all hosts. Pure."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import Confidence, Finding, Kind, Severity, Where
from nccl_doctor.toolkit.blame import blame_links, odd_ones_out
from nccl_doctor.toolkit.hosts import host_labels, link_names, sides_in_words
from nccl_doctor.toolkit.kernel_waits import CAUSES, cause_of
from nccl_doctor.toolkit.outliers import slow_ones
from nccl_doctor.toolkit.storage import kinds
from nccl_doctor.toolkit.storage.examine import ALL, HEADS, SEEN_S
from nccl_doctor.toolkit.storage.file_systems import is_network
from nccl_doctor.toolkit.storage.sharing import Facts, Sharing, sharing_of

_MIB = 1 << 20
_ROOM = 1024 * _MIB
"""Less than the checkpoint of a small model."""
_INODES = 1000
_SLOW_S, _SLOW_TIMES = 1.0, 5.0
"""A write and fsync that takes longer than this, and so many times what others need."""
_KINDS: Mapping[int, Kind] = {
    errno.ENOENT: kinds.MISSING,
    errno.ENOTDIR: kinds.MISSING,
    errno.EROFS: kinds.READ_ONLY,
    errno.ENOSPC: kinds.FULL,
    errno.EDQUOT: kinds.FULL,
    errno.ESTALE: kinds.STALE,
}
_DENIED = (errno.EACCES, errno.EPERM)
_DOING = {
    "look": "looking at it",
    "write": "writing a file of 4 KiB with fsync",
    "find": "looking for files of other hosts",
    "lock": "locking a file",
    "remove": "removing a file",
}
FORMS = {"folder": "a folder", "file": "a file", "other": "neither a folder nor a file"}

Hosts = dict[int, Facts]


def paths_of(cluster: Cluster, check: str) -> dict[str, Hosts]:
    """Path → seat → facts of `examine`, what the first hosts of the groups saw included."""
    found: dict[str, Hosts] = defaultdict(dict)
    for name in (ALL, HEADS):
        for rank, facts in cluster.facts(check, name):
            for one in facts.get("paths", ()):
                before = found[one["path"]].get(rank.seat, {})
                sees = {**before.get("sees", {}), **one.get("sees", {})}
                found[one["path"]][rank.seat] = {**one, **before, "sees": sees}
    return found


def is_well(facts: Facts) -> bool:
    """Whether every step with this path ended well."""
    return "error" not in facts and "hung" not in facts


def judge_path(
    cluster: Cluster, path: str, hosts: Hosts, *, must: bool = False
) -> Iterator[Finding]:
    """Findings on one path; `must`: it has to be shared whatever it lies on."""
    labels = host_labels(cluster)
    well = {seat: facts for seat, facts in hosts.items() if is_well(facts)}
    forms = odd_ones_out({seat: facts["form"] for seat, facts in well.items()})
    sharing = sharing_of(well, must=must)
    usual = _mount_line(well, sharing.main)
    for seat, facts in hosts.items():
        where = Where(hosts=(labels[seat],))
        if "hung" in facts:
            yield _hung(path, facts, where)
        elif "error" in facts:
            yield _failed(path, facts, usual, where)
        elif facts["writes"] and facts["form"] == "folder":
            yield from _room(path, facts, where)
    if forms is not None:
        yield _different(path, well, forms.places, labels)
        return
    yield from _not_shared(path, well, sharing, labels)
    yield from _unseen(path, sharing, labels)
    yield from _slow(path, well, labels)


def _mount_line(well: Hosts, seats: Iterable[int]) -> str:
    """Command that mounts the network file system of these hosts; empty where they have none."""
    for seat in sorted(seats):
        facts = well[seat]
        if is_network(facts["type"]):
            return f"mount -t {facts['type']} {facts['source']} {facts['mount']}"
    return ""


def _evidence(facts: Facts) -> dict[str, Any]:
    keys = ("type", "source", "mount", "owner", "mode", "uid", "free", "inodes_free")
    return {key: facts[key] for key in (*keys, "error", "hung") if facts.get(key) is not None}


def _hung(path: str, facts: Facts, where: Where) -> Finding:
    hung = facts["hung"]
    cause = cause_of("", hung["wchan"])
    if cause is None:
        kind = facts["type"].partition(".")[0]
        cause = next((each for each in CAUSES if kind in each.file_systems), None)
    words = f", which waits for {cause.words}" if cause else ""
    state = f" (process state {hung['state']}{words})" if hung["state"] else ""
    return Finding(
        kinds.HANGS,
        f"{path}: {_DOING[hung['step']]} did not end within {hung['after_s']:.0f} s{state}",
        where,
        _evidence(facts),
        fix=cause.fix if cause else "",
    )


def _failed(path: str, facts: Facts, usual: str, where: Where) -> Finding:
    error = facts["error"]
    kind = _KINDS.get(error["errno"], kinds.IO_ERROR)
    if error["errno"] in _DENIED:
        kind = kinds.NOT_READABLE if error["step"] == "look" else kinds.NOT_WRITABLE
    if kind is kinds.MISSING and error["step"] != "look":
        kind = kinds.IO_ERROR  # the folder is there
    message = f"{path}: {error['text']}"
    if error["step"] != "look":
        message = f"{path}: {_DOING[error['step']]}: {error['text']}"
    place = facts["mount"] or path
    fix = ""
    if kind is kinds.MISSING:
        fix = f"{usual}; or " if usual else ""
        fix += f"mkdir -p {path}, or correct the option" if facts["writes"] else "create it"
    elif kind in (kinds.NOT_READABLE, kinds.NOT_WRITABLE):
        if "mode" in facts:
            message += f" (uid {facts['uid']}, owner {facts['owner']}, mode {facts['mode']})"
        fix = kind.fix.replace("<path>", path)
    elif kind is kinds.FULL:
        fix = kind.fix.replace("<path>", path)
    elif kind in (kinds.READ_ONLY, kinds.STALE):
        fix = kind.fix.replace("<mount>", place)
    if kind in (kinds.NOT_WRITABLE, kinds.READ_ONLY):
        fix += f"; if the job only reads there: --path {path}:ro"
    return Finding(kind, message, where, _evidence(facts), fix=fix)


def _room(path: str, facts: Facts, where: Where) -> Iterator[Finding]:
    free, inodes = facts.get("free"), facts.get("inodes_free")
    little = []
    if free is not None and free < _ROOM:
        little.append(f"{free / _MIB:.0f} MiB free")
    if inodes is not None and inodes < _INODES:
        little.append(f"{inodes} inodes free")
    if little:
        yield Finding(
            kinds.FULL,
            f"{path}: {', '.join(little)}",
            where,
            _evidence(facts),
            fix=kinds.FULL.fix.replace("<path>", path),
            severity=Severity.WARN,  # the file of the examination found room
        )


def _different(path: str, well: Hosts, odd: tuple[int, ...], labels: Mapping[int, str]) -> Finding:
    sides: dict[str, list[str]] = defaultdict(list)
    for seat, facts in well.items():
        sides[FORMS[facts["form"]]].append(labels[seat])
    return Finding(
        kinds.MISSING,
        f"{path} is {sides_in_words(sides)}",
        Where(hosts=tuple(sorted(labels[seat] for seat in odd))),
        fix=f"ls -ld {path} on these hosts; make it the same on all",
    )


def _not_shared(
    path: str, well: Hosts, sharing: Sharing, labels: Mapping[int, str]
) -> Iterator[Finding]:
    if not sharing.apart:
        return
    names = {seat: f"{facts['type']} {facts['source']}".strip() for seat, facts in well.items()}
    usual = {names[seat] for seat in sharing.main}
    sides: dict[str, list[str]] = defaultdict(list)
    for seat, name in names.items():
        same_name = seat not in sharing.main and name in usual
        sides[f"another {name}" if same_name else name].append(labels[seat])
    proven = all(well[seat]["writes"] for seat in well) and not sharing.tie
    yield Finding(
        kinds.NOT_SHARED,
        f"{path}: {sides_in_words(sides)}",
        Where(hosts=tuple(sorted(labels[seat] for seat in sharing.apart))),
        fix="" if sharing.tie else _mount_line(well, sharing.main),
        severity=Severity.FAIL if proven else Severity.WARN,
        confidence=Confidence.CERTAIN if proven else Confidence.LIKELY,
    )


def _unseen(path: str, sharing: Sharing, labels: Mapping[int, str]) -> Iterator[Finding]:
    if not sharing.unseen:
        return
    blame = blame_links(sharing.tried, sharing.unseen)
    yield Finding(
        kinds.NOT_VISIBLE,
        f"{path}: a file of another host was not visible within {SEEN_S:.0f} s "
        f"({len(sharing.unseen)} of {len(sharing.tried)} ordered pairs); an attribute cache may "
        "hide it for a minute",
        Where(
            hosts=tuple(sorted(labels[seat] for seat in blame.hosts)),
            links=link_names(labels, sharing.unseen),
        ),
        confidence=Confidence.LIKELY,
    )


def _slow(path: str, well: Hosts, labels: Mapping[int, str]) -> Iterator[Finding]:
    times = {seat: facts["write_s"] for seat, facts in well.items() if "write_s" in facts}
    for seat, ratio in slow_ones(times, _SLOW_TIMES).items():
        if times[seat] > _SLOW_S:
            yield Finding(
                kinds.SLOW,
                f"{path}: a write and fsync of 4 KiB takes {times[seat]:.1f} s, on the other hosts "
                f"{times[seat] / ratio:.3f} s",
                Where(hosts=(labels[seat],)),
                {"write_s": times[seat], "type": well[seat]["type"]},
                confidence=Confidence.LIKELY,
            )
