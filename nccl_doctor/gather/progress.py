"""Progress line on a terminal: the current step, the ranks it waits for, the seconds left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from nccl_doctor.toolkit.more_time import no_more
from nccl_doctor.toolkit.terminal import complain, safe

_EVERY_S = 0.2


class Progress:
    """Writer of progress to stderr, only to a terminal that is watched. `doing` is always kept."""

    def __init__(
        self,
        *,
        shown: bool,
        deadline: float,
        speaks: bool = False,
        more: Callable[[], float] = no_more,
    ) -> None:
        """`shown`: the line of this participant is the one to watch; `speaks`: it speaks for its
        host, and prints lines for the log; `more`: seconds by which the deadline is put off.
        """
        self.doing = "starting"
        self._shown = shown and sys.stderr.isatty()
        self._speaks = speaks
        self._deadline, self._more = deadline, more
        self._next = 0.0

    def say(self, doing: str) -> None:
        """Say what runs now."""
        self.doing = doing
        self._next = 0.0
        self.tick()

    def tick(self) -> None:
        """Refresh the line, at most some times a second."""
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + _EVERY_S
        left = max(0.0, self._deadline + self._more() - now)
        sys.stderr.write(f"\r\x1b[2K{safe(self.doing)} … {left:.0f} s left"[:200])
        sys.stderr.flush()

    def tell(self, text: str) -> None:
        """Say something worth a line of its own, on a terminal or not."""
        if self._speaks:
            self.clear()
            complain(text)

    def hear(self, crumb: Mapping[str, Any]) -> None:
        """Print a step that a check marked with `tell`: a wait that the user may want to end."""
        if crumb.get("tell"):
            self.tell(str(crumb["step"]))

    def clear(self) -> None:
        """Take the line away before the report is printed."""
        if self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
