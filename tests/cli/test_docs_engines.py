"""docs/engines.md: its lines are those that the tests run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from tests.cli.program import CLEAN
from tests.ranks.ranks import free_port
from tests.support.forkserver import quick_python_path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
HOSTS = ("gpu001", "gpu002")
SSH = """#!/bin/sh
while [ $# -gt 0 ]; do
    case $1 in -o | -l | -p) shift 2 ;; -*) shift ;; *) break ;; esac
done
export MADE_UP_HOST=$1
shift
exec sh -c "$*"
"""
# Where clush is not installed: the same line on all hosts of the file at once, and the worst code.
CLUSH = """#!/bin/sh
[ "$1 $2 $4" = "-S -f --hostfile" ] || exit 9
pids=
for host in $(cat "$5"); do ssh "$host" "$6" & pids="$pids $!"; done
worst=0
for pid in $pids; do wait "$pid" || worst=$?; done
exit $worst
"""


def program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def test_the_line_of_clush(tmp_path: Path) -> None:
    """With two hosts, of one rank each, in place of 512; the ssh gets in to this very host."""
    (line,) = re.findall(r"^clush -.*$", PAGE, re.MULTILINE)
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder / "ssh", SSH)
    program(folder / "hostname", '#!/bin/sh\necho "$MADE_UP_HOST"\n')
    doctor = f'exec {shlex.quote(quick_python_path())} -m nccl_doctor "$@"'
    program(folder / "nccl-doctor", f"#!/bin/sh\n{doctor}\n")
    if shutil.which("clush") is None:
        program(folder / "clush", CLUSH)
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{host}\n" for host in HOSTS))
    for old, new in (
        ("/shared/hosts", str(hosts)),
        ("512", "2"),
        ("--nproc-per-node 8", "--nproc-per-node 1 --backend gloo --select ranks"),
        ("--master-addr gpu001", f"--master-addr 127.0.0.1 --master-port {free_port()}"),
    ):
        assert old in line
        line = line.replace(old, new)
    done = subprocess.run(
        ["sh", "-c", line],
        env={**CLEAN, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done
    assert "PASS: 1 check passed for 2 ranks on 2 hosts" in done.stdout


def test_the_tests_that_the_page_names_are_there() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE)
    assert len(named) == 8
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), name
