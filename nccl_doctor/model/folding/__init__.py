"""Facts that are equal on many ranks, kept once: `fold` writes them so, `unfold` reads them.

A template holds what most of some values have in common, under a name made from its content. A
folded value names its template and says what it has of its own:

    {"$same": NAME, "$each": [...], "$but": {POINTER: ...}, "$not": [POINTER, ...]}
    {"$rows": NAME, "$each": {KEY: [...], ...}, "$but": {KEY: ...}}

`$each` are its values at the places that differ on each, in the order in which the template lists
these places; `$but` what it has elsewhere in place of the template's; `$not` what it lacks. A
POINTER is one of JSON (RFC 6901). Within a value of its own, another folded value may stand; within
a template none. `{"$literal": VALUE}` is a value that must not be taken for a folded one.

The second form is an object whose entries are like one template, for example the calls of a host to
healthy peers: `$each` are their own values by key, `$but` the entries that are unlike, as they are.
Of a list, `$each` is a list, and there is no `$but`.
"""

from __future__ import annotations

SAME, ROWS, LITERAL = "$same", "$rows", "$literal"
EACH, BUT, NOT = "$each", "$but", "$not"
FORMS = frozenset({SAME, ROWS, LITERAL, EACH, BUT, NOT})
"""Keys of a folded value. A record of the report that has one may have others, in clear."""


def pointer(path: tuple[str | int, ...]) -> str:
    """JSON pointer of a place."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)
