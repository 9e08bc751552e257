"""Fixtures of tests that share a real store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed  # noqa: F401  a CUDA build takes seconds, which no time-out here counts

from nccl_doctor.gather import server
from nccl_doctor.system import forks
from tests.ranks.ranks import free_port


@pytest.fixture
def store_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of a store on this machine."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    port = free_port()
    served = server.serve(port)
    assert served.error is None
    yield port
    served.close()
    assert not forks.living
