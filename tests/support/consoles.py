"""Consoles of made-up jobs: the lines that torch, torchrun, Slurm and others print at the end."""

from __future__ import annotations

import io
from collections.abc import Mapping

from nccl_doctor.autopsy.console import read_console
from nccl_doctor.autopsy.ranks import JobEnd, Source, job_of

CLOSED = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [10.0.0.2]:15256"
)
TIMED_OUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out "
    "waiting 5000ms for recv operation to complete"
)
_TORCH = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def raised(rank: int | None, error: str, *, line: int = 47, name: str = "train") -> str:
    """A traceback as a rank prints it, or without a rank's prefix."""
    prefix = "" if rank is None else f"[rank{rank}]: "
    in_torch = (f'  File "{_TORCH}", line 3252, in all_reduce', "    work.wait()")
    frames = (
        "Traceback (most recent call last):",
        f'  File "/home/user/job.py", line {line}, in {name}',
        "    d.all_reduce(x)",
        *(in_torch if error in (CLOSED, TIMED_OUT) else ()),
        error,
    )
    return "".join(f"{prefix}{each}\n" for each in frames)


def block(codes: Mapping[int, int], root: int, *, named: bool = True) -> str:
    """The last lines of torchrun: ranks with exit codes, process 1000 + rank; `named`: 2.13."""
    lines = ["=" * 60, "job.py FAILED", "-" * 60, "Failures:"]
    for rank, code in [*((r, c) for r, c in codes.items() if r != root), (root, codes[root])]:
        if rank == root:
            lines += ["-" * 60, "Root Cause (first observed failure):"]
        signal = f"  (SIG{-code})" if named and code < 0 else ""
        lines += [
            "[0]:",
            "  time      : 2026-11-27_23:28:44",
            "  host      : node0",
            f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {code} (pid: {1000 + rank}){signal}",
            "  error_file: <N/A>",
        ]
    return "\n".join([*lines, "=" * 60]) + "\n"


def job(*texts: str, names: tuple[str, ...] = ()) -> JobEnd:
    """Ends of the ranks, by the consoles of a job."""
    named = names or tuple(f"console{chr(97 + i)}.log" for i in range(len(texts)))
    return job_of(
        (Source.named(name), read_console(io.BytesIO(text.encode())))
        for name, text in zip(named, texts, strict=True)
    )
