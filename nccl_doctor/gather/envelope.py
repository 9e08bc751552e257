"""Envelope of a message of the control store: the version that wrote it, and its seal.

`nccl-doctor` + a header in JSON on one line + the compressed JSON of the message. The header says
the version of this protocol and of the tool, so that a reader of another version knows that it
cannot read the rest. With a secret that all participants share, the header holds an HMAC-SHA256
over the run, the key of the store and the message: then nobody else can write, change, move or
repeat one. Of what is not sealed nothing is unpacked or parsed, but a claim of 4 KB at most, which
names who wrote it. Without a secret, whoever reaches the port of the store can write every message:
then a budget bounds what all messages together may take.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import zlib
from dataclasses import dataclass
from typing import Any

from nccl_doctor import __version__

PROTOCOL = 7
"""Raise it with every change of a message that an older version cannot read, or reads wrongly."""
LARGEST = 32 << 20
"""Largest message, in bytes of JSON: the list of all participants may be long."""
CLAIM_MAX = 4096
"""Most bytes of JSON that are read of a message that is not believed: to name who wrote it."""
DEEPEST = 40
"""Most lists and objects within each other."""
_MAGIC = b"nccl-doctor "
_HEADER = re.compile(
    rb'nccl-doctor \{"protocol": (\d{1,9}), "version": "([ !#-\[\]-~]{1,64})"'
    rb'(?:, "mac": "([0-9a-f]{64})")?(\}|, )'
)
"""Header as `wrap` writes it, so that nothing is parsed before the seal; a later version may add to
it."""
HEADER_MAX = 400
_HOLD_OTHERS = (dict, list)


class BadMessage(ValueError):
    """A message is not what it should be: damaged, too large, or not of this program. `value` is
    what it says, where that can be read: not to be believed, but to name who says it.
    """

    def __init__(self, words: str, value: Any = None) -> None:
        super().__init__(words)
        self.value = value


class OtherVersion(BadMessage):
    """A message of a version of nccl-doctor that this one does not understand."""


class NotAuthentic(BadMessage):
    """Message whose sender does not have the key of this run."""


class Budget:
    """Bytes of JSON that messages without a seal may take together. The first `FREE` of each do not
    count: many say little. One may have a `PART` of what is left.
    """

    FREE, PART = 16 << 10, 4

    def __init__(self, left: int) -> None:
        self.left = left

    def largest(self, largest: int) -> int:
        """Most that a message may have now, of one that may have `largest`."""
        return min(largest, self.FREE + self.left // self.PART)

    def spend(self, size: int) -> None:
        """Count a message of this size."""
        self.left -= max(0, min(size - self.FREE, self.left))


@dataclass(frozen=True)
class Seal:
    """The secret of a run, if there is one. `run` is what no other run has: a message of an earlier
    run with the same secret is none of this one.
    """

    secret: bytes | None = None
    run: str = ""

    def mac(self, key: str, version: str, payload: bytes) -> str | None:
        """HMAC that proves that the writer has the secret; None without a secret."""
        if self.secret is None:
            return None
        parts = (self.run.encode(), key.encode(), version.encode(), payload)
        signed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self.secret, signed, hashlib.sha256).hexdigest()

    def name(self, key: str) -> str:
        """Name of a key in the store: with a secret, only who has it can tell it."""
        mac = self.mac(key, "name", b"")
        return key if mac is None else f"{key}~{mac[:16]}"


OPEN = Seal()
"""No secret."""


def wrap(key: str, value: Any, seal: Seal = OPEN, largest: int = LARGEST) -> bytes:
    """A message, ready for the store.

    Raises:
        ValueError: it is larger than `largest`.
    """
    text = json.dumps(value).encode()
    if len(text) > largest:
        raise ValueError(f"{key}: {len(text)} bytes is more than {largest}")
    payload = zlib.compress(text)
    header: dict[str, Any] = {"protocol": PROTOCOL, "version": __version__}
    if (mac := seal.mac(key, __version__, payload)) is not None:
        header["mac"] = mac
    return _MAGIC + json.dumps(header).encode() + b"\n" + payload


def unwrap(
    key: str,
    data: bytes,
    seal: Seal = OPEN,
    largest: int = LARGEST,
    budget: Budget | None = None,
) -> tuple[Any, str]:
    """Content of a message, and the version of nccl-doctor that wrote it.

    Of one that must be sealed and is not, at most a claim is read. All others count against the
    `budget`, if there is one.

    Raises:
        BadMessage: it says nothing, or not to us: see the three classes.
    """
    header, newline, payload = data.partition(b"\n")
    told = _HEADER.match(header)
    trusted = largest if seal.secret is None else min(largest, CLAIM_MAX)
    if told is None or len(header) > HEADER_MAX or not newline:
        elder = None if header.startswith(_MAGIC) else _claim(data, trusted, budget)
        if isinstance(elder, (dict, list)):  # compressed JSON, without a header
            raise OtherVersion("it is of an older version of nccl-doctor", elder)
        raise BadMessage("it is no message of nccl-doctor")
    version = told[2].decode()
    if int(told[1]) == PROTOCOL and (told[4] != b"}" or told.end() != len(header)):
        raise BadMessage("it is no message of nccl-doctor")
    if int(told[1]) != PROTOCOL:
        words = f"it is of nccl-doctor {version}, here is {__version__}"
        raise OtherVersion(words, _claim(payload, trusted, budget))
    own, mac = seal.mac(key, version, payload), told[3]
    if own is None and mac is None:
        return _content(payload, largest, budget), version
    if own is not None and mac is not None and hmac.compare_digest(own.encode(), mac):
        return _content(payload, largest), version
    words = "it was written with another key"
    if own is None:
        words = "it was written with a key; here is none (--key)"
    elif mac is None:
        words = "it was written without the key of this run (--key)"
    raise NotAuthentic(words, _claim(payload, CLAIM_MAX))


def may_be_sealed(start: bytes) -> bool:
    """True if a message that begins so says that it is sealed, which may be a lie."""
    told = _HEADER.match(start)
    return told is not None and told[3] is not None


def _claim(payload: bytes, largest: int, budget: Budget | None = None) -> Any:
    """Content that is not to be believed; None if it cannot be read."""
    try:
        return _content(payload, largest, budget)
    except BadMessage:
        return None


def _content(payload: bytes, largest: int, budget: Budget | None = None) -> Any:
    most = largest if budget is None else budget.largest(largest)
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(payload, most)
    except zlib.error as error:
        raise BadMessage("it is damaged") from error
    if budget is not None:
        budget.spend(len(text))
    if not unpacker.eof:
        if len(text) < most:
            raise BadMessage("it is cut off")
        together = (
            "" if most == largest else ", the most that is left for one without a key (--key)"
        )
        raise BadMessage(f"it is larger than {most} bytes{together}")
    return parsed(text)


def parsed(text: bytes) -> Any:
    """Value of JSON that another process has written.

    Raises:
        BadMessage: it is none, or nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise BadMessage("it is nested too deeply") from error
    except ValueError as error:
        raise BadMessage("it is not JSON") from error
    level = [value] if type(value) in _HOLD_OTHERS else []
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in _HOLD_OTHERS
        ]
        if not level:
            return value
    raise BadMessage("it is nested too deeply")
