"""The job's variables beside those that a cloud installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Context, Launch, Severity, Skip
from nccl_doctor.checks.cloud_profile import CloudProfile
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only

CHECK = CloudProfile()
GIB = "/usr/local/gib/scripts/set_nccl_env.sh"
SCRIPT = """#!/bin/bash
# export NCCL_PROTO=LL
export NCCL_NET=gIB
export NCCL_IB_TC=52   # traffic class
if [[ $MACHINE == a4 ]]; then
  NCCL_CROSS_NIC="0"
else
  NCCL_CROSS_NIC='1'
fi
export NCCL_TUNER_CONFIG_PATH=${LIB}/tuner.textproto
export NCCL_DEBUG=WARN
export WANDB_API_KEY=x
"""


def observe(root: Path, backend: str = "nccl", **env: str) -> Any:
    return CHECK.observe(Context(launch=Launch(), env=env, backend=backend, root=root))


@pytest.fixture
def google(tmp_path: Path) -> Path:
    path = tmp_path / GIB[1:]
    path.parent.mkdir(parents=True)
    path.write_text(SCRIPT)
    return tmp_path


def test_values_of_the_profile_are_no_word_and_other_ones_are(google: Path) -> None:
    good = {"NCCL_NET": "gIB", "NCCL_IB_TC": "52", "NCCL_CROSS_NIC": "1"}
    free = {"NCCL_DEBUG": "INFO", "NCCL_TUNER_CONFIG_PATH": "/mine", "NCCL_ALGO": "Ring"}
    secret = {"WANDB_API_KEY": "mine"}
    assert observe(google, **good, **free, **secret)["profiles"] == {GIB: {}}
    seen = observe(google, **{**good, "NCCL_NET": "Socket", "NCCL_CROSS_NIC": "2"})["profiles"]
    assert seen == {GIB: {"NCCL_NET": ["Socket", ["gIB"]], "NCCL_CROSS_NIC": ["2", ["0", "1"]]}}


def test_the_environment_wins_over_the_file_of_an_image(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_IB_PCI_RELAXED_ORDERING=1\n")
    seen = observe(tmp_path, NCCL_IB_PCI_RELAXED_ORDERING="0")["profiles"]
    assert seen == {"/etc/nccl.conf": {"NCCL_IB_PCI_RELAXED_ORDERING": ["0", ["1"]]}}


def test_without_a_profile_or_nccl_there_is_nothing_to_compare(
    google: Path, tmp_path: Path
) -> None:
    with pytest.raises(Skip):
        observe(google, "gloo")
    with pytest.raises(Skip):
        observe(tmp_path / "empty")


def test_both_values_are_said_and_it_is_information() -> None:
    differs = {"NCCL_NET": ["Socket", ["gIB"]], "NCCL_CROSS_NIC": ["2", ["0", "1"]]}
    facts = {"nd0": {"profiles": {GIB: {}}}, "nd1": {"profiles": {GIB: differs}}}
    cluster = make_cluster(check=CHECK.name, by_host=facts)
    found = only(CHECK, cluster, "env-contradicts-profile", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert "NCCL_CROSS_NIC=2, there 0 or 1; NCCL_NET=Socket, there gIB" in found.message
    assert found.fix.startswith("unset NCCL_CROSS_NIC NCCL_NET; or . /")


def test_no_shell_is_told_to_read_another_file() -> None:
    facts = {"nd0": {"profiles": {"/tmp/mine.sh": {"NCCL_NET": ["Socket", ["gIB"]]}}}}
    cluster = make_cluster(check=CHECK.name, by_host=facts)
    assert only(CHECK, cluster, "env-contradicts-profile", hosts=["nd0"]).fix == "unset NCCL_NET"


def test_a_profile_that_is_followed_is_silent() -> None:
    facts = {name: {"profiles": {GIB: {}}} for name in ("nd0", "nd1")}
    assert judge(CHECK, make_cluster(check=CHECK.name, by_host=facts)) == []
