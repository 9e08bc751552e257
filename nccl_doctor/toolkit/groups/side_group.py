"""A group of one trainer and one foreign process over a store of its own: weight synchronisation.

Trainers of reinforcement learning form it between rank 0 of the training world and the inference
engines: a store beside the job's own, and torch's private helper in place of `new_group`, because
the engine is no member of the default group. Runs in a probe child; every call that may block
leaves a breadcrumb first.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import inspect
import json
import secrets
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

from nccl_doctor.model.check import Context, Untested
from nccl_doctor.toolkit.groups.attempts import CONNECT, ENTRY
from nccl_doctor.toolkit.groups.forming import beyond, take_device
from nccl_doctor.toolkit.groups.store import serve_store
from nccl_doctor.toolkit.net.dial import dial
from nccl_doctor.toolkit.net.interfaces import interfaces, is_link_local, is_loopback
from nccl_doctor.toolkit.net.names import look_up
from nccl_doctor.toolkit.net.routes import source_of

SIZE = 2
"""Members of the side group: the trainer is its rank 0, the engine its rank 1."""
_TAG = "side-store"
_LOOK_UP_S = 2.0
_REACH_S = 5.0


class Versions(TypedDict):
    """Versions of torch and DeepSpeed; None where DeepSpeed is not installed."""

    torch: str
    deepspeed: str | None


class DefaultGroup(Versions):
    """The device that the default group is bound to, and the class that its collectives run in."""

    bound_device_id: str | None
    backend_class: str


class SideFacts(Versions):
    """The class that a side group's collectives run in, and the ADDRESS:PORT of its store."""

    side_class: str
    store: str


@dataclass(frozen=True)
class Side:
    """One end of a side group.

    Attributes:
        group: the process group.
        rank: of this end in it.
        device: the `torch.device` of its tensors.
        facts: for the report.
    """

    group: Any
    rank: int
    device: Any
    facts: SideFacts

    @property
    def membership(self) -> tuple[Any, int, int]:
        """Group, rank and size, as `Exercise` takes them."""
        return self.group, self.rank, SIZE


def side_helper() -> Callable[..., Any]:
    """Torch's private helper that every process group is made by.

    Raises:
        Untested: this torch has no helper with the arguments that those frameworks pass.
    """
    import torch
    from torch.distributed import distributed_c10d as c10d

    try:
        helper: Callable[..., Any] = c10d._new_process_group_helper
        # Options of the backend may be left out (`pg_options`, from torch 2.6 `backend_options`).
        inspect.signature(helper).bind(SIZE, 0, [], "", None, group_name="", timeout=None)
    except (AttributeError, TypeError) as error:
        raise Untested(
            f"torch {torch.__version__} has no helper for side groups that trainers can call: "
            f"{error}"
        ) from error
    return helper


def meet_engine(ctx: Context, name: str, device: Any, *, clear: bool = False) -> Side:
    """Trainer rank 0: serve the side group's store, send its address to the engine, form the group.

    Args:
        ctx: of a round whose first member this is; its params hold `one_host` and
            `engine_addresses` (numeric addresses of the engine's host).
        name: of the side group, for messages.
        device: of this trainer.
        clear: remove the default group's binding to a device while the group is formed.

    Raises:
        RuntimeError: no address to serve at, or torch's own error.
        OSError: nothing can listen there.
    """
    assert ctx.peers is not None
    ctx.breadcrumb(CONNECT, group=name, side="server")
    address = serving_address(
        ctx.launch.master_addr or "",
        ctx.params.get("engine_addresses", ()),
        loopback=bool(ctx.params.get("one_host")),
    )
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(16)
    port = listener.getsockname()[1]
    store = serve_store(listener, address, beyond(ctx))
    nonce = secrets.token_hex(8)
    place = json.dumps({"address": address, "port": port, "nonce": nonce})
    # For one of perhaps thousands: not by `collect`, which waits for all of them.
    ctx.peers.store().set(_TAG, place)
    return _form(ctx, name, (store, nonce, f"{address}:{port}"), 0, device, clear=clear)


def meet_trainer(ctx: Context, name: str) -> Side:
    """Engine: wait for the address of rank 0's store, connect to it, form the side group.

    Raises:
        RuntimeError: the store cannot be reached (with the address that was tried), or torch's own
            error.
    """
    import torch.distributed as dist

    assert ctx.peers is not None
    device = take_device(ctx, name)
    # It enters by waiting for the trainers: until they come, it is not to blame.
    ctx.breadcrumb(ENTRY, group=name)
    ctx.breadcrumb(CONNECT, group=name, side="client")
    ours = ctx.peers.store()
    ours.wait([_TAG], beyond(ctx))
    place = json.loads(ours.get(_TAG))
    address, port = str(place["address"]), int(place["port"])
    where = f"{address}:{port}"
    ctx.breadcrumb(CONNECT, group=name, side="client", address=where)
    # Well before the deadline: an address that cannot be reached raises here, and is no hang.
    patience = max(1.0, min(_REACH_S, ctx.left() / 4))
    dialled, sock = dial(address, port, patience)
    if sock is None:
        raise RuntimeError(
            f"cannot reach the trainer's store at {where}: {dialled.outcome} ({dialled.detail})"
        )
    sock.close()
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=patience),
        )
    except RuntimeError as error:
        words = str(error).partition("\n")[0]
        raise RuntimeError(f"cannot use the trainer's store at {where}: {words}") from error
    store.set_timeout(beyond(ctx))
    return _form(ctx, name, (store, str(place["nonce"]), where), 1, device)


def serving_address(
    master: str,
    towards: Collection[str],
    *,
    loopback: bool,
    own: Callable[[], Collection[str]] | None = None,
) -> str:
    """Numeric address of this host at which the engine can reach it.

    The address of MASTER_ADDR if it is on this host, as the others have met there; else the address
    that this host sends from to the engine's.

    Args:
        master: MASTER_ADDR, or empty.
        towards: numeric addresses of the engine's host.
        loopback: whether the engine is on this host, so that a loopback address will do.
        own: this host's addresses; by default those of its interfaces.

    Raises:
        RuntimeError: there is none.
    """
    here = set((own or _own_addresses)())
    answers = look_up(master, _LOOK_UP_S).answers if master else ()
    sources = (source_of(address)[0] for address in towards if not is_link_local(address))
    for address in (*(a for a in answers if a in here), *sources):
        if address and (loopback or not is_loopback(address)):
            return address
    raise RuntimeError(
        f"no address to serve the side group's store at: MASTER_ADDR {master or '(unset)'} "
        f"resolves to {', '.join(answers) or 'nothing'}, and there is no route to the engine's "
        f"host at {', '.join(towards) or 'no known address'}"
    )


def describe_default(ctx: Context, device: Any) -> DefaultGroup:
    """Properties of the default group, and versions.

    They are recorded as a witness too, as a child that hangs in the side group leaves no facts.
    """
    import torch.distributed as dist

    world = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)  # torch from 2.2 on
    found: DefaultGroup = {
        "bound_device_id": None if bound is None else str(bound),
        "backend_class": _class_of(world, device),
        **_versions(),
    }
    ctx.witness("default_group", found)
    return found


def _versions() -> Versions:
    import torch

    deepspeed = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        deepspeed = importlib.metadata.version("deepspeed")
    return {"torch": str(torch.__version__), "deepspeed": deepspeed}


def _class_of(group: Any, device: Any) -> str:
    """The class that a group's collectives run in: one backend name may mean several."""
    kind = type(group._get_backend(device))
    return f"{kind.__module__}.{kind.__qualname__}"


def _own_addresses() -> Collection[str]:
    return {address for nic in interfaces() for address in nic.addresses}


def _form(
    ctx: Context,
    name: str,
    meeting: tuple[Any, str, str],
    rank: int,
    device: Any,
    *,
    clear: bool = False,
) -> Side:
    """Form the group as those frameworks do: no global ranks, its own store, registered by hand.

    `meeting` is the store, the nonce of this group, and where the store is.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    store, nonce, where = meeting
    helper = side_helper()
    group_name = f"side-{nonce}"
    prefixed = dist.PrefixStore(group_name, store)
    ctx.breadcrumb(ENTRY, group=name)
    with _unbound(dist.group.WORLD) if clear else contextlib.nullcontext():
        group, _ = helper(
            SIZE,
            rank,
            [],
            c10d.Backend(ctx.backend),
            prefixed,
            group_name=group_name,
            timeout=beyond(ctx),
        )
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError(f"torch returned {group!r} and no group, as if this were no member")
    # Both ends before any collective, so that a group that only one end could form does not look
    # like a hang in a collective.
    prefixed.set(f"formed/{rank}", b"1")
    prefixed.wait([f"formed/{member}" for member in range(SIZE)], beyond(ctx))
    c10d._world.pg_group_ranks[group] = {member: member for member in range(SIZE)}
    facts: SideFacts = {"side_class": _class_of(group, device), "store": where, **_versions()}
    return Side(group, rank, device, facts)


@contextlib.contextmanager
def _unbound(world: Any) -> Iterator[None]:
    """Context in which torch sees the default group as not bound to a device."""
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound
