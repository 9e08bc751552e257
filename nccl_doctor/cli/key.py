"""`--key`: the secret by which the ranks of a run know each other."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nccl_doctor.system.helpers import send

if TYPE_CHECKING:
    from nccl_doctor.gather.context import Key

LEAST, MOST = 16, 4096
"""Bytes of a key: fewer can be guessed; /dev/zero has no end."""
SECRET = "nccl-doctor.secret"
"""Key in the click context for the secret that came over ssh."""
_KEY, _WORDS = b"=", b"!"


def key_of(ctx: click.Context, given: Mapping[str, Any]) -> Key | None:
    """Secret of the run: of the file, or what came over ssh; None without one.

    Raises:
        click.UsageError: the file cannot be used.
    """
    from nccl_doctor.gather.context import Key

    if ctx.meta.get(SECRET):
        return Key(ctx.meta[SECRET], lasts=False)
    path = given["key"]
    if path is None:
        return None
    if given["hostfile"]:
        raise click.UsageError("--key and --hostfile: the hosts get a key over ssh; leave it out")
    if not path:
        raise click.UsageError("--key '': a file name is needed")
    try:
        told = send(Path(path).parent, lambda: _read(path))
    except OSError as error:
        raise click.UsageError(f"--key: cannot read {path}: {error.strerror}") from error
    if told.startswith(_WORDS):
        raise click.UsageError(f"cannot use {path} for --key, {told[1:].decode()}")
    return Key(told[1:], lasts=True)


def _read(path: str) -> bytes:
    """The key, or what is wrong with the file. In a child, as the disk may not answer."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            return _WORDS + b"it is not a file"
        if about.st_uid not in (0, os.geteuid()):
            return _WORDS + b"it belongs to another user, who knows it"
        if about.st_mode & 0o077:
            mode = stat.S_IMODE(about.st_mode)
            return _WORDS + f"others can read it (mode {mode:04o}); chmod 600 {path}".encode()
        key = file.read(MOST + 1).strip()
    if not LEAST <= len(key) <= MOST:
        words = f"a key has {LEAST} to {MOST} bytes; make one: openssl rand -hex 32 > {path}"
        return _WORDS + words.encode()
    return _KEY + key
