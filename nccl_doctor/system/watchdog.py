"""Watchdog of every participant: ends it at the deadline or at a signal, whatever is stuck.

A thread, because the main thread may sit in C++ code where Python handles no signal. It kills the
children, has the last words written, and ends the process. Where no thread can be started, an alarm
does the same, if the main thread lets it; and it takes no signals: the supervisor does.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

from nccl_doctor.system import forks, helpers, supervisor
from nccl_doctor.system.deadline import no_more
from nccl_doctor.system.pauses import TICK_S

LAST_WORDS_S = 5
"""Seconds to write the last report; then SIGALRM ends the process without it."""
AT_THE_END_S = 2.0
"""As long may a disk take at the deadline: who watches this process ends it a little later."""


class Watchdog:
    """Watches the deadline and the signals of this process; `interrupted` once a signal came."""

    def __init__(
        self,
        deadline: float,
        last_words: Callable[[str], int],
        first: Callable[[], None] = lambda: None,
        *,
        more: Callable[[], float] = no_more,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Start watching; only from the main thread, which may have blocked the signals so far.

        Args:
            deadline: `time.monotonic()` second by which this process is gone.
            last_words: writes what is known, given why; returns the exit code. It runs in the
                watchdog's thread while the main thread may be stuck anywhere.
            first: called before the children are killed, so that nobody takes their end for a
                fact.
            more: seconds by which the deadline is put off meanwhile.
            tick: called every `TICK_S` while this process runs.
        """
        self.interrupted = False
        self._first_deadline, self._more = deadline, more
        self._last_words = last_words
        self._first = first
        self._tick = tick
        self._leaving = threading.Lock()
        self._wake = -1
        # Of all threads only the main one takes them, and only once everything stands.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, forks.SIGNALS)
        try:
            self._wake, wake_end = forks.wake_pipe()
            signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        except (OSError, RuntimeError):  # no file or no thread is to be had
            signal.set_wakeup_fd(-1)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            signal.signal(signal.SIGALRM, lambda *_: self._alarmed())
            self._set_alarm()
            return
        for number in forks.to_catch():
            signal.signal(number, lambda *_: None)  # the wake-up pipe tells the thread
        supervisor.take_signals()  # one that came before is taken now

    def stand_down(self) -> bool:
        """The main thread is about to write the report itself.

        Returns: False when the watchdog is already leaving; then only wait for the end.
        """
        if not self._leaving.acquire(blocking=False):
            return False
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        left = max(1, int(self._deadline - time.monotonic()) + LAST_WORDS_S)
        helpers.leave_by(max(self._deadline, time.monotonic()) + AT_THE_END_S)
        signal.alarm(left)
        return True

    def hand_over(self) -> int:
        """Stop watching. One that came before ends the process here.

        Returns: the descriptor from which the numbers of signals are read, for whoever goes on; -1
            where this watchdog takes none.
        """
        came = self._wake >= 0 and select.select([self._wake], [], [], 0)[0]
        if came or not self._leaving.acquire(blocking=False):
            time.sleep(LAST_WORDS_S + 1)
        return self._wake

    @property
    def _deadline(self) -> float:
        return self._first_deadline + self._more()

    def _watch(self) -> None:
        readable: list[int] = []
        while not readable and (left := self._deadline - time.monotonic()) > 0:
            self._tick()
            readable, _, _ = select.select([self._wake], [], [], min(left, TICK_S))
        # Who took over reads from there: it would wait for ever for what is read here.
        if self._leaving.acquire(blocking=False):
            self._leave(os.read(self._wake, 1)[0] if readable else None)

    def _set_alarm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(0.1, self._deadline - time.monotonic()))

    def _alarmed(self) -> None:
        if time.monotonic() < self._deadline:  # it was put off
            self._set_alarm()
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if self._leaving.acquire(blocking=False):
            self._leave(None)

    def _leave(self, number: int | None) -> None:
        """End the process with the last words; `number`: of a signal."""
        reason = f"the deadline passed (pid {os.getpid()})"
        if number is not None:
            self.interrupted = True
            reason = f"received {forks.signal_name(number)}"
        code = 3
        try:
            signal.alarm(LAST_WORDS_S)
            limit_s = AT_THE_END_S if number is None else LAST_WORDS_S
            helpers.leave_by(time.monotonic() + limit_s)
            self._first()
            forks.kill_living()
            code = self._last_words(reason)
            supervisor.written(code)
            supervisor.done(code)
        finally:
            os._exit(code)
