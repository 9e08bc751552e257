"""Hosts for the comparison, and the comparison of one version on all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.hosts import Host
from tests.lab.lab import Lab
from tests.lab.nccl.rows import HOSTS, Row
from tests.support.libraries import compiled

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 300.0

_PLUGIN = """
#include <stdlib.h>
#include <stdint.h>
#include <string.h>
static int init(uint8_t major, uint8_t minor, uint8_t patch, const char *suffix) { return 0; }
static int finalize(void) { return 0; }
static const char *get(const char *name) {
    const char *mine = getenv("PLUGIN_NAME");
    return mine && !strcmp(name, mine) ? getenv("PLUGIN_VALUE") : getenv(name);
}
struct { const char *name; void *init, *finalize, *get; } ncclEnvPlugin_v1 =
    { "trial", init, finalize, get };
"""
_COVER = 'mount --bind "$1" /etc; cd "$2"; shift 2; exec "$@"'


@dataclass(frozen=True)
class Result:
    """What NCCL said to one row, and each difference between that and the rules."""

    row: Row
    said: str
    differences: tuple[str, ...]


def add_interfaces(host: Host, steps: str) -> None:
    """Give a host the interfaces of `HOSTS`; the other end of each is on the host too."""
    # An address that the kernel still tries (duplicates) cannot be bound: none of its own.
    batch = ["link set eth0 addrgenmode none", "addr flush dev eth0 scope link"]
    for line in steps.split("\n"):
        match line.split():
            case ["nic", name, *addresses]:
                peer = f"zz{name}"
                batch.append(f"link add {name} type veth peer name {peer}")
                batch += [f"link set {each} addrgenmode none" for each in (name, peer)]
                batch += [f"link set {each} up" for each in (name, peer)]
                for each in addresses:
                    batch.append(f"addr add {each} dev {name}{' nodad' if ':' in each else ''}")
            case ["add", name, address]:
                batch.append(f"addr add {address} dev {name} nodad")
            case ["label", name, label, address]:
                batch.append(f"addr add {address} dev {name} label {label}")
            case ["cut", name]:
                batch.append(f"link set zz{name} down")
            case ["flush", name]:
                batch.append(f"addr flush dev {name}")
    host.call("ip", "-batch", "-", stdin="\n".join([*batch, ""]))


def compare(
    lab: Lab, hosts: Mapping[str, Host], library: Path, rows: Sequence[Row]
) -> list[Result]:
    """Results of all rows, in order, by one library; `hosts`: name in `HOSTS` → host of the lab."""
    results: dict[int, Result] = {}
    for name, host in hosts.items():
        mine = [row for row in rows if row.host == name]
        folder, etc = prepared(lab.folder / f"trial-{name}", host)
        task = {"folder": str(folder), "library": str(library)}
        said = host.call(
            *("unshare", "--mount", "--propagation", "private", "sh", "-ec", _COVER, "trial"),
            *(str(etc), str(ROOT), sys.executable, "-m", "tests.lab.nccl.trial"),
            stdin=json.dumps({**task, "rows": [row.to_json() for row in mine]}),
            timeout_s=LIMIT_S,
        )
        for row, found in zip(mine, json.loads(said), strict=True):
            results[id(row)] = Result(row, found["said"], tuple(found["differences"]))
    return [results[id(row)] for row in rows]


def prepared(folder: Path, host: Host) -> tuple[Path, Path]:
    """Folder of the trial of a host, and what is /etc there: its own names and users."""
    etc = folder / "etc"
    if not folder.exists():
        for each in (etc, folder / "home", folder / "owner"):
            each.mkdir(parents=True)
        for name in ("hosts", "resolv.conf", "nsswitch.conf"):
            (etc / name).write_text((host.etc / name).read_text())
        if Path("/etc/ld.so.cache").exists():
            (etc / "ld.so.cache").write_bytes(Path("/etc/ld.so.cache").read_bytes())
        (etc / "passwd").write_text(f"root:x:0:0::{folder / 'owner'}:/bin/sh\n")
        (etc / "group").write_text("root:x:0:\n")
        compiled(folder / "plugin.so", _PLUGIN)
    return folder, etc


def build(lab: Lab, names: Iterable[str] = HOSTS) -> dict[str, Host]:
    """Name in `HOSTS` → host of a lab that has one for each, with its interfaces."""
    hosts = dict(zip(names, lab.hosts, strict=True))
    for name, host in hosts.items():
        add_interfaces(host, HOSTS[name])
    return hosts
