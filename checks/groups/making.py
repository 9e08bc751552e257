"""Making of further groups of one round, with a record of what was requested and what torch made.

For a probe child, on a default group that is already formed.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from nccl_doctor.api import Context, number_range
from nccl_doctor.toolkit.groups.attempts import NEW_GROUP
from nccl_doctor.toolkit.groups.strays import MADE, MAKING, NO_GROUP

_LAST_WORD_S = 1.0
_MAX_TEXT = 60


class Maker:
    """Maker of groups by new_group; before the deadline it records the group that is stuck.

    Attributes:
        made: group → what torch reports about it (see `describe_group`), including the default
            group, under the name of the round.
    """

    def __init__(self, ctx: Context, device: Any) -> None:
        """`device` is the `torch.device` that the default group's tensors belong on."""
        import torch.distributed as dist

        self._ctx, self._device = ctx, device
        self._now: dict[str, Any] = {}
        self._main = threading.get_ident()
        everybody = ranks_text(range(len(ctx.group)))
        self.made = {ctx.round: describe_group(dist.group.WORLD, device)}
        self._tell(ctx.round, everybody, self.made[ctx.round])
        timer = threading.Timer(max(0.0, ctx.left() - _LAST_WORD_S), self._last_word)
        timer.daemon = True
        timer.start()

    def make(self, name: str, members: Sequence[int], backend: str | None = None) -> Any:
        """Call new_group, as every rank must, and return the group; announced before it may block.

        Args:
            name: of the group, for messages.
            members: ranks of the default group, ascending.
            backend: of the group; None is that of the default group. `gloo` serves the CPU alone.
        """
        import torch
        import torch.distributed as dist

        device = torch.device("cpu") if backend == "gloo" else self._device
        asked = ranks_text(members)
        self._now = {"group": name, "expected": asked}
        self._ctx.breadcrumb(NEW_GROUP, group=name, ranks=asked)
        group = dist.new_group(list(members), backend=backend)
        self._now = {}
        is_member = self._ctx.position in members
        seen = describe_group(group, device)
        if is_member:
            self.made[name] = seen
        self._tell(name, asked if is_member else NO_GROUP, seen)
        return group

    def _tell(self, name: str, expected: str, seen: Mapping[str, Any]) -> None:
        self._ctx.breadcrumb(MADE, group=name, expected=expected, count=_count(), **seen)

    def _last_word(self) -> None:
        """Record the group in the frame of torch's own helper: only torch knows it while stuck."""
        now = dict(self._now)
        frame = sys._current_frames().get(self._main)
        while now and frame is not None:
            ranks = frame.f_locals.get("global_ranks_in_group")
            if frame.f_code.co_name == "_new_process_group_helper" and ranks:
                label = frame.f_locals.get("group_name")
                said = {"ranks": ranks_text(ranks), "label": label, "count": _count()}
                self._ctx.witness(MAKING, {**now, **said})
                return
            frame = frame.f_back


def describe_group(group: Any, device: Any) -> dict[str, Any]:
    """Torch's own description of a group; None for what this torch does not show.

    Returns: `ranks` of the default group that are in it, as text; `label`, torch's own name of it;
        `bound_device_id`, the device that it is bound to; `backend_class`, which class serves
        `device`. Of a group that this rank is not in, only `ranks`.
    """
    import torch.distributed as dist

    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        return {"ranks": NO_GROUP}
    bound = getattr(group, "bound_device_id", None)
    return {
        "ranks": ranks_text(dist.get_process_group_ranks(group)),
        "label": getattr(group, "group_name", None),
        "bound_device_id": None if bound is None else str(bound),
        "backend_class": _backend_class(group, device),
    }


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as text that is short and the same for the same ranks only."""
    text = number_range(ranks)
    if len(text) <= _MAX_TEXT:
        return text
    mark = zlib.crc32(text.encode())
    return f"{text[: _MAX_TEXT // 2]}… ({len(ranks)} ranks, {mark:08x})"


def _backend_class(group: Any, device: Any) -> str | None:
    find = getattr(group, "_get_backend", None)
    try:
        return type(find(device)).__name__ if find else None
    except RuntimeError:  # no backend of this group serves the device
        return None


def _count() -> int | None:
    """Number of groups that torch has named so far; it determines the next names."""
    import torch.distributed as dist

    count = getattr(getattr(dist.distributed_c10d, "_world", None), "group_count", None)
    return count if isinstance(count, int) else None
