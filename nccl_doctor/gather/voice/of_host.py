"""A host's speaker, as its ranks start it and call it."""

from __future__ import annotations

import contextlib
import os
import time

from nccl_doctor.gather.context import Run
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.gather.voice.letters import MOST_SPOKEN
from nccl_doctor.gather.voice.line import LineLost, call, listener_at, name_of
from nccl_doctor.gather.voice.speaker import Speaker
from nccl_doctor.gather.voice.spoken import Spoken
from nccl_doctor.model.launch import OWN
from nccl_doctor.system import forks

CALL_S = 2.0
"""Time for the first rank of a host to have started, so that it can be called."""
_LEAVE_S = 1.0


class HostVoice:
    """The speaker of this host, for one of its ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pid = 0
        self._has_called = False

    def start(self) -> None:
        """Start the speaker, as the first rank of a host that is to have one."""
        run = self._run
        if run.launch.local_rank or not self._is_wanted():
            return
        if listener := listener_at(name_of(run.launch)):
            key = run.config.key
            with contextlib.suppress(OSError):  # no process is to be had: each speaks for itself
                self._pid = forks.fork_service(
                    "speaker", lambda: Speaker(listener, key).serve(), [listener.fileno()]
                )
            listener.close()

    def sign_in(self, box: ControlStore, run_id: str, who: object) -> tuple[ControlStore, int]:
        """Store and seat of a rank that is spoken for.

        Raises:
            LineLost: nobody speaks for it; it signs in by itself.
        """
        launch = self._run.launch
        # The first process of a host of the own launcher comes for the host, which has no place.
        first = launch.launcher == OWN and not launch.local_rank
        if self._has_called or first or not self._is_wanted():
            raise LineLost("nobody speaks for this rank")
        self._has_called = True  # not in a later run of the same ranks: it is of the first
        line = call(name_of(launch), min(CALL_S, self._run.left()))
        if line is None:
            raise LineLost("this host has no speaker")
        spoken = Spoken(box, line)
        try:
            return spoken, spoken.sign_in(run_id, who, launch.local_world_size or 1)
        except LineLost:
            line.close()  # so that the speaker knows, too
            raise

    def end(self) -> None:
        """Let the speaker say goodbye for all, as the one that started it, and see that it ends."""
        if self._pid:
            until = time.monotonic() + _LEAVE_S
            while time.monotonic() < until:
                if os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    break
                time.sleep(0.01)
            forks.stop_service(self._pid)
            self._pid = 0

    def _is_wanted(self) -> bool:
        """True if there are so many ranks that those of a host speak with one voice.

        Those of rank 0's host have no way to the store that would be worth it.
        """
        run, launch = self._run, self._run.launch
        here = launch.local_world_size or 1
        ranks = launch.world_size or here * (launch.nnodes or 1)
        is_first_host = launch.rank is not None and launch.rank == (launch.local_rank or 0)
        return ranks >= run.options.voices_from and 1 < here <= MOST_SPOKEN and not is_first_host
