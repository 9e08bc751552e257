"""Partial reports in `--output-dir`: if all hosts share the folder, rank 0 reads those of hosts
that cannot reach it.

Each host writes its file when it starts, and again when it knows more. The coordinator reads
there what the hosts say that did not sign in. Ages are compared by the file server's clock alone:
hosts may disagree about the time.

Where the report is to have pseudonyms, hosts hear each other in a private folder, and what lies
beside it is redacted, with one key for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Protocol

from nccl_doctor.model.report import Report
from nccl_doctor.toolkit.errands import send
from nccl_doctor.toolkit.files import write_private, write_whole

_POLL_S = 0.2


class Redaction(Protocol):
    """Gives pseudonyms to what hosts leave in a folder that they share, with one key for all."""

    def private_folder(self, folder: Path) -> Path:
        """The private folder in it, where hosts read each other's names; made if it can be."""

    def of(self, report: Report, folder: Path) -> tuple[Report, Callable[[str], object]]:
        """The report with pseudonyms, and what saves their map for a file of this name.

        Raises:
            OSError: the key cannot be read, or the map cannot be written.
            ValueError: the key file holds no key.
        """


class PartialReports:
    """The folder, as one host of the run sees it; without a folder nothing is written or read."""

    def __init__(
        self, folder: str | None, join_timeout_s: float, redaction: Redaction | None = None
    ) -> None:
        """`redaction` puts pseudonyms into the reports that stay in the folder."""
        self._open = None if folder is None else Path(folder)
        self._redaction = redaction
        self._folder = self._open
        if redaction is not None and self._open is not None:
            self._folder = redaction.private_folder(self._open)
        # Hosts may have started earlier than this one, but not by more than they would wait.
        self._oldest = self._now() - join_timeout_s

    def write(self, node_rank: int | None, report: Report) -> str:
        """Write the partial report of a host for the coordinator, as `node<K>.json`; as
        `node<K>.<host>.json` if another host has the same node rank in this run.

        Returns: what went wrong, or the empty string.
        """
        if self._folder is None or node_rank is None:
            return ""
        path = self._path(self._folder, node_rank, report)
        try:
            (write_private if self._redaction else write_whole)(path, _text(report))
        except OSError as error:
            return f"the partial report was not saved: {path}: {error.strerror}"
        return ""

    def leave(self, node_rank: int | None, report: Report, *, heard: bool) -> str:
        """A host's last word, which stays. `heard`: the coordinator has no more need of its names.

        Returns: what went wrong, or the empty string.
        """
        if self._open is None or self._folder is None or node_rank is None:
            return ""
        if self._redaction is None:
            return self.write(node_rank, report)
        try:
            seen, save_map = self._redaction.of(report, self._open)
            path = self._path(self._open, node_rank, seen)
            save_map(path.name)
            write_whole(path, _text(seen))
            if heard:
                private = self._path(self._folder, node_rank, report)
                send(self._folder, lambda: _removed([private]))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            return f"the partial report was not saved: {self._open}: {why}"
        return ""

    def of(self, nodes: Collection[int], patience_s: float) -> list[Report]:
        """Partial reports of these nodes, in order; waits for nodes that have so far only written
        that they started.

        Files of earlier runs, and what is no report, are left out.
        """
        until = time.monotonic() + patience_s
        while True:
            found = self._read(nodes, self._folder)
            there = [
                each for each in found.values() if any(host.facts for host in each.cluster.hosts)
            ]
            if len(there) == len(nodes) or time.monotonic() > until or self._folder is None:
                self._forget(found)
                return [found[node] for node in sorted(found)]
            time.sleep(_POLL_S)

    def _forget(self, nodes: Collection[int]) -> None:
        """Names that were heard need not lie there any longer."""
        folder = self._folder
        if folder is not None and nodes and self._redaction:
            with contextlib.suppress(OSError):
                send(folder, lambda: _removed(folder / f"node{node}.json" for node in nodes))

    def _path(self, folder: Path, node: int, report: Report) -> Path:
        """Path of a host's partial report; with its name if another host has that node rank."""
        mine, there = report.cluster.hosts[0], self._read([node], folder).get(node)
        if there is not None and there.cluster.hosts and there.cluster.hosts[0].key != mine.key:
            return folder / f"node{node}.{mine.name}.json"
        return folder / f"node{node}.json"

    def _read(self, nodes: Collection[int], folder: Path | None) -> dict[int, Report]:
        """Node → its view, of those that lie in the folder and belong to this run."""
        if folder is None or not nodes:
            return {}
        found = {}
        with contextlib.suppress(OSError):
            texts = json.loads(send(folder, lambda: _texts(folder, nodes, self._oldest)))
            for node, text in texts:
                with contextlib.suppress(ValueError):
                    found[node] = Report.from_json(json.loads(text))
        return found

    def _now(self) -> float:
        """The time by the clock that stamps the files of the folder."""
        folder = self._folder
        if folder is not None:
            with contextlib.suppress(OSError):
                return float(send(folder, lambda: _stamp(folder)))
        return time.time()


def _text(report: Report) -> str:
    return json.dumps(report.to_json(), indent=1) + "\n"


# -- in a child, as the folder may not answer ---------------------------------------------------


def _texts(folder: Path, nodes: Collection[int], oldest: float) -> bytes:
    """Node and text of each file that is not older, as JSON."""
    found = []
    for node in nodes:
        path = folder / f"node{node}.json"
        with contextlib.suppress(OSError, ValueError):
            if path.stat().st_mtime >= oldest:
                found.append((node, path.read_text(encoding="utf-8")))
    return json.dumps(found).encode()


def _stamp(folder: Path) -> bytes:
    with tempfile.TemporaryFile(dir=folder) as file:
        return str(os.fstat(file.fileno()).st_mtime).encode()


def _removed(paths: Iterable[Path]) -> bytes:
    for path in paths:
        path.unlink(missing_ok=True)
    return b""
