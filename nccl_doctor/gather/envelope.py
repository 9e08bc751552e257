"""Envelope of a message of the control store: the version that wrote it, and its seal.

`nccl-doctor` + a header in JSON on one line + the compressed JSON of the message. The header says
the version of this protocol and of the tool, so that a reader of another version knows that it
cannot read the rest. With a secret that all participants share, the header holds an HMAC-SHA256
over the run, the key of the store and the message: then nobody else can write, change, move or
repeat one. Without a secret, whoever reaches the port of the store can write every message.

Both ends know the words that most messages hold (`familiar.json`): these need no bytes on the way,
so that what one participant says fits into one or two small packets.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import zlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from nccl_doctor import __version__

PROTOCOL = 5
"""Raise it with every change of a message that an older version cannot read, or reads wrongly."""
LARGEST = 32 << 20
"""Largest message, in bytes of JSON: the list of all participants may be long."""
DEEPEST = 40
"""Most lists and objects within each other."""

FAMILIAR = files("nccl_doctor.gather").joinpath("familiar.json").read_bytes()
"""Words of most messages, for zlib, which looks back to them. They are part of the protocol; read
now, as later there may be no file to be had."""
_PACKER = zlib.compressobj(6, zdict=FAMILIAR)
"""Copied for each message, as to learn these words anew takes longer than to pack most of them. At
level 9 a message is a tenth smaller, and takes four times as long."""
_MAGIC = b"nccl-doctor "
_HEADER_MAX = 400
_TEXT_MAX = 64
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
    packer = _PACKER.copy()
    payload = packer.compress(text) + packer.flush()
    header: dict[str, Any] = {"protocol": PROTOCOL, "version": __version__}
    if (mac := seal.mac(key, __version__, payload)) is not None:
        header["mac"] = mac
    return _MAGIC + json.dumps(header).encode() + b"\n" + payload


def unwrap(key: str, data: bytes, seal: Seal = OPEN, largest: int = LARGEST) -> tuple[Any, str]:
    """Content of a message, and the version of nccl-doctor that wrote it.

    Raises:
        BadMessage: it says nothing, or not to us: see the three classes.
    """
    header, newline, payload = data.partition(b"\n")
    if not header.startswith(_MAGIC) or len(header) > _HEADER_MAX or not newline:
        elder = _claim(data, largest)
        if isinstance(elder, (dict, list)):  # compressed JSON, without a header
            raise OtherVersion("it is of an older version of nccl-doctor", elder)
        raise BadMessage("it is no message of nccl-doctor")
    about = parsed(header[len(_MAGIC) :])
    if not isinstance(about, dict):
        raise BadMessage("its header is not an object")
    version = str(about.get("version")).encode("ascii", "replace").decode()[:_TEXT_MAX]
    if about.get("protocol") != PROTOCOL:
        words = f"it is of nccl-doctor {version}, here is {__version__}"
        raise OtherVersion(words, _claim(payload, largest))
    told, own = about.get("mac"), seal.mac(key, version, payload)
    if own is None and told is None:
        return _content(payload, largest), version
    if own is None:
        raise NotAuthentic(
            "it was written with a key; here is none (--key)", _claim(payload, largest)
        )
    if not isinstance(told, str):
        raise NotAuthentic(
            "it was written without the key of this run (--key)", _claim(payload, largest)
        )
    if not hmac.compare_digest(own.encode(), told.encode("utf-8", "replace")):
        raise NotAuthentic("it was written with another key", _claim(payload, largest))
    return _content(payload, largest), version


def _claim(payload: bytes, largest: int) -> Any:
    """Content that is not to be believed; None if it cannot be read."""
    try:
        return _content(payload, largest)
    except BadMessage:
        return None


def _content(payload: bytes, largest: int) -> Any:
    unpacker = zlib.decompressobj(zdict=FAMILIAR)  # not used for what was made without
    try:
        text = unpacker.decompress(payload, largest)
    except zlib.error as error:
        raise BadMessage("it is damaged") from error
    if not unpacker.eof:
        whole = len(text) < largest
        raise BadMessage("it is cut off" if whole else f"it is larger than {largest} bytes")
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
