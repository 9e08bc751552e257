"""`nccl-doctor run`, from options to exit code: who started us, start ranks, write the report."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from nccl_doctor import identity, registry, spawn
from nccl_doctor.launch import Launch, detect
from nccl_doctor.options import Flags, Options
from nccl_doctor.output import print_report, save
from nccl_doctor.progress import Progress
from nccl_doctor.supervisor import Departure, Run, Supervisor


def run(options: Options, flags: Flags) -> int:
    """Examine the cluster this process is part of, or, launched by nothing, this one host.

    Returns: the exit code. Never later than `options.timeout_s` after it was called.
    """
    started = time.monotonic()
    environ = dict(os.environ)
    # The store client logs every retry and look-up with a C++ stack; what matters of it is a fact.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    launch = detect(environ)
    if launch.launcher != "none":
        return supervise(options, launch, environ, started)
    nproc = spawn.num_local_ranks(flags.nproc_per_node or "auto", environ)
    address = flags.master_addr or "localhost"
    port = flags.master_port or spawn.DEFAULT_PORT
    _import_torch()

    def rank(local_rank: int) -> int:
        identity_ = spawn.rank_environment(local_rank, nproc, address, port)
        os.environ.update(identity_)  # torch itself reads LOCAL_RANK
        mine = {**environ, **identity_}
        return supervise(options, detect(mine), mine, started)

    return spawn.run_local(nproc, rank, deadline=started + options.timeout_s)


def supervise(options: Options, launch: Launch, environ: Mapping[str, str], started: float) -> int:
    """Run one participant and write what it has to write."""
    _import_torch()
    deadline = started + options.timeout_s
    first = launch.rank in (0, None)
    run_ = Run(
        options=options,
        launch=launch,
        environ=environ,
        registry=registry.load(options.select, options.ignore),
        backend=identity.resolve_backend(options.backend, environ),
        started=started,
        deadline=deadline,
        command=shlex.join(["nccl-doctor", *sys.argv[1:]]),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        progress=Progress(shown=first and not options.quiet, deadline=deadline),
    )

    def write(departure: Departure) -> int:
        run_.progress.clear()
        return _write(departure, options, launch)

    return Supervisor(run_, write).run()


def _write(departure: Departure, options: Options, launch: Launch) -> int:
    """Print and save a report where this participant has one to give; returns the exit code.

    The coordinator's goes to stdout and to `--json`. One that never got in tells its own view on
    stderr and beside that path, once per host.
    """
    report = departure.report
    if report is None:
        return departure.code
    alone = departure.is_own_view and launch.rank not in (0, None)
    if alone and launch.local_rank not in (0, None):
        print(f"nccl-doctor: rank {launch.rank}: {report.summary}", file=sys.stderr)  # noqa: T201
        return departure.code
    path = options.json_path
    if path not in (None, "-") and alone:
        node = launch.node_rank if launch.node_rank is not None else f"-rank{launch.rank}"
        path = str(Path(str(path)).with_suffix("")) + f".node{node}.json"
    try:
        if path is not None and not (path == "-" and alone):
            save(report, path)
    except OSError as error:
        print(f"nccl-doctor: the report was not saved: {error}", file=sys.stderr)  # noqa: T201
        departure = Departure(max(departure.code, 3))
    if path != "-" or alone:
        print_report(report, options, sys.stderr if alone else sys.stdout)
    return departure.code


def _import_torch() -> None:
    """Before any fork, so that no child pays for it again. Its absence is a finding, later."""
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        return
