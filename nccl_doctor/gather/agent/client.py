"""The agent of a host, as its ranks start it and connect to it."""

from __future__ import annotations

import contextlib
import os
import time

from nccl_doctor.gather.agent.agent import Agent
from nccl_doctor.gather.agent.batches import AGENT_RANKS_MAX
from nccl_doctor.gather.agent.connection import AgentLost, connect, listener_at, name_of
from nccl_doctor.gather.agent.store import AgentStore
from nccl_doctor.gather.context import Run
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.model.launch import OWN
from nccl_doctor.system import forks

CONNECT_S = 2.0
"""Time for the first rank of a host to start the agent."""
_LEAVE_S = 1.0


class AgentClient:
    """The agent of this host, for one of its ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pid = 0
        self._has_connected = False

    def start(self) -> None:
        """Start the agent, as the first rank of a host that is to have one."""
        run = self._run
        if run.launch.local_rank or not self._is_wanted():
            return
        if listener := listener_at(name_of(run.launch)):
            key = run.config.key
            with contextlib.suppress(OSError):  # no process is to be had: each answers by itself
                self._pid = forks.fork_service(
                    "agent", lambda: Agent(listener, key).serve(), [listener.fileno()]
                )
            listener.close()

    def sign_in(self, box: ControlStore, run_id: str, who: object) -> tuple[ControlStore, int]:
        """Store and seat of a rank that has an agent.

        Raises:
            AgentLost: it has none, and signs in by itself.
        """
        launch = self._run.launch
        # The first process of a host of the own launcher comes for the host, which has no place.
        first = launch.launcher == OWN and not launch.local_rank
        if self._has_connected or first or not self._is_wanted():
            raise AgentLost("this rank has no agent")
        self._has_connected = True  # not in a later run of the same ranks: it is of the first
        connection = connect(name_of(launch), min(CONNECT_S, self._run.left()))
        if connection is None:
            raise AgentLost("this host has no agent")
        store = AgentStore(box, connection)
        try:
            return store, store.sign_in(run_id, who, launch.local_world_size or 1)
        except AgentLost:
            connection.close()  # so that the agent knows, too
            raise

    def end(self) -> None:
        """Let the agent say goodbye for all, as the one that started it, and see that it ends."""
        if self._pid:
            until = time.monotonic() + _LEAVE_S
            while time.monotonic() < until:
                if os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    break
                time.sleep(0.01)
            forks.stop_service(self._pid)
            self._pid = 0

    def _is_wanted(self) -> bool:
        """True if there are so many ranks that those of a host have an agent.

        Those of rank 0's host have no way to the store that would be worth it.
        """
        run, launch = self._run, self._run.launch
        here = launch.local_world_size or 1
        ranks = launch.world_size or here * (launch.nnodes or 1)
        is_first_host = launch.rank is not None and launch.rank == (launch.local_rank or 0)
        return (
            ranks >= run.options.agents_from and 1 < here <= AGENT_RANKS_MAX and not is_first_host
        )
