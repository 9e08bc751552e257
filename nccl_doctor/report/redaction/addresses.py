"""Pseudonyms of addresses that are addresses again, and of long hexadecimal numbers. Pure.

Two addresses that share their first n bits have pseudonyms that share their first n bits, and no
more, for every n: subnets, prefixes and routes stay what they are (the scheme of Xu, Fan, Ammar and
Moon, "Prefix-preserving IP address anonymization", ICNP 2002). In addition each block that has a
meaning of its own (private, link-local, loopback) is mapped to itself, so that rules about them
come out the same.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from functools import cache

from nccl_doctor.report.redaction.book import Book

_Block = tuple[int, int, bool]
"""Value of the network, length of its prefix, and whether its addresses say nothing of anybody."""


def _blocks(own: Sequence[str], plain: Sequence[str]) -> tuple[_Block, ...]:
    return tuple(
        (int(network.network_address), network.prefixlen, is_plain)
        for names, is_plain in ((own, False), (plain, True))
        for network in map(ipaddress.ip_network, names)
    )


_BLOCKS = {
    4: _blocks(
        ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"),
        ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4"),
    ),
    6: _blocks(
        ("2000::/3", "fc00::/8", "fd00::/8", "fe80::/10", "fe80::/64", "ff02::1:ff00:0/104"),
        ("::/64", "ff00::/8"),
    ),
}
_EMBEDDED = (
    ipaddress.IPv6Network("::ffff:0:0/96"),
    ipaddress.IPv6Network("64:ff9b::/96"),
    ipaddress.IPv6Network("::ffff:0:0:0/96"),
)
"""Where the last 32 bits are an IPv4 address."""
_EXPLODED = re.compile(r"(?:[0-9a-f]{4}:){7}[0-9a-f]{4}", re.IGNORECASE)


def is_ip(text: str) -> bool:
    """True if a text is a numeric address, perhaps with a zone or the length of a prefix."""
    try:
        ipaddress.ip_address(text.partition("/")[0].partition("%")[0])
    except ValueError:
        return False
    return True


class Addresses:
    """Pseudonyms of IPv4, IPv6 and hardware addresses, and of GUIDs and UUIDs."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._known: dict[str, str] = {}
        self._flips = cache(self._flip)  # addresses of one cluster begin alike

    def ip(self, text: str) -> str | None:
        """The pseudonym of an address, of `ADDRESS%ZONE` or `ADDRESS/PREFIX`; None for others.

        What stands for a network (all bits behind the prefix are 0) stands for one afterwards.
        """
        if text not in self._known:
            made = self._ip(text)
            if made is None:
                return None
            self._known[text] = made
        return self._known[text]

    def _ip(self, text: str) -> str | None:
        bare, slash, length = text.partition("/")
        bare, percent, zone = bare.partition("%")
        try:
            address = ipaddress.ip_address(bare)
        except ValueError:
            return None
        bits = address.max_prefixlen
        if slash and not (length.isdecimal() and int(length) <= bits):
            return None
        value = self._mapped(int(address), address.version)
        if slash:
            host_bits = (1 << (bits - int(length))) - 1
            if not int(address) & host_bits:
                value &= ~host_bits
        made = _written(value, address.version, like=bare)
        if value != int(address):
            self._book.keep(f"ipv{address.version}", made, str(address))
        return made + percent + zone + slash + length

    def _mapped(self, value: int, version: int) -> int:
        if version == 6:
            whole = ipaddress.IPv6Address(value)
            if any(whole in network for network in _EMBEDDED):
                return value >> 32 << 32 | self._mapped(value & 0xFFFFFFFF, 4)
        width = 32 if version == 4 else 128
        around = [
            (base, length, is_plain)
            for base, length, is_plain in _BLOCKS[version]
            if value >> (width - length) == base >> (width - length)
        ]
        if around and max(around, key=lambda block: block[1])[2]:
            return value
        made = 0
        for depth in range(width):
            bit = value >> (width - depth - 1) & 1
            made = made << 1 | bit ^ self._flips(version, width, depth, value >> (width - depth))
        return made

    def _flip(self, version: int, width: int, depth: int, prefix: int) -> int:
        """1 if the bit behind this prefix is another one afterwards."""
        if _leads_to_block(prefix, depth, version, width):
            return 0
        return self._book.bit(f"ipv{version}", depth, prefix)

    def hardware(self, text: str) -> str:
        """The pseudonym of a MAC address, of a longer hardware address, or of a GUID of 16 digits:
        as long, with the same separators. One that is nobody's (all 0, all f) stays.
        """
        plain = text.lower().removeprefix("0x")
        bare = re.sub(r"[^0-9a-f]", "", plain)
        if len(set(bare)) == 1:
            return text
        digits = iter(("02" if len(bare) == 12 else "0e") + self._hardware_digits(bare))
        made = "".join(next(digits) if c in "0123456789abcdef" else c for c in plain)
        made = text[: len(text) - len(plain)] + made
        self._book.keep("hardware", made, text)
        return made

    def _hardware_digits(self, bare: str) -> str:
        return self._book.digits("hardware", bare, max(len(bare) - 2, 0))

    def uuid(self, text: str) -> str:
        """The pseudonym of a UUID or another long hexadecimal number, as long."""
        bare = text.lower().replace("-", "")
        digits = iter(self._book.digits("uuid", bare, len(bare)))
        made = "".join("-" if c == "-" else next(digits, "0") for c in text)
        self._book.keep("uuid", made, text)
        return made


def _leads_to_block(prefix: int, depth: int, version: int, width: int) -> bool:
    """True if a block begins further down: flipping the next bit would move it."""
    return any(
        length > depth and base >> (width - depth) == prefix for base, length, _ in _BLOCKS[version]
    )


def _written(value: int, version: int, *, like: str) -> str:
    """An address as text, in the spelling of another."""
    if version == 4:
        return str(ipaddress.IPv4Address(value))
    address = ipaddress.IPv6Address(value)
    if _EXPLODED.fullmatch(like):
        return address.exploded
    if "." in like:
        head = ipaddress.IPv6Address(value >> 32 << 32)
        last = ipaddress.IPv4Address(value & 0xFFFFFFFF)
        if head == ipaddress.IPv6Address("::ffff:0:0"):
            return f"::ffff:{last}"
    return str(address)


# Long hexadecimal numbers that stand for one machine, port or container, inside words. Pure.
#
# Of 12 or 64 digits: a container, whose short id is the beginning of the long one. Of 16: a GUID,
# as tools write it without 0x. Of 32: a machine id. In the form of a UUID, with `-` or `_`: a
# pod. A number has digits and letters: what has digits only counts something. Checksums of other
# lengths stay, and so does what `sha256:` and the like stand before.


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
