"""`checks`, `explain` and `schema`: what the program knows, without examining anything."""

from __future__ import annotations

import importlib.resources
import shutil
import textwrap

import click

from nccl_doctor.cli.help import ASK_EXITS, PROGRAM, Manual
from nccl_doctor.cli.params import Code


@click.command(
    cls=Manual,
    short_help="List the installed checks and what they find.",
    exits=ASK_EXITS,
    examples=(
        ("All checks", "nccl-doctor checks"),
        ("Only the checks of speed", "nccl-doctor checks | grep speed"),
    ),
)
def checks() -> None:
    """List the installed checks, built-in and plug-in, in the order in which they run.

    Each line shows the layer, the scope (once per host, or on every rank), the cost, the
    distribution that the check comes from, and every code that it can find. A plug-in that cannot
    be loaded is named on stderr.
    """
    from tabulate import tabulate

    from nccl_doctor import registry
    from nccl_doctor.system.terminal import complain, safe

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
        # In the order of the run: checks that need no peers come before the sign-in.
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
        complain(f"{problem.code}: {problem.message}")


@click.command(
    cls=Manual,
    short_help="Print the page of a finding code or a check.",
    exits=ASK_EXITS,
    examples=(
        ("A code from a report", "nccl-doctor explain peer-one-way"),
        ("A check", "nccl-doctor explain firewall"),
    ),
)
@click.argument("code", type=Code())
def explain(code: str) -> None:
    """Print the page of a finding code: how to fix it, why it matters, how it is found.

    Where a firewall is the cause, the fix is told for nft, iptables, firewalld, ufw, the security
    groups of clouds and NetworkPolicy. The pages of the checks that find it follow: what they look
    at, when they are wrong, and the sources of their rules. CODE may also be the name of a check.
    docs/codes and docs/checks hold the same pages.
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
        ("Save it for programs that read reports", "nccl-doctor schema > nccl-doctor.schema.json"),
    ),
)
def schema() -> None:
    """Print the JSON Schema of the report.

    It describes the output of --json. New keys may be added; no key is renamed, and none changes
    its meaning.
    """
    file = importlib.resources.files("nccl_doctor.report").joinpath("schema.json")
    click.echo(file.read_text(encoding="utf-8"), nl=False)
