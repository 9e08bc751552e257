"""Every way in which a report is read, written and printed: made from the program, so that a new
format is covered by itself, and a new subcommand missed by a test that says so.
"""

from __future__ import annotations

from pathlib import Path

import click

from nccl_doctor.cli import cli
from nccl_doctor.report import issue
from nccl_doctor.report.formats import formats, renderer
from tests.support.planted import secret_report

REPORT = cli.commands["report"]
assert isinstance(REPORT, click.Group)
SAVED = renderer("json")(secret_report())
SUMMARY = "FAIL: gandalf's firewall drops connections from bilbo17"
MOST_S = 100.0

READS = {  # subcommand of `report` → every way in which it reads the file BAD, beside the good GOOD
    "show": [["show", "BAD"], *(["show", "--format", form, "BAD"] for form in formats())],
    "judge": [["judge", "BAD"]],
    "merge": [["merge", "BAD"], ["merge", "GOOD", "BAD"]],
    "diff": [["diff", "BAD", "GOOD"], ["diff", "GOOD", "BAD"]],
    "fixes": [["fixes", "BAD"], ["fixes", "--host", "x", "BAD"]],
    "bundle": [["bundle", "--no-tools", "BAD"]],
    "issue": [["issue", name, "BAD"] for name in issue.projects()],
}
GIVES = {  # subcommand → how it is called to write a report to a path, or to stdout
    "show": ["show", "GOOD"],
    "judge": ["judge", "GOOD"],
    "merge": ["merge", "GOOD"],
}
PRINTS = {
    **{f"show as {form}": ["show", "--format", form, "GOOD"] for form in ("text", *formats())},
    "show with a profile": ["show", "--exit-profile", "nagios", "GOOD"],
    "judge": ["judge", "GOOD"],
    "judge to -": ["judge", "--json", "-", "GOOD"],
    "merge": ["merge", "GOOD"],
    "diff": ["diff", "GOOD", "GOOD"],
    "diff as json": ["diff", "--format", "json", "GOOD", "GOOD"],
    "fixes": ["fixes", "GOOD"],
    "bundle": ["bundle", "--no-tools", "GOOD"],
    "issue": ["issue", "nccl", "GOOD"],
}


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, and what it holds."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def has_outputs(command: click.Command) -> bool:
    """Whether it writes a report in any format."""
    return set(formats()) <= {param.name for param in command.params}
