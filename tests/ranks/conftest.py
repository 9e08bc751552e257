"""Fixtures of tests that share a real store."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest

from nccl_doctor.gather import server
from nccl_doctor.system import forks
from tests.ranks.ranks import free_port


@pytest.fixture
def store_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of a store on this machine."""
    import_module("torch.distributed")  # seconds, of a CUDA build, that no time-out here counts
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    port = free_port()
    served = server.serve(port)
    assert served.error is None
    yield port
    served.close()
    assert not forks.living
