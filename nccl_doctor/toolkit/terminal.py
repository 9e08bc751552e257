"""Text from elsewhere on its way to a terminal, a log or a page: nothing in it may be obeyed.

The name of a process, a host, a file or a key, an error message of ssh, any field of a report that
somebody sent: whoever chose it could clear the screen, colour a failure green, or turn the
direction of a line around. All of it goes through `safe` or `lines`, whatever prints it.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from typing import TextIO

from nccl_doctor.toolkit.masking import masked

_OBEYED = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Control characters; invisible and direction-changing ones; halves of surrogates; private ones."""
_COMMAND = re.compile(r"^(\s*)::|##\[", re.MULTILINE)


def safe(text: str) -> str:
    """Text on one line without anything that a terminal would obey.

    White space becomes one space; control characters, escapes, invisible and direction-changing
    characters are written out as Python would escape them.
    """
    return _written_out(" ".join(str(text).split()))


def lines(text: str) -> str:
    """The same for text of several lines: line ends and tabs stay, and all other white space."""
    return "\n".join("\t".join(map(_written_out, line.split("\t"))) for line in text.split("\n"))


def inert(text: str) -> str:
    """A text for the log of a step, in which the runner of GitHub finds no command to obey."""
    return _COMMAND.sub(lambda found: f"{found[1]}\\::" if found[1] is not None else r"#\#[", text)


def in_github() -> bool:
    """True in a step of GitHub Actions, whose runner reads what is printed."""
    return bool(os.environ.get("GITHUB_ACTIONS"))


def obeys_escapes(stream: TextIO) -> bool:
    """True for a terminal on which the cursor can be moved."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def wants_color(stream: TextIO) -> bool:
    """True if text on this stream is to have colours: NO_COLOR and FORCE_COLOR decide, in this
    order, else whether it is a terminal.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if forced := os.environ.get("FORCE_COLOR"):
        return forced != "0"
    return obeys_escapes(stream)


def complain(text: str) -> None:
    """Write one line to stderr, with the name of the program before it, and no secret in it."""
    sys.stderr.write(f"nccl-doctor: {inert(safe(masked(text)))}\n")
    sys.stderr.flush()


def _written_out(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _OBEYED else char
        for char in text
    )
