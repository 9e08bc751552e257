"""Options of `run` for what the job needs besides its hosts: storage, ports, services, a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from nccl_doctor.cli.params import Word
from nccl_doctor.toolkit.masking import masked
from nccl_doctor.toolkit.net.endpoints import endpoint_words, read_endpoint

F = TypeVar("F", bound=Callable[..., Any])


class StoragePath(Word):
    """A path that the job needs: `DIR`, or `DIR:ro` for one that it only reads."""

    name = "dir[:ro]"

    def _read(self, value: Any) -> tuple[str, bool]:
        if not isinstance(value, str):
            return value[0], bool(value[1])  # already read
        path = value.removesuffix(":ro")
        if not path or not path.isprintable():
            raise ValueError(f"{value!r} is not a path")
        return os.path.abspath(os.path.expanduser(path)), path == value


class Endpoint(Word):
    """Port of a service: `HOST:PORT`."""

    name = "host:port"

    def _read(self, value: Any) -> str:
        return endpoint_words(*read_endpoint(str(value)))


class Url(Word):
    """A service outside of the job: scheme, host and port of a URL; all else is left out."""

    name = "url"

    def _read(self, value: Any) -> str:
        form = "http://HOST, https://HOST[:PORT] or tcp://HOST:PORT"
        try:
            url = urlsplit(str(value))
            host, port = url.hostname or "", url.port
        except ValueError:
            url, host, port = urlsplit(""), "", None
        good = url.scheme in ("http", "https") or (url.scheme == "tcp" and port)
        if not (good and host and host.isprintable() and " " not in host) or port == 0:
            raise ValueError(f"{masked(str(value))!r} is not {form}")
        return f"{url.scheme}://{endpoint_words(host, port) if port else _in_brackets(host)}"


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def needs_options(function: F) -> F:
    """The options."""
    for option in reversed(
        (
            click.option(
                "--path",
                "paths",
                multiple=True,
                metavar="DIR[:ro]",
                type=StoragePath(),
                help="Storage that the job needs (checkpoints, data, caches): every host uses it "
                "for a moment, and looks for what the others wrote. With :ro nothing is written "
                "there. Several times for several.",
            ),
            click.option(
                "--endpoint",
                "endpoints",
                multiple=True,
                metavar="HOST:PORT",
                type=Endpoint(),
                help="Port of a service of the job (Ray, vLLM, metrics): is it free on HOST, a "
                "host of the job by name, address or node rank, and can the others reach it. To "
                "another HOST, every host tries to connect. Several times for several.",
            ),
            click.option(
                "--reach",
                multiple=True,
                metavar="URL",
                type=Url(),
                help="Service outside of the job that every host has to reach (hub, registry, "
                "tracking server): http, https or tcp://HOST:PORT. Path, user and password are not "
                "used. Several times for several.",
            ),
        )
    ):
        function = option(function)
    return function


def needs_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `Job` from these options."""
    return {
        "paths": tuple(dict(given["paths"]).items()),
        "endpoints": tuple(dict.fromkeys(given["endpoints"])),
        "reach": tuple(dict.fromkeys(given["reach"])),
    }
