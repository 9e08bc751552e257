"""Reading a run of the doctor as a person would: what is wrong, where, and who is left alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

import nccl_doctor
from tests.lab.lab import COLLECTIVE_S, HEALTHY_S, JOIN_S, TOTAL_S
from tests.lab.run import Run

START_S = 20.0
"""From exec to the doctor's own clock: importing torch, many at once on a small, busy machine."""
ELSEWHERE = (
    "rendezvous_endpoint", "agent_names", "slurm_allocation", "nccl_library", "torch_nccl",
    "net_plugin", "compile_caches", "deepspeed_ssh",
    "libraries", "driver_libraries", "numa_calls",
    "idle_connections", "nccl_features", "device_mesh", "side_group", "deepspeed_groups",
    "deepspeed_config", "gpu_state", "gpu_work", "gpu_affinity", "mnnvl", "imex_service",
    "rdma", "fabric_ports", "roce_gids", "ib_hca", "gpu_direct", "rdma_errors", "rails",
    "rail_reach", "pcie_errors", "memory_errors", "hardware_errors", "known_releases",
    "gdrcopy", "preload", "nccl_plugins", "partition_keys", "mps",
    "nccl_diagnostics", "network_speed",
    "amd_gpus", "dcgm", "dcgm_diag", "held_connections", "throttling", "bonds", "loss",
    "cloud_profile",
    "paths", "endpoints", "reach", "init_method",
)  # fmt: skip
"""Checks of what the lab has not, or not always: torchrun's c10d rendezvous, Slurm, connection
tracking, losses, what somebody asks for by an option, mostly NCCL, a job with a side group, a
kernel that counts errors of its hardware, and limits of CPU time.
"""
SETTLE_S = 5.0
"""What the doctor allows a participant, beyond a deadline, to examine a stuck child."""

Report = Mapping[str, Any]


@functools.cache
def _schema() -> Any:
    path = Path(nccl_doctor.__file__).parent / "report" / "schema.json"
    return jsonschema.Draft202012Validator(json.loads(path.read_text()))


def validate(report: Report) -> None:
    """Assert that a report meets the published schema."""
    _schema().validate(report)


def loud(report: Report) -> list[Mapping[str, Any]]:
    """Findings above info."""
    return [found for found in report["findings"] if found["severity"] != "info"]


_TRACEBACK = "Traceback (most recent call last)"
_AGENT = "torch/distributed/elastic/agent/server/api.py"
"""Where torchrun logs that the agent with the store left before it: nothing of ours."""


def check_clean(run: Run, within_s: float = TOTAL_S) -> None:
    """Every report is valid, everybody left in time, nothing is left behind."""
    for report in (run.report, *run.partial.values()):
        if report is not None:
            validate(report)
    assert None not in run.codes, f"a process had to be killed\n{run}"
    assert run.seconds < START_S + within_s, f"too late: {run.seconds:.1f} s\n{run}"
    assert run.leftovers == [], str(run)
    for done in run.done:
        raised = [line for line in done.stderr.splitlines() if _TRACEBACK in line]
        assert [line for line in raised if _AGENT not in line] == [], str(run)


def check_healthy(run: Run, ranks: int) -> None:
    """Verdict pass, nothing above info, every rank there, every check done."""
    check_clean(run, HEALTHY_S)
    report = run.report
    assert report is not None, str(run)
    assert loud(report) == [], str(run)
    assert report["verdict"] == "pass", str(run)
    assert report["exit_code"] == 0
    assert set(run.codes) == {0}, str(run)
    assert run.partial == {}, str(run)
    assert [rank["rank"] for rank in report["ranks"] if rank["reported"]] == list(range(ranks))
    other = {check["name"] for check in report["checks"] if check["status"] != "pass"}
    assert other <= set(ELSEWHERE), str(run)
    assert any(check["name"] == "collectives" for check in report["checks"])


def check_cause(
    run: Run,
    report: Report | None,
    code: str | Collection[str],
    *,
    hosts: Sequence[str] = (),
    ranks: Sequence[int] | None = None,
    links: Sequence[tuple[str, str]] = (),
    interfaces: Sequence[str] = (),
    nodes: Sequence[int] = (),
) -> Mapping[str, Any]:
    """The report names this one cause at exactly this place, and blames nobody else.

    `ranks` None: no rank but those of `hosts` may be named. What else is above info must be
    explained by the cause. Returns: the finding.
    """
    assert report is not None, f"no report\n{run}"
    codes = {code} if isinstance(code, str) else set(code)
    assert report["verdict"] == "fail", str(run)
    assert report["exit_code"] == 1, str(run)
    roots = report["root_causes"]
    assert len(roots) == 1, f"{[root['code'] for root in roots]}\n{run}"
    root: Mapping[str, Any] = roots[0]
    assert root["code"] in codes, f"{root['code']} is not {codes}\n{run}"
    assert root["severity"] == "fail"
    assert root["message"]
    assert root["fix"]
    where = root["where"]
    assert sorted(where["hosts"]) == sorted(hosts), str(run)
    assert sorted(map(tuple, where["links"])) == sorted(links), str(run)
    assert sorted(where["interfaces"]) == sorted(interfaces), str(run)
    assert sorted(where["nodes"]) == sorted(nodes), str(run)
    if ranks is None:
        mine = {rank["rank"] for rank in report["ranks"] if rank["host"] in hosts}
        assert set(where["ranks"]) <= mine, str(run)
    else:
        assert sorted(where["ranks"]) == sorted(ranks), str(run)
    for other in loud(report):
        explained = other["explained_by"] in codes
        same = {**other, "where": None} == {**root, "where": None}
        assert same or explained, f"{other['code']} as well\n{run}"
    return root


def view_of(run: Run, node: int) -> Report | None:
    """The report written on behalf of a node: its own one, or for node 0 the coordinator's."""
    if node in run.partial:
        return run.partial[node]
    return run.report if node == 0 else None


SIGN_IN_S = JOIN_S + SETTLE_S
"""A run that nobody can join ends after the roll call."""
PEERS_S = SETTLE_S + 4 * 3.0
"""Calls between hosts, two of 3 s where one fails, small and large, and the local rules."""
ROUND_S = COLLECTIVE_S + SETTLE_S
"""A round of collectives in which somebody is stuck."""
