#!/bin/sh
# py-spy 0.4.3, Python 3.10 and later, Linux: `py-spy dump` gives no stack of a process that is
# stopped (state T), which is what somebody asks for who looks at a rank that stands still. It ends
# with 1 and "Failed to suspend process", as it waits for a stop that has come already. With
# `--nonblocking`, which is meant for processes that must not be disturbed, it reads the stack.
#
# Seen:
#   running, dump:                0, Thread N (idle): "MainThread"
#   stopped, dump:                1, Error: Failed to get stack traces
#   stopped, dump --nonblocking:  0, Thread N (idle): "MainThread"
#
# It attaches to another process: as root, or where kernel.yama.ptrace_scope is 0.
set -eu

folder=$(mktemp -d)
process=
trap 'test -z "$process" || kill -KILL $process; rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check py-spy==0.4.3

cat > rank.py <<'PYTHON'
import threading
import time

threading.current_thread()


def load_batch():
    time.sleep(300)


print("ready", flush=True)
load_batch()
PYTHON
venv/bin/python rank.py > out &
process=$!
until grep -q ready out; do sleep 0.1; done

dump() {
    if timeout 60 venv/bin/py-spy dump "$@" --pid $process > said 2>&1; then code=0; else code=$?; fi
    line=$(grep -m 1 -e '^Thread' -e '^Error' said | sed "s/Thread $process/Thread N/")
    echo "$code, $line"
}

same() {
    echo "$1: $3"
    test "$2" = "$3" || { echo "changed: it was $2"; cat said; exit 1; }
}

same "running, dump" '0, Thread N (idle): "MainThread"' "$(dump)"
kill -STOP $process
until grep -q 'State:.T' /proc/$process/status; do sleep 0.1; done
same "stopped, dump" '1, Error: Failed to get stack traces' "$(dump)"
grep -q 'Failed to suspend process' said
same "stopped, dump --nonblocking" '0, Thread N (idle): "MainThread"' "$(dump --nonblocking)"
grep -q 'load_batch (rank.py:' said
grep -q 'State:.T' /proc/$process/status
echo "as it was seen"
