"""README.md and CONTRIBUTING.md speak of the program as it is: commands, options, codes, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from nccl_doctor import registry
from nccl_doctor.cli import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")
}
RUN = cli.commands["run"]
EXAMPLE = "clock_skew"
"""The check that readers are asked to imagine."""

page = pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)


def options(command: click.Command, *, hidden: bool) -> set[str]:
    """Long options of a command, with or without those that --help does not show."""
    found = [p for p in command.params if isinstance(p, click.Option) and (hidden or not p.hidden)]
    return {opt for option in found for opt in option.opts if opt.startswith("--")}


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def code(text: str) -> list[str]:
    """Code spans, and the lines of code blocks; a line that goes on in the next is one."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [*re.findall(r"`([^`\n]+)`", rest), *lines]


def doctor(text: str) -> Iterator[list[str]]:
    """The words behind `nccl-doctor` or `-m nccl_doctor`, wherever it is called."""
    for line in code(text):
        for rest in re.findall(r"(?:\bnccl-doctor|-m nccl_doctor) (.*)", line):
            yield shlex.split(rest, comments=True)


def test_it_leads_with_the_line_that_one_has_and_a_failing_sample() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    assert blocks[0].startswith("nccl-doctor run -- torchrun ")
    assert blocks[1].startswith("nccl-doctor: FAIL: ")
    titles = re.findall(r"^## (.*)$", PAGES["README.md"], re.MULTILINE)
    assert titles[:7] == [
        *("Install", "Before a job", "In CI", "Under Slurm", "On Kubernetes", "After a job"),
        "Reading a report",
    ]


def test_it_is_short_and_leaves_the_options_to_their_page() -> None:
    assert len(PAGES["README.md"].split()) <= 800
    assert not re.search(r"^\| `--", PAGES["README.md"], re.MULTILINE)
    assert "(docs/cli.md)" in PAGES["README.md"]
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for option in options(RUN, hidden=False):
        assert re.search(rf"^ +(?:-\w, )?(?:--\S+, |--\S+ / )?{option}\b", page, re.MULTILINE), (
            option
        )


@page
def test_every_command_that_is_called_exists(text: str) -> None:
    called = [words for words in doctor(text) if words and re.fullmatch(r"[a-z]+", words[0])]
    assert called
    for words in called:
        command: click.Command = cli.commands[words[0]]
        if isinstance(command, click.Group):
            command = command.commands[words[1]]
        own = words[: words.index("--")] if "--" in words else words
        given = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert given <= options(command, hidden=True)


def test_every_code_in_a_sample_exists() -> None:
    text, found = PAGES["README.md"], registry.load()
    codes = set(re.findall(r"^✗ .* \[([a-z-]+)\]$", text, re.MULTILINE))
    codes |= set(re.findall(r"(?:blocked|explained) by ([a-z]+-[a-z-]+)", text))
    assert codes
    assert codes <= set(found.kinds)
    asked = {words[1] for words in doctor(text) if words[0] == "explain"} - {"CODE"}
    assert asked <= {*found.kinds, *(check.name for check in found.checks)}


@page
def test_every_file_and_target_that_is_named_exists(text: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    tops = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build"}  # what is made
    spans = [span for span in code(text) if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span)]
    paths = [span for span in spans if "/" in span and span.split("/")[0] in tops]
    assert links
    for path in {*links, *paths}:
        assert EXAMPLE in path or (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", "\n".join(code(text))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_target_stands_in_contributing() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)) - {"help", "clean"}
    assert targets == set(
        re.findall(r"^\| `make ([a-z-]+)", PAGES["CONTRIBUTING.md"], re.MULTILINE)
    )
