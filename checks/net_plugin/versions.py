"""Versions of the interface for network plug-ins that a release of NCCL accepts. Pure.

Source: src/net.cc of NCCL 2.17.1, 2.18.1, 2.20.3 and 2.22.3; src/plugin/net.cc of 2.26.2
to 2.30.7; for 2.32.3 the names in the library of the wheel.
"""

from __future__ import annotations

from collections.abc import Collection

from nccl_doctor.toolkit.versions import release

_READ = (
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
)
"""Release, oldest and newest version that it accepts. Both only rise: a release between two of
these accepts nothing older than the one before it, and nothing newer than the one after it.
"""


def plugin_range(nccl: str | None) -> tuple[int, int | None]:
    """The oldest and the newest version of the interface that a release of NCCL may accept.

    For a release that is not in the table, the range is too wide rather than too narrow.

    Args:
        nccl: its version, such as `2.26.2`; None if not known.

    Returns: 0 and None for a bound that is not known.
    """
    number = release(nccl)[:2]
    oldest = max((low for read, low, _ in _READ if number and read <= number), default=0)
    newest = min((high for read, _, high in _READ if number and number <= read), default=None)
    return oldest, newest


def takes_plugin(nccl: str | None, versions: Collection[int]) -> bool:
    """Whether a release of NCCL may accept a plug-in that exports these versions."""
    oldest, newest = plugin_range(nccl)
    return any(oldest <= each and (newest is None or each <= newest) for each in versions)
