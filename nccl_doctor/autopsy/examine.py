"""The whole of an autopsy: from files to a report."""

from __future__ import annotations

import io
import json
import secrets
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from nccl_doctor import __version__
from nccl_doctor.autopsy.console import Stack, Told, read_console
from nccl_doctor.autopsy.flight import Dump, read_dump
from nccl_doctor.autopsy.flight_rules import findings_of_dumps
from nccl_doctor.autopsy.inputs import Content, JobFile, found_in, read_error_file, read_stacks
from nccl_doctor.autopsy.kinds import CAUSE_NOT_TOLD
from nccl_doctor.autopsy.ranks import JobEnd, Source, job_of
from nccl_doctor.autopsy.ras import RasAnswer, findings_of_ras, read_ras
from nccl_doctor.autopsy.rules import first_failure, victims
from nccl_doctor.model.cluster import Cluster, Host, Rank
from nccl_doctor.model.findings import Confidence, Finding, Level
from nccl_doctor.model.report import Report, RunRecord
from nccl_doctor.system.helpers import send
from nccl_doctor.toolkit.hosts import everybody_came_in

_MOST_DAMAGED = 8
"""Reasons that the report holds."""
NOTHING = "Nothing in the given files shows a failure of a rank"
"""Summary of a job that ended well, or whose text ends before it failed."""


@dataclass
class Read:
    """Inputs that were read: their number and their bytes, for the report, and those that are no
    consoles. `damaged`: those that could not be read, with the reason.
    """

    files: int = 0
    size: int = 0
    dumps: list[Dump] = field(default_factory=list)
    answers: list[RasAnswer] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def examine(paths: Sequence[str], standard_input: BinaryIO, *, started: str) -> Report:
    """The report of what a job left; `started` is now, as ISO 8601 in UTC.

    Raises:
        ValueError: an input cannot be read, or there is none.
    """
    began = time.monotonic()
    read = Read()
    job = job_of(_consoles(paths, standard_input, read))
    if not read.size:
        why = "; ".join(read.damaged) or "there is no text of a job, and no dump"
        raise ValueError(f"{', '.join(paths)}: {why}")
    for dump in read.dumps:
        if dump.rank is not None:
            job.rank(dump.rank)
    for answer in read.answers:
        for (pid, host), number in answer.ranks.items():
            job.rank(number).pid, job.rank(number).host = pid, host
    causes = first_failures(job, read.dumps, read.answers)
    run = RunRecord(
        id=secrets.token_hex(8),
        started=started,
        launcher="none",
        command=shlex.join(("nccl-doctor", "autopsy", *paths)),
        duration_s=round(time.monotonic() - began, 3),
        source="autopsy",
        extra={"files": read.files, "bytes": read.size, "damaged": read.damaged[:_MOST_DAMAGED]},
    )
    return report_of(job, causes, run)


def first_failures(
    job: JobEnd, dumps: Sequence[Dump], answers: Sequence[RasAnswer] = ()
) -> list[Finding]:
    """Causes by the text if they are certain; else by the dumps, by RAS, or by the text."""
    told = first_failure(job)
    if told is not None and told.confidence is Confidence.CERTAIN and told.kind != CAUSE_NOT_TOLD:
        return [told]
    by_state = findings_of_dumps(dumps) or findings_of_ras(answers)
    return by_state or ([] if told is None else [told])


def with_examinations(report: Report, before: Report | None, after: Report | None) -> Report:
    """The report with what was found on the same hosts after the job, and not before it.

    A host that did not come again says nothing: its part of the job may still run.
    """
    known = {(cause.code, cause.where) for cause in (before.root_causes if before else ())}
    new = [
        cause.replaced(
            message=f"after the job: {cause.message}",
            evidence={**cause.evidence, "examined": "after the job"},
        )
        for cause in (after.root_causes if after and everybody_came_in(after.cluster) else ())
        if (cause.code, cause.where) not in known
    ]
    examined = {
        name: {"id": each.run.id, "started": each.run.started, "verdict": each.verdict}
        for name, each in (("before", before), ("after", after))
        if each is not None
    }
    report = replace(report, run=replace(report.run, extra={**report.run.extra, **examined}))
    if not new or after is None:
        return report
    told = [cause for cause in report.root_causes if cause.kind != CAUSE_NOT_TOLD]
    rest = [finding for finding in report.findings if finding.kind != CAUSE_NOT_TOLD]
    return replace(
        report,
        verdict="fail",
        exit_code=1,
        summary=(told or new)[0].kind.title,
        cluster=after.cluster,
        root_causes=(*told, *new),
        findings=(*rest, *new),
    )


def examine_files(paths: Sequence[str], *, started: str) -> Report:
    """The report of files, which are read in a child: their disk may never answer.

    Raises:
        ValueError: as `examine`, or the disk does not answer.
    """

    def work() -> bytes:
        try:
            return json.dumps(examine(paths, io.BytesIO(), started=started).to_json()).encode()
        except ValueError as error:
            return json.dumps(str(error)).encode()

    try:
        answer = json.loads(send(paths[0], work))
    except OSError as error:
        raise ValueError(f"cannot read {', '.join(paths)}: {error.strerror or error}") from error
    if isinstance(answer, str):
        raise ValueError(answer)
    return Report.from_json(answer)


def report_of(job: JobEnd, roots: Sequence[Finding], run: RunRecord) -> Report:
    """The report on what failed first in a job, and on the ranks that lost it."""
    told = [finding for finding in roots if finding.kind != CAUSE_NOT_TOLD]
    findings = [*roots, *victims(job, told)]
    unsure = roots or run.extra.get("damaged")
    verdict, code = ("fail", 1) if told else ("unknown", 3) if unsure else ("pass", 0)
    return Report(
        verdict=verdict,
        exit_code=code,
        summary=roots[0].kind.title if roots else NOTHING,
        run=run,
        cluster=_cluster(job),
        root_causes=tuple(roots),
        findings=tuple(findings),
        tool={"name": "nccl-doctor", "version": __version__},
    )


def _consoles(
    paths: Sequence[str], standard_input: BinaryIO, read: Read
) -> Iterator[tuple[Source, Iterable[Stack | Told]]]:
    """Every text of the job, with its messages; what is no text goes into `read`.

    A damaged file is left out where it lies among others.
    """
    for found in found_in(paths, standard_input):
        if found.content is Content.REPORT and not found.given:
            continue  # of an examination of its hosts: it is no text of the job
        try:
            console = _console(found, read)
        except ValueError as error:
            if found.given:
                raise
            read.damaged.append(str(error))
            continue
        if console is not None:
            yield Source.named(found.name), _to_its_damage(console, found, read)
        read.files += 1
        read.size += found.size


def _to_its_damage(
    console: Iterable[Stack | Told], found: JobFile, read: Read
) -> Iterator[Stack | Told]:
    try:
        yield from console
    except ValueError as error:
        if found.given:
            raise
        read.damaged.append(str(error))


def _console(found: JobFile, read: Read) -> Iterable[Stack | Told] | None:
    """The messages of a file; None for one that is no text, which goes into `read`.

    Raises:
        ValueError: it is damaged, or no file of a job.
    """
    match found.content:
        case Content.CONSOLE:
            return read_console(found.stream)
        case Content.ERROR_FILE:
            return read_error_file(found.whole(), found.name)
        case Content.STACKS:
            return read_stacks(found.whole(), found.name)
        case Content.RAS:
            read.answers.append(read_ras(found.whole(), found.name))
        case Content.DAMAGED:
            raise ValueError(found.why)
        case Content.DUMP:
            read.dumps.append(read_dump(found.whole(), found.name))
        case _:
            raise ValueError(
                f"{found.name} is a report of nccl-doctor: nccl-doctor report show {found.name}"
            )
    return None


def _cluster(job: JobEnd) -> Cluster:
    """Cluster of the ranks and hosts that the text names."""
    names = sorted({rank.host for rank in job.ranks.values()} - {""})
    hosts = [Host(id=i, name=name, node_rank=None, reported=True) for i, name in enumerate(names)]
    nobody = Host(id=len(hosts), name=None, node_rank=None, reported=False)
    by_name = {host.name or "": host for host in hosts}
    ranks = [
        Rank(
            seat=number,
            rank=number,
            local_rank=rank.local_rank,
            host=by_name.get(rank.host, nobody),
            reported=bool(rank.ended or rank.calls),
            pid=rank.pid,
        )
        for number, rank in sorted(job.ranks.items())
    ]
    if any(rank.host is nobody for rank in ranks):
        hosts.append(nobody)
    return Cluster(
        world_size=max(job.size, 1),
        nnodes=max(len(names), 1),
        backend="",
        level=Level.QUICK,
        hosts=tuple(hosts),
        ranks=tuple(ranks),
    )
