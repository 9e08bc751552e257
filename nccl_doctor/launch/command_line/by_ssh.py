"""Lines that start the job on their hosts over ssh: horovodrun and colossalai; and Fabric's, which
is torchrun with other names.

The flags are those of horovod/runner/launch.py (Horovod, at 059f6905), colossalai/cli/launcher
(ColossalAI, at 02c4da3a) and lightning/fabric/cli.py (Lightning, at 021e6b11). The first two start
the ranks of their own host without ssh.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nccl_doctor.launch.command_line import torchrun
from nccl_doctor.launch.command_line.job_line import (
    DEFAULT,
    MAX_PORT,
    Draft,
    FlagTable,
    GivenFlags,
    JobLine,
    JobLineError,
    LineValue,
    number,
    read_flags,
)
from nccl_doctor.launch.ssh import hostfile
from nccl_doctor.launch.ssh.hostfile import Entry
from nccl_doctor.model.job import UnreadHosts

HOROVODRUN = FlagTable(
    values="""
        -np/--num-proc -H/--hosts -hostfile/--hostfile --host-discovery-script
        -p/--ssh-port -i/--ssh-identity-file --start-timeout --network-interfaces
        --network-interface --output-filename --config-file --fusion-threshold-mb --cycle-time-ms
        --cache-capacity --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample
        --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise
        --min-num-proc/--min-np --max-num-proc/--max-np --slots-per-host --elastic-timeout
        --reset-limit --timeline-filename --stall-check-warning-time-seconds
        --stall-check-shutdown-time-seconds --mpi-args --binding-args --num-nccl-streams
        --thread-affinity --gloo-timeout-seconds --log-level
    """,
    switches="""
        --disable-cache --verbose --hierarchical-allreduce --no-hierarchical-allreduce
        --hierarchical-allgather --no-hierarchical-allgather --autotune --no-autotune
        --timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check --stall-check
        --mpi-threads-disable --no-mpi-threads-disable --tcp --log-with-timestamp
        --log-without-timestamp -prefix-timestamp/--prefix-output-with-timestamp
        --log-hide-timestamp --no-log-hide-timestamp --gloo --mpi --jsrun
    """,
    dashes=False,
)
COLOSSALAI = FlagTable(
    values="""
        -H/-host/--host --hostfile --include --exclude --num_nodes --nproc_per_node --master_port
        --master_addr --extra_launch_args --ssh-port
    """,
    switches="",
    dashes=False,
    abbreviations=False,
)
FABRIC = FlagTable(
    values="""
        --accelerator --strategy --devices --num_nodes --node_rank --main_address --main_port
        --precision
    """,
    switches="",
    abbreviations=False,
)
_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0")


def read_horovodrun(words: Sequence[str], cwd: Path) -> JobLine:
    """Read the words behind `horovodrun`; its ranks take the slots of the hosts in order.

    Raises:
        JobLineError: horovodrun would refuse the line.
    """
    given = read_flags(HOROVODRUN, words)
    flags = given.flags
    if script := flags.get("host_discovery_script"):
        return JobLine(unread=UnreadHosts(f"the command says {script.source}"))
    if "num_proc" not in flags:
        raise JobLineError("-np is missing: the number of ranks of all hosts together")
    ranks = number(flags["num_proc"], 1)
    if file := flags.get("hostfile"):
        entries = _file(file, cwd)
        source = file
    else:
        source = flags.get("hosts", LineValue(f"localhost:{ranks}", DEFAULT))
        entries = _listed(source)
    used: list[Entry] = []
    left = ranks
    for entry in entries:
        if left and entry.slots:
            used.append(replace(entry, slots=min(left, entry.slots)))
            left -= used[-1].slots or 0
    if left:
        have = f"{source.source} has {ranks - left} slots"
        raise JobLineError(f"{flags['num_proc'].source} {ranks}: {have}")
    if len(used) > 1 and any(entry.name in _LOCAL for entry in used):
        said = f"the command says {source.source} with {len(used)} hosts, one by no name of its own"
        return JobLine(unread=UnreadHosts(said), notes=given.notes)
    draft = Draft("horovodrun", given.notes)
    _put_hosts(draft, used, source, flags)
    return draft.done()


def read_colossalai(words: Sequence[str], cwd: Path) -> JobLine:
    """Read the words behind `colossalai run`, which starts torchrun on each host.

    Raises:
        JobLineError: the hosts cannot be read, or nothing says how many ranks each has.
    """
    given = read_flags(COLOSSALAI, words)
    flags = given.flags
    nproc = flags.get("nproc_per_node")
    if nproc is None:
        raise JobLineError("--nproc_per_node is missing: colossalai then starts torchrun with -1")
    slots = number(nproc, 1)
    source = flags.get("hostfile") or flags.get("host") or LineValue("localhost", DEFAULT)
    if "hostfile" in flags:
        entries = _chosen(flags, _file(source, cwd, bare=True))
    else:
        names = source.text.strip().split(",")
        entries = tuple(Entry(name, None, line) for line, name in enumerate(names, start=1))
    used = [replace(entry, slots=slots) for entry in entries]
    draft = Draft("colossalai", given.notes)
    _put_hosts(draft, used, source, flags)
    if len(used) > 1:
        addr = flags.get("master_addr", LineValue("127.0.0.1", DEFAULT))
        draft.put("master_addr", addr.text, addr.source)
    port = flags.get("master_port", LineValue("29500", DEFAULT))
    draft.put("master_port", number(port, 1, MAX_PORT), port.source)
    return draft.done()


def read_fabric(words: Sequence[str]) -> JobLine:
    """Read the words behind `fabric run`, which become those of torchrun.

    Raises:
        JobLineError: torchrun would refuse them.
    """
    given = read_flags(FABRIC, words)
    flags = given.flags
    devices = flags.get("devices", LineValue("1", DEFAULT))
    text = "1" if devices.text == "auto" else "gpu" if devices.text == "-1" else devices.text
    if "," in text:
        text = str(len([each for each in text.split(",") if each.strip()]))
    names = {
        "nnodes": flags.get("num_nodes"),
        "node_rank": flags.get("node_rank"),
        "nproc_per_node": LineValue(text, devices.source),
        "master_addr": flags.get("main_address"),
        "master_port": flags.get("main_port", LineValue("29400", DEFAULT)),
    }
    said = {name: each for name, each in names.items() if each is not None}
    return torchrun.resolve("fabric", said, given.notes)


def _put_hosts(draft: Draft, used: Sequence[Entry], source: LineValue, flags: GivenFlags) -> None:
    for name in ("nnodes", "max_nnodes"):
        draft.put(name, len(used), source.source)
    if len(used) == 1 and used[0].name in _LOCAL:
        draft.put("node_rank", 0, DEFAULT)
        draft.put("nproc_per_node", str(used[0].slots), source.source)
        return
    if port := flags.get("ssh_port"):
        draft.put("ssh_port", number(port, 1, MAX_PORT), port.source)
    draft.put("hosts", tuple(used))
    if source is flags.get("hostfile"):
        draft.put("hostfile", source.text, source.source)
    draft.put("starts_remote", True, source.source)
    draft.put("shell_here", True)


def _listed(said: LineValue) -> tuple[Entry, ...]:
    """Entries of `HOST:SLOTS,…`."""
    entries = []
    for line, text in enumerate(said.text.split(","), start=1):
        match = re.fullmatch(r"\s*([\w.-]+):(0*[1-9][0-9]{,4})\s*", text)
        if match is None:
            raise JobLineError(f"{said.source} {text!r} is not HOST:SLOTS")
        entries.append(Entry(match[1], int(match[2]), line))
    return tuple(entries)


def _file(said: LineValue, cwd: Path, *, bare: bool = False) -> tuple[Entry, ...]:
    """Entries of a hostfile; `bare`: only names stand in it."""
    try:
        entries = hostfile.read(str(cwd / said.text))
    except hostfile.HostfileError as error:
        raise JobLineError(str(error)) from error
    for entry in entries:
        if (entry.slots is None) is not bare:
            form = entry.name if bare else f"{entry.name} slots=N"
            raise JobLineError(f'{said.source} {said.text}, line {entry.line}: write "{form}"')
    return entries


def _chosen(flags: GivenFlags, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Entries that --include, --exclude and --num_nodes leave."""
    if "include" in flags and "exclude" in flags:
        raise JobLineError("--include and --exclude exclude each other")
    by_name = {entry.name: entry for entry in entries}
    for name in ("include", "exclude"):
        if name not in flags:
            continue
        wanted = flags[name].text.split(",")
        for host in wanted:
            if host not in by_name:
                raise JobLineError(f"{flags[name].source} {host!r}: the hostfile has no such host")
        if name == "include":
            entries = tuple(by_name[host] for host in wanted)
        else:
            entries = tuple(entry for entry in entries if entry.name not in wanted)
    if "num_nodes" in flags and (most := number(flags["num_nodes"], -1)) > 0:
        entries = entries[:most]
    if not entries:
        raise JobLineError("no host is left")
    return entries
