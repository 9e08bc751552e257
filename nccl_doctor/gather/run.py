"""`nccl-doctor run`, from options to exit code: read the launcher, start ranks, and `env`."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from nccl_doctor import registry
from nccl_doctor.gather.context import Key, Run, RunConfig
from nccl_doctor.gather.ends import death_of, tell_killed
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.examine import examine_alone
from nccl_doctor.gather.first_look import look_first
from nccl_doctor.gather.messages import introduce
from nccl_doctor.gather.progress import Phase, Progress
from nccl_doctor.gather.rank import Participant
from nccl_doctor.gather.report import make_report
from nccl_doctor.gather.views import Redaction
from nccl_doctor.judge.checks import error_words
from nccl_doctor.launch import identity, ranks
from nccl_doctor.launch.detect import detect
from nccl_doctor.launch.ranks import (
    DEFAULT_PORT,
    NPROC,
    free_port,
    host_flags,
    host_launch,
    placed,
    set_rank_env,
)
from nccl_doctor.model.codec import MAX_RANKS
from nccl_doctor.model.findings import Finding, Where
from nccl_doctor.model.kinds import RUN_INTERRUPTED
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.model.layout import Address, HostPlace
from nccl_doctor.model.options import Flags, Options
from nccl_doctor.model.report import ParticipantResult, Report
from nccl_doctor.system import forks, supervisor, tick
from nccl_doctor.system.deadline import MoreTime
from nccl_doctor.system.masking import command_line
from nccl_doctor.system.watchdog import LAST_WORDS_S, Watchdog
from nccl_doctor.toolkit.c10d import recognise
from nccl_doctor.toolkit.host import import_psutil
from nccl_doctor.toolkit.load_torch import import_torch

if TYPE_CHECKING:
    from nccl_doctor.judge.history import Past


def run(
    options: Options,
    flags: Flags,
    write: Callable[[ParticipantResult, Launch], int],
    give_up: Callable[[str], int],
    *,
    started: float | None = None,
    past: Past | None = None,
    redaction: Redaction | None = None,
    key: Key | None = None,
    more: MoreTime | None = None,
    logs: bool = True,
) -> int:
    """Examine the cluster that this process is a rank of, or else a host of.

    Args:
        options: what to do; the coordinator's hold for all.
        flags: topology asked for on the command line, used where nothing launched this process.
        write: prints and saves what a participant has to say as it leaves; returns its exit code.
        give_up: says why there is no report; returns the exit code.
        started: the `time.monotonic()` second from which the time limits count; now, if not given.
        past: earlier reports that the coordinator holds this run against.
        redaction: gives pseudonyms to what stays in `options.output_dir`; None for names.
        key: the secret that the ranks of all hosts share, if there is one.
        more: see `RunConfig`; made here, if not given.
        logs: whether long waits are told on stderr, where it is no terminal.

    Returns: the exit code. Never later than `options.timeout_s` after it was started, or
        `MOST_MORE_S` more if `options.timeout_grows`.

    Raises:
        NoGpu: `--nproc-per-node gpu` on a host without one.
        TooManyRanks: more than `MAX_RANKS` on all hosts.
    """
    started = time.monotonic() if started is None else started
    more = MoreTime() if more is None else more
    environ = dict(os.environ)
    # The store client logs every retry and look-up with a C++ stack; what matters of it is a fact.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    found = detect(environ)
    # A command behind `--` has been read with these variables, where its launcher reads them.
    of_host = None if flags.starts_ranks else host_flags(found, environ)
    if of_host is None and found.launcher != "none" and not flags.starts_ranks:
        return _supervise(
            prepare(
                options,
                found,
                environ,
                started,
                past=past,
                redaction=redaction,
                key=key,
                more=more,
                logs=logs,
            ),
            write,
        )
    nproc = ranks_here(flags, of_host, environ)
    flags = flags if of_host is None else of_host
    if (flags.nnodes or 1) * nproc > MAX_RANKS:
        hosts = f"--nnodes {flags.nnodes} with {nproc} ranks each"
        raise ranks.TooManyRanks(f"{hosts}: more than {MAX_RANKS} ranks")
    if key is None and (flags.nnodes or 1) == 1 and flags.master_addr is None:
        key = Key(secrets.token_bytes(32), lasts=False)  # all ranks are forked from here
    doing = "looking at this host"
    tick.doing(doing, options.timeout_s)
    watchdog = Watchdog(
        started + options.timeout_s,
        lambda why: give_up(f"{why} while {doing}: no rank was started"),
    )
    checks = load_checks(options)
    is_master = bool(flags.any_node_rank) and (
        is_endpoint(str(flags.master_addr)) if flags.is_host is None else flags.is_host
    )
    port = DEFAULT_PORT if (flags.nnodes or 1) > 1 else free_port()
    host = host_launch(flags, nproc, is_master=is_master, port=port)
    if of_host is not None:
        host = replace(host, sources={**host.sources, **found.sources}, problems=found.problems)

    mine = prepare(
        options,
        host,
        set_rank_env(host, environ),
        started,
        checks,
        past=past,
        redaction=redaction,
        key=key,
        more=more,
        logs=logs,
    )
    for line in look_first(mine):
        mine.progress.tell(line)
    doing = "importing torch"
    supervisor.doing(doing, options.timeout_s)
    import_torch()
    supervisor.doing("", options.timeout_s)

    def first(start_siblings: Callable[[HostPlace, Address], None]) -> int:
        config = replace(mine.config, start_siblings=start_siblings)
        return _supervise(replace(mine, config=config), write)

    def sibling(place: HostPlace, meeting: Address, local_rank: int) -> int:
        launch = placed(host, place, local_rank)
        ranked = set_rank_env(launch, environ)
        run_ = prepare(
            options, launch, ranked, started, checks, redaction=redaction, key=key, more=more
        )
        config = replace(run_.config, meeting=meeting)
        return _supervise(replace(run_, config=config), write)

    def died(local: int, pid: int, name: str, place: HostPlace, meeting: Address) -> int:
        death = death_of(pid, place.first_rank + local, name)
        return forks.fork_service("messenger", lambda: tell_killed(meeting, death, key))

    return ranks.run_host(
        nproc,
        first,
        sibling,
        deadline=started + options.timeout_s,
        wake=watchdog.hand_over(),
        died=died,
        more=more,
    )


def ranks_here(flags: Flags, of_host: Flags | None, environ: Mapping[str, str]) -> int:
    """Number of ranks that this host starts; `of_host`: what a launcher tells that starts none.

    Raises:
        NoGpu: `gpu` on a host without one.
    """
    own, told = flags.nproc_per_node, of_host.nproc_per_node if of_host else None
    if told is not None and not (own and own.isdecimal()):
        return ranks.num_local_ranks(told, environ, of_torchrun=True, source=NPROC)
    of_torchrun = bool(flags.starts_ranks and own)
    return ranks.num_local_ranks(own or "auto", environ, of_torchrun=of_torchrun)


def is_endpoint(address: str) -> bool:
    """True if this host serves the run, by torch's rule: by what its own name resolves to.

    Where torch would find no host, the one that has the address serves, and the report can say so.
    """
    return recognise(address, identity.LOOK_UP_S).serves or identity.is_this_host(address)


def prepare(
    options: Options,
    launch: Launch,
    environ: Mapping[str, str],
    started: float,
    checks: registry.Registry | None = None,
    *,
    past: Past | None = None,
    redaction: Redaction | None = None,
    key: Key | None = None,
    more: MoreTime | None = None,
    logs: bool = True,
) -> Run:
    """Everything that one participant needs to know before it looks at anything.

    `checks`: those of `load_checks`, if they are loaded already; `more`: see `RunConfig`; `logs`:
    see `run`.
    """
    deadline = started + options.timeout_s
    more = MoreTime() if more is None else more
    of_host = launch.local_rank in (0, None) and not options.quiet
    config = RunConfig(
        registry=load_checks(options) if checks is None else checks,
        options=options,
        started=started,
        deadline=deadline,
        command=command_line(["nccl-doctor", *sys.argv[1:]]),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        progress=Progress(
            shown=of_host,
            deadline=deadline,
            # These lines name hosts, before all names are known and could be replaced.
            speaks=of_host and not options.redact,
            # Of srun or mpirun, all hosts write to one log.
            logs=logs and (launch.rank == 0 or launch.launcher in (OWN, "torchrun")),
            more=more,
            began=started,
        ),
        past=past,
        redaction=redaction,
        key=key,
        more=more,
    )
    backend = identity.resolve_backend(options.backend, environ)
    return Run(config, launch, environ, backend)


def load_checks(options: Options) -> registry.Registry:
    """Checks of a run, with what they import as they observe. Before ranks are forked, it is done
    once for all of them.
    """
    import_psutil()
    return registry.load(options.select, options.ignore)


def _supervise(run_: Run, write: Callable[[ParticipantResult, Launch], int]) -> int:
    def leave(result: ParticipantResult) -> int:
        run_.progress.close()
        return write(result, run_.launch)

    return Participant(run_, leave).run()


# `nccl-doctor env`: the facts of this host alone, with no process group and no store.


JOIN_S = 3.0
"""Join time-out: no job starts here, so a master that does not answer is given up soon."""
TIMEOUT_S = 60.0
"""Time limit: a few seconds are normal; with a stuck driver or file system each probe may need its
whole deadline.
"""


def examine_here(options: Options, give_up: Callable[[str], int]) -> Report:
    """Observe everything that needs no other host, and judge it as the report of one host.

    Ends the process if it is interrupted or takes longer than `TIMEOUT_S`: `give_up` says why there
    is no report, and returns the exit code.
    """
    options = replace(options, timeout_s=TIMEOUT_S, join_timeout_s=JOIN_S)
    environ = dict(os.environ)
    started = supervisor.began()
    supervisor.set_deadline(started + TIMEOUT_S)
    run = prepare(options, detect(environ), environ, started)
    watchdog = Watchdog(
        run.config.deadline, lambda why: give_up(f"{why} while {run.progress.doing}")
    )
    run.progress.doing = "importing torch"
    supervisor.doing(run.progress.doing, TIMEOUT_S)
    import_torch()
    supervisor.doing("", TIMEOUT_S)
    scopes = {check.name: check.scope for check in run.registry.checks}
    evidence = EvidenceLog(run.launch, scopes, environ)
    who = introduce(run.launch, environ, options.backend)
    evidence.sign_in(0, who, 0.0)
    broke = []
    try:
        evidence.sign_in(0, replace(who, facts=examine_alone(run)), 0.0)
    except Exception as error:  # a mistake, of ours or of a plug-in, must not cost the report
        words = f"nccl-doctor itself failed: {error_words(error)}"
        broke.append(Finding(RUN_INTERRUPTED, words, Where(hosts=(who.host_name,))))
    run.progress.say("judging", Phase.VERDICT)
    report = make_report(run, evidence, complete=False, alone=True, extra=broke)
    if not watchdog.stand_down():
        time.sleep(LAST_WORDS_S)  # the watchdog is speaking, and ends the process
    run.progress.close()
    return report
