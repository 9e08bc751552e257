"""Free text with pseudonyms in it: messages, stacks, log lines, what tools print. Pure.

One pass over the text: what has been replaced is not looked at again. What cannot be told from its
shape, the bare name of a host or a user, is known from elsewhere in the record (`KnownNames`).
"""

from __future__ import annotations

import re

from nccl_doctor.report.redaction.addresses import Addresses, Ids
from nccl_doctor.report.redaction.book import Book
from nccl_doctor.report.redaction.names import KnownNames, is_public
from nccl_doctor.report.redaction.paths import HOMES, Paths, is_systems_own
from nccl_doctor.system.masking import MASK, masked

_PATH_END = r"[^\s'\"`<>|;,()\[\]{}:]"
_WORD = re.compile(r"[a-z0-9]+(?:[-_.]+[a-z0-9]+)*", re.IGNORECASE)
_THINGS = re.compile(
    r"""
    (?P<url>\b[a-z][a-z0-9+.-]*://[^\s'"`<>,;]+)
    |(?P<unit_of>--runtime\ )(?P<unit>[\w:.@\\-]+)
    |(?P<serial>(?:\bserial(?:\ number|[_-]number)?|\[SN\]\ Serial\ number|\basset\ tag)
        \s*[:=]\s*)(?P<serial_is>[\w.-]+)
    |(?P<uuid_of>(?<![0-9a-z])(?:[a-z][a-z0-9_]*[-_])?)
        (?P<uuid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-z]))
    |(?P<mac>(?<!\w)[0-9a-f]{2}(?P<sep>[:-])[0-9a-f]{2}(?:(?P=sep)[0-9a-f]{2}){4,18}
        (?!\w|(?P=sep)[0-9a-f]))
    |(?P<dotted>(?<![\w.])[0-9a-f]{4}(?:\.[0-9a-f]{4}){2,3}(?!\w|\.\w))
    |(?P<enx>\benx)(?P<enx_is>[0-9a-f]{12})\b
    |(?P<guid>(?<![\w:])[0-9a-f]{4}(?::[0-9a-f]{4}){3}(?![\w:])|\b0x(?!0000)[0-9a-f]{16}\b)
    |(?P<ipv6>(?<![\w%])(?:[0-9a-f]{0,4}:){2,7}(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9a-f]{0,4})
        (?:%[\w.-]*\w)?(?:/\d{1,3}(?![\w.]))?)(?!\w)
    |(?P<ipv4>(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?:/\d{1,2}(?![\w./]))?)(?!\w|\.\d)
    |(?P<quote>['"])(?P<quoted>(?:~[\w.-]*|\.{1,2}|/(?!/)[^'"\s/]+)/[^'"\n]*)(?P=quote)
    |(?P<path>(?:(?<![\w/.~)\]}>$-])(?:~[\w.-]*|\.{1,2}|\$\{?\w+\}?)?/(?!/)
        |/(?=(?:home|Users)/))PATH_END*)
    |(?P<user>\b[a-z_][\w.-]*)@(?P<at>(?!if\d|eth|en[opsx]|ib\d|bond|veth|wl|lo\b)
        [a-z0-9](?:[\w.-]*[a-z0-9])?(?:\[\d[\d,-]*\])?)
    |(?P<hosts>[a-z0-9][a-z0-9_.-]*(?:\[\d[\d,-]*\](?:[a-z0-9_.-]*[a-z0-9])?)+)
    |(?P<word>WORD)
    """.replace("PATH_END", _PATH_END).replace("WORD", _WORD.pattern),
    re.VERBOSE | re.IGNORECASE,
)
_VERSION = re.compile(
    r"(?:\b(?:versions?|release|firmware|fw|driver|vbios|cudnn|cublas|nccl|cuda|torch|cu1\d)|==)"
    r"[\s:=(]*$",
    re.IGNORECASE,
)
"""What stands before four numbers that are a version, and no address."""
_IS_VERSION = re.compile(r"v?\d+(?:\.\d+)+[\w.+-]*", re.IGNORECASE)
_FOUR = re.compile(r"(?<!\d)(?:\d{1,3}\.){3}\d{1,3}(?!\d)")
_LISTED = re.compile(
    r"(?<![a-z0-9_.-])[a-z0-9][a-z0-9_.-]*(?:\[\d[\d,-]*\](?:[a-z0-9_.-]*[a-z0-9])?)+",
    re.IGNORECASE,
)
_NCCL_LINE = re.compile(r"(?<!\S)([^\s:]+):\d+:\d+ \[")
_HOMES = re.compile(rf"/(?:{'|'.join(sorted(HOMES))})/([^\s/'\"`<>|;,()\[\]{{}}:%*$]+)")
_SAID = re.compile(r"\b(?:connect to host |resolve host(?:name)? |HOSTNAME=)([\w.-]*\w)")
_USER_IS = re.compile(r"\b(?:USER|LOGNAME|SUDO_USER)=([\w.-]+)")
_SAID_SIGNS = ("connect to host ", "resolve host", "HOSTNAME=")
_USER_SIGNS = ("USER=", "LOGNAME=")
"""One of them is in every text that the pattern finds something in: to look for them is quick."""


class Text:
    """Puts pseudonyms into free text, once the names in it are known."""

    def __init__(self, book: Book) -> None:
        self.names = KnownNames(book)
        self.addresses = Addresses(book)
        self.ids = Ids(book, self.addresses)
        self.paths = Paths(book, self.names, self.ids)
        self.book = book
        self._known_ips: set[str] = set()

    def know_address(self, address: str) -> None:
        """Note that this numeric address is in the record: it is never taken for a version."""
        self._known_ips.add(address.partition("/")[0])

    def learn(self, text: str) -> None:
        """Note the names of hosts and users that a text gives away by the place that they stand in:
        the head of NCCL's log lines, home directories, what ssh says.
        """
        if "/" in text:
            for user in _HOMES.findall(text):
                self.names.know_user(user)
        if "[" in text:
            for listed in _LISTED.findall(text):
                self.names.know_list(listed)
        if " [" in text:
            for host in _NCCL_LINE.findall(text):
                self.names.know_host(host)
        if any(sign in text for sign in _SAID_SIGNS):
            for host in _SAID.findall(text):
                self.names.know_host(host)
        if any(sign in text for sign in _USER_SIGNS):
            for user in _USER_IS.findall(text):
                self.names.know_user(user)

    def replaced(self, text: str, *, is_version: bool = False) -> str:
        """The text with pseudonyms in it; `is_version`: four numbers in it are one."""

        def put(match: re.Match[str]) -> str:
            return self._put(match, is_version)

        return _THINGS.sub(put, masked(text))

    def _put(self, match: re.Match[str], is_version: bool) -> str:
        kind, text = match.lastgroup, match.group()
        if kind == "word":
            return self._word(text, match, is_version)
        if kind == "hosts":
            return self._hosts(text, match, is_version)
        if kind == "dotted" and (is_version or _VERSION.search(_before(match))):
            return text
        if kind in ("ipv4", "ipv6"):
            return self._ip(match, text, is_version)
        if kind == "path":
            return self._path(text)
        if kind == "quoted":
            return match["quote"] + self._quoted(match["quoted"]) + match["quote"]
        if kind == "at":
            return self._at(text, match["user"], match["at"])
        if kind == "unit":
            return match["unit_of"] + self.paths.group(match["unit"])
        if kind == "uuid":
            return match["uuid_of"] + self.addresses.uuid(match["uuid"])
        if kind == "enx_is":
            return match["enx"] + self.addresses.hardware(match["enx_is"])
        if kind == "serial_is":
            return match["serial"] + self.serial(match["serial_is"])
        if kind == "url":
            return self._url(text)
        return self.addresses.hardware(text)

    def serial(self, text: str) -> str:
        """The pseudonym of a serial number; of none, as tools write it, itself."""
        if text.upper() in ("N", "N/A", "0", "NONE", "UNKNOWN"):
            return text
        return self.book.pseudonym("serial", text)

    def _hosts(self, text: str, match: re.Match[str], is_version: bool) -> str:
        """A list of hosts; or a word, and numbers in brackets that are no hosts."""
        made = self.names.list_of(text)
        if made is not None:
            return made
        return _WORD.sub(lambda word: self._word(word.group(), match, is_version), text)

    def _word(self, word: str, match: re.Match[str], is_version: bool) -> str:
        """Names and ids in a word; and addresses, as in `nccl.10.0.0.1.log`, that are known."""
        if not is_version:
            word = self.ids.replaced(word, _before(match), self.names.knows_host)
        if word.count(".") < 3:
            return self.names.in_word(word)

        def put(match: re.Match[str]) -> str:
            known = match.group() in self._known_ips
            return (self.addresses.ip(match.group()) if known else None) or match.group()

        made = _FOUR.sub(put, word)
        return self.names.in_word(word) if made == word else made

    def _ip(self, match: re.Match[str], text: str, is_version: bool) -> str:
        bare, slash, length = text.partition("/")
        is_known = match.lastgroup != "ipv4" or bare in self._known_ips
        if not is_known and (is_version or _VERSION.search(_before(match))):
            return text
        inner = text.strip(":") if "::" not in (text[:2], text[-2:]) else text
        for each in (text, text.removesuffix(":"), inner):
            made = self.addresses.ip(each)
            if made is not None:
                return text.replace(each, made, 1)
        if slash:
            return self.replaced(bare) + slash + length
        return ":".join(map(self.replaced, text.split(":"))) if ":" in text else text

    def _at(self, text: str, user: str, at: str) -> str:
        if _IS_VERSION.fullmatch(at) and self.addresses.ip(at) is None:
            return text
        listed = self.names.list_of(at) if "[" in at else None
        host = listed or self.addresses.ip(at) or self.names.host(at)
        return f"{self.names.user(user)}@{host}"

    def _quoted(self, text: str) -> str:
        """A path in quotes may hold spaces; so may a command that begins with one."""
        if " " in text and is_systems_own(text):
            return self.replaced(text)
        return self.paths.path(text)

    def _path(self, text: str) -> str:
        bare = text.rstrip(".!?…")
        return self.paths.path(bare) + text[len(bare) :]

    def _url(self, text: str) -> str:
        bare = text.rstrip(").]!?…" if "[" not in text else ".!?…")
        scheme, _, rest = bare.partition("://")
        host, slash, path = rest.partition("/")
        if is_public(host.partition(":")[0]):
            return text
        user, at, host = host.rpartition("@")
        if at and user != MASK:
            user = self.names.user(user)
        made = f"{scheme}://{user}{at}{self.replaced(host)}"
        return made + (self.paths.path(slash + path) if slash else "") + text[len(bare) :]


def _before(match: re.Match[str]) -> str:
    """The few characters before a match, which may say what it is."""
    return match.string[max(0, match.start() - 24) : match.start()]
