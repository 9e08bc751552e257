"""Rules on files that variables name: of one rank, and compared between hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from nccl_doctor.api import Confidence, Fix, Severity, Step, Where, shell
from nccl_doctor.toolkit.hosts import sides_in_words
from nccl_doctor.toolkit.variables.table import NamedFile, table
from nccl_doctor.toolkit.versions import differences

from .view import Placed, Problem, Seen, View, either

FILE_UNUSABLE, FILE_DIFFERS = "env-file-unusable", "env-file-differs"
_LOGS = ("WARN", "ATTN", "INFO", "ABORT", "TRACE")
"""Values of NCCL_DEBUG at which NCCL opens NCCL_DEBUG_FILE (src/debug.cc)."""


def file_problems(view: View) -> Iterator[Problem]:
    """Problems of files that cannot be used as their reader uses them."""
    for facts in view.facts.get("files", ()):
        name, row = facts["name"], table().variables.get(facts["name"])
        if row is None or row.file is None or not view.is_set(name):
            continue
        if name == "NCCL_DEBUG_FILE" and (view.text("NCCL_DEBUG") or "").upper() not in _LOGS:
            continue
        file, sure = row.file, Confidence.CERTAIN
        if "hung" in facts:
            says, then = f"did not answer within {facts['hung']['after_s']:.0f} s", file.then
            severity, sure = Severity.WARN, Confidence.LIKELY
        elif "error" in facts:
            says, then, severity = facts["error"]["text"], file.then, Severity(file.missing)
        elif facts.get("fault"):
            says = f"it {facts['fault']}"
            fatal = facts["fatal"]
            then = "NCCL ends with an internal error" if fatal else file.then
            severity = Severity.FAIL if fatal else Severity.WARN
        else:
            continue
        inside = f" ({file.inside} there)" if file.inside else ""
        empty = "" if view.text(name) else " (empty, which counts as set)"
        yield Problem(
            FILE_UNUSABLE,
            f"{view.says(name)}{inside}{empty}: {says}; {then}",
            _fix(view, name, facts["path"], file),
            view.bounded(row, severity),
            confidence=sure,
        )


def _fix(view: View, name: str, path: str, file: NamedFile) -> Fix:
    if file.use == "read":
        others = ["put the file there"] if path else []
        return either(view.drop(name), *others)
    folder = path.rpartition("/")[0] or "."
    make = Step(
        shell("mkdir -p {}", folder), undo=shell("rmdir {}", folder), persists=True,
        note="if it is missing",
    )  # fmt: skip
    return Fix(*view.drop(name).steps, alternatives=[Fix(make)])


def differing_files(seen: Seen) -> Iterator[Placed]:
    """Problems of files that a variable names on several hosts, and whose content differs."""
    of: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    hosts = {}
    for rank, view in seen.values():
        hosts[rank.host.id] = rank.host.label
        for facts in view.facts.get("files", ()):
            if "digest" in facts:
                of[facts["name"]][rank.host.id].add(facts["digest"])
    for name, digests in of.items():
        alike = {host: {name: min(each)} for host, each in digests.items() if len(each) == 1}
        for difference in differences(alike):
            sides = defaultdict(list)
            for host, each in alike.items():
                sides[f"sha256 {each[name]}…"].append(hosts[host])
            odd = tuple(hosts[host] for host in sorted(difference.places))
            yield Placed(
                Problem(
                    FILE_DIFFERS,
                    f"the file that {name} names is not the same: {sides_in_words(sides)}",
                    Fix(text="copy the right one to the hosts that are named"),
                    Severity.WARN,
                    confidence=Confidence.POSSIBLE if difference.tie else Confidence.CERTAIN,
                ),
                Where(hosts=odd),
                {"sha256": dict(sides)},
            )
