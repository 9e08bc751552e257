"""Which side of a pair connects, asked of the gloo that is installed."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

from nccl_doctor.toolkit.peers.matrix import gloo_calls

ADDRESSES = ("127.0.0.9", "127.0.0.10", "127.0.0.4")
_JOB = """
import sys, threading
from datetime import timedelta

import psutil
import torch
from torch.distributed import HashStore, ProcessGroupGloo

store, groups, addresses = HashStore(), [], sys.argv[1:]

def join(rank):
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=addresses[rank])]
    options._timeout = timedelta(seconds=20)
    group = ProcessGroupGloo(store, rank, len(addresses), options)
    group.allreduce([torch.ones(4)]).wait()
    groups.append(group)

ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(len(addresses))]
for each in ranks:
    each.start()
for each in ranks:
    each.join()
sockets = psutil.Process().net_connections("tcp")
doors = {each.laddr for each in sockets if each.status == psutil.CONN_LISTEN}
called = [each.laddr.ip for each in sockets if each.laddr in doors and each.raddr]
print(*sorted(called))
"""


def test_the_greater_address_connects() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _JOB, *ADDRESSES],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    called = [a if gloo_calls(b, a) else b for a, b in combinations(ADDRESSES, 2)]
    assert done.stdout.split() == sorted(called), done.stderr
