"""Paths of all hosts: what may be shared, room, and one that is slow. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Finding,
    Fix,
    Severity,
    Where,
    fill,
    host_labels,
    look,
    odd_ones_out,
    shell,
    word,
)
from nccl_doctor.toolkit.hosts import sides_in_words
from nccl_doctor.toolkit.outliers import slow_ones
from nccl_doctor.toolkit.storage.kinds import FULL, MISSING, path_kind
from nccl_doctor.toolkit.storage.rules import (
    Hosts,
    Labels,
    broken,
    evidence_of,
    mount_line,
    not_shared,
    unseen,
    well_of,
)
from nccl_doctor.toolkit.storage.sharing import sharing_of

NOT_SHARED = path_kind(
    "path-not-shared",
    "A path is not the same file system on all hosts",
    "What one host writes there the others never see: a checkpoint is found incomplete when it is "
    "loaded, and a host without the mount fills its own disk.",
    "mount the shared file system on the hosts that lack it",
)
SLOW = path_kind(
    "path-slow",
    "Writing to a path is much slower on one host than on the others",
    "A checkpoint takes as long as the slowest host: all others wait for it in a collective, which "
    "may time out.",
    Fix(
        look(
            shell("mount"),
            "compare the options, and the network to the file server, with those of another host",
        )
    ),
    Severity.WARN,
)

_MIB = 1 << 20
_ROOM = 1024 * _MIB
"""Less than the checkpoint of a small model."""
_INODES = 1000
_SLOW_S, _SLOW_TIMES = 1.0, 5.0
"""A write and fsync that takes longer than this, and so many times what others need."""
_FORMS = {"folder": "a folder", "file": "a file", "other": "neither a folder nor a file"}


def judge_path(cluster: Cluster, path: str, hosts: Hosts) -> Iterator[Finding]:
    """Findings on one path."""
    labels, well = host_labels(cluster), well_of(hosts)
    sharing = sharing_of(well)
    yield from broken(
        path, hosts, labels, mount_line(well, sharing.main), f"--path {word(path)}:ro"
    )
    forms = odd_ones_out({seat: facts["form"] for seat, facts in well.items()})
    if forms is not None:
        yield _different(path, well, forms.places, labels)
        return
    for group in sharing.groups:
        yield from _room(path, {seat: well[seat] for seat in sorted(group)}, labels)
    yield from not_shared(NOT_SHARED, path, well, sharing, labels)
    yield from unseen(path, sharing, labels)
    yield from _slow(path, well, labels)


def _room(path: str, group: Hosts, labels: Labels) -> Iterator[Finding]:
    """The finding on one file system, and on all hosts that have it."""
    where = {
        seat: facts
        for seat, facts in group.items()
        if facts["writes"] and facts["form"] == "folder"
    }
    free = min((f["free"] for f in where.values() if f.get("free") is not None), default=_ROOM)
    inodes = [f["inodes_free"] for f in where.values() if f.get("inodes_free") is not None]
    little = [f"{free / _MIB:.0f} MiB free"] if free < _ROOM else []
    if min(inodes, default=_INODES) < _INODES:
        little.append(f"{min(inodes)} inodes free")
    if little:
        yield Finding(
            FULL,
            f"{path}: {', '.join(little)}",
            Where(hosts=tuple(sorted(labels[seat] for seat in where))),
            evidence_of(where[min(where)]),
            fix=fill(FULL.fix, FOLDER=path),
            severity=Severity.WARN,  # the file of the examination found room
        )


def _different(path: str, well: Hosts, odd: tuple[int, ...], labels: Labels) -> Finding:
    sides: dict[str, list[str]] = defaultdict(list)
    for seat, facts in well.items():
        sides[_FORMS[facts["form"]]].append(labels[seat])
    return Finding(
        MISSING,
        f"{path} is {sides_in_words(sides)}",
        Where(hosts=tuple(sorted(labels[seat] for seat in odd))),
        fix=Fix(look(shell("ls -ld {}", path), "make it the same on all hosts")),
    )


def _slow(path: str, well: Hosts, labels: Labels) -> Iterator[Finding]:
    times = {seat: facts["write_s"] for seat, facts in well.items() if "write_s" in facts}
    for seat, ratio in slow_ones(times, _SLOW_TIMES).items():
        if times[seat] > _SLOW_S:
            yield Finding(
                SLOW,
                f"{path}: a write and fsync of 4 KiB takes {times[seat]:.1f} s, on the other hosts "
                f"{times[seat] / ratio:.3f} s",
                Where(hosts=(labels[seat],)),
                {"write_s": times[seat], "type": well[seat]["type"]},
                confidence=Confidence.LIKELY,
            )
