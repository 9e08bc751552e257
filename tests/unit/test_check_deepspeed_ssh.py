"""The check `deepspeed_ssh`: its rule on made-up clusters, and its call of an ssh."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Launch, Severity, Skip
from nccl_doctor.model.job import Job
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster
from tests.support.fixes import in_full

CHECK = CHECKS["deepspeed_ssh"]
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)


def cluster_of(hosts: tuple[str, ...] = ("nd0",), **facts: Any) -> Cluster:
    seen = {"host": "nd0", "problem": "", "silent": False, **facts}
    return make_cluster(hosts, check=CHECK.name, by_host={hosts[-1]: seen})


def test_an_answer() -> None:
    assert judge(cluster_of()) == []


def test_no_answer_on_one_host() -> None:
    found = only(
        cluster_of(problem="exit 255: Permission denied"), "deepspeed-ssh-failed", hosts=["nd0"]
    )
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
    said = "deepspeed asks first for ssh nd0 hostname: exit 255: Permission denied"
    assert found.message == said
    assert "--no_ssh_check --master_addr 127.0.0.1" in in_full(found.fix)


def test_no_answer_among_several() -> None:
    cluster = cluster_of(("nd0", "nd1"), problem="ssh did not end within 15 s", silent=True)
    found = only(cluster, "deepspeed-ssh-failed", hosts=["nd1"])
    assert found.confidence is Confidence.LIKELY
    assert "--master_addr ADDRESS" in in_full(found.fix)
    assert "no_ssh_check" not in in_full(found.fix)


def ssh(folder: Path, script: str) -> dict[str, str]:
    program = folder / "ssh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/bin:/usr/bin"}


def observe(env: dict[str, str], left_s: float = 20.0) -> dict[str, Any]:
    job = Job(asks_ssh=("-p", "2222", "bob@nd0"))
    until = time.monotonic() + left_s
    return dict(CHECK.observe(Context(Launch(), env, job=job, deadline=until)))


def test_observe(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no line of deepspeed"):
        CHECK.observe(Context(Launch(), {}))
    good = observe(ssh(tmp_path, 'echo "$@" > "$(dirname "$0")/words"'))
    assert good == {"host": "bob@nd0", "problem": "", "silent": False}
    words = "-o PasswordAuthentication=no -o BatchMode=yes -p 2222 bob@nd0 hostname\n"
    assert (tmp_path / "words").read_text() == words
    bad = observe(ssh(tmp_path, "echo 'Host key verification failed.' >&2; exit 255"))
    assert bad["problem"] == "exit 255: Host key verification failed."
    silent = observe(ssh(tmp_path, "exec tail -f /dev/null"), left_s=5.0)
    assert silent == {"host": "bob@nd0", "problem": "ssh did not end within 1 s", "silent": True}
    assert observe({"PATH": str(tmp_path / "none")})["problem"] == "ssh is not installed"
