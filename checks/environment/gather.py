"""Variables that are set on this host: in the environment, and in NCCL's configuration files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.system.masking import masked_variable
from nccl_doctor.toolkit.nccl.conf import conf_faults, nccl_settings
from nccl_doctor.toolkit.variables.recorded import SET
from nccl_doctor.toolkit.variables.table import VariableTable, table

from .no_proxy import is_proxied

ENVIRONMENT = "environment"


class Gathered(TypedDict):
    """Facts that `gather_variables` returns."""

    variables: dict[str, dict[str, Any]]
    unknown: list[str]
    faults: list[dict[str, Any]]
    proxied: bool


def gather_variables(
    env: Mapping[str, str], home: Path | None = None, root: Path = Path("/")
) -> Gathered:
    """Facts, as plain data, on variables that are in the table or under its prefixes.

    `variables`: name → `{"value", "origin", "line"}`, as effective for the library that reads
    it: `origin` is `environment` or a file of NCCL's. Secrets are masked as in every report.
    `unknown`: names under the prefixes that are not in the table.
    `faults`: `{"path", "line", "name", "fault", "misplaced"}`, see `ConfFault`; a variable in a
    file that its library does not read is `misplaced`.
    `proxied`: whether programs that obey http_proxy would use a proxy for MASTER_ADDR.
    """
    known = table()
    variables: dict[str, Any] = {}
    faults: list[dict[str, Any]] = []
    settings = nccl_settings(env, home, root)
    for name, setting in sorted(settings.items()):
        row = known.variables.get(name)
        if row is None:
            continue
        if setting.origin != ENVIRONMENT and not row.in_files:
            fault = "has no effect: torch reads its variables before NCCL reads this file"
            if row.library != "torch":
                fault = "has no effect here: only NCCL reads this file"
            faults.append(_fault(setting.origin, setting.line, name, fault, misplaced=True))
            continue
        shown = SET if row.kind == "url" else masked_variable(name, setting.value)
        variables[name] = {"value": shown, "origin": setting.origin, "line": setting.line}
    for each in conf_faults(env, home, root):
        if not each.name or each.name in known.variables or known.library_of(each.name):
            faults.append(_fault(each.path, each.line, each.name, each.fault))
    return {
        "variables": variables,
        "unknown": _unknown(known, settings),
        "faults": faults,
        "proxied": is_proxied(env),
    }


def _fault(
    path: str, line: int, name: str, fault: str, *, misplaced: bool = False
) -> dict[str, Any]:
    return {"path": path, "line": line, "name": name, "fault": fault, "misplaced": misplaced}


def _unknown(known: VariableTable, names: Iterable[str]) -> list[str]:
    """Names that no library reads, by the table; it knows every name only for a few prefixes."""
    prefixes = tuple(each for library in known.libraries for each in library.near)
    found = []
    for name in names:
        library = known.library_of(name)
        if name in known.variables or not name.isidentifier():
            continue
        if library is not None and library.ignores(name):
            continue
        if library or name in known.unread or name.startswith(prefixes) or closest(name):
            found.append(name)
    return sorted(found)


def closest(name: str) -> str:
    """The name of the table that was meant, if only upper case or the word NCCL is wrong."""
    variables = table().variables
    if name.upper() in variables and name.upper() != name:
        return "" if name in variables else name.upper()
    word, _, rest = name.upper().partition("_")
    meant = f"NCCL_{rest}"
    is_slip = word != "NCCL" and word.startswith("N") and set(word) == set("NCCL")
    return meant if is_slip and meant in variables else ""
