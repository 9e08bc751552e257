"""Own views in `--output-dir`: where all hosts share that folder, hosts that cannot meet still can
be heard.

Each host writes its file when it starts, and again when it knows more. The coordinator reads
there what the hosts say that did not sign in. Ages are compared by the file server's clock alone:
hosts may disagree about the time.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from nccl_doctor.files import write_whole
from nccl_doctor.record import Report

_POLL_S = 0.1


class Views:
    """The folder, as one host of the run sees it; without a folder nothing is written or read."""

    def __init__(self, folder: str | None, join_timeout_s: float) -> None:
        self._folder = None if folder is None else Path(folder)
        # Hosts may have started earlier than this one, but not by more than they would wait.
        self._oldest = self._now() - join_timeout_s

    def write(self, node_rank: int | None, report: Report) -> str:
        """Leave a host's own view, as `node<K>.json`; where another host has claimed that node rank
        in this run, as `node<K>.<host>.json`.

        Returns: what went wrong, or the empty string.
        """
        if self._folder is None or node_rank is None:
            return ""
        path = self._folder / f"node{node_rank}.json"
        mine, there = report.hosts[0], self._read(node_rank)
        if there is not None and there.hosts and there.hosts[0].get("key") != mine.get("key"):
            path = self._folder / f"node{node_rank}.{mine['host']}.json"
        try:
            write_whole(path, json.dumps(report.to_json(), indent=1) + "\n")
        except OSError as error:
            return f"the own view was not saved: {path}: {error.strerror}"
        return ""

    def of(self, nodes: Collection[int], patience_s: float) -> list[Report]:
        """What these nodes say, in order; waits for those that have only said that they started.

        Files of earlier runs, and what is no report, are left out.
        """
        until = time.monotonic() + patience_s
        while True:
            found = {node: view for node in nodes if (view := self._read(node)) is not None}
            told = [view for view in found.values() if any(host["facts"] for host in view.hosts)]
            if len(told) == len(nodes) or time.monotonic() > until or self._folder is None:
                return [found[node] for node in sorted(found)]
            time.sleep(_POLL_S)

    def _read(self, node: int) -> Report | None:
        if self._folder is None:
            return None
        path = self._folder / f"node{node}.json"
        try:
            if path.stat().st_mtime < self._oldest:
                return None
            return Report.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None

    def _now(self) -> float:
        """The time by the clock that stamps the files of the folder."""
        if self._folder is not None:
            with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self._folder) as file:
                return Path(f"/proc/self/fd/{file.fileno()}").stat().st_mtime
        return time.time()
