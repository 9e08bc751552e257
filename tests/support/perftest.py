"""A program that speaks as `ib_write_bw` of perftest does, and writes nothing."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

_PROGRAM = """#!{python}
import argparse, json, socket, sys

parser = argparse.ArgumentParser()
for name in ("-d", "-i", "-x"):
    parser.add_argument(name)
for name in ("-s", "-n", "-p"):
    parser.add_argument(name, type=int, required=True)
for name in ("-F", "--report_gbits"):
    parser.add_argument(name, action="store_true", required=True)
parser.add_argument("server", nargs="?")
said = parser.parse_args()
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(vars(said)) + "\\n")
if said.d in {broken!r}:
    sys.exit(" Failed to modify QP 0x12 to RTR")
print("-" * 87)
print(f"                    RDMA_Write BW Test\\n Device         : {{said.d}}")
print(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
if said.server is None:
    with socket.create_server(("", said.p)) as server:
        server.accept()
else:
    with socket.create_connection((said.server, said.p)):
        pass
    print(f" {{said.s:<7}}    {{said.n:<10}}       391.20             {gbps:<7.2f}\\t     0.0437")
print("-" * 87)
"""


def install_perftest(folder: Path, *, gbps: float = 366.5, broken: Collection[str] = ()) -> Path:
    """Put the program into a folder for PATH.

    Args:
        folder: a new one; `calls` in it gets the arguments of each call, as JSON, one to a line.
        gbps: Gb/s that every call claims.
        broken: devices with which it fails.
    """
    folder.mkdir()
    program = folder / "ib_write_bw"
    program.write_text(
        _PROGRAM.format(
            python=sys.executable, calls=str(folder / "calls"), gbps=gbps, broken=tuple(broken)
        )
    )
    program.chmod(0o755)
    return folder
