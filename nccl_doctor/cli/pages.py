"""`checks`, `explain` and `schema`: what the program knows, without examining anything."""

from __future__ import annotations

import importlib.resources
import shutil
import textwrap

import click

from nccl_doctor.cli.help import ASK_EXITS, Manual
from nccl_doctor.cli.words import PROGRAM


@click.command(
    cls=Manual,
    short_help="List the installed checks and what they find.",
    exits=ASK_EXITS,
    examples=(
        ("All of them", "nccl-doctor checks"),
        ("Those that look at links and speeds", "nccl-doctor checks | grep speed"),
    ),
)
def checks() -> None:
    """List the installed checks, built-in and plug-in, in the order in which they run.

    For each its layer, who observes (one participant per host, or every rank), what it costs, the
    distribution that it comes from, and every code that it can find. A plug-in that cannot be
    loaded is named on stderr.
    """
    from tabulate import tabulate

    from nccl_doctor import registry
    from nccl_doctor.report.text import safe

    found = registry.load()
    rows = [
        [
            check.name,
            check.layer.value,
            check.scope.value,
            check.cost,
            safe(found.origins[check.name]),
            " ".join(kind.code for kind in check.kinds),
        ]
        # As they run: what needs no peers is observed before the roll call.
        for check in sorted(found.checks, key=lambda check: check.together)
    ]
    head = ["check", "layer", "scope", "cost", "from", "finds"]
    room = shutil.get_terminal_size((100, 24)).columns
    taken = sum(max(len(str(row[i])) for row in [head, *rows]) + 2 for i in range(5))
    for row in rows:  # tabulate would break a code at its hyphens
        width = max(30, room - taken)
        row[5] = textwrap.fill(row[5], width, break_on_hyphens=False, break_long_words=False)
    click.echo(tabulate(rows, head, "simple", disable_numparse=True))
    for problem in found.problems:
        click.echo(f"{PROGRAM}: {problem.code}: {safe(problem.message)}", err=True)


@click.command(
    cls=Manual,
    short_help="Print the page of a finding code or a check.",
    exits=ASK_EXITS,
    examples=(
        ("A code that a report names", "nccl-doctor explain peer-one-way"),
        ("A check", "nccl-doctor explain firewall"),
    ),
)
@click.argument("code")
def explain(code: str) -> None:
    """Print the page of a finding code: what it is, why it matters, how to fix it.

    The pages of the checks that find it follow: what they look at, when they are wrong, where their
    rules come from. CODE may be the name of a check as well. The pages are those of docs/codes and
    docs/checks.
    """
    from nccl_doctor import registry
    from nccl_doctor.report.manual import check_page, code_page
    from nccl_doctor.toolkit.suggest import suggest

    found = registry.load()
    named = {check.name: check for check in found.checks}
    if code in found.kinds:
        page = code_page(found, code)
    elif code in named:
        page = check_page(named[code])
    else:
        hint = suggest(code, [*found.kinds, *named]) or f"; `{PROGRAM} checks` lists them"
        raise click.UsageError(f'no check or finding code is named "{code}"{hint}')
    click.echo(page)


@click.command(
    cls=Manual,
    exits=ASK_EXITS,
    examples=(
        ("Keep it beside what reads reports", "nccl-doctor schema > nccl-doctor.schema.json"),
    ),
)
def schema() -> None:
    """Print the JSON Schema of the report.

    It describes what --json writes. Keys are added; none is renamed or gets another meaning.
    """
    file = importlib.resources.files("nccl_doctor.report").joinpath("schema.json")
    click.echo(file.read_text(encoding="utf-8"), nl=False)
