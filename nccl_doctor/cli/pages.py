"""`checks`, `explain` and `schema`: what the program knows, without examining anything."""

from __future__ import annotations

import importlib.resources
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nccl_doctor.cli.help import ASK_EXITS, PROGRAM, Manual
from nccl_doctor.cli.params import Code

if TYPE_CHECKING:
    from nccl_doctor.registry import Registry


def _show(text: str) -> None:
    """Print a text; on a terminal that it does not fit on, in a pager, which PAGER names."""
    from nccl_doctor.system import supervisor

    if sys.stdout.isatty() and len(text.splitlines()) >= shutil.get_terminal_size().lines:
        supervisor.hold_for_reader()
        click.echo_via_pager(f"{text}\n")
    else:
        click.echo(text)


_TOOL_S = 2.0
"""Time limit to ask which firewall this host has."""


_as_json = click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")


@click.command(
    cls=Manual,
    short_help="List the installed checks and what they find.",
    exits=ASK_EXITS,
    examples=(
        ("All checks", "nccl-doctor checks"),
        ("Only the codes of speed", "nccl-doctor checks | grep speed"),
    ),
)
@_as_json
def checks(as_json: bool) -> None:
    """List the installed checks, built-in and plug-in, in the order in which they run.

    On a terminal: each check with its layer, its scope (once per host, or on every rank), its cost,
    the distribution that it comes from, and every code that it can find. In a pipe: one line for
    each code. A plug-in that cannot be loaded is named on stderr.
    """
    from nccl_doctor import registry
    from nccl_doctor.system.terminal import complain, safe

    found = registry.load()
    rows = [
        {
            "check": check.name,
            "layer": check.layer.value,
            "scope": check.scope.value,
            "cost": check.cost,
            "from": safe(found.origins[check.name]),
            "finds": [kind.code for kind in check.kinds],
        }
        # In the order of the run: checks that need no peers come before the sign-in.
        for check in sorted(found.checks, key=lambda check: check.together)
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    elif sys.stdout.isatty():
        _show(_table(rows))
    else:
        for row in rows:
            for code in row.pop("finds"):
                click.echo("  ".join((f"{code:32}", *map(str, row.values()))))
    for problem in found.problems:
        complain(f"{problem.code}: {problem.message}")


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The checks, each with its codes, no wider than the terminal."""
    from tabulate import tabulate

    room = shutil.get_terminal_size((100, 24)).columns
    names = [name for name in rows[0] if name != "finds"]
    taken = sum(2 + max(len(name), *(len(row[name]) for row in rows)) for name in names)
    # tabulate would break a code at its hyphens
    wrap = textwrap.TextWrapper(
        max(30, room - taken), break_on_hyphens=False, break_long_words=False
    )
    shown = [{**row, "finds": wrap.fill(" ".join(row["finds"]))} for row in rows]
    return str(tabulate(shown, "keys", "simple", disable_numparse=True))


@click.command(
    cls=Manual,
    short_help="Print the page of a finding code or a check.",
    exits=ASK_EXITS,
    examples=(
        ("A code from a report", "nccl-doctor explain peer-one-way"),
        ("Codes with a word in their name", "nccl-doctor explain mtu"),
        ("A check", "nccl-doctor explain firewall"),
    ),
)
@click.argument("code", type=Code())
@click.option(
    "--all", "whole", is_flag=True, help="Add other firewalls, and the pages of the checks."
)
@_as_json
def explain(code: str, whole: bool, as_json: bool) -> None:
    """Print one screen on a finding code: its meaning, how to fix it, when it is wrong.

    Where a firewall is the cause, the fix is told for the one of this host; with --all also for
    nft, iptables, firewalld, ufw, the security groups of clouds and NetworkPolicy, with the pages
    of the checks that find it and the sources of their rules. CODE may also be the name of a check,
    or a part of a name: then the codes that have it are listed. docs/codes and docs/checks hold the
    same pages.
    """
    from nccl_doctor import registry
    from nccl_doctor.report.manual import check_page, code_and_check_pages, code_page
    from nccl_doctor.toolkit.suggest import suggest

    found = registry.load()
    named = {check.name: check for check in found.checks}
    if code not in found.kinds and code not in named:
        names, part = [*found.kinds, *named], code.strip().replace("_", "-")
        holding = sorted({name for name in names if part and part in name.replace("_", "-")})
        if not holding:
            hint = suggest(code, names) or f"; `{PROGRAM} checks` lists them"
            raise click.UsageError(f'no check or finding code is named "{code}"{hint}')
        if len(holding) > 1:
            click.echo(_listed(found, holding, as_json=as_json))
            return
        code = holding[0]
    if as_json:
        click.echo(_listed(found, [code], as_json=True))
    elif code in named:
        _show(check_page(named[code]))
    elif whole:
        _show(code_and_check_pages(found, code))
    else:
        from nccl_doctor.report.story import recipe_for
        from nccl_doctor.toolkit.firewall.rulesets import tool_here

        tool = tool_here(_TOOL_S) if recipe_for(code) else ""  # it starts programs
        _show(f"{code_page(found, code, tool)}\n\nAll of it: {PROGRAM} explain --all {code}")


def _listed(found: Registry, names: Sequence[str], *, as_json: bool) -> str:
    """Codes and checks with what they mean, one on each line."""
    from tabulate import tabulate

    from nccl_doctor import registry

    rows = []
    for name in names:
        if name in found.kinds:
            kind = found.kinds[name][0]
            rows.append(
                {
                    "code": name,
                    "title": kind.title,
                    "why": kind.why,
                    "fix": str(kind.fix),
                    "layer": kind.layer.value,
                    "severity": kind.severity.value,
                    "checks": list(found.owners.get(name, ())),
                }
            )
        else:
            (check,) = (check for check in found.checks if check.name == name)
            rows.append({"check": name, "title": registry.question(check)})
    if as_json:
        return json.dumps(rows, indent=1)
    lines = [(row.get("code") or row["check"], row["title"]) for row in rows]
    return str(tabulate(lines, tablefmt="plain", disable_numparse=True))


def versions() -> str:
    """The version of this program and what it would run with, as for a ticket: Python, and torch
    and DeepSpeed as they would be imported. Imports none of them.
    """
    import importlib.metadata
    import importlib.util
    import platform

    from nccl_doctor import __file__ as own_file
    from nccl_doctor import __version__

    home = Path(own_file).parent
    commit = commit_at(home.parent / ".git")
    if not home.is_dir():
        where = f"one file: {home.parent}"
    elif (home / "checks").is_dir():
        where = f"package: {home}"
    else:
        where = f"source tree: {home.parent}"
    rows: list[tuple[str, str, str | Path]] = [
        (PROGRAM, f"{__version__}, commit {commit}" if commit else __version__, where),
        ("python", platform.python_version(), sys.executable),
    ]
    for name in ("torch", "deepspeed"):
        found = importlib.util.find_spec(name)
        if found is None:
            rows.append((name, "not installed", ""))
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        rows.append((name, version, Path(found.origin or "unknown").parent))
    return "\n".join(f"{name} {version}" + f" ({at})" * bool(at) for name, version, at in rows)


def commit_at(git: Path) -> str:
    """The commit that a checkout is at, shortened; empty where there is none to be read."""
    try:
        head = git.joinpath("HEAD").read_text(encoding="ascii").strip()
        ref = head.removeprefix("ref: ")
        if ref != head:
            packed = git / "packed-refs"
            lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
            known = {name: commit for commit, _, name in (line.partition(" ") for line in lines)}
            file = git / ref
            head = file.read_text(encoding="ascii") if file.is_file() else known.get(ref, "")
    except (OSError, ValueError):
        return ""
    return head.strip()[:12]


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
