"""Options of `run` for what the job needs besides its hosts: storage, ports, services, a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import click

from nccl_doctor.cli.line import COMMAND
from nccl_doctor.cli.params import OneWord
from nccl_doctor.system.masking import masked
from nccl_doctor.toolkit.net.endpoints import endpoint_words, read_endpoint

_ENV, _TCP, _FILE = "env://", "tcp://", "file://"


class StoragePath(OneWord):
    """A path that the job needs: `DIR`, or `DIR:ro` for one that it only reads."""

    name = "dir[:ro]"

    def _read(self, value: Any) -> tuple[str, bool]:
        if not isinstance(value, str):
            return value[0], bool(value[1])  # already read
        path = value.removesuffix(":ro")
        if not path or not path.isprintable():
            raise ValueError(f"{value!r} is not a path")
        return os.path.abspath(os.path.expanduser(path)), path == value


class Endpoint(OneWord):
    """Port of a service: `HOST:PORT`."""

    name = "host:port"

    def _read(self, value: Any) -> str:
        return endpoint_words(*read_endpoint(str(value)))


class Url(OneWord):
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


class InitMethod(OneWord):
    """The init_method of a job, without what stands behind a question mark: `env://`,
    `tcp://HOST:PORT` or `file:///PATH`.
    """

    name = "url"

    def _read(self, value: Any) -> str:
        scheme, slashes, rest = str(value).partition("?")[0].partition("://")
        if slashes and scheme == "env" and not rest:
            return _ENV
        if slashes and scheme == "tcp":
            return _TCP + endpoint_words(*read_endpoint(rest.rstrip("/")))
        if slashes and scheme == "file":
            if not rest.startswith("/"):
                raise ValueError(
                    f"{value!r}: torch takes the part up to the next / for a host and leaves it "
                    f"out; write file:///{rest} with the whole path"
                )
            path = os.path.normpath(rest)
            if rest.endswith("/") or path == "/" or not path.isprintable():
                raise ValueError(f"{value!r} names no file")
            return _FILE + path
        raise ValueError(f"{value!r} is not file:///PATH, tcp://HOST:PORT or env://")


def meet_at(ctx: click.Context, given: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Let `--init-method tcp://HOST:PORT` stand for the options that say where to meet, unless a
    launcher or a command says that.

    Raises:
        click.UsageError: --master-addr or --master-port says something else.
    """
    from nccl_doctor.launch.detect import detect

    text = given["init_method"] or ""
    if not text.startswith(_TCP):
        return
    place = read_endpoint(text.removeprefix(_TCP))
    there = dict(zip(("master_addr", "master_port"), place, strict=True))
    for name, value in there.items():
        if given[name] not in (None, value):
            option = f"--{name.replace('_', '-')} {given[name]}"
            raise click.UsageError(
                f"--init-method {text} and {option} contradict each other: leave one of them out",
                ctx,
            )
    launch = detect(environ)
    if not (launch.master_addr or launch.master_port or ctx.meta.get(COMMAND)):
        given.update(there)


def needs_of(given: Mapping[str, Any], master_port: int | None) -> dict[str, Any]:
    """Fields of a `Job` from these options.

    The job's own store is one more endpoint, where it is not at the port where the ranks of this
    run meet: at the same port, it is the same store by another name.
    """
    init_method = given["init_method"] or ""
    in_a_file = init_method.startswith(_FILE)
    endpoints = dict.fromkeys(given["endpoints"])
    store = init_method.removeprefix(_TCP) if init_method.startswith(_TCP) else ""
    if store and read_endpoint(store)[1] == master_port:
        store = ""
    if store:
        endpoints[store] = None
    paths: dict[str, bool] = {}
    for path, writes in given["paths"]:
        paths[path] = writes or paths.get(path, False)
    return {
        "paths": tuple(paths.items()),
        "endpoints": tuple(endpoints),
        "reach": tuple(dict.fromkeys(given["reach"])),
        "init_store": store,
        "init_file": init_method.removeprefix(_FILE) if in_a_file else "",
    }
