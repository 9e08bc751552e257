"""Tables of facts in TOML files beside the code, in a folder or a zip file."""

from __future__ import annotations

import sys
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_table(package: str, name: str) -> dict[str, Any]:
    """The content of the file `name` of a package, not cached."""
    found: dict[str, Any] = tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))
    return found
