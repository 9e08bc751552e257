"""NCCL's network plug-ins: which libraries it would look for, and whether they can be loaded.

Source: `initPluginLibsOnceFunc` in NCCL's src/plugin/net.cc, src/plugin/plugin_open.cc and
src/plugin/net/.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

NET_PLUGIN = "libnccl-net.so"
"""What NCCL looks for where nobody names a plug-in."""
NO_PLUGIN = "none"
_SYMBOLS = tuple(f"ncclNetPlugin_v{version}" for version in range(2, 21))
"""Tables of functions, by version of the interface; NCCL 2.30 takes 6 to 12."""


def plugin_candidates(plugin: str) -> Sequence[str]:
    """Libraries that NCCL tries for one value of NCCL_NET_PLUGIN, in its order.

    A value that is neither a path nor a library's name is a suffix; several are separated by
    commas. `none` means that none is wanted.
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
    """Load a library as the dynamic loader does it for NCCL; what is wrong with it, or empty.

    For `observe`: it may crash.
    """
    try:
        loaded = ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    if not any(hasattr(loaded, symbol) for symbol in _SYMBOLS):
        return f"{library}: it exports no ncclNetPlugin_v* that NCCL could use"
    return ""


def first_plugin(plugin: str, breadcrumb: Callable[[str], None]) -> tuple[list[list[str]], str]:
    """([library, what is wrong with it] in NCCL's order up to the first good one, that one or
    empty).

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
