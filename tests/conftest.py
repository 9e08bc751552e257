"""The order in which several workers get the tests."""

from __future__ import annotations

from itertools import groupby

import pytest

_HEAVY = ("lab", "ranks")
_SHARE = 0.9
"""Heavy tests are spread over so much of the others, so that no worker begins its last one late."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread the tests that start ranks and hosts, which wait more than they work, over the rest.

    Side by side they would starve each other; between modules, so that fixtures are kept.
    """
    if not hasattr(config, "workerinput"):
        return
    heavy = [item for item in items if item.path.parent.name in _HEAVY]
    light = [item for item in items if item.path.parent.name not in _HEAVY]
    modules = [list(group) for _, group in groupby(light, key=lambda item: item.path)]
    items.clear()
    given = 0
    for number, module in enumerate(modules, 1):
        due = min(len(heavy), round(len(heavy) * number / (_SHARE * len(modules))))
        items += heavy[given:due] + module
        given = due
    items += heavy[given:]
