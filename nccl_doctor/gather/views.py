"""Partial reports in `--output-dir`: if all hosts share the folder, rank 0 reads those of hosts
that cannot reach it.

Each host writes its file when it starts, and again when it knows more. The coordinator reads
there what the hosts say that did not sign in. Ages are compared by the file server's clock alone:
hosts may disagree about the time.

A folder is used for many runs. A file counts if it was written after this process began, by a host
that did not begin long before it, and that does not know of another run.

Where the report is to have pseudonyms, hosts hear each other in a private folder, and what lies
beside it is redacted, with one key for all. Only files of this user, or of root, are believed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.report import Report
from nccl_doctor.system import folders
from nccl_doctor.system.files import write_whole
from nccl_doctor.system.helpers import send

_POLL_S = 0.2
_MOST_MORE = 64
"""Hosts beyond the number that rank 0 was told, of which partial reports are looked for."""
_LARGEST = 64 << 20
"""Largest partial report that is read, in bytes: some hundred times that of a host of 16 ranks."""

Opened: TypeAlias = Callable[[], AbstractContextManager[int]]
"""Opens a folder: its descriptor for the time of a block."""
STAMP = "folder"
"""Key in `run` of a partial report: when its process began, which run it knows, and whether it has
given up.
"""


class Redaction(Protocol):
    """Gives pseudonyms to what hosts leave in a folder that they share, with one key for all."""

    def of(self, report: Report, folder: Path) -> tuple[Report, Callable[[str], object]]:
        """The report with pseudonyms, and what saves their map for a file of this name.

        Raises:
            OSError: the key cannot be read, or the map cannot be written.
            ValueError: the key file holds no key.
        """


class HostReports:
    """The folder, as one host of the run sees it; without a folder nothing is written or read."""

    def __init__(
        self,
        folder: str | None,
        join_timeout_s: float,
        redaction: Redaction | None = None,
        *,
        age_s: float = 0.0,
    ) -> None:
        """`redaction` puts pseudonyms into the reports that stay in the folder. `age_s`: seconds
        since this process began.
        """
        self._folder = None if folder is None else Path(folder)
        self._redaction = redaction
        self.run_id = ""
        """Identifies the run, once this host knows it."""
        self._began = self._now() - age_s
        # Hosts may have started earlier than this one, but not by more than they would wait.
        self._oldest = self._began - join_timeout_s

    def write(self, node_rank: int | None, report: Report, *, last: bool = False) -> str:
        """Write the partial report of a host for the coordinator, as `node<K>.json`; as
        `node<K>.<host>.json` if another host has the same node rank in this run.

        Args:
            node_rank: of the host; without one nothing is written.
            report: as far as it is known.
            last: the host has given up, and nothing will be added.

        Returns: what went wrong, or the empty string.
        """
        if self._folder is None or node_rank is None:
            return ""
        opened = self._opened(self._folder)
        name = self._name(opened, node_rank, report)
        try:
            text = _text(self._stamped(report, last=last))
            if self._redaction is None:
                write_whole(self._folder / name, text)
            else:
                send(self._folder, lambda: _put(opened, name, text))
        except OSError as error:
            return f"the partial report was not saved: {self._folder / name}: {error.strerror}"
        return ""

    def leave(self, node_rank: int | None, report: Report, *, heard: bool) -> str:
        """A host's last word, which stays. `heard`: the coordinator has no more need of its names.

        Returns: what went wrong, or the empty string.
        """
        folder = self._folder
        if folder is None or node_rank is None:
            return ""
        if self._redaction is None:
            return self.write(node_rank, report, last=True)
        try:
            seen, save_map = self._redaction.of(report, folder)
            name = self._name(partial(folders.opened, folder), node_rank, seen)
            save_map(name)
            write_whole(folder / name, _text(seen))
            if heard:
                opened = self._opened(folder)
                private = self._name(opened, node_rank, report)
                send(folder, lambda: _removed(opened, [private]))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            return f"the partial report was not saved: {folder}: {why}"
        return ""

    def of(self, nodes: Collection[int], patience_s: float, longest_s: float = 0.0) -> list[Report]:
        """Partial reports of these nodes, in order; waits for nodes that have not given up yet, for
        `longest_s` if their file is there: they are still trying.

        Files of earlier runs, and what is no report, are left out.
        """
        began = time.monotonic()
        while True:
            found = {}
            if self._folder is not None:
                read = self._read(nodes, self._opened(self._folder), self._began)
                found = {node: each for node, each in read.items() if self._is_of_this_run(each)}
            trying = any(not _stamp_of(each).get("last") for each in found.values())
            waited = time.monotonic() - began
            is_over = waited > (max(patience_s, longest_s) if trying else patience_s)
            if is_over or self._folder is None or (len(found) == len(nodes) and not trying):
                self._forget(found)
                return [found[node] for node in sorted(found)]
            time.sleep(_POLL_S)

    def _opened(self, folder: Path) -> Opened:
        """Opens the folder where hosts hear each other."""
        return partial(folders.opened_private if self._redaction else folders.opened, folder)

    def _stamped(self, report: Report, *, last: bool) -> Report:
        """The report with what tells its run from others, and whether more will follow."""
        stamp = {"began": self._began, "run": self.run_id, "last": last}
        return replace(report, run=replace(report.run, extra={**report.run.extra, STAMP: stamp}))

    def _is_of_this_run(self, report: Report) -> bool:
        """True if a host may have left it in this run, also one that does not know the run yet."""
        stamp = _stamp_of(report)
        if not stamp:
            return True
        began = stamp.get("began")
        late = not isinstance(began, (int, float)) or began >= self._oldest
        return late and stamp.get("run") in ("", self.run_id)

    def _forget(self, nodes: Collection[int]) -> None:
        """Names that were heard need not lie there any longer."""
        folder = self._folder
        if folder is not None and nodes and self._redaction:
            opened = self._opened(folder)
            with contextlib.suppress(OSError):
                send(folder, lambda: _removed(opened, [f"node{node}.json" for node in nodes]))

    def _name(self, opened: Opened, node: int, report: Report) -> str:
        """File of a host's partial report; with its name if another host has that node rank."""
        mine, there = report.cluster.hosts[0], self._read([node], opened, self._oldest).get(node)
        if there is not None and there.cluster.hosts and there.cluster.hosts[0].key != mine.key:
            return f"node{node}.{str(mine.name).replace('/', '_')}.json"
        return f"node{node}.json"

    def _read(self, nodes: Collection[int], opened: Opened, oldest: float) -> dict[int, Report]:
        """Node → its view, of those that lie in the folder and belong to this run."""
        if self._folder is None or not nodes:
            return {}
        found = {}
        with contextlib.suppress(OSError):
            texts = json.loads(send(self._folder, lambda: _texts(opened, nodes, oldest)))
            for node, text in texts:
                with contextlib.suppress(ValueError):
                    found[node] = Report.from_json(json.loads(text))
        return found

    def _now(self) -> float:
        """The time by the clock that stamps the files of the folder."""
        folder = self._folder
        if folder is not None:
            opened = self._opened(folder)
            with contextlib.suppress(OSError):
                return float(send(folder, lambda: _stamp(opened)))
        return time.time()


def not_heard(cluster: Cluster) -> list[int]:
    """Node ranks that no host has that signed in: those of absent hosts, and those that other hosts
    count on, where they disagree about the number of hosts.
    """
    claims = (rank.launch.given("nnodes") or 0 for rank in cluster.present if rank.launch)
    most = min(max(claims, default=0), cluster.nnodes + _MOST_MORE)
    here = {host.node_rank for host in cluster.present_hosts}
    absent = {host.node_rank for host in cluster.hosts if not host.reported}
    wanted = {*absent, *range(cluster.nnodes, most)} - here
    return sorted(node for node in wanted if node is not None)


def _stamp_of(report: Report) -> Mapping[str, object]:
    stamp = report.run.extra.get(STAMP)
    return stamp if isinstance(stamp, Mapping) else {}


def _text(report: Report) -> str:
    return json.dumps(report.to_json(), indent=1) + "\n"


# -- in a child, as the folder may not answer ---------------------------------------------------


def _texts(opened: Opened, nodes: Collection[int], oldest: float) -> bytes:
    """Node and text of each file that is not older, and that no other user can have written, as
    JSON.
    """
    found = []
    with opened() as folder:
        for node in nodes:
            with contextlib.suppress(OSError, ValueError):
                data, written = folders.read_own(folder, f"node{node}.json", _LARGEST)
                if written >= oldest:
                    found.append((node, data.decode()))
    return json.dumps(found).encode()


def _put(opened: Opened, name: str, text: str) -> bytes:
    with opened() as folder:
        folders.put(folder, name, text.encode(), 0o600)
    return b""


def _stamp(opened: Opened) -> bytes:
    with opened() as folder:
        return str(folders.fresh(folder).st_mtime).encode()


def _removed(opened: Opened, names: Iterable[str]) -> bytes:
    with opened() as folder:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
    return b""
