"""Elements of HTML that cannot be made without escaping what is put into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from nccl_doctor.system.terminal import lines

_VOID = frozenset({"br", "input", "link", "meta"})

Attribute = str | int | float | bool | None


class Html(str):
    """Text that is HTML already. Everything else is text, and escaped."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: Attribute) -> Html:
    """One element.

    Args:
        name: of the element, from the program and never from a report.
        children: `Html` is taken as it is; anything else is escaped; None is left out.
        attributes: `class_` is class, `data_from` is data-from; None and False leave one out, True
            gives one without a value.
    """
    opening = name + "".join(
        _attribute(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{together(*children)}</{name}>")


def together(*children: object) -> Html:
    """Several children in a row, as those of an element."""
    return Html(
        "".join(
            child if isinstance(child, Html) else escape(lines(str(child)), quote=True)
            for child in children
            if child is not None
        )
    )


def fold(summary: object, *children: object, is_open: bool = False, class_: str = "") -> Html:
    """Children under a line that hides or shows them."""
    head = element("summary", summary)
    return element("details", head, *children, open=is_open, class_=class_ or None)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table that scrolls by itself where the page is narrower than it."""
    top = element("tr", *(element("th", name, scope="col") for name in head))
    body = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    whole = element("table", element("thead", top), element("tbody", *body))
    return element("div", whole, class_="scroll", tabindex=0)


def _attribute(name: str, value: Attribute) -> str:
    return f" {name}" if value is True else f' {name}="{escape(lines(str(value)), quote=True)}"'
