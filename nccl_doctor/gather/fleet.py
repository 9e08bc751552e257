"""`run --hostfile`: start the run on every host over ssh, and make one report of their answers.

Each host runs `nccl-doctor run` as a person would have started it there, with its node rank. The
coordinator sends the report; a host that could not sign in sends its partial report; for a host
where nccl-doctor could not be started, the message of ssh is the finding. Nothing is examined here.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from nccl_doctor import registry
from nccl_doctor.gather.context import in_words, time_limit
from nccl_doctor.gather.first_look import SO_FAR
from nccl_doctor.gather.progress import Progress
from nccl_doctor.judge.conclusion import conclude, judge_again
from nccl_doctor.judge.history import Past, judge_beside
from nccl_doctor.judge.merge import merge_reports
from nccl_doctor.launch.identity import is_this_host
from nccl_doctor.launch.ranks import DEFAULT_PORT
from nccl_doctor.launch.ssh import faults
from nccl_doctor.launch.ssh.connection import (
    MARKER,
    MORE,
    CommandEnd,
    Heard,
    converse,
    instructions,
    ssh_command,
)
from nccl_doctor.launch.ssh.hostfile import Entry
from nccl_doctor.launch.ssh.program import own_words, start_words
from nccl_doctor.model.cluster import Cluster, Host, Rank
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.kinds import RUN_INTERRUPTED
from nccl_doctor.model.launch import OWN
from nccl_doctor.model.options import Flags, Options
from nccl_doctor.model.report import Report, RunRecord
from nccl_doctor.registry import Registry
from nccl_doctor.system import supervisor
from nccl_doctor.system.deadline import MoreTime
from nccl_doctor.system.masking import command_line, masked_data, masked_job

CONNECT_S = 10.0
"""Time for ssh to connect, at most a quarter of the run's time."""
LOGIN_S = 5.0
"""More time for the log-in to complete; then the other hosts wait no longer."""
JUDGE_S = 1.0
"""Part of the run's time for the report; the hosts end `ANSWER_S` earlier to send theirs."""
ANSWER_S = 1.5
NO_MASTER_S = 5.0
"""Join time-out if node 0 cannot be started: its port never opens, so waiting is useless."""
MOST_TOLD = 5
"""Lines that are passed on of what hosts say before the report: all may have the same fault."""
_CONFIG_S = 5.0
_SO_FAR = re.compile(rb"^nccl-doctor: (" + SO_FAR.encode() + rb"[^\r\n]+)\r?\n", re.MULTILINE)
_MORE = re.compile(re.escape(MORE).encode() + rb"(\d{1,3})\r?\n")


@dataclass(frozen=True)
class Fleet:
    """Hosts and what to start on them: the hosts by node rank, `--nproc-per-node` of each, the
    flags of all, the variables that a launcher would export to them, and the port of ssh if the
    command of the job gives one. `shell_here`: what is on this host is started without ssh.
    """

    path: str
    entries: tuple[Entry, ...]
    nproc: tuple[str, ...]
    master_addr: str
    master_port: int
    variables: Mapping[str, str]
    ssh_port: int | None = None
    shell_here: bool = False

    @classmethod
    def of(
        cls,
        path: str,
        entries: tuple[Entry, ...],
        nproc: tuple[str, ...],
        flags: Flags,
        variables: Mapping[str, str],
    ) -> Fleet:
        """Fleet whose master is the first host, at the address that ssh uses for it, unless the
        flags give one.
        """
        address = flags.master_addr or _address(entries[0])
        port = flags.master_port or DEFAULT_PORT
        return cls(path, entries, nproc, address, port, variables)

    def command(self, node_rank: int, connect_s: float) -> list[str]:
        """Words of the local ssh, or shell, that starts the run on one host."""
        run = [*start_words(Path.cwd(), self.variables), "run", "--relay"]
        run += ["--nnodes", str(len(self.entries)), "--node-rank", str(node_rank)]
        run += ["--nproc-per-node", self.nproc[node_rank]]
        run += ["--master-addr", self.master_addr, "--master-port", str(self.master_port)]
        words = ssh_command(
            self.entries[node_rank].destination,
            run,
            connect_s=connect_s,
            port=self.ssh_port,
            # Others may be secret, and follow over the connection; Python needs its own to start.
            variables={
                **{k: v for k, v in self.variables.items() if k.startswith("PYTHON")},
                "PYTHONPATH": "",
            },
        )
        if self.shell_here and is_this_host(self.entries[node_rank].name):
            return ["sh", "-c", words[-1]]
        return words


def run_on_hosts(
    fleet: Fleet, options: Options, past: Past | None = None, *, started: float | None = None
) -> Report:
    """Examine the cluster of a hostfile, and hold it against `past`, if there is any.

    Returns: the report. Never later than `options.timeout_s` after it was `started`, a
        `time.monotonic()` second: now, if not given. With `options.timeout_grows` the hosts may put
        that off.

    Raises:
        OSError: ssh could not be started.
    """
    started = time.monotonic() if started is None else started
    started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    deadline = started + options.timeout_s - min(JUDGE_S, options.timeout_s / 10)
    connect_s = min(CONNECT_S, options.timeout_s / 4)

    def longer(seconds: int) -> None:
        supervisor.put_off(started + options.timeout_s + seconds)
        progress.tell(in_words(options.timeout_s, seconds))

    more = MoreTime(longer)
    progress = Progress(
        shown=not options.quiet,
        deadline=deadline,
        speaks=not (options.quiet or options.redact),
        more=more,
        began=started,
    )
    secret = secrets.token_bytes(32)

    def word(lost: frozenset[int]) -> str:
        left = max(1.0, deadline - ANSWER_S - time.monotonic())
        return instructions(_options_for_hosts(options, left, lost), fleet.variables, secret)

    told: set[bytes] = set()

    def hear(stderr: bytes) -> None:
        for line in _SO_FAR.findall(stderr):
            if line not in told and len(told) < MOST_TOLD:
                told.add(line)
                progress.tell(line.decode("utf-8", "replace"))
        if options.timeout_grows:
            more.give(max(map(int, _MORE.findall(stderr)), default=0))

    def tick(doing: str) -> None:
        progress.say(doing)

    heard = converse(
        [fleet.command(node, connect_s) for node in range(len(fleet.entries))],
        marker=MARKER,
        word=word,
        ready_by=started + connect_s + min(LOGIN_S, options.timeout_s / 8),
        deadline=deadline,
        spread_s=options.timeout_s / 4,
        tick=tick,
        hear=hear,
        more=more,
    )
    progress.close()
    checks = registry.load(options.select, options.ignore)
    report = combine(
        fleet,
        options,
        heard,
        checks,
        RunRecord(
            started=started_at,
            duration_s=round(time.monotonic() - started, 3),
            launcher=OWN,
            command=command_line(["nccl-doctor", *sys.argv[1:]]),
            options=masked_data(encode(options)),
            extra={"hostfile": fleet.path, **time_limit(options.timeout_s, more())},
        ),
    )
    if past is None or not report.cluster.complete:
        return report
    return judge_beside(report, checks, past)


def combine(
    fleet: Fleet, options: Options, heard: Heard, checks: Registry, run: RunRecord
) -> Report:
    """One report from the answers of all hosts. `run` is the record of this process."""
    reports = [report for ended in heard.ended if (report := report_of(ended.stdout)) is not None]
    problems = list(_problems(fleet, heard, reports, run.duration_s or 0.0))
    if len(reports) == 1 and reports[0].cluster.complete and not problems:
        return replace(reports[0], run=_taken_over(reports[0].run, run))
    problems = [problem for problem in problems if checks.wanted(problem.code)]
    if not reports:
        return conclude(
            _nobody(fleet, options),
            checks.checks,
            run=replace(run, id=secrets.token_hex(8)),
            problems=[*checks.problems, *problems],
            wanted=checks.wanted,
            strict=options.strict,
        )
    merged = merge_reports(reports, checks)
    names: dict[int | None, str] = {node: entry.name for node, entry in enumerate(fleet.entries)}
    known = replace(
        merged,
        run=_taken_over(merged.run, run),
        findings=(*merged.findings, *problems),
        cluster=_named(merged.cluster, names),
    )
    return judge_again(known, checks)


def _taken_over(theirs: RunRecord, own: RunRecord) -> RunRecord:
    """The record of this process, with what the hosts alone know of the run."""
    return replace(
        own,
        id=theirs.id,
        baseline=theirs.baseline,
        redacted_with=theirs.redacted_with,
        alone=theirs.alone,
        extra={**theirs.extra, **own.extra},
    )


def report_of(stdout: str) -> Report | None:
    """The report in what a host answered; a log-in that prints something must not cost it."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"^\{", stdout, re.MULTILINE):
        try:
            return Report.from_json(decoder.raw_decode(stdout, start.start())[0])
        except (ValueError, RecursionError):
            continue
    return None


def _options_for_hosts(options: Options, left_s: float, lost: frozenset[int]) -> Options:
    """The options as the hosts get them: what they have to write, and where, is for here."""
    join_s = min(options.join_timeout_s, left_s)
    return replace(
        options,
        outputs={},
        baseline=None,
        hands_over=False,
        timeout_s=left_s,
        join_timeout_s=min(join_s, NO_MASTER_S) if 0 in lost else join_s,
        collective_timeout_s=min(options.collective_timeout_s, left_s),
        absent_nodes=tuple(sorted(lost)),
    )


def _problems(
    fleet: Fleet, heard: Heard, reports: Sequence[Report], after_s: float
) -> Iterable[Finding]:
    """Findings on hosts without a report, from what ssh printed here in so many seconds."""
    if heard.interrupted:
        words = f"stopped after {after_s:.1f} s by {heard.interrupted}"
        yield Finding(RUN_INTERRUPTED, words)
    there = {host.node_rank for report in reports for host in report.cluster.hosts if host.reported}
    yield from faults.findings(
        (
            faults.SilentHost(entry.name, entry.name, entry.destination, ended)
            for node, (entry, ended) in enumerate(zip(fleet.entries, heard.ended, strict=True))
            if node not in there and not (heard.interrupted and _was_stopped(ended))
        ),
        own_words(),
    )


def _was_stopped(ended: CommandEnd) -> bool:
    """True if it may have ended only because this process stopped it."""
    return ended.ready or ended.code is None


def _named(cluster: Cluster, names: Mapping[int | None, str]) -> Cluster:
    """The cluster, with names from the hostfile for hosts without a report."""
    hosts = {
        host.id: replace(host, name=host.name or names.get(host.node_rank))
        for host in cluster.hosts
    }
    ranks = (replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts.values()), ranks=tuple(ranks))


def _nobody(fleet: Fleet, options: Options) -> Cluster:
    """The cluster if no host sent a report."""
    hosts = tuple(Host(i, entry.name, i, reported=False) for i, entry in enumerate(fleet.entries))
    homes = [
        (host, local)
        for host, nproc in zip(hosts, fleet.nproc, strict=True)
        for local in range(int(nproc) if nproc.isdecimal() else 1)
    ]
    return Cluster(
        world_size=len(homes),
        nnodes=len(hosts),
        backend=options.backend if options.backend != "auto" else "nccl",
        level=options.level,
        hosts=hosts,
        ranks=tuple(
            Rank(i, i, local, host, reported=False) for i, (host, local) in enumerate(homes)
        ),
        join_timeout_s=options.join_timeout_s,
        collective_timeout_s=options.collective_timeout_s,
        complete=False,
        expected=options.expected,
        job=masked_job(options.job),
    )


def _address(first: Entry) -> str:
    """Host name behind the first entry, as ssh resolves it: the entry may be an alias of ssh."""
    try:
        done = subprocess.run(
            ["ssh", "-G", "--", first.destination],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_CONFIG_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return first.name
    found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    return found[1] if found and found[1].lower() != first.name.lower() else first.name
