"""Draw the rooms of the program and who imports whom, from the code: docs/architecture.svg.

An arrow goes from the room that imports to the room that is imported, downwards. Arrows that other
arrows imply are left out (A → C, where A → B → C), so the picture shows the order and not every
import. With --check nothing is written: exit 1 where the picture is stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PICTURE = ROOT / "docs" / "architecture.svg"
Arrows = Mapping[str, frozenset[str]]
"""Room → rooms that it imports."""

ROOMS = {  # room: (row, column, what it holds); an arrow may only go to a lower row
    "cli": (0, 1.5, "click: parse, run, render, exit"),
    "gather": (1, 0.75, "store, joining, rounds, coordinator"),
    "report": (1, 2.25, "renderers, profiles, bundle, redaction"),
    "launch": (2, 0, "who am I; local ranks; job line; ssh"),
    "observe": (2, 1, "one observe in a child that may hang"),
    "judge": (2, 2, "facts → verdict; merging; history"),
    "checks": (2, 3, "a file or folder each: facts and rules"),
    "registry": (3, 2, "finds the checks"),
    "api": (3, 3, "what every check needs"),
    "autopsy": (4, 1.5, "what a dead job left → who failed first"),
    "toolkit": (5, 1.5, "what two or more checks share"),
    "system": (6, 1.5, "processes, deadlines, files, secrets"),
    "model": (7, 1.5, "records that everybody speaks"),
}
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _EDGE = 262, 48, 22, 40, 16


def room_of(module: str) -> str:
    """The room of a module: the folder or module below `nccl_doctor`, or `checks`."""
    parts = module.split(".")
    return parts[0] if parts[0] == "checks" else (parts[1:2] or [""])[0]


def arrows() -> Arrows:
    """The imports between rooms, as the source has them."""
    graph = grimp.build_graph("nccl_doctor", "checks", cache_dir=None)
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            here, there = room_of(module), room_of(other)
            if here in ROOMS and there in ROOMS and here != there:
                found[here].add(there)
    return {room: frozenset(others) for room, others in found.items()}


def upward(found: Arrows) -> list[str]:
    """The arrows that do not lead to a lower row: none, or the picture would hold a circle."""
    return [
        f"{room} → {other}"
        for room in sorted(found)
        for other in sorted(found[room])
        if ROOMS[room][0] >= ROOMS[other][0]
    ]


def implied(found: Arrows, room: str, other: str) -> bool:
    """Whether a longer way leads from one room to the other."""
    return any(other == far or far_leads(found, far, other) for far in found[room] - {other})


def far_leads(found: Arrows, room: str, other: str) -> bool:
    """Whether a room imports another, directly or by way of others."""
    return other in found[room] or any(far_leads(found, far, other) for far in found[room])


def picture(found: Arrows) -> str:
    """The SVG, the same text for the same arrows."""
    rows, columns = (1 + max(place[axis] for place in ROOMS.values()) for axis in (0, 1))
    width = 2 * _EDGE + columns * _WIDTH + (columns - 1) * _GAP_X
    height = 2 * _EDGE + rows * _HEIGHT + (rows - 1) * _GAP_Y
    place = {
        room: (_EDGE + column * (_WIDTH + _GAP_X), _EDGE + row * (_HEIGHT + _GAP_Y))
        for room, (row, column, _) in ROOMS.items()
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="sans-serif" font-size="12">',
        "<title>The rooms of nccl-doctor and who imports whom</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
    ]
    for room in sorted(found):
        for other in sorted(found[room]):
            if not implied(found, room, other):
                (x1, y1), (x2, y2) = place[room], place[other]
                lines.append(
                    f'<path d="M{x1 + _WIDTH / 2:g} {y1 + _HEIGHT:g}L{x2 + _WIDTH / 2:g} {y2:g}" '
                    'stroke="#667" fill="none" marker-end="url(#tip)"/>'
                )
    for room in sorted(place):
        x, y = place[room]
        middle = x + _WIDTH / 2
        lines += [
            f'<rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" '
            'fill="#eef3fa" stroke="#46608a"/>',
            f'<text x="{middle:g}" y="{y + 20:g}" text-anchor="middle" font-weight="bold" '
            f'font-size="14">{room}</text>',
            f'<text x="{middle:g}" y="{y + 37:g}" text-anchor="middle">{ROOMS[room][2]}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main(argv: Sequence[str]) -> int:
    """Write the picture, or say whether it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where stale")
    found = arrows()
    if wrong := upward(found):
        sys.stderr.write(f"imports that lead up: {', '.join(wrong)}\n")
        return 1
    text = picture(found)
    if not parser.parse_args(argv).check:
        PICTURE.write_text(text, encoding="utf-8")
        return 0
    if PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write("docs/architecture.svg is stale: run `make docs`\n")
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
