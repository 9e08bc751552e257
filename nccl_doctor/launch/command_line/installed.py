"""The flags of a launcher that is installed, from its own parser.

The tables of this package are those of the releases that were read; the next one has others. A
launcher imports torch, so that it is asked in a child, and only about a line that needs it.
"""

from __future__ import annotations

import importlib
import json
from argparse import ArgumentParser
from functools import cache
from typing import NoReturn

from nccl_doctor.system.helpers import send_foreign

_ASK_S = 30.0
"""Longest time for the import of a launcher: torch takes 2 s, and 20 s from a slow disk."""


@cache
def installed_flags(parser: str) -> dict[str, bool]:
    """Flags of the launcher in this Python: spellings joined by `/` → whether it takes a value.

    Args:
        parser: `module:function`; that returns its parser, or parses with it.

    Returns: nothing where it is not installed, or cannot be asked.
    """
    if not parser:
        return {}
    try:
        flags: dict[str, bool] = json.loads(send_foreign("launcher", lambda: _ask(parser), _ASK_S))
    except OSError:
        return {}
    return flags


class _Made(Exception):
    """Raised with the parser of a function that would parse with it."""


def _ask(parser: str) -> bytes:
    """Body of the child."""

    def keep(self: ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise _Made(self)

    module, _, function = parser.partition(":")
    ArgumentParser.parse_args = ArgumentParser.parse_known_args = keep  # type: ignore[assignment, method-assign]
    try:
        found = getattr(importlib.import_module(module), function)()
    except _Made as made:
        found = made.args[0]
    except BaseException:  # code of others: whatever it raises, it gives no answer
        return b"{}"
    return json.dumps(
        {
            "/".join(action.option_strings): action.nargs != 0
            for action in found._actions
            if any(name.startswith("--") for name in action.option_strings)
            and action.dest != "help"
        }
    ).encode()
