#!/usr/bin/env bash
# In gloo's flight-recorder dumps every collective is "scheduled" for ever, healthy ones too.
#
# torch 2.8 and later record gloo's collectives without any variable set. On NCCL an entry goes from
# "scheduled" to "started" and "completed", and the entry that is not completed is where a job hangs.
# On gloo the state stays "scheduled" and no entry has a time of its end, also in a job that ended
# well; and "retired" becomes true for a collective that timed out as for one that worked. The rank
# that left the collective out has one entry less: the number of entries tells, the state does not.
# Expected: what is done is "completed", and what failed is not retired like what worked.
#
# Seen with torch 2.13.0 (CPU), Python 3.11, two ranks on one host.
#
# Needs Python 3.10 to 3.13, 2 GB of disk, and three minutes at most.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >job.py <<'PYTHON'
import json, os, sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json


def entries():
    found = json.loads(_dump_fr_trace_json())["entries"]
    return [(e["profiling_name"], e["state"], e["retired"], e["time_discovered_completed_ns"]) for e in found]


rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
values = torch.ones(1)
for _ in range(3):
    dist.all_reduce(values)
healthy = entries()
try:
    if rank == 0:
        dist.all_reduce(values)  # rank 1 leaves it out
    else:
        import time

        time.sleep(5)
except RuntimeError:
    pass
failed = entries()
print(f"rank {rank}: after three that worked {healthy}", flush=True)
print(f"rank {rank}: after one that timed out {failed}", flush=True)
if any(state != "scheduled" or end for _, state, _, end in healthy):
    sys.exit("changed: a state or a time tells that a collective ended")
if rank == 0 and not (len(failed) == 4 and failed[3][1] == "scheduled"):
    sys.exit("changed: the one that timed out looks different")
if rank == 1 and len(failed) != 3:
    sys.exit("changed: the rank that left one out has an entry for it")
os._exit(0)
PYTHON
python3 -m venv venv
venv/bin/pip --quiet --disable-pip-version-check install torch==2.13.0 "numpy<3"
timeout 100 venv/bin/torchrun --standalone --nproc-per-node 2 job.py 2>/dev/null | sort
test "${PIPESTATUS[0]}" = 0 || { echo "changed: see above"; exit 1; }
echo "as described"
