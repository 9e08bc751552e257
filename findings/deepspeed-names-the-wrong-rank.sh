#!/usr/bin/env bash
# DeepSpeed's launcher names the command of the wrong rank as the one that failed.
#
# When a process of a host ends with an error, deepspeed.launcher.launch kills the others and prints
# one line: the command of a process, with its --local_rank, and "exits with return code = N". The
# code is that of the process that failed; the command is the one that was started last, whichever
# failed. So the line blames the last rank of the host, and whoever looks at its log, or its GPU,
# looks at a rank that was only killed with the rest.
#
# Seen with deepspeed 0.19.8, torch 2.13.0 (CPU), Python 3.11: of three processes number 1 ends by
# SIGKILL, and the line is "… rank.py, --local_rank=2 … exits with return code = -9".
#
# Needs Python 3.10 to 3.13, 2 GB of disk, and five minutes at most.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip --quiet --disable-pip-version-check install torch==2.13.0 "numpy<3" setuptools wheel
venv/bin/pip --quiet --disable-pip-version-check install --no-build-isolation deepspeed==0.19.8
cat >rank.py <<'PYTHON'
import os
import signal
import time

if os.environ["LOCAL_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(120)
PYTHON
hosts=$(venv/bin/python -c '
import base64, json
print(base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1, 2]}).encode()).decode())')
timeout 100 venv/bin/python -m deepspeed.launcher.launch --world_info="$hosts" \
    --master_addr=127.0.0.1 --master_port=29611 rank.py >said 2>&1 || true
line=$(grep 'exits with return code' said)
echo "$line"
case $line in
*"--local_rank=2'] exits with return code = -9") echo "as described" ;;
*) echo "changed: the line names another rank, or another code" && exit 1 ;;
esac
