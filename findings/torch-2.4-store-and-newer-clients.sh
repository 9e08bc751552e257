#!/usr/bin/env bash
# Two releases of torch in one gloo job: who serves the store decides.
#
# torch 2.5.1 to 2.15.0 form a group with each other and with 2.4.1, whatever rank has which. But if
# rank 0 has torch 2.4.1, no rank of 2.5.1 or newer gets into its TCPStore: the one says that 1 of 2
# clients joined, the other that its client socket timed out, and neither speaks of a version.
# Expected: it works both ways, or fails both ways.
#
# Seen with torch 2.4.1 and 2.5.1 (builds for CUDA, on a machine without a GPU), Python 3.11:
#   rank 0 torch 2.5.1, rank 1 torch 2.4.1: both exit 0
#   rank 0 torch 2.4.1, rank 1 torch 2.5.1: rank 0 "Timed out after 21 seconds waiting for clients.
#     1/2 clients joined.", rank 1 "The client socket has timed out after 20000ms"
# Also seen with 2.6.0, 2.7.1, 2.13.0 and 2.15.0 in place of 2.5.1.
#
# Needs Python 3.9 to 3.12, some 12 GB of disk, and half an hour at most.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >job.py <<'PYTHON'
from datetime import timedelta
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == 2
print("rank", dist.get_rank(), "torch", torch.__version__, "sum", one.item())
dist.destroy_process_group()
PYTHON
for version in 2.4.1 2.5.1; do
    python3 -m venv "$version"
    "$version/bin/pip" --quiet --disable-pip-version-check install "torch==$version" "numpy<3"
done

pair() { # RANK_0_VERSION RANK_1_VERSION: exit codes and last lines of both
    export MASTER_ADDR=127.0.0.1 WORLD_SIZE=2 MASTER_PORT
    MASTER_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    RANK=1 timeout 120 "$2/bin/python" job.py >rank1 2>&1 &
    local code_0=0 code_1=0
    RANK=0 timeout 120 "$1/bin/python" job.py >rank0 2>&1 || code_0=$?
    wait $! || code_1=$?
    echo "rank 0 with torch $1: exit $code_0: $(tail -n 1 rank0)"
    echo "rank 1 with torch $2: exit $code_1: $(tail -n 1 rank1)"
    codes="$code_0 $code_1"
}

pair 2.5.1 2.4.1
[ "$codes" = "0 0" ] || { echo "changed: the older client does not get in"; exit 1; }
pair 2.4.1 2.5.1
[ "$codes" = "1 1" ] || { echo "changed: the newer client gets in"; exit 1; }
grep -q '1/2 clients joined' rank0 || { echo "changed: other words"; exit 1; }
echo "as described"
