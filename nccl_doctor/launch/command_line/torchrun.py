"""torchrun, `python -m torch.distributed.run` and `.launch`: how they read their flags.

The rules are those of torch/distributed/run.py and of the rendezvous back ends that it chooses,
2.4 to 2.15; a test holds the flags against the installed torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

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
from nccl_doctor.model.job import Rendezvous

FLAGS = FlagTable(
    values="""
        --nnodes --nproc_per_node --rdzv_backend --rdzv_endpoint --rdzv_id --rdzv_conf
        --max_restarts --monitor_interval --start_method --event_log_handler --role --log_dir
        -r/--redirects -t/--tee --local_ranks_filter --duplicate_stdout_filters
        --duplicate_stderr_filters --node_rank --master_addr --master_port --local_addr
        --logs_specs --numa_binding --signals_to_handle --shutdown_timeout
        --log_line_prefix_template
    """,
    switches="""
        --standalone -m/--module --no_python --run_path --virtual_local_rank --print_completion
    """,
    parser="torch.distributed.run:get_args_parser",
)
LAUNCH_FLAGS = FLAGS.with_more({"--use_env": False})
"""`torch.distributed.launch` has one more."""

PORT = 29500
C10D_PORT = 29400
_LOCAL = "localhost"
_WORDS = ("auto", "cpu", "gpu")
_FROM_VARIABLES = (
    *("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port", "local_addr"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone", "max_restarts"),
)
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


def read(words: Sequence[str], environ: Mapping[str, str], table: FlagTable = FLAGS) -> JobLine:
    """Read the words behind `torchrun`; PET_ variables stand for flags that are not given.

    Raises:
        JobLineError: torchrun would refuse the line, or the line contradicts itself.
    """
    given = read_flags(table, words)
    flags = {**_of_variables(environ), **given.flags}
    try:
        return resolve("torchrun", flags, given.notes)
    except JobLineError as error:
        raise JobLineError(f"{error}{_one_for_each_task(flags, environ)}") from error


def _one_for_each_task(flags: GivenFlags, environ: Mapping[str, str]) -> str:
    """A hint where the node rank is the number of a task, and a host has several of them."""
    rank, tasks = flags.get("node_rank"), environ.get("SLURM_NTASKS", "")
    several = tasks.isdecimal() and tasks != environ.get("SLURM_NNODES", tasks)
    if not rank or rank.text != environ.get("SLURM_PROCID") or not several:
        return ""
    return (
        f"; it is SLURM_PROCID, the number of one of {tasks} tasks: start one task on each host "
        "(srun --ntasks-per-node=1), and give it --node-rank $SLURM_NODEID"
    )


def read_variables(environ: Mapping[str, str]) -> JobLine:
    """Record of the job of a torchrun that is given no flag, only PET_ variables.

    Raises:
        JobLineError: as in `read`.
    """
    return resolve("torchrun", _of_variables(environ))


def _of_variables(environ: Mapping[str, str]) -> dict[str, LineValue]:
    flags = {
        name: LineValue(environ[variable], variable)
        for name in _FROM_VARIABLES
        if (variable := f"PET_{name.upper()}") in environ
    }
    if "standalone" in flags and number(flags["standalone"], 0) == 0:
        del flags["standalone"]
    return flags


def resolve(launcher: str, flags: GivenFlags, notes: tuple[str, ...] = ()) -> JobLine:
    """Record of the job as torchrun reads its flags, from any source.

    Raises:
        JobLineError: as in `read`.
    """
    draft = Draft(launcher, notes)
    conf = _conf(flags)
    draft.put("rendezvous", _rendezvous(flags))
    draft.put("max_restarts", number(flags.get("max_restarts", LineValue("0", DEFAULT)), 0))
    least, most = _nnodes(flags.get("nnodes", LineValue("1", DEFAULT)))
    _put_nproc(draft, flags.get("nproc_per_node", LineValue("1", DEFAULT)))
    if said := flags.get("local_addr"):
        draft.put("local_addr", said.text, said.source)
    backend = flags.get("rdzv_backend", LineValue("static", DEFAULT))
    if not backend.text and "standalone" not in flags:
        raise JobLineError(f"{backend.source} is empty, which torchrun refuses: leave it out")
    if said := flags.get("standalone"):
        _standalone(draft, flags, least)
        least = most = 1
    elif backend.text == "static":
        if least != most:
            draft.note(f"{flags['nnodes'].source} {least}:{most}: static waits for {most} hosts")
        least = most
        _static(draft, flags, most)
    else:
        if (said := flags.get("rdzv_id")) and said.text:
            draft.put("run_id", said.text, said.source)
        _dynamic(draft, flags, conf, least, most)
    source = flags["nnodes"].source if "nnodes" in flags else DEFAULT
    draft.put("nnodes", least, source)
    draft.put("max_nnodes", most, source)
    if least != most:
        draft.note(f"{source} {least}:{most}: waits for {most} hosts, and is content with {least}")
    return draft.done()


def _rendezvous(flags: GivenFlags) -> Rendezvous:
    """Options of the rendezvous; --standalone sets some of them, as torchrun does."""
    conf = flags.get("rdzv_conf", LineValue("", ""))
    if "standalone" in flags:
        backend, endpoint = "c10d", f"{_LOCAL}:0"
    else:
        backend = flags["rdzv_backend"].text if "rdzv_backend" in flags else "static"
        endpoint = flags["rdzv_endpoint"].text if "rdzv_endpoint" in flags else ""
    local_addr = flags.get("local_addr", LineValue("", "")).text
    return Rendezvous(backend, endpoint, conf.text, conf.source, local_addr)


def _nnodes(said: LineValue) -> tuple[int, int]:
    parts = [LineValue(part, said.source) for part in said.text.split(":")]
    if len(parts) > 2:
        raise JobLineError(f"{said.source} {said.text!r} is neither a number nor MIN:MAX")
    least, most = number(parts[0], 1), number(parts[-1], 1)
    if least > most:
        raise JobLineError(f"{said.source} {said.text}: the first number is above the second")
    return least, most


def _put_nproc(draft: Draft, said: LineValue) -> None:
    text = said.text
    if text in _WORDS:
        draft.put("nproc_per_node", text, said.source)
    elif re.fullmatch(r"[a-z_]+", text):  # a back end that is plugged into torch has its own word
        close = difflib.get_close_matches(text, _WORDS, 1, 0.7)  # "xpu" is not that close to "gpu"
        if close:
            raise JobLineError(f'{said.source} {text!r} is not known; did you mean "{close[0]}"?')
        draft.note(f"{said.source} {text}: only GPUs with CUDA or ROCm are counted here")
    else:
        draft.put("nproc_per_node", str(number(said, 1)), said.source)


def _standalone(draft: Draft, flags: GivenFlags, least: int) -> None:
    if least > 1:
        raise JobLineError(
            f"{flags['standalone'].source} is for one host, but {flags['nnodes'].source} is "
            f"{flags['nnodes'].text}: leave one out"
        )
    for name in ("rdzv_backend", "rdzv_endpoint", "rdzv_id"):
        if name in flags and flags[name].text:
            draft.note(f"{flags[name].source} is not used with {flags['standalone'].source}")
    _alone(draft, flags["standalone"].source)


def _alone(draft: Draft, source: str) -> None:
    """One host that meets itself, on any free port."""
    draft.put("node_rank", 0, DEFAULT)
    draft.put("master_addr", _LOCAL, source)


def _static(draft: Draft, flags: GivenFlags, nnodes: int) -> None:
    """Node rank and address are given to each host."""
    addr = flags.get("master_addr", LineValue("127.0.0.1", DEFAULT))
    port = flags.get("master_port", LineValue(str(PORT), DEFAULT))
    endpoint = flags.get("rdzv_endpoint")
    if endpoint and endpoint.text.strip():
        host, at = parse_endpoint(endpoint)
        if at is None:
            raise JobLineError(
                f"{endpoint.source} {endpoint.text} has no port, and a static rendezvous has no "
                f"default port: write {endpoint.text}:{PORT}"
            )
        for said, used in ((flags.get("master_addr"), host), (flags.get("master_port"), str(at))):
            if said and said.text != used:
                draft.note(f"{said.source} {said.text} is not used: {endpoint.source} comes first")
        addr = port = endpoint
    else:
        at = number(port, 0, MAX_PORT)
        if nnodes == 1 and port.source == DEFAULT:  # the address is not read (run() of torch 2.13)
            addr = LineValue(addr.text or _LOCAL, addr.source)
        host, _ = parse_endpoint(LineValue(f"{addr.text}:{at}", addr.source), shown=addr.text)
    if at == 0 and nnodes > 1:
        raise JobLineError(f"{port.source} 0: {nnodes} hosts cannot find each other on any port")
    _put_node_rank(draft, flags, nnodes)
    draft.put("master_addr", host, addr.source)
    if at and (nnodes > 1 or port.source != DEFAULT):  # alone, newer torch takes any free port
        draft.put("master_port", at, port.source)


def _put_node_rank(draft: Draft, flags: GivenFlags, nnodes: int) -> None:
    said = flags.get("node_rank")
    if said:
        rank = number(said, 0)
        if rank >= nnodes:
            last = f"0 to {nnodes - 1}" if nnodes > 1 else "0"
            raise JobLineError(f"{said.source} {rank} is out of range: with {nnodes} it is {last}")
        draft.put("node_rank", rank, said.source)
    elif nnodes == 1:
        draft.put("node_rank", 0, DEFAULT)
    else:
        draft.note("--node_rank is not given: torchrun then uses node rank 0 on every host")


def _dynamic(
    draft: Draft, flags: GivenFlags, conf: Mapping[str, str], least: int, most: int
) -> None:
    """Hosts get their node ranks as they meet."""
    backend = flags["rdzv_backend"]
    endpoint = flags.get("rdzv_endpoint", LineValue("", DEFAULT))
    if most == 1:
        draft.put("node_rank", 0, DEFAULT)
    else:
        draft.put("ranks_assigned", True, backend.source)
        said = flags.get("node_rank")
        if said and number(said, 0):
            draft.note(f"{said.source} is not used: {backend.text} assigns the node ranks")
    store = conf.get("store_type", "tcp").lower()
    if backend.text != "c10d" or store == "file":
        where = "the file" if backend.text == "c10d" else f"{backend.text} at"
        draft.note(
            f"the rendezvous is in {where} {endpoint.text or '(not given)'}, which is not "
            "examined: give --master-addr to nccl-doctor"
        )
        return
    if store != "tcp":
        raise JobLineError(
            f"{flags['rdzv_conf'].source} store_type={store} is neither tcp nor file"
        )
    host, port = parse_endpoint(endpoint)
    port = C10D_PORT if port is None else port
    if not endpoint.text.strip() and "master_addr" in flags:
        draft.note(
            f"{flags['master_addr'].source} is not used: c10d needs --rdzv_endpoint HOST:PORT"
        )
    if port == 0 and least > 1:
        raise JobLineError(f"{endpoint.source} has port 0: {least} hosts cannot meet on any port")
    draft.put("master_addr", host, endpoint.source)
    if port:
        draft.put("master_port", port, endpoint.source)
    if "is_host" in conf:
        word = conf["is_host"].lower()
        if word not in _TRUE + _FALSE:
            raise JobLineError(
                f"{flags['rdzv_conf'].source} is_host={word} is neither true nor false"
            )
        draft.put("is_host", word in _TRUE, flags["rdzv_conf"].source)


def _conf(flags: GivenFlags) -> dict[str, str]:
    said = flags.get("rdzv_conf", LineValue("", DEFAULT))
    conf = {}
    for item in said.text.split(",") if said.text.strip() else []:
        key, _, value = (part.strip() for part in item.partition("="))
        if not key or not value:
            raise JobLineError(f"{said.source} {said.text!r}: {item!r} is not KEY=VALUE")
        conf[key] = value
    return conf


def parse_endpoint(said: LineValue, shown: str | None = None) -> tuple[str, int | None]:
    """(host, port) of `host[:port]`; an IPv6 host may be in brackets; port None: not given.

    As torch reads it: what stands behind the last colon is the port, an empty text is this host.

    Raises:
        JobLineError: it is not that.
    """
    text = said.text.strip()
    shown = text if shown is None else shown
    if not text:
        return _LOCAL, None
    host, colon, tail = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, colon = text, ""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host:
        raise JobLineError(f"{said.source} {shown!r} has no host; is its shell variable set?")
    if not re.fullmatch(r"[\w.:-]+", host):
        raise JobLineError(f"{said.source} {shown!r} does not begin with a host name or address")
    if not colon:
        return host, None
    if not re.fullmatch(r"[0-9]{1,5}", tail) or int(tail) > MAX_PORT:
        hint = f"; write an IPv6 address as [{text}]" if ":" in host else ""
        raise JobLineError(f"{said.source} {shown!r}: {tail!r} is not a port{hint}")
    return host, int(tail)
