"""GPUs whose state is not known, because their reader was stopped or killed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nccl_doctor.toolkit.gpu.ends import certainty_of_reader, waits_for


def why_unread(facts: Mapping[str, Any]) -> list[str]:
    """A clause for each GPU whose reader ended, or stood still, for a reason that is not its own.

    `facts` are those of `gather_gpus`.
    """
    return [
        of_reader(f"GPU {gpu['index']}", gpu["wedged"], facts.get("memory_kills") or 0)
        for gpu in facts["gpus"]
        if is_unread(gpu)
    ]


def is_unread(gpu: Mapping[str, Any]) -> bool:
    """True if the process that read it was stopped or killed from outside."""
    return bool(gpu.get("wedged")) and certainty_of_reader(gpu["wedged"]) is None


def of_reader(what: str, stuck: Mapping[str, Any], kills: int) -> str:
    """The reason why the state of `what` is not known, in words."""
    call, how = stuck["call"], stuck["how"]
    text = f"the state of {what} is not known"
    signal = how.partition("killed the process, ")[2]
    if signal:
        text += f": the process that asked was ended by {signal} in {call}"
        if signal == "SIGKILL" and kills:
            many = "1 process" if kills == 1 else f"{kills} processes"
            text += f"; the kernel killed {many} for lack of memory meanwhile"
        return text
    text += f": {call} {how}, "
    state, wchan = str(stuck.get("state") or ""), str(stuck.get("wchan") or "")
    standing = waits_for(state, wchan)
    if standing:
        state += f", {wchan}" if wchan not in ("", "0") else ""
        verb = "" if standing.startswith("waits") else "is "
        return f"{text}but the process {verb}{standing} (state {state})"
    return f"{text}but the examination itself was stopped for {stuck.get('stopped_s'):g} s of it"
