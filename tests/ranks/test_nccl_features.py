"""Real ranks whose collectives hang unless a feature of NCCL is off; gloo stands in for NCCL."""

from __future__ import annotations

from pathlib import Path

from nccl_doctor.toolkit.groups.attempts import UNKNOWN_S
from tests.broken import broken
from tests.ranks.ranks import Ranks

ATTEMPT_S = 4
TIMEOUT_S = 90


def test_what_hangs_with_p2p_alone_is_laid_to_p2p(tmp_path: Path) -> None:
    options = ["--backend", "nccl", "--select", "collectives,nccl_features"]
    ranks = Ranks(
        tmp_path,
        2,
        [*options, "--collective-timeout", str(ATTEMPT_S), f"--timeout={TIMEOUT_S}"],
        changes={rank: broken("p2p_is_broken") for rank in range(2)},
    )
    ended = ranks.wait(TIMEOUT_S + 5)
    assert {each.code for each in ended.values()} == {1}, ended
    report = ranks.report()
    alone = [rank["facts"]["collectives"].get("first") for rank in report["ranks"]]
    assert [each and each["status"] for each in alone] == ["ok", None]  # one of the host, before
    (cause,) = report["root_causes"]
    assert (cause["code"], cause["where"]["ranks"]) == ("nccl-feature-broken", [0, 1])
    assert "good with NCCL_P2P_DISABLE=1, fails again without" in cause["message"]
    assert cause["evidence"]["tried"] == ["NCCL_CUMEM_HOST_ENABLE=0", "NCCL_P2P_DISABLE=1"]
    others = {(f["code"], f["explained_by"]) for f in report["findings"] if f != cause}
    assert others == {("collective-hang", "nccl-feature-broken")}
    # Two rounds that hang, here and in collectives, the control, and settling; but no attempt is
    # cut short before a driver of GPUs, which nobody has timed here, may have started.
    assert report["run"]["duration_s"] < 6 * ATTEMPT_S + 2 * UNKNOWN_S + 20
