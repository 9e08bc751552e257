"""Local ranks that take GPUs in another order than on the other hosts, on made-up clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nccl_doctor.api import ALONE, Cluster, Confidence, Severity
from nccl_doctor.checks.backend_device import BackendDevice
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.gpu_facts import H100, H200, facts, gpu

CHECK = BackendDevice()
SLOTS = ("0000:1b:00.0", "0000:43:00.0", "0000:9d:00.0", "0000:df:00.0")


def cluster(
    *orders: Sequence[int],
    told: bool = True,
    models: Sequence[str] = (H100,) * 4,
    addresses: bool = False,
    rdma: Any = None,
    order: str = "",
) -> Cluster:
    """Hosts of which the ranks see the GPUs in these orders; `told` by CUDA_VISIBLE_DEVICES.

    `order`: CUDA_DEVICE_ORDER of the last host.
    """
    by_rank, places, env = {}, {}, {}
    size = len(orders[0])
    for node, seen in enumerate(orders):
        devices = [
            {**gpu(node, number, models[number]), "index": index}
            for index, number in enumerate(seen)
        ]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, seen))} if told else {}
        for local in range(size):
            rank = node * size + local
            by_rank[rank] = facts(node, local, 4, devices=devices, visible=visible)
            places[rank] = {"address": SLOTS[seen[local]], "uuid": None, "rdma": rdma}
            env[rank] = {"LOCAL_RANK": str(local)}
            if order and node == len(orders) - 1:
                env[rank]["CUDA_DEVICE_ORDER"] = order
    names = [f"nd{node}" for node in range(len(orders))]
    made = make_cluster(names, size, check=CHECK.name, by_rank=by_rank, backend="nccl", env=env)
    for rank in made.ranks if addresses else ():
        seen_too = {"gpu_affinity": {ALONE: outcome(places[rank.seat])}}
        made = change_rank(made, rank.seat, facts={**rank.facts, **seen_too})
    return made


STRAIGHT, TURNED = (0, 1, 2, 3), (1, 0, 2, 3)


def test_one_order_is_fine_however_it_is_said() -> None:
    for addresses in (True, False):
        assert judge(CHECK, cluster(TURNED, TURNED, TURNED, addresses=addresses)) == []
        assert judge(CHECK, cluster(STRAIGHT, STRAIGHT, told=False, addresses=addresses)) == []


def test_the_host_with_another_order_is_named_with_its_ranks() -> None:
    for addresses, told in ((True, True), (True, False), (False, True)):
        made = cluster(STRAIGHT, TURNED, STRAIGHT, addresses=addresses, told=told)
        found = only(CHECK, made, "gpu-order-differs", hosts=["nd1"], ranks=[4, 5])
        assert (found.level, found.confidence) == (Severity.INFO, Confidence.CERTAIN)
        first, other = (f"at {SLOTS[1]}", f"at {SLOTS[0]}") if addresses else ("1", "0")
        assert found.message.startswith(
            f"local rank 0 takes the GPU {first}, on other hosts {other}; local rank 1"
        )
        assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found.kind.fix


def test_a_host_without_the_variable_takes_them_as_they_come() -> None:
    made = cluster(STRAIGHT, STRAIGHT, (3, 2, 1, 0))
    unset = made.ranks[0].facts[CHECK.name][ALONE].facts | {"visible": {}}
    for seat in range(4):
        mine = {**unset, "device": seat}
        made = change_rank(made, seat, facts={CHECK.name: {ALONE: outcome(mine)}})
    only(CHECK, made, "gpu-order-differs", hosts=["nd2"], ranks=[8, 9, 10, 11])


def test_a_tie_names_both_hosts() -> None:
    found = judge(CHECK, cluster(STRAIGHT, TURNED))
    assert [(one.code, one.where.hosts) for one in found] == [
        ("gpu-order-differs", ("nd0",)),
        ("gpu-order-differs", ("nd1",)),
    ]
    assert {one.confidence for one in found} == {Confidence.POSSIBLE}


def test_another_model_for_the_same_local_rank_is_a_warning() -> None:
    models = (H100, H200, H200, H200)
    for rdma in (None, {"near": 0}):  # whatever NICs are beside them
        made = cluster(
            STRAIGHT, TURNED, STRAIGHT, models=models, told=False, addresses=True, rdma=rdma
        )
        found = only(CHECK, made, "gpu-order-differs", hosts=["nd1"], ranks=[4, 5])
        assert found.level is Severity.WARN
        assert found.message == (
            f"local rank 0 takes {H200}, on other hosts {H100}; "
            f"local rank 1 takes {H100}, on other hosts {H200}"
        )


def test_the_variable_that_numbers_gpus_explains_it() -> None:
    models = (H100, H200, H200, H200)
    made = cluster(STRAIGHT, STRAIGHT, TURNED, models=models, order="PCI_BUS_ID")
    (found,) = judge(CHECK, made)
    assert (found.code, found.explained_by) == ("gpu-order-differs", "env-differs")
    made = cluster(STRAIGHT, STRAIGHT, TURNED, models=models, order="FASTEST_FIRST")
    assert [one.explained_by for one in judge(CHECK, made)] == [None]


def test_where_the_nics_beside_them_are_known_these_are_compared_instead() -> None:
    assert judge(CHECK, cluster(STRAIGHT, TURNED, addresses=True, rdma={"near": 0})) == []


def test_other_gpus_are_not_another_order() -> None:
    assert judge(CHECK, cluster((0, 1), (2, 3), (1, 2))) == []
    by_uuid = cluster(STRAIGHT, TURNED)
    for rank in by_uuid.ranks:
        mine = rank.facts[CHECK.name][ALONE].facts
        named = ",".join(device["uuid"] for device in mine["devices"])
        mine = {**mine, "visible": {"CUDA_VISIBLE_DEVICES": named}}
        by_uuid = change_rank(by_uuid, rank.seat, facts={CHECK.name: {ALONE: outcome(mine)}})
    assert judge(CHECK, by_uuid) == []
