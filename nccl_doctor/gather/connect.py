"""The store of a run, as a participant opens it and reaches it: by MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from nccl_doctor.gather import server
from nccl_doctor.gather.context import Run
from nccl_doctor.gather.envelope import OPEN, BadMessage, Seal
from nccl_doctor.gather.opening import MEETING
from nccl_doctor.gather.progress import Phase
from nccl_doctor.gather.store import ControlStore, StoreLost, StoreTimeout
from nccl_doctor.launch import identity
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.launch import Launch
from nccl_doctor.system.shortage import Shortage, shortage_of
from nccl_doctor.toolkit.load_torch import torch_error
from nccl_doctor.toolkit.net.dial import dial
from nccl_doctor.toolkit.net.names import look_up

SHORT_ROAD_S = 2.0
"""Time of one more try on a network path that the checks found broken."""
SIBLING_S = 10.0
"""Time limit for a rank whose host has signed in: the store is known to be up."""


def open_store(run: Run) -> Shortage | None:
    """Serve the store of the run, as rank 0 whose launcher has none.

    Returns: what this host lacks for it. It is examined all the same.
    """
    launch = run.launch
    if launch.agent_store:
        run.door = server.ServerState("agent")
    elif serves_store(launch) and launch.master_port is not None and not run.door.error:
        only = launch.master_addr if launch.nnodes == 1 else None
        if torch_error():
            run.door = server.ServerState("none")
            return None
        try:
            run.door = server.serve(launch.master_port, only_for=only)
        except (OSError, RuntimeError) as error:
            if scarce := shortage_of(error):
                return scarce
            raise
    return None


def serves_store(launch: Launch) -> bool:
    """True if the participant with this launch record serves the store of the run."""
    return launch.rank == 0 and not launch.agent_store


def first_seal(run: Run) -> Seal:
    """Seal of messages before the run is opened."""
    return Seal(run.config.key.secret) if run.config.key else OPEN


def connect(run: Run, token: str, road: Finding | None) -> tuple[ControlStore, bool]:
    """Connect to the store of the run.

    By its `token`, which nobody else knows, a participant tells the store that it serves. `road` is
    a failure that the checks have seen on the way, if any: then one short try is left.

    Returns: the store, for what is said before the run is known, and True if another rank 0 than
        this one serves it.

    Raises:
        StoreLost: it was not reached in time.
        RuntimeError: the process that serves it here has ended.
    """
    if run.config.meeting:
        return _connected(run, *run.config.meeting, min(SIBLING_S, run.left())), False
    patience = run.options.join_timeout_s - (time.monotonic() - run.config.started)
    serves = run.door.server == "self" and not run.door.error
    if road:
        if patience < SHORT_ROAD_S and not serves:  # the road was tried to the end
            raise StoreLost(f"gave up after {run.options.join_timeout_s:g} s: {road.message}")
        patience = SHORT_ROAD_S
    patience = min(max(patience, SHORT_ROAD_S), run.left())
    server.bound_resolver()
    master, port = str(run.launch.master_addr), run.launch.master_port or 0
    doing = f"signing in at {master}:{port}"
    run.progress.say(doing, Phase.SIGN_IN, time.monotonic() + patience)
    if not serves:
        with run.joining.phase("look_up_s"):
            found = look_up(master, SHORT_ROAD_S).answers
            # Once it is known, torch is not to ask for it again, in this process and in each child:
            # where a name server is silent, that costs seconds, and this host its place.
            at = first_to_answer(found, port) if len(found) > 1 else next(iter(found), "")
        return _connected(run, at or master, port, patience), False
    # Rank 0 reaches the store that it serves even where MASTER_ADDR is another machine: the others
    # cannot, and it is the one to say so. Unless another rank 0 serves there.
    own = _connected(run, run.door.address, port, patience, run.door.look)
    own.put("server", token)
    if not identity.is_this_host(master):
        with contextlib.suppress(StoreLost, StoreTimeout):
            other = _store(run, master, port, SHORT_ROAD_S)
            if not _is_served_by(other, token):
                return other, True
    return own, False


def first_to_answer(addresses: Sequence[str], port: int) -> str:
    """The first address that accepts connections, or empty.

    torch would wait two minutes at a silent address before it tries the next. The job does so too,
    and check `port` says it; the report is not to come that late.
    """
    for address in addresses:
        _, sock = dial(address, port, SHORT_ROAD_S)
        if sock is not None:
            sock.close()
            return address
    return ""


def _connected(
    run: Run, host: str, port: int, timeout_s: float, look: Callable[[], None] | None = None
) -> ControlStore:
    with run.joining.watched("connect_s"):
        return _store(run, host, port, timeout_s, look)


def _store(
    run: Run, host: str, port: int, timeout_s: float, look: Callable[[], None] | None = None
) -> ControlStore:
    seal = first_seal(run)
    return ControlStore(host, port, timeout_s=timeout_s, prefix=MEETING, seal=seal, look=look)


def _is_served_by(store: ControlStore, token: str) -> bool:
    try:
        return bool(store.get("server", SHORT_ROAD_S) == token)
    except BadMessage:
        return False
