"""The pages of what was found, as `nccl-doctor explain` prints them: cards lead to them."""

from __future__ import annotations

from collections.abc import Iterable

from nccl_doctor.model.check import Check
from nccl_doctor.model.report import Report
from nccl_doctor.report.manual import check_page, kind_page
from nccl_doctor.report.page.markup import Html, element, fold
from nccl_doctor.report.sections import Checks


def anchor(code: str) -> str:
    """Name of the page of a code, in this file."""
    return f"about-{code}"


def section(report: Report, checks: Checks) -> Html | None:
    """A fold for each code, the causes first, and then for each check that finds one of them."""
    kinds = {found.code: found.kind for found in (*report.root_causes, *report.findings)}
    if not kinds:
        return None
    parts, told = [], dict[str, Check]()
    owners = _owners(checks())
    for code, kind in kinds.items():
        mine = {check.name: check for check in owners.get(code, ())}
        told |= mine
        page = element("pre", kind_page(kind, list(mine)))
        parts.append(fold(element("b", code, id=anchor(code)), page))
    parts += [fold(f"check {name}", element("pre", check_page(told[name]))) for name in told]
    return element("section", element("h2", "What the codes mean"), *parts, id="pages")


def _owners(checks: Iterable[Check]) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for check in checks:
        for kind in check.kinds:
            found.setdefault(kind.code, []).append(check)
    return found
