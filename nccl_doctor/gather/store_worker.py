"""Thread for the calls of a store: any of them may never come back."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from nccl_doctor.toolkit.shortage import shortage_of

T = TypeVar("T")

_TICK_S = 0.1


class StoreLost(ConnectionError):
    """The store cannot be reached, broke off, or did not answer in time."""


class Worker:
    """Runs one call at a time in a daemon thread; a call that outlives its deadline is given up."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._lost = ""
        try:
            threading.Thread(target=self._serve, name="control-store", daemon=True).start()
        except RuntimeError as error:
            scarce = shortage_of(error)
            raise StoreLost(scarce.words if scarce else str(error)) from error

    def call(
        self,
        function: Callable[[], T],
        timeout_s: float,
        tick: Callable[[], None] | None = None,
    ) -> T:
        """Result of the function. Meanwhile `tick` is called several times a second."""
        if self._lost:
            raise StoreLost(self._lost)
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._calls.put((function, answer))
        until = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            try:
                value, error = answer.get(timeout=min(left_s, _TICK_S) if tick else left_s)
                break
            except queue.Empty:
                if time.monotonic() >= until:
                    self._lost = f"no answer from the store for {timeout_s:.0f} s"
                    raise StoreLost(self._lost) from None
                if tick:
                    tick()
        if error is not None:
            self._lost = str(error).partition("\n")[0]
            raise StoreLost(self._lost) from error
        return value  # type: ignore[no-any-return]

    def end(self) -> None:
        """End the thread, once what was called before is done."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (called := self._calls.get()) is not None:
            function, answer = called
            try:
                answer.put((function(), None))
            # The base of every torch.distributed error; a torch that cannot be imported; a value
            # of which a store says that it is as large as no memory.
            except (RuntimeError, ImportError, OSError, MemoryError) as error:
                answer.put((None, error))
