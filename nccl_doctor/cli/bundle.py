"""`report bundle` and `report issue`: material for support tickets."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nccl_doctor.cli.help import READ_EXITS, Manual
from nccl_doctor.cli.options import with_options
from nccl_doctor.cli.redaction import cover_of
from nccl_doctor.cli.saving import NotSaved, check_place, read_to_print
from nccl_doctor.system.terminal import in_github, inert, safe
from nccl_doctor.toolkit.host import host_name

if TYPE_CHECKING:
    from nccl_doctor.model.report import Report
    from nccl_doctor.report.bundle import Bundle, Piece
    from nccl_doctor.report.redaction import Text
    from nccl_doctor.report.redaction.cover import Cover

PROJECTS = ("deepspeed", "nccl", "pytorch")
"""Projects with an issue form; a test compares them with the files."""


@click.command(
    cls=Manual,
    short_help="Print a project's issue form, filled in.",
    exits=READ_EXITS,
    examples=(
        ("For an issue of NCCL", "nccl-doctor report issue nccl report.json > issue.md"),
        (
            "With real names, for your own tracker",
            "nccl-doctor report issue pytorch report.json --no-redact",
        ),
    ),
)
@click.argument(
    "project",
    metavar=f"{{{'|'.join(PROJECTS)}}}",
    shell_complete=lambda ctx, param, begin: [name for name in PROJECTS if name.startswith(begin)],
)
@click.argument("file", metavar="FILE", required=False)
@with_options("issue")
def issue(project: str, file: str | None, no_redact: bool, redact_key: str | None) -> None:
    """Print the issue form of a project, filled in from a saved report.

    It begins with whether the finding can be a fault of that project at all. On a host of the
    report, the output of torch.utils.collect_env is part of the form that asks for it.

    FILE may be - for stdin. Names are replaced by pseudonyms; FILE.map.json holds the real names.
    """
    from nccl_doctor.registry import installed
    from nccl_doctor.report.bundle import Piece, by_line
    from nccl_doctor.report.issue import (
        NAMES,
        asks_for_collect_env,
        comment,
        fill,
        form_of,
        upstream_fault,
    )

    if project not in PROJECTS or file is None:
        given = file or ("FILE" if project in PROJECTS else project)
        raise click.UsageError(
            f"for which project: {', '.join(PROJECTS[:-1])} or {PROJECTS[-1]}? "
            f"Type: nccl-doctor report issue PROJECT {given}"
        )
    saved = read_to_print(file)
    empty = form_of(project)
    collected = _collected(saved) if asks_for_collect_env(empty) else ""
    cover = _cover(_beside(file), file, no_redact, redact_key)
    if cover is not None:
        text = cover.text_of(saved)
        _learn(text, [Piece("", "", collected.encode())])
        collected = by_line(collected, text.replaced)
        saved = cover.of_report(saved)
        cover.keep(text.book)
        _write_map(cover)
    answer = upstream_fault(project, saved)
    question = f"Is this a fault of {NAMES[project]}?"
    form = f"<!-- {question} {comment(answer.words)} -->\n"
    form += fill(empty, saved, installed, collected)
    click.echo(inert(form) if in_github() else form, nl=False)


@click.command(
    cls=Manual,
    short_help="Pack an archive for a support ticket.",
    exits=READ_EXITS,
    examples=(
        ("For a support ticket, with pseudonyms", "nccl-doctor report bundle report.json"),
        (
            "With a log of NCCL, and another name for the archive",
            "nccl-doctor report bundle --log nccl.log --output ticket.tar.gz report.json",
        ),
    ),
)
@click.argument("file")
@with_options("bundle")
def bundle(
    file: str, output: str | None, logs: tuple[str, ...], no_tools: bool, **given: Any
) -> None:
    """Pack a report, the logs of NCCL and the output of tools on this host into one archive.

    Files named by NCCL_DEBUG_FILE and NCCL_TOPO_DUMP_FILE of the job are added without an option,
    if they are on this host. Names are replaced by pseudonyms; PATH.map.json, next to the archive,
    holds the real names.
    """
    from nccl_doctor.report.bundle import Bundle, named_logs, read_logs
    from nccl_doctor.report.redaction.cover import MAP

    for log in logs:
        check_place(f"--log {log}", Path(log).parent, partial(_wrong_with_log, Path(log)))
    saved = read_to_print(file)
    path = Path(output or _default_output(file))
    check_place(f"--output {path}", path.parent, lambda: _wrong_with(path))
    cover = _cover(f"{path}{MAP}", file, **given)
    packed = Bundle()
    pieces = [
        *read_logs([*map(Path, logs), *named_logs(saved)], packed, raw=cover is None),
        *([] if no_tools else _tools(packed, saved)),
    ]
    if cover is None:
        _pack(packed, saved, pieces)
    else:
        text = cover.text_of(saved)
        _learn(text, pieces)
        _pack(packed, cover.of_report(saved), pieces, text)
        cover.keep(text.book)
    about = {"redacted": cover is not None, "verdict": saved.verdict, "run": saved.run.id}
    kept = _write_map(cover) if cover else None  # first: without it the archive is half an answer
    try:
        packed.write(path, about)
    except OSError as error:
        raise NotSaved(f"the bundle was not written: {path}: {error.strerror}") from error
    said = f"; real names of the pseudonyms: {kept}" if kept else ""
    click.echo(f"{safe(str(path))}: {len(packed)} files and a manifest{said}")


def _cover(path: str | None, file: str, no_redact: bool, redact_key: str | None) -> Cover | None:
    """The key that was given, or else that of the map that lies beside the report already."""
    if no_redact and redact_key is not None:
        raise click.UsageError("--redact-key and --no-redact exclude each other")
    if no_redact:
        return None
    beside = _beside(file)
    return cover_of(path, redact_key, [beside] if beside is not None else [])


def _beside(file: str) -> str | None:
    from nccl_doctor.report.redaction.cover import MAP

    return None if file == "-" else f"{file}{MAP}"


def _wrong_with(target: Path) -> str:
    if target.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        return "a folder, or in a folder that is not writable"
    return ""


def _wrong_with_log(log: Path) -> str:
    if not log.exists():
        return "no such file"
    return "" if log.is_file() and os.access(log, os.R_OK) else "not a readable file"


def _default_output(file: str) -> str:
    return "nccl-doctor.bundle.tar.gz" if file == "-" else f"{Path(file).stem}.bundle.tar.gz"


def _tools(packed: Bundle, saved: Report) -> Iterator[Piece]:
    """Output of the tools of this host; that of `collect_env` only if it is a host of the job."""
    from nccl_doctor.report.bundle import Piece, without_secrets
    from nccl_doctor.report.vendor import COLLECT_ENV, COMMANDS, run_tools

    commands = {**COMMANDS, **(COLLECT_ENV if _is_here(saved) else {})}
    if not _is_here(saved):
        packed.leave_out(shlex.join(COLLECT_ENV["collect_env"]), "no host of the report")
    for name, printed in run_tools(commands).items():
        command = shlex.join(printed.command)
        if printed.problem:
            packed.leave_out(command, printed.problem)
        if printed.text:
            yield Piece(f"tools/{name}.txt", command, without_secrets(printed.text.encode()))


def _is_here(saved: Report) -> bool:
    return host_name() in {host.name for host in saved.cluster.hosts}


def _collected(saved: Report) -> str:
    """Output of `collect_env` on a host of the job; empty elsewhere, or where it fails."""
    from nccl_doctor.report.bundle import without_secrets
    from nccl_doctor.report.vendor import COLLECT_ENV, run_tools

    if not _is_here(saved):
        return ""
    (printed,) = run_tools(COLLECT_ENV).values()
    text = without_secrets(printed.text.encode()).decode("utf-8", "replace")
    return "" if printed.problem else text


def _learn(text: Text, pieces: Sequence[Piece]) -> None:
    """Note the names in what is packed, and those of the host and the user that pack it."""
    import getpass

    text.names.know_host(host_name())
    with suppress(KeyError, OSError):  # a container's user may have no name
        text.names.know_user(getpass.getuser())
    for piece in pieces:
        text.learn(piece.what)
        text.learn(piece.data.decode("utf-8", "replace"))


def _pack(packed: Bundle, saved: Report, pieces: Sequence[Piece], text: Text | None = None) -> None:
    from nccl_doctor.registry import installed
    from nccl_doctor.report.bundle import by_line
    from nccl_doctor.report.formats import renderer
    from nccl_doctor.report.text import render

    packed.add("report.json", renderer("json")(saved), "nccl-doctor report show --format json")
    shown = render(saved, verbose=2, checks=installed)
    packed.add("report.txt", shown, "nccl-doctor report show -v")
    for piece in pieces:
        if text is None:
            packed.add(piece.name, piece.data, piece.what)
        else:
            words = by_line(piece.data.decode("utf-8", "replace"), text.replaced)
            packed.add(piece.name, words, text.replaced(piece.what))
    if text is not None:
        packed.reword(text.replaced)


def _write_map(cover: Cover) -> str | None:
    try:
        return cover.write()
    except OSError as error:
        raise NotSaved(f"the map of the pseudonyms was not written: {error.strerror}") from error
