#!/bin/sh
# Create a virtual environment: make_venv.sh PYTHON FOLDER
set -eu
python=$1
folder=$2

if ! command -v "$python" >/dev/null 2>&1; then
    echo "make: $python not found: install Python 3.10 or newer, or say make PYTHON=/path/to/python3" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "make: $("$python" -V) is too old: 3.10 or newer is needed; say make PYTHON=python3.12" >&2
    exit 2
fi
# Debian and Ubuntu ship `venv` without the `ensurepip` that it needs.
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing $package"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq </dev/null
        apt-get install -qq -y --no-install-recommends "$package" </dev/null >/dev/null
    else
        echo "make: $python cannot make a virtual environment: install $package" \
            "(Debian, Ubuntu: sudo apt-get install $package)" >&2
        exit 2
    fi
fi
exec "$python" -m venv "$folder"
