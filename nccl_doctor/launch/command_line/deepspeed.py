"""The `deepspeed` command: its flags, and the hosts of a hostfile that they select.

The rules are those of deepspeed/launcher/runner.py; a test holds the flags against the installed
one. Those of elastic training were there from 0.7 on, and are gone in 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nccl_doctor.launch.command_line.job_line import (
    DEFAULT,
    MAX_PORT,
    Draft,
    FlagTable,
    GivenFlags,
    JobLine,
    JobLineError,
    LineValue,
    is_file,
    number,
    read_flags,
)
from nccl_doctor.launch.ssh import hostfile
from nccl_doctor.launch.ssh.hostfile import Entry
from nccl_doctor.system.programs import installed
from nccl_doctor.toolkit.suggest import suggest
from nccl_doctor.toolkit.versions import release

FLAGS = FlagTable(
    values="""
        -H/--hostfile -i/--include -e/--exclude --num_nodes --num_gpus/--num_accelerators
        --master_port --master_addr --node_rank --launcher --launcher_args --enable_each_rank_log
        --autotuning --bind_core_list --ssh_port --venv_script --log_level
        --min_elastic_nodes --max_elastic_nodes
    """,
    switches="""
        --module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid
        --bind_cores_to_rank -q/--quiet --elastic_training
    """,
    parser="deepspeed.launcher.runner:parse_args",
    dashes=False,
)

HOSTFILE = "/job/hostfile"
"""Default hostfile, read if it exists."""
_AS_IT_IS = (0, 15, 2), (0, 19, 7)
"""First release that takes --include as it is, and first one that does not again."""
LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich")
_PORT = "29500"
_ALL: frozenset[int] = frozenset()
"""Slots of a host that a filter gives without slots."""


def read(words: Sequence[str], cwd: Path) -> JobLine:
    """Read the words behind `deepspeed`, and the hostfile.

    Raises:
        JobLineError: deepspeed would refuse the line, or would leave out hosts in silence.
    """
    given = read_flags(FLAGS, words)
    return resolve("deepspeed", given.flags, cwd, given.notes)


def resolve(launcher: str, flags: GivenFlags, cwd: Path, notes: tuple[str, ...] = ()) -> JobLine:
    """Record of the job as deepspeed reads its flags, from any source.

    Raises:
        JobLineError: as in `read`.
    """
    draft = Draft(launcher, notes)
    _refuse_contradictions(flags)
    port = flags.get("master_port", LineValue(_PORT, DEFAULT))
    draft.put("master_port", number(port, 1, MAX_PORT), port.source)
    for name in ("min_elastic_nodes", "max_elastic_nodes"):
        if name in flags:
            number(flags[name], -1)
    if "elastic_training" in flags:
        draft.note(
            f"{flags['elastic_training'].source}: all hosts are examined, though fewer could start "
            "the job; newer DeepSpeed has no such flag"
        )
    if "autotuning" in flags:
        draft.note(f"{flags['autotuning'].source} starts many short jobs; one is examined")
    named = flags.get("hostfile", LineValue(HOSTFILE, DEFAULT))
    if is_file(cwd / named.text):
        _many(draft, flags, named, cwd)
    elif named.source == DEFAULT:
        _alone(draft, flags)
    else:
        raise JobLineError(
            f"{named.source} {named.text}: no such file; deepspeed would use this host only"
        )
    return draft.done()


def _refuse_contradictions(flags: GivenFlags) -> None:
    filters = [said for name in ("include", "exclude") if (said := flags.get(name)) and said.text]
    counts = [
        said
        for name in ("num_nodes", "num_gpus")
        if (said := flags.get(name)) and _count(said) >= 0
    ]
    if len(filters) > 1 or (filters and counts):
        pair = [*filters, *counts][:2]
        raise JobLineError(f"{pair[0].source} and {pair[1].source} exclude each other")
    launcher = flags.get("launcher", LineValue(LAUNCHERS[0], DEFAULT))
    if launcher.text.lower() not in LAUNCHERS:
        hint = suggest(launcher.text.lower(), LAUNCHERS) or f"; it is one of {', '.join(LAUNCHERS)}"
        raise JobLineError(f"{launcher.source} {launcher.text!r} is not known{hint}")


def _alone(draft: Draft, flags: GivenFlags) -> None:
    """Put the ranks of this host, without a hostfile."""
    nodes = flags.get("num_nodes")
    if nodes and _count(nodes) > 1:
        raise JobLineError(f"{nodes.source} {nodes.text} needs a --hostfile that names the hosts")
    if (said := flags.get("master_addr")) and said.text:
        draft.note(f"{said.source} is not used without a hostfile: the job uses this host only")
    if "no_ssh" in flags:
        _no_ssh_rank(flags, 1)
    for name in ("nnodes", "max_nnodes"):
        draft.put(name, 1, DEFAULT)
    draft.put("node_rank", 0, DEFAULT)
    draft.put("master_addr", "127.0.0.1", DEFAULT)
    include, exclude = flags.get("include"), flags.get("exclude")
    count = flags.get("num_gpus")
    slots: Sequence[int] = ()
    if include and include.text:
        chosen = _filter(include, ["localhost"])
        if version := _takes_include_as_it_is():
            _refuse_whole_hosts(include, chosen, {}, version)
        slots = sorted(chosen["localhost"])
        source = include.source
    elif count and _count(count) > 0:
        slots, source = range(_count(count)), count.source
    elif exclude and exclude.text:
        _filter(exclude, ["localhost"])
        draft.note(f"{exclude.source} {exclude.text}: the number of ranks depends on the GPUs here")
        draft.put("environ", {"CUDA_VISIBLE_DEVICES": None})
        return
    if slots:
        draft.put("nproc_per_node", str(len(slots)), source)
        draft.put("environ", {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))})
    else:
        draft.put("nproc_per_node", "gpu", DEFAULT)


def _many(draft: Draft, flags: GivenFlags, named: LineValue, cwd: Path) -> None:
    """Put the hosts of a hostfile that the filters leave."""
    try:
        found = named.source == DEFAULT
        entries = hostfile.read(str(cwd / named.text), found=found, of_deepspeed=True)
    except hostfile.HostfileError as error:
        raise JobLineError(str(error)) from error
    for entry in entries:
        if not entry.slots:
            where = f"{named.source} {named.text}, line {entry.line}: {entry.name} has slots=0"
            if entry is entries[0] and "master_addr" not in flags:
                raise JobLineError(f"{where}, and rank 0 would look for its store there")
            draft.note(f"{where}: no rank is started there")
    active = _active(flags, entries)
    if not active:
        raise JobLineError(f"{named.source} {named.text}: no host is left by the filters")
    draft.put("hostfile", named.text, named.source)
    draft.put("hosts", tuple(replace(host, slots=len(slots)) for host, slots in active))
    for name in ("nnodes", "max_nnodes"):
        draft.put(name, len(active), named.source)
    if (said := flags.get("master_addr")) and said.text:
        draft.put("master_addr", said.text, said.source)
    if "ssh_port" in flags:
        draft.put("ssh_port", number(flags["ssh_port"], 1, MAX_PORT), flags["ssh_port"].source)
    if "no_ssh" in flags:
        node = _no_ssh_rank(flags, len(active))
        draft.put("node_rank", node, flags["node_rank"].source)
    elif len(active) > 1 or "force_multi" in flags:
        draft.put("starts_remote", True, named.source)
        return
    else:
        node = 0
        draft.put("node_rank", 0, DEFAULT)
    if not ("no_ssh" in flags or "no_ssh_check" in flags) or not _text(flags, "master_addr"):
        port = ("-p", _text(flags, "ssh_port")) if "ssh_port" in flags else ()
        draft.put("asks_ssh", (*port, active[0][0].destination))
    slots = active[node][1]
    draft.put("nproc_per_node", str(len(slots)), named.source)
    draft.put("environ", {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))})


def _active(flags: GivenFlags, entries: Sequence[Entry]) -> list[tuple[Entry, Sequence[int]]]:
    """The hosts that take part, in the order of the file, each with the slots that it gives."""
    slots = {entry.destination: set(range(entry.slots or 0)) for entry in entries}
    for name in ("include", "exclude"):
        said = flags.get(name)
        if not said or not said.text:
            continue
        wanted = _filter(said, list(slots))
        if name == "include" and (version := _takes_include_as_it_is()):
            _refuse_whole_hosts(said, wanted, {h: len(own) for h, own in slots.items()}, version)
            slots = {host: set(wanted.get(host, ())) for host in slots}
            continue
        for host, numbers in wanted.items():
            if not numbers <= slots[host]:
                worst = min(numbers - slots[host])
                raise JobLineError(
                    f"{said.source}: {host} has no slot {worst}, only {len(slots[host])} from 0"
                )
        named = {host: numbers or slots[host] for host, numbers in wanted.items()}
        for host, own in slots.items():
            chosen = named.get(host, set())
            slots[host] = own & chosen if name == "include" else own - chosen
    active: list[tuple[Entry, Sequence[int]]] = [
        (entry, sorted(left)) for entry in entries if (left := slots[entry.destination])
    ]
    if (said := flags.get("num_nodes")) and _count(said) > 0:
        active = active[: _count(said)]
    if (said := flags.get("num_gpus")) and _count(said) > 0:
        active = [(entry, range(_count(said))) for entry, _ in active]
    return active


def _filter(said: LineValue, hosts: Sequence[str]) -> dict[str, frozenset[int]]:
    """Host → slots of `host[:slot,…]@host…`; `_ALL` where it names none."""
    wanted: dict[str, frozenset[int]] = {}
    for part in said.text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in hosts:
            few = ", ".join(hosts[:5]) + (", …" if len(hosts) > 5 else "")
            raise JobLineError(f"{said.source} {part!r}: the job has no such host; it has {few}")
        slots = [LineValue(item, f"{said.source} {part!r}: slot") for item in numbers.split(",")]
        found = frozenset(number(slot, 0) for slot in slots) if colon else _ALL
        wanted[host] = wanted.get(host, _ALL) | found
    return wanted


def _takes_include_as_it_is() -> str:
    """The version of the installed deepspeed, if it looks up no slots for --include: 0.15.2 to
    0.19.6 (`parse_inclusion_exclusion` of launcher/runner.py). Then a slot that the hostfile does
    not have is taken, and a host without slots has none, and is left out in silence.
    """
    version = installed("deepspeed") or ""
    return version if _AS_IT_IS[0] <= release(version) < _AS_IT_IS[1] else ""


def _refuse_whole_hosts(
    said: LineValue, wanted: Mapping[str, frozenset[int]], slots: Mapping[str, int], version: str
) -> None:
    """JobLineError for a host without slots; `slots`: host → how many it has, where it is known."""
    for host, numbers in wanted.items():
        if not numbers:
            own = ",".join(map(str, range(slots.get(host, 0))))
            write = f'write "{host}:{own}"' if own else f'write them, as in "{host}:0"'
            raise JobLineError(
                f"{said.source}: deepspeed {version} leaves out {host} without its slots; {write}"
            )


def _no_ssh_rank(flags: GivenFlags, nnodes: int) -> int:
    """Node rank of this host, which --no_ssh needs: each host is started by its own line."""
    if "node_rank" not in flags:
        raise JobLineError(f"{flags['no_ssh'].source} needs --node_rank, from 0 to {nnodes - 1}")
    rank = number(flags["node_rank"], 0)
    if rank >= nnodes:
        hint = "no hostfile" if nnodes == 1 else f"the job has {nnodes} hosts"
        raise JobLineError(f"{flags['node_rank'].source} {rank} is out of range: {hint}")
    return rank


def _text(flags: GivenFlags, name: str) -> str:
    return flags[name].text if name in flags else ""


def _count(said: LineValue) -> int:
    """A number; -1 means that it is not given."""
    return number(said, -1)
