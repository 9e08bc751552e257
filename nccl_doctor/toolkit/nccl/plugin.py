"""NCCL's plug-ins: which libraries it would look for, and whether it could use them.

Source: `initPluginLibsOnceFunc` in NCCL's src/plugin/net.cc, src/plugin/plugin_open.cc,
src/plugin/net/; src/plugin/tuner.cc, profiler.cc and env.cc.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

from nccl_doctor.system.helpers import send_foreign
from nccl_doctor.toolkit.libraries import fingerprint


@dataclass(frozen=True)
class PluginType:
    """One type of plug-in.

    Attributes:
        variable: names the plug-in; several of them where NCCL loads `several`.
        prefix: without `.so`, the library that NCCL looks for if no plug-in is named.
        symbol: name of the table of functions, without the version of the interface.
        oldest: version of the interface with which such plug-ins begin.
    """

    variable: str
    prefix: str
    symbol: str
    oldest: int = 1
    several: bool = False

    @property
    def library(self) -> str:
        """The library that NCCL looks for if no plug-in is named."""
        return f"{self.prefix}.so"


NET = PluginType("NCCL_NET_PLUGIN", "libnccl-net", "ncclNetPlugin_v", oldest=2, several=True)
TUNER = PluginType("NCCL_TUNER_PLUGIN", "libnccl-tuner", "ncclTunerPlugin_v")
PROFILER = PluginType("NCCL_PROFILER_PLUGIN", "libnccl-profiler", "ncclProfiler_v")
ENV = PluginType("NCCL_ENV_PLUGIN", "libnccl-env", "ncclEnvPlugin_v")

NET_PLUGIN = NET.library
NO_PLUGIN = "none"
CRASHED, HUNG, UNTRIED = "crashed", "hung", "untried"
_STATIC = "STATIC_PLUGIN"
_COLLNET_SYMBOL = "ncclCollNetPlugin_v"
"""Symbol of collectives in the switches (SHARP), which a network plug-in may bring."""
_VERSIONS_END = 21


def plugin_candidates(plugin: str, of: PluginType = NET) -> Sequence[str]:
    """Libraries that NCCL tries for one value of the plug-in's variable, in its order.

    A value that is neither a path nor a library's name is a suffix; several are separated by
    commas. `none` means no plug-in.
    """
    if plugin.lower() == NO_PLUGIN:
        return ()
    if not plugin:
        return (of.library,)
    names: list[str] = []
    for name in filter(None, plugin.split(",") if of.several else (plugin,)):
        is_file = "/" in name or (name.startswith("lib") and name.endswith(".so"))
        names += [name] if is_file else [name, f"{of.prefix}-{name}.so"]
    return names


def is_linked_in(plugin: str) -> bool:
    """True if a value means a plug-in that is linked into the program: any beginning of its name,
    as NCCL compares it.
    """
    return bool(plugin) and _STATIC.startswith(plugin.upper())


def load_plugin(library: str, of: PluginType = NET) -> str:
    """Load a library as the dynamic loader does it for NCCL; the error, or empty.

    For `observe`: it may crash.
    """
    try:
        loaded = ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    if not any(_exported(loaded, of.symbol, of.oldest)):
        return f"{library} exports no {of.symbol}* that NCCL could use"
    return ""


class PluginBuild(TypedDict):
    """Properties of a plug-in, as `plugin_build` returns them."""

    path: str | None
    versions: list[int]
    collnet: list[int]
    fingerprint: str | None


def plugin_build(library: str, of: PluginType = NET) -> PluginBuild:
    """Properties of a plug-in that loads, to compare it with NCCL and with other hosts.

    Returns: `path`: of the real file, after links; `versions`: those of the interface that it
    exports, ascending, and `collnet`: those of CollNet; `fingerprint`: see `fingerprint`. None for
    what cannot be read.
    """
    facts: PluginBuild = {"path": None, "versions": [], "collnet": [], "fingerprint": None}
    with suppress(OSError):
        loaded = ctypes.CDLL(library)
        facts["versions"] = list(_exported(loaded, of.symbol, of.oldest))
        facts["collnet"] = list(_exported(loaded, _COLLNET_SYMBOL, NET.oldest))
        facts["path"] = _file_of(loaded, f"{of.symbol}{facts['versions'][0]}")
        if facts["path"]:
            facts["fingerprint"] = fingerprint(facts["path"])
    return facts


def _exported(loaded: ctypes.CDLL, symbol: str, oldest: int) -> Iterator[int]:
    versions = range(oldest, _VERSIONS_END)
    return (version for version in versions if hasattr(loaded, f"{symbol}{version}"))


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


class PluginTrial(TypedDict):
    """Libraries that were tried in children, as `try_plugin` returns them."""

    tried: list[list[str]]
    loaded: str | None
    build: PluginBuild | None
    fault: str


def try_plugin(
    plugin: str, of: PluginType, breadcrumb: Callable[[str], None], patience_s: float
) -> PluginTrial:
    """Load what NCCL would load, each library in a child of its own.

    Args:
        plugin: value of the plug-in's variable.
        of: type of the plug-in.
        breadcrumb: called before each library is loaded.
        patience_s: longest time for one library.

    Returns: `tried`: [library, error] in NCCL's order up to the first one that loads; `loaded`:
    that one, or None; `build`: its `plugin_build`; `fault`: if the last library did not return, one
    of `CRASHED`, `HUNG` and `UNTRIED`, and empty else.
    """
    trial: PluginTrial = {"tried": [], "loaded": None, "build": None, "fault": ""}
    for library in plugin_candidates(plugin, of):
        breadcrumb(f"load {library}")
        try:
            told = json.loads(send_foreign("plugin", partial(_tried, library, of), patience_s))
        except TimeoutError as error:
            trial["tried"].append([library, f"did not load: {error.strerror}"])
            return {**trial, "fault": HUNG}
        except ChildProcessError as error:
            words = error.strerror or ""
            trial["tried"].append([library, words])
            # SIGKILL comes from outside: no memory, or an administrator.
            known = words.startswith("ended") and "SIGKILL" not in words
            return {**trial, "fault": CRASHED if known else UNTRIED}
        trial["tried"].append([library, told["error"]])
        if not told["error"]:
            return {**trial, "loaded": library, "build": told["build"]}
    return trial


def _tried(library: str, of: PluginType) -> bytes:
    error = load_plugin(library, of)
    build = None if error else plugin_build(library, of)
    return json.dumps({"error": error, "build": build}).encode()
