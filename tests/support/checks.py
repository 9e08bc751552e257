"""Checks of this program, found once: to find them all takes 20 ms in each module that does."""

from __future__ import annotations

from nccl_doctor import registry

REGISTRY = registry.load()
CHECKS = {check.name: check for check in REGISTRY.checks}
