"""A fix on the page: commands as code, below the hosts that they are for, and prose as prose."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nccl_doctor.report.page.markup import Html, element

_ABOVE = "# "
"""Begins the line above commands: on which hosts they are typed."""
_CODE = re.compile(r"`([^`\n]+)`")


def fix_of(text: str) -> Html:
    """One fix: lines of a shell, which begin with a comment that names hosts, or words.

    The script of the page puts a button beside the hosts, which copies the commands below.
    """
    if not text.startswith(_ABOVE):
        return element("div", element("p", *_prose(text)), class_="fix")
    return element("div", *_typed(text.splitlines()), class_="fix")


def _typed(lines: list[str]) -> Iterator[Html]:
    """Each line that names hosts, above the commands until the next one."""
    heads = [i for i, line in enumerate(lines) if line.startswith(_ABOVE)]
    for i, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        above = element("p", lines[i].removeprefix(_ABOVE), class_="on")
        commands = "\n".join(lines[i + 1 : end])
        if commands:
            code = element("pre", element("code", commands))
            yield element("div", above, code, class_="typed")
        else:
            yield above


def _prose(text: str) -> Iterator[object]:
    """Words, with code where backticks say so."""
    for i, part in enumerate(_CODE.split(text)):
        yield element("code", part) if i % 2 else part
