#!/usr/bin/env bash
# TORCH_DISTRIBUTED_DEBUG=DETAIL makes a healthy gloo job fail after a monitored_barrier.
#
# DETAIL wraps each group and compares, before each collective, what all ranks call, by sequence
# numbers of the group. monitored_barrier is counted by rank 0 and by the others unevenly, so that
# the next collective, called by all ranks with the same shape, is refused as a mismatch. With two
# ranks the job passes; with three or more it fails. Without DETAIL it passes with any number.
# Expected: the variable for finding wrong jobs leaves a right one alone.
#
# Seen with torch 2.13.0 (CPU), Python 3.11, three ranks on one host.
#
# Needs Python 3.10 to 3.13, 2 GB of disk, and three minutes at most.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >job.py <<'PYTHON'
import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
dist.monitored_barrier()
try:
    dist.all_reduce(torch.ones(1))
    print(f"rank {os.environ['RANK']}: the all-reduce worked", flush=True)
except RuntimeError as error:
    print(f"rank {os.environ['RANK']}: {str(error).splitlines()[0][:100]}", flush=True)
os._exit(0)
PYTHON
python3 -m venv venv
venv/bin/pip --quiet --disable-pip-version-check install torch==2.13.0 "numpy<3"
tried() { timeout 100 venv/bin/torchrun --standalone --nproc-per-node 3 job.py 2>/dev/null | sort; }
plain=$(tried)
detail=$(TORCH_DISTRIBUTED_DEBUG=DETAIL tried)
printf 'without:\n%s\nwith DETAIL:\n%s\n' "$plain" "$detail"
[ "$(grep -c 'all-reduce worked' <<<"$plain")" = 3 ] || { echo "changed: it fails without DETAIL"; exit 1; }
grep -q "mismatch between collectives" <<<"$detail" || { echo "changed: no mismatch with DETAIL"; exit 1; }
