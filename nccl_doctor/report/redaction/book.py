"""The key that pseudonyms are made with, and what each of them stands for. Pure."""

from __future__ import annotations

import hmac
import json
from typing import Any

_DIGITS = 8
"""Hexadecimal digits of a pseudonym: two of a thousand names share one in once in 8000 reports."""


class Book:
    """Maker of pseudonyms, with the real name of each.

    Args:
        key: whoever has it can try whether a pseudonym stands for a name that they guess. Books
            with the same key make the same pseudonyms.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._stand_for: dict[str, dict[str, str]] = {}

    def pseudonym(self, kind: str, real: str, *, shown: str | None = None) -> str:
        """`kind-xxxxxxxx`, always the same for a name; `shown` is how the map spells the name."""
        made = f"{kind}-{self.digits(kind, real, _DIGITS)}"
        self.keep(kind, made, real if shown is None else shown)
        return made

    def digits(self, kind: str, real: str, count: int) -> str:
        """Hexadecimal digits that depend on the key and the name, at most 64."""
        return self._digest(f"{kind}\0{real}").hex()[:count]

    def bit(self, kind: str, depth: int, prefix: int) -> int:
        """0 or 1, by the key and the `depth` leading bits of a number."""
        return self._digest(f"{kind}\0{depth}\0{prefix:x}")[0] & 1

    def keep(self, kind: str, pseudonym: str, real: str) -> None:
        """Note what a pseudonym stands for."""
        self._stand_for.setdefault(kind, {})[pseudonym] = real

    @property
    def fingerprint(self) -> str:
        """Tells keys apart, and says nothing else of them."""
        return self.digits("fingerprint", "", _DIGITS)

    def to_json(self) -> dict[str, Any]:
        """The private map: the key, and for each kind what every pseudonym stands for."""
        kinds = sorted(self._stand_for.items())
        return {
            "what": "Real names of the pseudonyms in a redacted report. Keep this file.",
            "key": self.key.hex(),
            "pseudonyms": {kind: dict(sorted(names.items())) for kind, names in kinds},
        }

    def _digest(self, text: str) -> bytes:
        return hmac.digest(self.key, text.encode("utf-8", "replace"), "sha256")


def key_of_map(text: str) -> bytes | None:
    """The key in a map that `Book.to_json` wrote; None where the text is no such map."""
    try:
        data = json.loads(text)
        key = data["key"] if isinstance(data, dict) and "pseudonyms" in data else None
        if not isinstance(key, str) or not _are_names(data["pseudonyms"]):
            return None
        return bytes.fromhex(key) or None
    except (ValueError, KeyError, RecursionError):
        return None


def _are_names(pseudonyms: Any) -> bool:
    """True if it is what a map holds: kind → pseudonym → real name."""
    return isinstance(pseudonyms, dict) and all(
        isinstance(names, dict) and all(isinstance(name, str) for name in names.values())
        for names in pseudonyms.values()
    )
