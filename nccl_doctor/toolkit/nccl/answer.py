"""NCCL's own answer: what it reads and which interface it takes, asked of the library itself.

`ncclGetUniqueId` needs no GPU and no driver: it reads NCCL's configuration files, loads the plug-in
for variables, chooses the interface of the bootstrap, listens there until the process ends, and
says all that at NCCL_DEBUG=INFO. Source: `ncclInit` in NCCL's src/init.cc, src/bootstrap.cc.
`ncclParamGetAllParameterKeys`, since 2.30.3, gives the names of some of its variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.toolkit.errands import send_foreign
from nccl_doctor.toolkit.gpu.devices import VISIBLE
from nccl_doctor.toolkit.libraries import library_name
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.nccl.library import nccl_version
from nccl_doctor.toolkit.versions import release

PATIENCE_S = 3.0
"""Longest time for an answer; 20 ms are usual."""
OLDEST = (2, 22)
"""Older releases also load the network plug-in and start it."""
OURS: Mapping[str, str] = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,BOOTSTRAP",
    "NCCL_DEBUG_FILE": "",  # set, so that a file of NCCL's cannot set it
    **dict.fromkeys(VISIBLE, "-1"),  # the log would wake the driver
}
"""Variables of the child that is asked; they win over configuration files."""

_MOST_NAMES = 1000

_SAYS = re.compile(r"NCCL (INFO|WARN) (.*)")
_USING = re.compile(r"Bootstrap ?: Using ?(\S+)<\d+>")
_READ = re.compile(r"(NCCL_\w+) set by environment to ")
_PLUGIN = re.compile(r"Successfully loaded external env plugin (.*)")


@dataclass(frozen=True)
class Answer:
    """The answer of one NCCL library.

    Attributes:
        library: path.
        version: as ncclGetVersion says.
        result: of ncclGetUniqueId, 0 for success; None if it gave none.
        interface, address: of the bootstrap; empty if it took none.
        error: the last warning of a call that failed, or how the process ended.
        used: variables that NCCL says it used.
        from_files: variable → value that NCCL took from its configuration files, of all names, so
            not for a report.
        plugin: plug-in that gives NCCL its variables, empty without one.
        names: variables that NCCL lists as its own, since 2.30.3; it does not list all of them.
    """

    library: str
    version: str = ""
    result: int | None = None
    interface: str = ""
    address: str = ""
    error: str = ""
    used: tuple[str, ...] = ()
    from_files: Mapping[str, str] = field(default_factory=dict)
    plugin: str = ""
    names: tuple[str, ...] = ()

    def read_otherwise(self, settings: Mapping[str, Setting]) -> list[str]:
        """Variables for which NCCL's configuration files gave it another value, or none.

        Args:
            settings: from `nccl_settings`.
        """
        ours = {
            name: each.value
            for name, each in settings.items()
            if each.origin != "environment" and name not in OURS
        }
        names = ours.keys() | self.from_files.keys()
        return sorted(name for name in names if ours.get(name) != self.from_files.get(name))


def ask_nccl(
    library: str,
    env: Mapping[str, str],
    breadcrumb: Callable[[str], None] = lambda step: None,
    patience_s: float = PATIENCE_S,
) -> Answer | None:
    """Ask one NCCL library, in a child that is killed if it does not answer.

    Args:
        library: path of one that this process has loaded.
        env: environment of the job.
        breadcrumb: called before.
        patience_s: longest time.

    Returns: None for a release that does more than to choose (before 2.22), and for RCCL, which
    also reads the settings of the GPUs.
    """
    version = nccl_version(library) or ""
    if library_name(library) != "libnccl" or release(version) < OLDEST:
        return None
    breadcrumb(f"ncclGetUniqueId of {library}")
    try:
        data = json.loads(send_foreign("nccl", lambda: _ask(library, env), patience_s))
    except TimeoutError as error:
        return Answer(library, version, error=error.strerror or "no answer in time")
    except ChildProcessError as error:
        return Answer(library, version, error=error.strerror or "ended its process")
    fields = said(data["log"])
    if data["result"] == 0:
        fields["error"] = ""
    names = tuple(data["names"])
    return Answer(library, version, data["result"], from_files=data["added"], names=names, **fields)


def said(log: str) -> dict[str, Any]:
    """Fields of an `Answer` that a log of NCCL holds: `interface`, `address`, `error`, `used`,
    `plugin`.
    """
    lines = _SAYS.findall(log)
    infos = [text for level, text in lines if level == "INFO"]
    warnings = [text.strip() for level, text in lines if level == "WARN"]
    pick = next(filter(None, map(_USING.match, infos)), None)
    plugin = next(filter(None, map(_PLUGIN.match, infos)), None)
    interface, address = _apart(pick[1]) if pick else ("", "")
    return {
        "interface": interface,
        "address": address,
        "error": warnings[-1] if warnings else "",
        "used": tuple(dict.fromkeys(found[1] for found in map(_READ.match, infos) if found)),
        "plugin": plugin[1] if plugin else "",
    }


def _apart(text: str) -> tuple[str, str]:
    """Interface and address of `eth0:1:192.0.2.1` or `eth0:fe80::1%eth0`; a label has a colon."""
    for colon in re.finditer(":", text):
        address = text[colon.end() :].partition("%")[0]
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(address)
            return text[: colon.start()], address
    return text.partition(":")[0], ""


def _ask(library: str, env: Mapping[str, str]) -> bytes:
    """Ask, in a child of its own: it changes environment and output, and leaves a thread."""
    os.environ.clear()
    os.environ.update({**env, **OURS})
    log = os.memfd_create("log")
    os.dup2(log, 1)
    before = _environment()
    unique_id = ctypes.create_string_buffer(128)
    nccl = ctypes.CDLL(library)
    result = nccl.ncclGetUniqueId(unique_id)
    ctypes.CDLL(None).fflush(None)
    added = {name: value for name, value in _environment().items() if name not in before}
    size = os.lseek(log, 0, os.SEEK_END)
    text = os.pread(log, min(size, 1 << 20), 0).decode("utf-8", "replace")
    names = _names(nccl)
    return json.dumps({"result": result, "added": added, "log": text, "names": names}).encode()


def _names(nccl: ctypes.CDLL) -> list[str]:
    """The parameters that a library lists by name; none before 2.30.3."""
    keys, count = ctypes.POINTER(ctypes.c_char_p)(), ctypes.c_int()
    try:
        result = nccl.ncclParamGetAllParameterKeys(ctypes.byref(keys), ctypes.byref(count))
    except AttributeError:
        return []
    found = [keys[i] or b"" for i in range(min(count.value, _MOST_NAMES))] if result == 0 else []
    return sorted(name.decode("utf-8", "replace") for name in found)


def _environment() -> dict[str, str]:
    """The environment of the process as C sees it; Python does not see what C code sets."""
    pointer = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found, index = {}, 0
    while (entry := pointer[index]) is not None:
        name, _, value = entry.decode("utf-8", "replace").partition("=")
        found[name] = value
        index += 1
    return found
