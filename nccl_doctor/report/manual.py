"""Pages of checks and finding codes, as `explain` and the documentation show them.

Each page is Markdown that reads as well in a terminal. Pure functions of what the registry found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nccl_doctor import registry
from nccl_doctor.model.check import Check
from nccl_doctor.model.findings import Effect, Kind, Scope
from nccl_doctor.model.fixes import Fix, On
from nccl_doctor.registry import Registry
from nccl_doctor.report.lines import wrapped
from nccl_doctor.report.story import recipe_for

_WIDTH = 100
_WRONG = "When it is wrong"
_RULE = "-" * 72
_OBSERVES = {Scope.HOST: "once per host", Scope.RANK: "every rank"}
_ON: Mapping[object, str] = {On.EVERY: "every host", On.OTHERS: "the other hosts"}
_SPAN = re.compile(r"(`[^`]*`)")
_PLACEHOLDER = re.compile(r"[^\s(`]*<[A-Za-z][^<>`]*>(?:[^\s`]*[^\s`.,;)])?")
"""A word that holds `<something>`, which a browser would take for markup."""


def code_page(found: Registry, code: str, tool: str = "") -> str:
    """The page of a finding code; `tool`: with the commands of this firewall alone (`nft`).

    No newline at the end.

    Raises:
        KeyError: nothing installed has this code.
    """
    return kind_page(found.kinds[code][0], _owners(found, code), tool)


def code_and_check_pages(found: Registry, code: str) -> str:
    """The page of a finding code, and those of the checks that find it.

    Raises:
        KeyError: nothing installed has this code.
    """
    pages = [code_page(found, code), *map(check_page, _owners(found, code))]
    return f"\n\n{_RULE}\n\n".join(pages)


def _owners(found: Registry, code: str) -> list[Check]:
    """The checks that find a code, in the order of the names in the registry."""
    named = {check.name: check for check in found.checks}
    return [named[name] for name in found.owners.get(code, ()) if name in named]


def _section(page: str, heading: str) -> str:
    """Text below a heading of a page; empty without it."""
    _, _, rest = page.partition(f"{heading}\n{'-' * len(heading)}\n")
    return re.split(r"\n\n\S[^\n]*\n-{4,}\n", rest)[0].strip()


def check_page(check: Check) -> str:
    """The page of a check: its docstring, below its first line what it finds."""
    question, _, rest = registry.page(check).partition("\n")
    observes = _OBSERVES[check.scope] + (", together" if check.together else "")
    lines = [
        *_heading(check.name),
        question.strip(),
        "",
        f"- layer: {check.layer.value}",
        f"- observed: {observes}",
        f"- lowest level: `--level {check.level.value}`",
        "- finds:",
        *_bullets(f"{kind.code} ({kind.severity.value}): {kind.title}" for kind in check.kinds),
        "",
        rest.strip(),
    ]
    return shown("\n".join(lines)).rstrip()


def shown(text: str) -> str:
    """Text in which a `<placeholder>` that stands in no code span is put into one."""
    parts = _SPAN.split(text)
    parts[::2] = [_PLACEHOLDER.sub(r"`\g<0>`", part) for part in parts[::2]]
    return "".join(parts)


def kind_page(kind: Kind, checks: Sequence[Check], tool: str = "") -> str:
    """The page of a kind that these checks find: why it matters, the fix, when it is wrong, how it
    is found. `tool`: with the commands of this firewall alone (`nft`).
    """
    recipe = recipe_for(kind.code, tool)
    # Several checks are wrong at different times: each tells it on its own page.
    wrong = _section(registry.page(checks[0]), _WRONG) if len(checks) == 1 else ""
    by = [f"check {check.name}: {registry.question(check)}" for check in checks]
    drains = (
        "; drains the host with `--exit-profile slurm`" if Effect.DRAINS in kind.effects else ""
    )
    lines = [
        *_heading(kind.code),
        f"{kind.title}.",
        "",
        *_paragraph(kind.why),
        "",
        *_heading("How to fix", "-"),
        *_fix(kind.fix),
        *(["", *recipe.splitlines()] if recipe else []),
        "",
        *([*_heading(_WRONG, "-"), shown(wrong), ""] if wrong else []),
        *_heading("How it is found", "-"),
        *_bullets(by or ["found by the engine, in no check"], "- "),
        f"- layer: {kind.layer.value}",
        f"- severity: {kind.severity.value}{drains}",
    ]
    return "\n".join(lines)


def _heading(name: str, line: str = "=") -> list[str]:
    return [name, line * len(name), ""]


def _bullets(items: Iterable[str], mark: str = "    - ") -> Iterator[str]:
    for item in items:
        yield from wrapped(item, _WIDTH, mark)


def _fix(fix: str) -> Iterator[str]:
    """Lines of a fix: commands as code, and other ways below them."""
    if not isinstance(fix, Fix):
        yield from _paragraph(fix)
        return
    for i, way in enumerate((fix, *fix.alternatives)):
        if i:
            yield ""
        if not way.steps:
            yield from _paragraph(f"Or: {way}" if i else way)
            continue
        if i:
            yield from ("Or:", "")
        for step in way.steps:
            where = "" if step.on is On.HERE else f"on {_ON.get(step.on, 'hosts that it names')}"
            above = ": ".join(filter(None, (where, step.note)))
            yield from (f"    # {above}",) if above else ()
            yield f"    {step.command}"


def _paragraph(text: str) -> list[str]:
    return wrapped(shown(text), _WIDTH)
