"""Files of hardware and of rings, as NCCL's own reader takes them: it knows a part of XML only.

Source: `xmlGetNode`, `xmlLoadSub` and the rules of the elements in NCCL's src/graph/xml.cc, limits
in src/graph/xml.h and topo.h, tag by tag from 2.6.4 to 2.32.3. A file that it cannot read ends NCCL
with an internal error; what has another root is read as an empty one. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nccl_doctor.toolkit.nccl.release import NcclRelease

TOPOLOGY, GRAPHS = "topology", "graphs"
_ELEMENTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    TOPOLOGY: {
        "": ("system",),
        "system": ("cpu",),
        "cpu": ("pci", "nic"),
        "pci": ("pci", "gpu", "nic", "pcilink"),
        "gpu": ("nvlink", "c2c"),
        "nic": ("net",),
    },
    GRAPHS: {
        "": ("graphs",),
        "graphs": ("graph",),
        "graph": ("channel",),
        "channel": ("net", "gpu"),
    },
}
"""Form → element → elements that are kept in it; others are skipped with all that they hold."""
_LONGEST = 254
"""Bytes of a name or a value."""


@dataclass(frozen=True)
class XmlFault:
    """A fault of a file: NCCL ends if it is `fatal`, and goes on without the file if not."""

    says: str
    fatal: bool = True


class _Broken(Exception):
    """Raised where NCCL gives up."""


def most_elements(form: str, release: NcclRelease) -> int:
    """Elements at which NCCL gives up."""
    number = release.number or (9999,)
    if number < (2, 21, 5):
        return 1024
    if form == TOPOLOGY:
        return 256
    return 65536 if number >= (2, 29, 7) else 4096


def fault_in(text: bytes, form: str, release: NcclRelease) -> XmlFault | None:
    """The fault of a file of this form, or None."""
    known, root = _ELEMENTS[form], _ELEMENTS[form][""][0]
    most = most_elements(form, release)
    reader = _Elements(text, b"\"'" if (release.number or (9999,)) >= (2, 27, 3) else b'"')
    around: list[tuple[str, tuple[str, ...]]] = []
    kept, rooted = 0, False
    try:
        while True:
            if kept == most:
                raise _Broken(f"has {most} elements or more, and NCCL reads less")
            node = reader.node()
            if node is None:
                if around:
                    raise _Broken(f"ends within <{around[-1][0]}>")
                return None if rooted else XmlFault(f"has no <{root}>", fatal=False)
            kind, name, attributes = node
            if kind == "close" and around:
                if around.pop()[0] != name:
                    raise _Broken(f"closes </{name}> where another element is open")
                continue
            is_kept = name in (around[-1][1] if around else known[""])
            if is_kept:
                kept += 1
                if name == root:
                    rooted = True
                    _check_version(attributes)
            if kind != "single":
                around.append((name, known.get(name, ()) if is_kept else ()))
    except _Broken as broken:
        return XmlFault(str(broken))


def _check_version(attributes: Mapping[str, str]) -> None:
    if "version" not in attributes:
        raise _Broken("has no version in its first element")
    if attributes["version"].strip() not in ("1", "0x1", "01"):
        raise _Broken(f"has version {attributes['version'][:20]}, and NCCL needs 1")


class _Elements:
    """Elements of a text, one after the other."""

    def __init__(self, text: bytes, quotes: bytes) -> None:
        self._text, self._quotes, self._at = text, quotes, 0

    def node(self) -> tuple[str, str, dict[str, str]] | None:
        """(`open`, `close` or `single`; name; attributes), None at the end of the text."""
        while True:
            while self._text[self._at : self._at + 1] in (b" ", b"\n", b"\r"):
                self._at += 1
            if self._at >= len(self._text):
                return None
            start = self._at
            if self._char() != b"<":
                raise _Broken(f"has something else than an element in line {self._line()}")
            name, _, last = self._token()
            if not name.startswith("!--"):
                break
            end = self._text.find(b"-->", start + 4)
            if end < 0:
                raise _Broken("ends within a comment")
            self._at = end + 3
        if not name and last == b"/":
            name, _, last = self._token()
            if last != b">":
                raise _Broken(f"has no > after </{name} in line {self._line()}")
            return "close", name, {}
        attributes = {}
        while last == b" ":
            key, value, last = self._token(values=True)
            attributes[key] = value
        kind = "open"
        if last == b"/":
            kind = "single"
            last = self._token()[2]
        if last != b">":
            raise _Broken(f"has no > where NCCL needs one, in line {self._line()}")
        return kind, name, attributes

    def _char(self) -> bytes:
        char = self._text[self._at : self._at + 1]
        if not char:
            raise _Broken("ends within an element")
        self._at += 1
        return char

    def _token(self, *, values: bool = False) -> tuple[str, str, bytes]:
        """(name, value, the character after it)."""
        name = b""
        while True:
            char = self._char()
            if char == b"=":
                if not values:
                    raise _Broken(f"has a = in the name of an element in line {self._line()}")
                value, last = self._value()
                return name.decode("utf-8", "replace"), value, last
            if char in (b" ", b">", b"/", b"\n", b"\r"):
                return name.decode("utf-8", "replace"), "", char
            name += char
            if len(name) >= _LONGEST:
                raise _Broken(f"has a name that is too long in line {self._line()}")

    def _value(self) -> tuple[str, bytes]:
        quote = self._char()
        if quote not in (self._quotes[:1], self._quotes[1:]):
            raise _Broken(f"has a value without quotes in line {self._line()}")
        end = self._text.find(quote, self._at)
        if end < 0 or end - self._at >= _LONGEST:
            raise _Broken(f"has a value without an end, or too long, in line {self._line()}")
        value = self._text[self._at : end].decode("utf-8", "replace")
        self._at = end + 1
        return value, self._char()

    def _line(self) -> int:
        return self._text.count(b"\n", 0, self._at) + 1
