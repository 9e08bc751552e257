"""The same fix for each tool: texts in `recipes/`, which `explain` prints with a code.

The first line of a text says which codes it is for; what follows is Markdown, commands indented.
"""

from __future__ import annotations

from importlib.resources import files

_CODES = "codes:"


def recipe_for(code: str) -> str:
    """Text of the recipe for a code; empty where there is none."""
    return next((text for codes, text in recipes() if code in codes), "")


def recipes() -> list[tuple[tuple[str, ...], str]]:
    """Every recipe: the codes that it is for, and its text."""
    found = []
    folder = files(__package__).joinpath("recipes")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".md"):
            first, _, text = file.read_text(encoding="utf-8").partition("\n")
            found.append((tuple(first.removeprefix(_CODES).split()), text.strip()))
    return found
