#!/usr/bin/env bash
# deepspeed --include leaves out every host that is named without its slots, in silence.
#
# The documented form is NAME[:SLOT[,SLOT ...]][@NAME...], where a name alone means all slots of that
# host. From DeepSpeed 0.15.2 to 0.19.6 such a host gets an empty list of slots and is dropped:
# "worker-0@worker-1:0" starts the job on worker-1 only, with a smaller world size and no message;
# "worker-0" alone ends in "IndexError: list index out of range". 0.15.1 and before, and 0.19.7 and
# later, take the whole host. Expected: the host with all of its slots, or an error that names it.
#
# Seen with DeepSpeed 0.19.6 and 0.19.7, torch 2.13.0, Python 3.11:
#   0.19.6: worker-0@worker-1:0 -> {'worker-1': [0]}
#   0.19.7: worker-0@worker-1:0 -> {'worker-0': [0, 1], 'worker-1': [0]}
#
# Needs Python 3.10 or newer; downloads torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv ds
install() { ds/bin/pip --quiet --disable-pip-version-check install "$@"; }
install torch==2.13.0 setuptools==80.9.0 wheel==0.45.1 ninja==1.13.0 packaging==25.0
cat >ask.py <<'PY'
import deepspeed.launcher.runner as runner
hosts = {"worker-0": 2, "worker-1": 2}
print(dict(runner.parse_inclusion_exclusion(hosts, "worker-0@worker-1:0", "")))
PY
for version in 0.19.6 0.19.7; do
    DS_BUILD_OPS=0 install --no-build-isolation deepspeed==$version
    ds/bin/python ask.py 2>/dev/null | tail -1 >$version
    echo "$version: worker-0@worker-1:0 -> $(cat $version)"
done
[ "$(cat 0.19.6)" = "{'worker-1': [0]}" ] || { echo "changed: 0.19.6"; exit 1; }
[ "$(cat 0.19.7)" = "{'worker-0': [0, 1], 'worker-1': [0]}" ] || { echo "changed: 0.19.7"; exit 1; }
echo "as described"
