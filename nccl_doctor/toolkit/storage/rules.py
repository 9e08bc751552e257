"""Findings on the paths of all hosts. Pure."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Confidence, Finding, Kind, Severity, Where
from nccl_doctor.model.fixes import Fix, On, Step, fill
from nccl_doctor.toolkit.blame import blame_links
from nccl_doctor.toolkit.hosts import link_names, sides_in_words
from nccl_doctor.toolkit.kernel_waits import CAUSES, cause_of
from nccl_doctor.toolkit.storage import kinds
from nccl_doctor.toolkit.storage.examine import ALL, HEADS, SEEN_S
from nccl_doctor.toolkit.storage.file_systems import is_network
from nccl_doctor.toolkit.storage.sharing import Facts, Sharing

_KINDS: Mapping[int, Kind] = {
    errno.ENOENT: kinds.MISSING,
    errno.ENOTDIR: kinds.MISSING,
    errno.EROFS: kinds.READ_ONLY,
    errno.ENOSPC: kinds.FULL,
    errno.EDQUOT: kinds.FULL,
    errno.ESTALE: kinds.STALE,
}
_OF_OTHERS = ("sees", "feels")
_DENIED = (errno.EACCES, errno.EPERM)
_DOING = {
    "look": "looking at it",
    "write": "writing a file of 4 KiB with fsync",
    "find": "looking for files of other hosts",
    "file": "looking at the file",
    "lock": "locking a file",
    "remove": "removing a file",
}

Hosts = Mapping[int, Facts]
"""Seat → facts of `examine` on one path."""
Labels = Mapping[int, str]


def paths_of(cluster: Cluster, check: str) -> dict[str, dict[int, Facts]]:
    """Path → seat → facts of `examine`, what the first hosts of the groups saw included."""
    found: dict[str, dict[int, Facts]] = defaultdict(dict)
    for name in (ALL, HEADS):
        for rank, facts in cluster.facts(check, name):
            for one in facts.get("paths", ()):
                before = found[one["path"]].get(rank.seat, {})
                both = {key: {**before.get(key, {}), **one.get(key, {})} for key in _OF_OTHERS}
                found[one["path"]][rank.seat] = {**one, **before, **both}
    return found


def well_of(hosts: Hosts) -> Hosts:
    """The hosts on which every step with the path ended well."""
    return {s: facts for s, facts in hosts.items() if "error" not in facts and "hung" not in facts}


def broken(path: str, hosts: Hosts, labels: Labels, usual: str, option: str) -> Iterator[Finding]:
    """Findings on hosts where a step with a path failed or did not end.

    Args:
        path: the path.
        hosts: all of them.
        labels: names of hosts.
        usual: from `mount_line`, of the hosts that are well.
        option: what to give if the job only reads there, or empty.
    """
    for seat, facts in hosts.items():
        where = Where(hosts=(labels[seat],))
        if "hung" in facts:
            yield _hung(path, facts, where)
        elif "error" in facts:
            yield _failed(path, facts, where, usual, option)


def mount_line(well: Hosts, seats: Iterable[int]) -> str:
    """The fix that mounts the network file system of these hosts; empty where they have none."""
    for seat in sorted(seats):
        facts = well[seat]
        if is_network(facts["type"]):
            where = facts["mount"]
            line = shell("mount -t {:name} {} {}", facts["type"], facts["source"], where)
            return Fix(Step(line, undo=shell("umount {}", where)))
    return ""


def evidence_of(facts: Facts) -> dict[str, Any]:
    """Facts of one host that are worth keeping."""
    keys = ("type", "source", "mount", "owner", "mode", "uid", "error", "hung")
    return {key: facts[key] for key in keys if facts.get(key) is not None}


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
        evidence_of(facts),
        fix=fill(cause.fix, MOUNT=facts["mount"] or path) if cause else "",
        confidence=Confidence.CERTAIN if hung["state"] == "D" else Confidence.LIKELY,
    )


def _failed(path: str, facts: Facts, where: Where, usual: str, option: str) -> Finding:
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
        fix = _to_have(path, usual, facts["writes"])
    elif kind in (kinds.NOT_READABLE, kinds.NOT_WRITABLE):
        if "mode" in facts:
            message += f" (uid {facts['uid']}, owner {facts['owner']}, mode {facts['mode']})"
        fix = fill(kind.fix, FOLDER=path)
    elif kind is kinds.FULL:
        fix = fill(kind.fix, FOLDER=path)
    elif kind in (kinds.READ_ONLY, kinds.STALE):
        fix = fill(kind.fix, MOUNT=place)
    if kind in (kinds.NOT_WRITABLE, kinds.READ_ONLY) and option:
        other = Fix(Step(shell("# {}", option), On.EVERY, note="if the job only reads there"))
        steps = fix.steps if isinstance(fix, Fix) else ()
        fix = Fix(*steps, alternatives=[other])
    return Finding(kind, message, where, evidence_of(facts), fix=fix)


def _to_have(path: str, usual: str, writes: bool) -> str:
    """The fix for a path that is not there: as other hosts mount it, or made anew."""
    mount = [usual] if usual else []
    if not writes:
        return mount[0] if mount else "create it"
    steps = (Step(shell("mkdir -p {}", path), undo=shell("rmdir {}", path), persists=True),)
    ways = [*(each for each in mount if isinstance(each, Fix)), Fix(*steps)]
    return Fix(*ways[0].steps, alternatives=[*ways[1:], Fix(text="correct the option")])


def not_shared(
    kind: Kind, path: str, well: Hosts, sharing: Sharing, labels: Labels
) -> Iterator[Finding]:
    """The finding, of this kind, on hosts that lack what the others share."""
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
        kind,
        f"{path}: {sides_in_words(sides)}",
        Where(hosts=tuple(sorted(labels[seat] for seat in sharing.apart))),
        fix="" if sharing.tie else mount_line(well, sharing.main),
        severity=kind.severity if proven or sharing.must else Severity.WARN,
        confidence=Confidence.CERTAIN if proven else Confidence.LIKELY,
    )


def unseen(path: str, sharing: Sharing, labels: Labels) -> Iterator[Finding]:
    """The finding on hosts that do not see what others write on the same mount."""
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
