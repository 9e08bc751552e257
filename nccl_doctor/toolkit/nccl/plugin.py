"""NCCL's network plug-ins: which libraries it would look for, and whether it could use them.

Source: `initPluginLibsOnceFunc` in NCCL's src/plugin/net.cc, src/plugin/plugin_open.cc and
src/plugin/net/.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from nccl_doctor.toolkit.libraries import fingerprint

NET_PLUGIN = "libnccl-net.so"
"""The library that NCCL looks for if no plug-in is named."""
NO_PLUGIN = "none"
_SYMBOL = "ncclNetPlugin_v"
"""Name of the table of functions, without the version of the interface."""
_COLLNET_SYMBOL = "ncclCollNetPlugin_v"
"""The same, of collectives in the switches (SHARP)."""
_VERSIONS = range(2, 21)


def plugin_candidates(plugin: str) -> Sequence[str]:
    """Libraries that NCCL tries for one value of NCCL_NET_PLUGIN, in its order.

    A value that is neither a path nor a library's name is a suffix; several are separated by
    commas. `none` means no plug-in.
    """
    if plugin.lower() == NO_PLUGIN:
        return ()
    if not plugin:
        return (NET_PLUGIN,)
    names: list[str] = []
    for name in filter(None, plugin.split(",")):
        is_file = "/" in name or (name.startswith("lib") and name.endswith(".so"))
        names += [name] if is_file else [name, f"libnccl-net-{name}.so"]
    return names


def load_plugin(library: str) -> str:
    """Load a library as the dynamic loader does it for NCCL; the error, or empty.

    For `observe`: it may crash.
    """
    try:
        loaded = ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    if not any(_exported(loaded)):
        return f"{library} exports no ncclNetPlugin_v* that NCCL could use"
    return ""


class PluginBuild(TypedDict):
    """Properties of a plug-in, as `plugin_build` returns them."""

    path: str | None
    versions: list[int]
    collnet: list[int]
    fingerprint: str | None


def plugin_build(library: str) -> PluginBuild:
    """Properties of a plug-in that loads, to compare it with NCCL and with other hosts.

    Returns: `path`: of the real file, after links; `versions`: those of the interface that it
    exports, ascending, and `collnet`: those of CollNet; `fingerprint`: see `fingerprint`. None for
    what cannot be read.
    """
    facts: PluginBuild = {"path": None, "versions": [], "collnet": [], "fingerprint": None}
    with suppress(OSError):
        loaded = ctypes.CDLL(library)
        facts["versions"] = list(_exported(loaded))
        facts["collnet"] = list(_exported(loaded, _COLLNET_SYMBOL))
        facts["path"] = _file_of(loaded, f"{_SYMBOL}{facts['versions'][0]}")
        if facts["path"]:
            facts["fingerprint"] = fingerprint(facts["path"])
    return facts


def _exported(loaded: ctypes.CDLL, symbol: str = _SYMBOL) -> Iterator[int]:
    return (version for version in _VERSIONS if hasattr(loaded, f"{symbol}{version}"))


class _Symbol(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(loaded: ctypes.CDLL, symbol: str) -> str | None:
    """Real path of the file that defines a symbol; the library may be linked from there."""
    dladdr = getattr(ctypes.CDLL(None), "dladdr", None)
    found, at = _Symbol(), ctypes.addressof(ctypes.c_char.in_dll(loaded, symbol))
    if dladdr is None or not dladdr(ctypes.c_void_p(at), ctypes.byref(found)) or not found.file:
        return None
    return str(Path(found.file.decode("utf-8", "replace")).resolve())


def first_plugin(plugin: str, breadcrumb: Callable[[str], None]) -> tuple[list[list[str]], str]:
    """([library, error] in NCCL's order up to the first one that loads, that one or empty).

    Args:
        plugin: value of NCCL_NET_PLUGIN.
        breadcrumb: called before each library is loaded.
    """
    tried: list[list[str]] = []
    for library in plugin_candidates(plugin):
        breadcrumb(f"load {library}")
        error = load_plugin(library)
        tried.append([library, error])
        if not error:
            return tried, library
    return tried, ""
