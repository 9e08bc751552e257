"""Long hexadecimal numbers that stand for one machine, port or container, inside words. Pure.

Of 12 or 64 digits: a container, whose short id is the beginning of the long one. Of 16: a GUID, as
tools write it without 0x. Of 32: a machine id. In the form of a UUID, with `-` or `_`: a pod. A
number has digits and letters: what has digits only counts something. Checksums of other lengths
stay, and so does what `sha256:` and the like stand before.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from nccl_doctor.report.redaction.addresses import Addresses
from nccl_doctor.report.redaction.book import Book

_SHORT = 12
"""Digits of a container's short id."""
_NEAR = 24
"""Characters before a number that may say what it is."""
_IDS = re.compile(
    r"(?<![0-9a-z])(?=[0-9a-f]*[a-f])(?=[a-f]*\d)(?!0000)"
    r"(?P<number>[0-9a-f]{64}|[0-9a-f]{32}|[0-9a-f]{16}|[0-9a-f]{12})(?![0-9a-z])"
    r"|(?:(?<=pod)|(?<![0-9a-z]))(?P<pod>[0-9a-f]{8}(?P<sep>[-_])[0-9a-f]{4}"
    r"(?:(?P=sep)[0-9a-f]{4}){2}(?P=sep)[0-9a-f]{12})(?![0-9a-z])",
    re.IGNORECASE,
)
_CHECKSUM = re.compile(
    r"(?:sha\d*|md5|blake\w*|checksum|digest|hash|commit|\+)[\s:=@\"'(-]{0,4}$", re.I
)
"""What stands before a number that is one of a file's content, or of a build."""


class Ids:
    """Pseudonyms of such numbers: as long, and of digits."""

    def __init__(self, book: Book, addresses: Addresses) -> None:
        self._book = book
        self._addresses = addresses

    def of(self, number: str) -> str:
        """The pseudonym of a number."""
        if len(number) == 16:
            return self._addresses.hardware(number)
        if len(number) in (_SHORT, 64):
            return self._container(number)
        return self._addresses.uuid(number)

    def replaced(self, word: str, before: str = "", known: Callable[[str], bool] = bool) -> str:
        """A word with pseudonyms for the ids in it.

        Args:
            word: of a text.
            before: what stands before it.
            known: whether a number is the name of a host: it is left to whoever knows those.
        """
        if len(word) < _SHORT:
            return word

        def put(match: re.Match[str]) -> str:
            if match["pod"]:
                made = self._addresses.uuid(match["pod"].replace("_", "-"))
                return made.replace("-", match["sep"])
            said = (before + word[max(0, match.start() - _NEAR) : match.start()])[-_NEAR:]
            if known(match["number"]) or _CHECKSUM.search(said):
                return match.group()
            return self.of(match["number"])

        return _IDS.sub(put, word)

    def _container(self, number: str) -> str:
        bare = number.lower()
        short, rest = bare[:_SHORT], bare[_SHORT:]
        made = self._book.digits("container", short, _SHORT)
        made += self._book.digits("container", bare, len(rest)) if rest else ""
        self._book.keep("container", made, number)
        return made
