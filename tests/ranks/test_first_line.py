"""The line on a terminal until the board stands: at once, each second, and gone with it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.waiting import until

RUN = ("-m", "nccl_doctor", "run", "--level", "quick", "--nproc-per-node", "1", "--timeout", "50")
SLOW = "import time\ntime.sleep({})\nraise ImportError('a file system that does not hurry')\n"
"""A torch that takes its time, and that nobody can interrupt."""


class Watched:
    """A run whose stderr is a terminal."""

    def __init__(self, *words: str, **env: str) -> None:
        self._own, its = pty.openpty()
        given = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=its,
            env={**given, "TERM": "xterm", **env},
        )
        os.close(its)
        self.seen = b""

    def reads(self, what: str) -> bool:
        """True once this has been written."""
        while not re.search(what, self.text):
            if not select.select([self._own], [], [], 0.2)[0]:
                return False
            try:
                self.seen += os.read(self._own, 1 << 16)
            except OSError:  # it has ended
                return bool(re.search(what, self.text))
        return True

    @property
    def text(self) -> str:
        return self.seen.decode()

    def end(self) -> str:
        """Read what was written, to its end."""
        while True:
            try:
                self.seen += os.read(self._own, 1 << 16)
            except OSError:
                break
        self.process.wait(60)
        os.close(self._own)
        return self.text


def slow_torch(folder: Path, seconds: float = 3.5) -> dict[str, str]:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(SLOW.format(seconds))
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def test_it_ticks_while_torch_is_imported_and_leaves_before_the_board(tmp_path: Path) -> None:
    text = Watched(*RUN, **slow_torch(tmp_path)).end()
    first = "\rnccl-doctor: examining the cluster, 0 s (verdict within 50 s)\x1b[K"
    assert text.startswith(first)
    ticks = [int(each) for each in re.findall(r"importing torch, (\d+) s ", text)]
    assert len(set(ticks)) >= 3, text
    assert ticks == sorted(ticks)
    last = text.rindex("importing torch, ")
    assert text[last:].partition("\x1b[K")[2].startswith("\r\x1b[K"), text[last:]
    assert last < text.index("[2/7]")


def test_a_usage_error_and_a_signal_stand_on_a_line_of_their_own(tmp_path: Path) -> None:
    text = Watched(*RUN, "--no-such-option").end()
    assert re.search(r"\r\x1b\[Knccl-doctor: error: ", text), text
    watched = Watched(*RUN, **slow_torch(tmp_path))
    assert until(lambda: watched.reads("importing torch"), 40)
    watched.process.send_signal(signal.SIGINT)
    assert re.search(r"\r\x1b\[Knccl-doctor: [^\r]*(SIGINT|interrupted)", watched.end())


def test_nobody_is_told_twice_nor_without_need(tmp_path: Path) -> None:
    for more, env in ((("--quiet",), {}), ((), {"LOCAL_RANK": "1"}), (("--help",), {})):
        slow = slow_torch(tmp_path / "".join([*more, *env]))
        assert "verdict within" not in Watched(*RUN, *more, **slow, **env).end()


def test_without_a_terminal_a_short_start_is_silent() -> None:
    done = subprocess.run(
        [sys.executable, *RUN], capture_output=True, text=True, timeout=60, check=False
    )
    assert "verdict within" not in done.stderr


def test_without_a_terminal_a_long_start_is_told(tmp_path: Path) -> None:
    slow = slow_torch(tmp_path, 12.0)
    done = subprocess.run(
        [sys.executable, *RUN],
        capture_output=True,
        env={**os.environ, **slow},
        text=True,
        timeout=80,
        check=False,
    )
    assert re.search(r"^nccl-doctor: importing torch \(\d\d of 50 s\)$", done.stderr, re.MULTILINE)
