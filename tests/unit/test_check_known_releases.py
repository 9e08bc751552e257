"""Releases with known faults: the table, and what is said of the NCCL that is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Context, Launch, Severity, Skip
from nccl_doctor.checks.known_releases import KnownReleases
from nccl_doctor.toolkit.releases import CONDITIONS, PRODUCTS, known_faults
from nccl_doctor.toolkit.versions import release
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.rows import each_row

CHECK = KnownReleases()
APART = {"p2p": {"OK": [[0, 1]], "CHIPSET_NOT_SUPPORTED": [[0, 2], [1, 2]]}}
VERBS, SOCKETS = {"road": "infiniband"}, {"road": "sockets"}


def cluster(version: str, *, cuda: str | None = "13.0", **seen: Any) -> Cluster:
    """Three hosts with two ranks each: nd1 has what was seen, and GPUs and roads of `seen`."""
    fine = {"driver": "580.95.05", "comm_id": False, "prevented": []}
    own = {key: seen[key] for key in fine if key in seen}
    facts = {"nd0": fine, "nd1": {**fine, **own}, "nd2": fine}
    made = make_cluster(list(facts), check=CHECK.name, by_host=facts, backend="nccl")
    for seat in range(6):
        more: dict[str, Any] = {
            "nccl_library": {ALONE: outcome({"loaded": {"version": version}, "cuda": cuda})}
        }
        if seat in (2, 3) and "worked" in seen:
            more["collectives"] = {"world": outcome({})}
        made = change_rank(made, seat, facts={**made.ranks[seat].facts, **more})
    for name in ("gpu_state", "rdma"):
        if name in seen:
            own_facts = {**made.ranks[2].facts, name: {ALONE: outcome(seen[name])}}
            made = change_rank(made, 2, facts=own_facts)
    return made


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_row_is_whole(product: str) -> None:
    rows = known_faults(product)
    assert rows
    for row in rows:
        assert release(row.since) < release(row.before)
        assert row.condition in CONDITIONS
        assert re.search(r"\d|\.py", row.reference)
        assert row.severity in (Severity.INFO, Severity.WARN)  # known, and not seen here
        assert row.driver is None or row.driver[0] < row.driver[1]


@pytest.mark.parametrize(
    ("version", "seen", "word"),
    [
        ("2.26.2", {"rdma": VERBS}, "Could not find NET with id 0"),
        ("2.29.7", {"comm_id": True}, "usually lo"),
        ("2.27.5", {"gpu_state": APART, "driver": "570.86.10"}, "Cuda failure 217"),
    ],
)
def test_a_release_with_a_fault_that_this_host_can_meet(
    version: str, seen: dict[str, Any], word: str
) -> None:
    found = only(CHECK, cluster(version, **seen), "nccl-known-bug", hosts=["nd1"], ranks=[2, 3])
    assert found.message.startswith(f"NCCL {version}: ")
    assert word in found.message
    assert found.confidence is Confidence.POSSIBLE
    assert found.level is not Severity.FAIL
    assert found.fix
    worked = cluster(version, **seen, worked=True)
    assert only(CHECK, worked, "nccl-known-bug", hosts=["nd1"], ranks=[2, 3]).level is Severity.INFO


@each_row(
    ("version", "seen"),
    [
        ("2.24.3", {"rdma": VERBS}),
        ("2.27.3", {"rdma": VERBS}),
        ("2.26.2", {"rdma": SOCKETS}),
        ("2.26.2", {"rdma": VERBS, "prevented": ["NCCL_NET_MERGE_LEVEL"]}),
        ("2.28.9", {"comm_id": True}),
        ("2.30.3", {"comm_id": True}),
        ("2.29.7", {"comm_id": True, "prevented": ["NCCL_SOCKET_IFNAME"]}),
        ("2.29.7", {"comm_id": True, "cuda": None}),  # RCCL's port of it is right
        ("2.27.5", {"gpu_state": APART, "driver": "580.95.05"}),
        ("2.27.5", {"gpu_state": APART, "driver": "555.42.06"}),
        ("2.27.5", {"gpu_state": {"p2p": {"OK": [[0, 1]]}}, "driver": "570.86.10"}),
        ("2.23.4", {"gpu_state": APART, "driver": "570.86.10"}),
        ("2.27.5", {"gpu_state": APART, "driver": "570.86.10",
                    "prevented": ["NCCL_CUMEM_HOST_ENABLE"]}),
    ],
)  # fmt: skip
def test_healthy(version: str, seen: dict[str, Any]) -> None:
    assert judge(CHECK, cluster(version, **seen)) == []


def with_libcuda(made: Cluster, version: str) -> Cluster:
    """The ranks of nd1 with the libcuda of a `compat` folder."""
    path = f"/usr/local/cuda/compat/libcuda.so.{version}"
    table = {"columns": ["library", "version", "path"], "rows": [["libcuda", version, path]]}
    for seat in (2, 3):
        more = {"driver_libraries": {ALONE: outcome({"kernel": "", "loaded": table})}}
        made = change_rank(made, seat, facts={**made.ranks[seat].facts, **more})
    return made


def test_nccl_goes_by_the_libcuda_of_a_compat_folder() -> None:
    made = cluster("2.27.5", gpu_state=APART, driver="535.104.05")
    assert judge(CHECK, made) == []
    only(CHECK, with_libcuda(made, "570.86.10"), "nccl-known-bug", hosts=["nd1"], ranks=[2, 3])
    faulty = cluster("2.27.5", gpu_state=APART, driver="570.86.10")
    assert judge(CHECK, with_libcuda(faulty, "580.95.05")) == []


def test_what_prevents_a_fault_is_read(tmp_path: Path) -> None:
    env = {
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_NET_MERGE_LEVEL": "PIX",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_COMM_ID": "10.0.0.1:4000",
        "NCCL_CONF_FILE": "/nonexistent",
    }
    seen = CHECK.observe(Context(launch=Launch(), env=env, backend="nccl", root=tmp_path))
    assert seen["prevented"] == ["NCCL_CUMEM_HOST_ENABLE", "NCCL_SOCKET_IFNAME"]
    assert (seen["comm_id"], seen["driver"]) == (True, None)
    with pytest.raises(Skip):
        CHECK.observe(Context(launch=Launch(), env=env, backend="gloo", root=tmp_path))
