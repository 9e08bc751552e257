"""Programs of others that an `observe` starts, and what they print; packages that are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from nccl_doctor.system import forks

LARGEST = 4 << 20
_LOOK_S = 0.05
_GOODBYE_S = 3.0
"""Time to end after SIGTERM: `dcgmi` first stops a diagnosis on the host engine."""
_MOST_WORDS = 400


@dataclass(frozen=True)
class ProgramEnd:
    """The end of a program.

    Attributes:
        text: what it printed.
        code: exit code; that of a signal is negative; None where it was stopped.
        problem: why there is no answer; empty where it ended by itself.
    """

    text: str
    code: int | None
    problem: str = ""

    @property
    def first_line(self) -> str:
        """The first line that says something, for a reason."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip(" +-|=")]
        return lines[0][:_MOST_WORDS] if lines else "nothing"


def find_program(name: str, env: Mapping[str, str]) -> str | None:
    """Path of a program, as this process would start it."""
    return shutil.which(name, path=env.get("PATH", ""))


def run_program(
    program: str,
    words: Sequence[str],
    env: Mapping[str, str],
    limit_s: float,
    tick: Callable[[], None] = lambda: None,
) -> ProgramEnd:
    """Run a program, for at most `limit_s` seconds.

    Its output goes to a file, so that it never waits for its reader. It stays in the process group
    of the probe child, and ends with that at the latest.

    Args:
        program: its path.
        words: its arguments.
        env: its environment.
        limit_s: seconds after which it gets SIGTERM, and a little later SIGKILL.
        tick: called now and then while it runs; what it raises ends the program.
    """
    import subprocess

    name = os.path.basename(program)
    call = f"{name} {words[0]}" if words and not words[0].startswith("-") else name
    until = time.monotonic() + limit_s
    with os.fdopen(forks.unnamed_file(name), "w+b") as output:
        try:
            process = subprocess.Popen(
                [program, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**env, "LC_ALL": "C"},
            )
        except OSError as error:
            return ProgramEnd("", None, f"{name} cannot be started: {error.strerror}")
        problem = ""
        try:
            while process.poll() is None and not problem:
                if time.monotonic() > until:
                    problem = f"{call} did not end within {limit_s:.0f} s"
                elif output.seek(0, 2) > LARGEST:
                    problem = f"{call} printed more than {LARGEST >> 20} MiB"
                else:
                    tick()
                    time.sleep(_LOOK_S)
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    process.wait(_GOODBYE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel keeps it
                        process.wait(_GOODBYE_S)
        output.seek(0)
        text = output.read(LARGEST).decode("utf-8", "replace")
        return ProgramEnd(text, None if problem else process.returncode, problem)


def installed(name: str) -> str | None:
    """Version of a package of Python from its metadata: to import one may start compilers."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
