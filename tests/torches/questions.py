"""What differs between releases of torch: each function asks one question of the one that is here.

    python -m tests.torches.questions

writes the answers as JSON: question → answer.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 3.0
LONGEST_S = 40.0
_RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
rank, size, port = map(int, sys.argv[1:])
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size,
    timeout=timedelta(seconds=30),
)
"""


@contextmanager
def _listening(backlog: int) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as server:
        yield server.getsockname()[1]


def _free_port() -> int:
    with _listening(1) as port:
        return port


def _client(port: int, **more: Any) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=LIMIT_S), **more)


def _ends(call: Callable[[], object]) -> str:
    begun = time.monotonic()
    try:
        call()
        how = "no error"
    except Exception as error:
        how = f"{type(error).__name__}: {_masked(str(error).splitlines()[0])}"
    return f"{time.monotonic() - begun:.1f} s, {how}"


def _masked(text: str) -> str:
    text = re.sub(r"\[?(?:127\.0\.0\.1|localhost|::1)\]?", "HOST", text)
    text = re.sub(r"\b\d{4,5}\b", "PORT", text)
    return text if len(text) <= 160 else f"{text[:159]}…"


def a_client_of_a_port_that_refuses() -> str:
    """With a time-out of 3 s."""
    return _ends(lambda: _client(_free_port()))


def a_server_on_a_port_that_is_taken() -> str:
    """With a time-out of 3 s."""
    with _listening(8) as port:
        return _ends(
            lambda: dist.TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=LIMIT_S))
        )


def a_socket_for_a_store_with_libuv() -> str:
    """`master_listen_fd` of TCPStore."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, number = server.getsockname()[1], server.detach()
    try:
        dist.TCPStore(
            "127.0.0.1", port, 1, True, use_libuv=True, master_listen_fd=number,
            timeout=timedelta(seconds=LIMIT_S),
        )  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {_masked(str(error).splitlines()[0])}"
    return "taken"


def time_outs_of_a_group() -> str:
    """Default time-outs of gloo and nccl."""
    from torch.distributed import constants

    gloo = constants.default_pg_timeout.total_seconds()
    nccl = constants.default_pg_nccl_timeout
    return f"{gloo:g} s; nccl {nccl.total_seconds() if nccl else 0:g} s"


def time_out_of_new_group_where_the_first_has_7_s() -> str:
    """Time-out of a second group of gloo."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7)
    )
    try:
        group = dist.new_group([0])
        options = group._get_backend(torch.device("cpu")).options
        return f"{options._timeout.total_seconds():g} s"
    except AttributeError as error:
        return f"not told ({error})"
    finally:
        dist.destroy_process_group()


def world_sizes_2_and_3() -> str:
    """Rank 0 says 2, rank 1 says 3; a time-out of 30 s."""
    port, begun = _free_port(), time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(size), str(port)],
            stderr=subprocess.DEVNULL,
        )
        for rank, size in ((0, 2), (1, 3))
    ]
    ends = []
    for rank, process in enumerate(ranks):
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(max(0.0, begun + LONGEST_S - time.monotonic()))
            ends.append(f"rank {rank} ends after {time.monotonic() - begun:.0f} s ({code})")
    for process in ranks:
        process.kill()
        process.wait()
    return ", ".join(ends) or f"none has ended after {LONGEST_S:g} s"


def flags_of_torchrun_that_others_have() -> str:
    """Those of our table that its parser lacks, and the other way round."""
    from nccl_doctor.launch.command_line.installed import installed_flags
    from nccl_doctor.launch.command_line.job_line import FlagTable
    from nccl_doctor.launch.command_line.torchrun import FLAGS

    def names(table: FlagTable) -> set[str]:
        return {name for takes in (True, False) for name in table.flags(takes)}

    theirs = {
        next(name for name in spellings.split("/") if name.startswith("--"))[2:].replace("-", "_")
        for spellings in installed_flags(FLAGS.parser)
    }
    lacks, more = sorted(names(FLAGS) - theirs), sorted(theirs - names(FLAGS))
    return f"lacks {', '.join(lacks) or 'none'}; has {', '.join(more) or 'none'} more"


QUESTIONS = (
    a_client_of_a_port_that_refuses,
    a_server_on_a_port_that_is_taken,
    a_socket_for_a_store_with_libuv,
    time_outs_of_a_group,
    time_out_of_new_group_where_the_first_has_7_s,
    world_sizes_2_and_3,
    flags_of_torchrun_that_others_have,
)


def _asked(name: str) -> str:
    """The answer of a child: what hangs is an answer, too."""
    command = [sys.executable, "-m", "tests.torches.questions", name]
    quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    try:
        done = subprocess.run(
            command, env=quiet, capture_output=True, text=True, timeout=LONGEST_S + 10, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not ended after {LONGEST_S + 10:g} s"
    return done.stdout or f"exit code {done.returncode}"


def main(names: Sequence[str]) -> None:
    """Ask one, or all, and write the answers."""
    asked = {each.__name__: each for each in QUESTIONS}
    for name in names:
        sys.stdout.write(asked[name]())
    if not names:
        sys.stdout.write(json.dumps({name.replace("_", " "): _asked(name) for name in asked}))


if __name__ == "__main__":
    main(sys.argv[1:])
