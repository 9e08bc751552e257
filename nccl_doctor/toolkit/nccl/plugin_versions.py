"""Versions of the interface for plug-ins that a release of NCCL accepts. Pure.

Source: src/net.cc of NCCL 2.17.1, 2.18.1, 2.20.3 and 2.22.3; src/plugin/net.cc of 2.26.2
to 2.30.7. Tuners: src/misc/tuner.cc of 2.19.1 to 2.25.1, then src/plugin/tuner.cc. Profilers:
src/misc/profiler.cc of 2.23.4 to 2.25.1, then src/plugin/profiler.cc. Variables: src/plugin/env.cc
of 2.28.7 to 2.30.7. For 2.32.3 the names in the library of the wheel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

from nccl_doctor.model.cluster import Cluster, Host
from nccl_doctor.toolkit.nccl.plugin import ENV, NET, PROFILER, TUNER, PluginType
from nccl_doctor.toolkit.versions import NCCL_LIBRARY, release

_READ: Mapping[PluginType, Sequence[tuple[tuple[int, int], int, int]]] = {
    NET: (
        ((2, 17), 4, 6),
        ((2, 18), 4, 6),
        ((2, 20), 5, 8),
        ((2, 22), 5, 8),
        ((2, 26), 6, 10),
        ((2, 27), 6, 10),
        ((2, 28), 6, 11),
        ((2, 29), 6, 11),
        ((2, 30), 6, 12),
        ((2, 32), 6, 12),
    ),
    TUNER: (
        ((2, 19), 1, 1),
        ((2, 20), 1, 1),
        ((2, 21), 2, 2),
        ((2, 22), 2, 3),
        ((2, 23), 2, 3),
        ((2, 24), 2, 4),
        ((2, 27), 2, 4),
        ((2, 28), 2, 5),
        ((2, 29), 2, 5),
        ((2, 30), 2, 6),
        ((2, 32), 2, 6),
    ),
    PROFILER: (
        ((2, 23), 1, 1),
        ((2, 24), 1, 2),
        ((2, 25), 1, 2),
        ((2, 26), 1, 3),
        ((2, 27), 1, 4),
        ((2, 28), 1, 5),
        ((2, 29), 1, 6),
        ((2, 30), 1, 6),
        ((2, 32), 1, 7),
    ),
    ENV: (
        ((2, 28), 1, 1),
        ((2, 29), 1, 1),
        ((2, 30), 1, 2),
        ((2, 32), 1, 2),
    ),
}
"""Release, oldest and newest version that it accepts. Both only rise: a release between two of
these accepts nothing older than the one before it, and nothing newer than the one after it.
"""


def cuda_releases(cluster: Cluster, host: Host) -> Set[str]:
    """Versions of the NCCL that ranks of a host have loaded; RCCL has a history of its own."""

    def find() -> Mapping[int, Set[str]]:
        found: dict[int, set[str]] = {}
        for rank, library in cluster.facts(NCCL_LIBRARY):
            if library["loaded"] and library["cuda"]:
                found.setdefault(rank.host.id, set()).add(library["loaded"]["version"])
        return found

    return cluster.once(cuda_releases, (NCCL_LIBRARY,), find).get(host.id, frozenset())


def knows_plugin(nccl: str | None, of: PluginType) -> bool:
    """True if a release of NCCL may look for plug-ins of this type at all."""
    number = release(nccl)[:2]
    return not number or number >= _READ[of][0][0]


def plugin_range(nccl: str | None, of: PluginType = NET) -> tuple[int, int | None]:
    """The oldest and the newest version of the interface that a release of NCCL may accept.

    For a release that is not in the table, the range is too wide rather than too narrow.

    Args:
        nccl: its version, such as `2.26.2`; None if not known.
        of: type of the plug-in.

    Returns: 0 and None for a bound that is not known.
    """
    number = release(nccl)[:2]
    oldest = max((low for read, low, _ in _READ[of] if number and read <= number), default=0)
    newest = min((high for read, _, high in _READ[of] if number and number <= read), default=None)
    return oldest, newest


def takes_plugin(nccl: str | None, versions: Collection[int], of: PluginType = NET) -> bool:
    """True if a release of NCCL may accept a plug-in that exports these versions."""
    oldest, newest = plugin_range(nccl, of)
    return any(oldest <= each and (newest is None or each <= newest) for each in versions)


def range_in_words(nccl: str | None, of: PluginType = NET) -> str:
    """`plugin_range` as text: `v6 to v12`, `v6 or newer`."""
    oldest, newest = plugin_range(nccl, of)
    return f"v{oldest} or newer" if newest is None else f"v{oldest} to v{newest}"
