"""Variables that differ between hosts, from the environment and from NCCL's own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.lab.lab import Lab
from tests.lab.reading import check_clean, loud
from tests.lab.run import Run


def check_warned(run: Run) -> dict[str, Mapping[str, Any]]:
    """Nothing failed, and the job met: the collectives ran. Returns: code → finding."""
    check_clean(run)
    assert run.report is not None, str(run)
    assert run.report["verdict"] == "warn", str(run)
    assert set(run.codes) == {0}, str(run)
    assert run.partial == {}, str(run)
    assert {check["name"]: check["status"] for check in run.report["checks"]}[
        "collectives"
    ] == "pass", str(run)
    found = {each["code"]: each for each in loud(run.report)}
    assert len(found) == len(loud(run.report)), str(run)
    assert {each["check"] for each in found.values()} == {"environment"}, str(run)
    return found


def test_a_slip_everywhere_and_another_algorithm_on_one_host(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    run = lab.plain_doctor(
        "--join-timeout",
        "20",
        env={"NCCL_IB_DISABEL": "1"},
        per_host={"nd1": {"NCCL_ALGO": "Ring"}},
    )
    found = check_warned(run)
    assert set(found) == {"env-unknown-variable", "env-differs"}, str(run)
    slip, differs = found["env-unknown-variable"], found["env-differs"]
    assert slip["where"]["hosts"] == ["nd0", "nd1", "nd2"]
    assert "did you mean NCCL_IB_DISABLE?" in slip["message"]
    assert differs["where"]["hosts"] == ["nd1"]
    assert differs["message"] == "NCCL_ALGO=Ring; elsewhere NCCL_ALGO not set"
    assert differs["fix"] == "unset NCCL_ALGO"
    assert differs["confidence"] == "certain"


def test_a_configuration_file_on_one_host(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    conf = lab.folder / "stale.conf"
    conf.write_text("# from an old image\nNCCL_PROTO=LL\nNCCL_IB_DISABLE=true\n")
    few = ("--join-timeout", "20", "--select", "environment,ranks,collectives")
    run = lab.plain_doctor(*few, per_host={"nd2": {"NCCL_CONF_FILE": str(conf)}})
    found = check_warned(run)
    assert set(found) == {"env-bad-value", "env-differs"}, str(run)
    assert {tuple(each["where"]["hosts"]) for each in found.values()} == {("nd2",)}, str(run)
    assert f"NCCL_IB_DISABLE=true ({conf} line 3) is read as 0" in found["env-bad-value"]["message"]
    assert f"NCCL_PROTO=LL ({conf} line 2)" in found["env-differs"]["message"]
    assert found["env-differs"]["fix"] == f"remove line 2 (NCCL_PROTO) from {conf}"
    assert run.report is not None
    facts = next(rank["facts"] for rank in run.report["ranks"] if rank["host"] == "nd2")
    told = facts["environment"]["alone"]["facts"]["variables"]
    assert told["NCCL_PROTO"] == {"value": "LL", "origin": str(conf), "line": 2}
