"""Made-up attempts of hosts to connect to MASTER_PORT."""

from __future__ import annotations

from typing import Any


def tried(outcome: str, answer: str = "", **more: Any) -> dict[str, Any]:
    """One knock at MASTER_PORT."""
    return {
        "address": "192.168.77.1",
        "outcome": outcome,
        "errno": None,
        "detail": "",
        "duration_s": 0.1,
        "answer": answer,
        "reply": "",
        **more,
    }


def facts(last: dict[str, Any] | None = None, server: str = "other", **more: Any) -> dict[str, Any]:
    """Facts of check `port` on a host: `last` is the outcome of its last attempt."""
    last = tried("connected", "store") if last is None else last
    knock = {"first": tried("refused"), "last": last, "passed": [], "knocks": 3, "seconds": 2.0}
    return {
        "master_addr": "nd0",
        "port": 29500,
        "server": server,
        "bind_errno": None,
        "bind_error": "",
        "may_bind": True,
        "ephemeral": None,
        "knock": knock,
        **more,
    }
