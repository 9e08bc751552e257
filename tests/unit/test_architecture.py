"""The picture of docs/architecture.md is that of the code, and shows no arrow up."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

if importlib.util.find_spec("grimp") is None:
    pytest.skip("import-linter is not installed", allow_module_level=True)

_spec = importlib.util.spec_from_file_location("architecture", ROOT / "scripts/architecture.py")
assert _spec is not None
assert _spec.loader is not None
architecture = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = architecture
_spec.loader.exec_module(architecture)


def test_the_picture_is_that_of_the_code():
    found = architecture.arrows()
    assert architecture.upward(found) == []
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.picture(found)


def test_every_folder_and_module_of_the_root_is_a_room():
    rooms = {
        path.name for path in (ROOT / "nccl_doctor").iterdir() if (path / "__init__.py").is_file()
    }
    assert rooms | {"api", "registry", "checks"} == set(architecture.ROOMS)
    assert len(rooms | {"checks"}) <= 12


def test_an_arrow_up_is_said():
    found = {**architecture.arrows(), "model": frozenset({"cli"})}
    assert architecture.upward(found) == ["model → cli"]


def test_an_implied_arrow_is_not_drawn():
    short = {"cli": frozenset({"gather", "model"}), "gather": frozenset({"model"})}
    found = {room: short.get(room, frozenset()) for room in architecture.ROOMS}
    assert len(re.findall("marker-end", architecture.picture(found))) == 2
