"""NCCL's own answer: what it reads and which interface it takes, asked of the library itself.

`ncclGetUniqueId` needs no GPU and no driver: it reads NCCL's configuration files, loads the plug-in
for variables, chooses the interface of the bootstrap, listens there until the process ends, and
says all that at NCCL_DEBUG=INFO. Source: `ncclInit` in NCCL's src/init.cc, src/bootstrap.cc.
Since 2.30.3 `ncclParamGetAllParameterKeys` gives the names of some of its variables, and
`ncclParamDumpAll` prints for each of them the value that counts and whether the variable gave it:
what NCCL cannot read leaves the default. Source: src/param/c_api.cc, src/include/param/param.h.
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
from typing import Any, NamedTuple

from nccl_doctor.system import forks
from nccl_doctor.system.helpers import send_foreign
from nccl_doctor.toolkit.gpu.devices import VISIBLE
from nccl_doctor.toolkit.libraries import library_name
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.nccl.library import nccl_version
from nccl_doctor.toolkit.variables.table import table
from nccl_doctor.toolkit.variables.values import reads_otherwise
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

_SHOW_ALL = "NCCL_PARAM_DUMP_ALL"
"""With it, those that the user guide does not name are listed too."""
_RESTORED = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS")
"""Those of `OURS` that the job's own text replaces before the values are asked for."""
_MOST_NAMES = 1000
_MOST_BYTES = 1 << 20

_SAYS = re.compile(r"NCCL (INFO|WARN) (.*)")
_USING = re.compile(r"Bootstrap ?: Using ?(\S+)<\d+>")
_READ = re.compile(r"(NCCL_\w+) set by environment to ")
_PLUGIN = re.compile(r"Successfully loaded external env plugin (.*)")
_DUMPED = re.compile(
    r"^(NCCL_\w+) \(.*?\) \[(.*?)\].*\n +Current value=(.*) set_by=(\w+) default=", re.MULTILINE
)
"""Name, flags, value and source of a parameter."""
_DEFAULT, _CACHED, _UNSET = "Default", "Cached", "<unset>"


class ReadValue(NamedTuple):
    """The value of a variable as NCCL reads it; `taken` is False where it is the default, since
    the variable is not set or its text is nothing that NCCL can read.
    """

    value: str
    taken: bool


@dataclass(frozen=True)
class LibraryAnswer:
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
        readings: variable → how NCCL reads it, of those `names` that the child did not change.
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
    readings: Mapping[str, ReadValue] = field(default_factory=dict)

    def read_otherwise(self, settings: Mapping[str, Setting]) -> list[str]:
        """Variables that NCCL reads with another value than expected, or that it gets from another
        place: a file that gave it another text or none, or a plug-in.

        Args:
            settings: from `nccl_settings`.
        """
        ours = {
            name: each.value
            for name, each in settings.items()
            if each.origin != "environment" and name not in OURS
        }
        names = ours.keys() | self.from_files.keys()
        found = {name for name in names if ours.get(name) != self.from_files.get(name)}
        for name, reading in self.readings.items():
            text = settings[name].value if name in settings else None
            if _is_unexpected(name, text, reading):
                found.add(name)
        return sorted(found)


def _is_unexpected(name: str, text: str | None, reading: ReadValue) -> bool:
    """True if the table of variables says that NCCL reads a text in another way than it does."""
    row = table().variables.get(name)
    if text is None:
        return reading.taken
    if row is None or not text:
        return False
    return reads_otherwise(row, text, reading.value, taken=reading.taken)


def ask_nccl(
    library: str,
    env: Mapping[str, str],
    breadcrumb: Callable[[str], None] = lambda step: None,
    patience_s: float = PATIENCE_S,
) -> LibraryAnswer | None:
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
        return LibraryAnswer(library, version, error=error.strerror or "no answer in time")
    except ChildProcessError as error:
        return LibraryAnswer(library, version, error=error.strerror or "ended its process")
    fields = said(data["log"])
    if data["result"] == 0:
        fields["error"] = ""
    return LibraryAnswer(
        library,
        version,
        data["result"],
        from_files=data["added"],
        names=tuple(data["names"]),
        readings=dumped(data["dump"], env),
        **fields,
    )


def dumped(text: str, env: Mapping[str, str]) -> dict[str, ReadValue]:
    """Variable → how NCCL reads it, of what `ncclParamDumpAll` prints in the child.

    Args:
        text: what was printed.
        env: environment of the job; the child has others of `OURS`.
    """
    return {
        name: ReadValue("" if value == _UNSET else value.strip(), source != _DEFAULT)
        for name, flags, value, source in _DUMPED.findall(text)
        if name != _SHOW_ALL
        and (name not in OURS or (name in _RESTORED and name in env and _CACHED not in flags))
    }


def said(log: str) -> dict[str, Any]:
    """Fields of a `LibraryAnswer` that a log of NCCL holds: `interface`, `address`, `error`,
    `used`, `plugin`.
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
    log = forks.unnamed_file("log")
    os.dup2(log, 1)
    before = _environment()
    unique_id = ctypes.create_string_buffer(128)
    nccl = ctypes.CDLL(library)
    result = nccl.ncclGetUniqueId(unique_id)
    said = _printed(log)
    added = {name: value for name, value in _environment().items() if name not in before}
    os.environ.update({name: env[name] for name in _RESTORED if name in env})
    os.environ[_SHOW_ALL] = "true"
    names = _names(nccl)
    dump = _dump(nccl, log)
    return json.dumps(
        {"result": result, "added": added, "log": said, "names": names, "dump": dump}
    ).encode()


def _printed(log: int) -> str:
    """The text that was printed into an empty file, which is empty again."""
    ctypes.CDLL(None).fflush(None)
    text = os.pread(log, min(os.lseek(log, 0, os.SEEK_END), _MOST_BYTES), 0)
    os.ftruncate(log, 0)
    os.lseek(log, 0, os.SEEK_SET)
    return text.decode("utf-8", "replace")


def _dump(nccl: ctypes.CDLL, log: int) -> str:
    """The parameters that a library prints with their values; nothing before 2.30.3."""
    try:
        dump = nccl.ncclParamDumpAll
    except AttributeError:
        return ""
    dump.restype = None
    dump()
    return _printed(log)


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
