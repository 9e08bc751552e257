"""Reports of many ranks, grown from one that two hosts wrote: each with measured values of its own.

`two-hosts-v1.json` is a report of schema version 1, of a healthy run in the lab, with pseudonyms.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from nccl_doctor.model.report import Report

RECORDED = Path(__file__).with_name("two-hosts-v1.json")


def recorded() -> Any:
    """The report of two hosts, as JSON data."""
    return json.loads(RECORDED.read_text())


def grown(hosts: int, nproc: int = 8, partners: int = 15) -> Report:
    """A healthy cluster of so many hosts; every number that was measured differs on each rank, and
    each host has called so many others.
    """
    data = recorded()
    draw = random.Random(hosts)
    pattern, ranks = data["hosts"][1], data["ranks"]
    text = json.dumps(pattern)
    data["hosts"] = [
        {
            **_varied(
                _with_peers(
                    json.loads(_renamed(text, pattern, node)), node, hosts, nproc, partners
                ),
                draw,
            ),
            "id": node,
            "node_rank": node,
            "key": f"{draw.getrandbits(64):016x}",
        }
        for node in range(hosts)
    ]
    data["ranks"] = [
        _rank(ranks[seat % nproc % len(ranks)], data["hosts"][seat // nproc], seat, nproc, draw)
        for seat in range(hosts * nproc)
    ]
    data["redacted"] = data["run"].pop("redacted_with") == ""
    data["run"] |= {"world_size": hosts * nproc, "nnodes": hosts}
    names = [host["host"] for host in data["hosts"]]
    for check in data["checks"]:
        tested = names if check["scope"] == "host" else [str(i) for i in range(hosts * nproc)]
        check["hosts_or_ranks_tested"] = tested
    return Report.from_json(data)


def _renamed(text: str, host: Any, node: int) -> str:
    own = text.replace(host["host"], f"gpu{node:03d}")
    return own.replace(host["addresses"][0], _address(node))


def _with_peers(host: Any, node: int, hosts: int, nproc: int, number: int) -> Any:
    """The host, with calls to so many others in place of the one."""
    others = [(node + i) % hosts for i in range(1, min(number, hosts - 1) + 1)]
    for facts in (
        host["facts"]["firewall"]["matrix"]["facts"]["peers"],
        host["facts"]["advertised_addresses"]["calls"]["facts"]["peers"],
        host["facts"]["links"]["exchange"]["facts"]["sent"],
    ):
        (one,) = facts.values()
        facts.clear()
        for other in others:
            facts[str(other * nproc)] = copy.deepcopy(one)
            for entry in facts[str(other * nproc)] if isinstance(one, list) else ():
                entry |= {"address": _address(other), "port": 32768 + (node * 31 + other) % 28000}
    return host


def _address(node: int) -> str:
    return f"10.{node // 250}.{node % 250}.1"


def _varied(value: Any, draw: random.Random) -> Any:
    """The value, with other times and speeds."""
    if isinstance(value, dict):
        return {key: _varied(each, draw) for key, each in value.items()}
    if isinstance(value, list):
        return [_varied(each, draw) for each in value]
    if isinstance(value, float):
        return round(value * draw.uniform(0.7, 1.5), 4)
    return value


def _rank(pattern: Any, host: Any, seat: int, nproc: int, draw: random.Random) -> Any:
    rank = _varied(copy.deepcopy(pattern), draw)
    rank["launch"] |= {"rank": seat, "local_rank": seat % nproc, "node_rank": host["node_rank"]}
    rank["env"] |= {"RANK": str(seat), "LOCAL_RANK": str(seat % nproc)}
    own = {"seat": seat, "rank": seat, "local_rank": seat % nproc, "pid": draw.randrange(1 << 15)}
    return {**rank, **own, "host": host["host"], "host_id": host["id"]}
