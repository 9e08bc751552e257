"""Paths of this host, each in a process of its own, and what other hosts see of what it wrote."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nccl_doctor.model.check import Context, Untested
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import Round
from nccl_doctor.system.shortage import shortage_of
from nccl_doctor.toolkit.host import Mount, mounts
from nccl_doctor.toolkit.hosts import master_host
from nccl_doctor.toolkit.storage.file_systems import mount_of, server_of
from nccl_doctor.toolkit.storage.steps import PathDesk
from nccl_doctor.toolkit.storage.worker import StorageWorker, ask, close_all

STEP_S = 8.0
"""Time for one step; a busy file server takes a second or two."""
SEEN_S = 8.0
"""Time for what one host has written to be visible on the others."""
ALL, HEADS = "hosts", "heads"
"""Rounds: hosts in groups, then the first host of each group."""
_MEET_S = 2 * STEP_S + 4
"""Time from the start, until all others have written."""
_REST_S = 4.0
_GROUP = 32
"""Every host looks for what all others of a group wrote: the work grows with the square."""


class NeededPath(NamedTuple):
    """A path that the job needs, and whether it writes there."""

    path: str
    writes: bool = True


def rounds_of(cluster: Cluster, params: Mapping[str, Any]) -> list[Round]:
    """The rounds of a check that calls `examine`: all hosts, in groups if they are many."""
    master = master_host(cluster)
    hosts = sorted(cluster.present_hosts, key=lambda host: host is not master)
    first = [cluster.first_on(host) for host in hosts]
    seats = [rank.seat for rank in first if rank is not None]
    groups = tuple(tuple(seats[i : i + _GROUP]) for i in range(0, len(seats), _GROUP))
    if not groups:
        return []
    deadline_s = _MEET_S + 2 * SEEN_S + 2 * _REST_S
    rounds = [Round(ALL, groups, deadline_s, params, may_shrink=True)]
    if len(groups) > 1:
        heads = tuple(group[0] for group in groups)
        rounds.append(Round(HEADS, (heads,), deadline_s, params, may_shrink=True))
    return rounds


def examine(ctx: Context, places: Sequence[NeededPath], *, store: str = "") -> list[dict[str, Any]]:
    """Look at paths, write a file in each, and look for those of the others.

    With `store`, the name of a file for torch's FileStore in these folders, also look at that file,
    and try whether locks work.

    Returns: for each `path` and `writes`; what the steps of `steps.PathDesk` return; `type`,
    `source` and `mount` of its file system, and `host`, its server; `sees`: seat, as text →
    seconds until the file of that host was there, None for never, and `feels`: whether a lock on it
    is felt; `error` or `hung` as of `worker.ask`, where a step ended so.

    Raises:
        Untested: no process could be started, or too little time is left.
    """
    began = time.monotonic()
    found: list[dict[str, Any]] = [{**place._asdict(), "sees": {}} for place in places]
    life_s = min(ctx.left(), _MEET_S + 2 * SEEN_S + 2 * _REST_S) + _REST_S
    workers: dict[int, StorageWorker] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: close_all(list(workers.values())))
        for number, place in enumerate(places):
            try:
                workers[number] = StorageWorker("storage", PathDesk(place.path), life_s)
            except OSError as error:
                scarce = shortage_of(error)
                raise Untested(scarce.words if scarce else str(error)) from error

        def do(step: str, words: Mapping[int, Mapping[str, Any]], limit_s: float) -> None:
            ctx.breadcrumb(f"storage: {step}", paths=[places[number].path for number in words])
            left_s = max(0.1, ctx.left() - 1)
            answers = ask(workers, step, words, min(limit_s, left_s))
            if left_s < limit_s and any("hung" in answer for answer in answers.values()):
                raise Untested(f"the run had {left_s:.0f} s left for it: give a longer --timeout")
            for number, answer in answers.items():
                found[number].update(answer)
                if step == "look" and "hung" in answer:
                    workers[number].close(kill=True)

        do("look", {number: {} for number in workers}, STEP_S)
        _add_mounts(ctx, found)
        do("write", {number: {} for number in workers if _is_written(found[number])}, STEP_S)
        wrote = [number for number in workers if "token" in found[number]]
        files = {str(n): [found[n].pop("name"), found[n].pop("token")] for n in wrote}
        if store:
            do("file", {number: {"name": store} for number in wrote}, STEP_S)
            do("lock", {number: {} for number in wrote}, STEP_S)
        if ctx.peers is not None and len(ctx.group) > 1:
            ctx.peers.post("written", files)
            ctx.breadcrumb("storage: waiting until the other hosts have written")
            left_s = max(0.1, began + _MEET_S - time.monotonic())
            theirs = ctx.peers.collect("written", min(ctx.left(), left_s))
            do("find", _to_find(wrote, theirs, ctx.seat), SEEN_S + 2)
            ctx.peers.post("looked", True)
            ctx.peers.collect("looked", min(ctx.left(), SEEN_S + 2 + _REST_S))
        do("remove", {number: {} for number in wrote}, _REST_S)
    return found


def _is_written(facts: Mapping[str, Any]) -> bool:
    good = "error" not in facts and "hung" not in facts
    return bool(good and facts["writes"] and facts["form"] == "folder")


def _to_find(
    wrote: Sequence[int], theirs: Mapping[int, Any], seat: int
) -> dict[int, dict[str, Any]]:
    """Path → arguments of step `find`: what the others wrote there."""
    words = {}
    for number in wrote:
        files = {
            str(other): told[str(number)]
            for other, told in theirs.items()
            if other != seat and str(number) in told
        }
        if files:
            words[number] = {"files": files, "limit_s": SEEN_S}
    return words


def _add_mounts(ctx: Context, found: Sequence[dict[str, Any]]) -> None:
    """Add the file systems; now, as one that is mounted when it is needed is there by now."""
    known: list[Mount] = []
    with contextlib.suppress(OSError):
        known = mounts(ctx.root)
    for facts in found:
        mount = mount_of(facts.get("real", facts["path"]), known)
        named = (mount.kind, mount.source, mount.folder) if mount else ("", "", "")
        facts.update(zip(("type", "source", "mount"), named, strict=True))
        if server := server_of(facts["source"]):
            facts["host"] = server
