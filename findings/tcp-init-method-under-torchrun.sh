#!/usr/bin/env bash
# Under torchrun, init_method="tcp://HOST:PORT" is served by nobody if PORT is not that of torchrun.
#
# The documentation says that rank 0 serves the store of tcp://HOST:PORT. torchrun sets
# TORCHELASTIC_USE_AGENT_STORE=True, and before torch 2.14 that makes every rank a client whatever
# HOST:PORT says, rank 0 too: at the agent's own port that is right, at any other port all ranks wait
# for a server that none of them is, and end at the time-out of init_process_group. The same script
# with the same address runs when its ranks are started without torchrun.
#
# Seen with torch 2.13.0 (CPU), Python 3.11, two ranks on one host: with torchrun both ranks end
# after the 8 s of the time-out with "The client socket has timed out"; without it, both are done
# in a second.
#
# Needs Python 3.10 to 3.13, 2 GB of disk, and three minutes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >job.py <<'PYTHON'
import os, sys
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group(
    "gloo",
    init_method=f"tcp://127.0.0.1:{sys.argv[1]}",
    rank=int(os.environ["RANK"]),
    world_size=2,
    timeout=timedelta(seconds=8),
)
dist.barrier()
print("formed", flush=True)
PYTHON
free_port() {
    venv/bin/python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
python3 -m venv venv
venv/bin/pip --quiet --disable-pip-version-check install torch==2.13.0 "numpy<3"

port=$(free_port)
RANK=1 venv/bin/python -W ignore job.py "$port" >one.txt 2>&1 &
RANK=0 venv/bin/python -W ignore job.py "$port" >zero.txt 2>&1
wait $!
[ "$(cat zero.txt one.txt | grep -c '^formed$')" = 2 ] || { echo "changed: plain ranks do not meet"; exit 1; }
echo "without torchrun: both ranks are in the group"

if timeout 120 venv/bin/torchrun --nproc-per-node 2 --master-port "$(free_port)" \
    job.py "$(free_port)" >torchrun.txt 2>&1; then
    echo "changed: the ranks met under torchrun"
    exit 1
fi
grep -m 1 -o 'The client socket has timed out' torchrun.txt || { echo "changed: other words"; exit 1; }
! grep -q '^formed$' torchrun.txt || { echo "changed: a rank is in the group"; exit 1; }
echo "as described"
