"""Rules of torchrun's c10d rendezvous: the host that serves it, and how long it waits.

Source: `_create_tcp_store` in torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py, and
`parse_rendezvous_endpoint` and `_matches_machine_hostname` in utils.py beside it, `create_handler`
in dynamic_rendezvous.py.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nccl_doctor.model.cluster import Cluster, Host
from nccl_doctor.model.job import Job, Rendezvous
from nccl_doctor.toolkit.host import ROOT, ancestors, command_line, host_name
from nccl_doctor.toolkit.net.names import LookUp, canonical_name, look_up

_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")
KEEP_ALIVE = (5.0, 15.0)
"""Default of `keep_alive`: create_handler in dynamic_rendezvous.py."""
_ANCESTORS = 4
_NNODES = re.compile(r"--nnodes[= ](\S+)")
_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")
_ATTEMPTS = 3
_PORT = 29400
_LONGEST = 10
_READ_TIMEOUT_S = 60.0
"""Time-out of the store of the rendezvous: of each operation, and of connecting to it."""


def rendezvous_of(job: Job, environ: Mapping[str, str]) -> Rendezvous:
    """Options of torchrun: those of the job's command, which torchrun reads with its PET_
    variables, or else the variables alone.
    """
    if job.rendezvous.backend:
        return job.rendezvous
    conf = environ.get("PET_RDZV_CONF", "")
    return Rendezvous(
        environ.get("PET_RDZV_BACKEND", ""),
        environ.get("PET_RDZV_ENDPOINT", ""),
        conf,
        "PET_RDZV_CONF" if conf else "",
        environ.get("PET_LOCAL_ADDR", ""),
    )


AGENT_NAMES, NAMES = "agent_names", "names"
"""The check in which hosts exchange the names of their agents, and its round."""


def first_agent(cluster: Cluster) -> Host | None:
    """The host whose agent will serve the store of the ranks: that of the first name, as torch
    sorts them (`_RendezvousState.participants`). None where no agents are to meet by c10d.
    """
    told = [
        (each.host, each.outcome.facts)
        for each in cluster.evidence(AGENT_NAMES, NAMES)
        if each.outcome.facts
    ]
    first = min((str(facts["first"]) for _, facts in told), default="")
    return next((host for host, facts in told if facts["name"] == first), None)


def lines_above(root: Path = ROOT) -> list[str]:
    """Command lines of the processes that started this one, the nearest first: under torchrun, its
    agent is one of them.
    """
    return [" ".join(command_line(pid, root)) for pid in ancestors(root)[:_ANCESTORS]]


def elastic_range(environ: Mapping[str, str], root: Path = ROOT) -> tuple[int, int] | None:
    """MIN and MAX of the agent that started this rank, by its line, or else by its variable; None
    where it is not elastic.
    """
    said = next((m[1] for line in lines_above(root) if (m := _NNODES.search(line))), None)
    match = _RANGE.fullmatch(environ.get("PET_NNODES", "") if said is None else said)
    least, most = map(int, match.groups()) if match else (0, 0)
    return (least, most) if least < most else None


@dataclass(frozen=True)
class Recognition:
    """Look-ups by which a machine decides whether it is the endpoint, and the answer of torch."""

    host: LookUp
    own: LookUp
    serves: bool


def recognise(host: str, limit_s: float, own_limit_s: float | None = None) -> Recognition:
    """True if torch's agent on this machine would take `host` for it; in little more time.

    `own_limit_s`: for the own name, in place of `limit_s`.
    """
    own = host_name()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(look_up, host, limit_s)
        mine = look_up(own, limit_s if own_limit_s is None else own_limit_s)
        resolved = other.result()
    canonical = "" if mine.timed_out else canonical_name(own, limit_s)
    matches = matches_machine(host, own, resolved.answers, mine.answers, canonical)
    return Recognition(resolved, mine, matches)


def endpoint_host(endpoint: str) -> str:
    """Host of `HOST[:PORT]`, an IPv6 address in brackets; localhost if it is empty."""
    text = endpoint.strip()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] or text or "localhost"


def port_of(endpoint: str) -> str:
    """Port of `HOST[:PORT]`; torchrun's default if it names none."""
    port = endpoint.strip().rpartition(":")[2]
    return port if ":" in endpoint and port.isdecimal() else str(_PORT)


def is_host_of(conf: str) -> bool | None:
    """`is_host` of PET_RDZV_CONF (`key=value,…`); None if torch decides."""
    word = _pairs(conf).get("is_host", "").lower()
    return True if word in _TRUE else False if word in _FALSE else None


def in_a_file(conf: str) -> bool:
    """True if the agents meet in a file, and not over TCP."""
    return _pairs(conf).get("store_type", "tcp").lower() == "file"


def read_timeout(given: Rendezvous) -> float | None:
    """Seconds in which torchrun's c10d rendezvous must be connected; None without c10d."""
    if given.backend.lower() != "c10d":
        return None
    return _number(_pairs(given.conf), "read_timeout", _READ_TIMEOUT_S)


def keep_alive(given: Rendezvous) -> tuple[float, float]:
    """(seconds between two signs of life of a host, seconds after which it is taken for dead)."""
    conf = _pairs(given.conf)
    every = _number(conf, "keep_alive_interval", KEEP_ALIVE[0])
    return every, every * _number(conf, "keep_alive_max_attempt", _ATTEMPTS)


def _pairs(conf: str) -> dict[str, str]:
    items = (part.partition("=") for part in re.split(r"[,;]", conf))
    return {name.strip(): value.strip() for name, _, value in items}


def _number(conf: Mapping[str, str], key: str, default: float) -> float:
    text = conf.get(key, "")
    return float(text) if text.isdecimal() and len(text) < _LONGEST else default


def matches_machine(
    host: str, own_name: str, resolved: Sequence[str], own: Sequence[str], canonical: str = ""
) -> bool:
    """True if a machine recognises itself as the endpoint, and so serves the store.

    It compares with the addresses that its own *name* resolves to, not with its interfaces.

    Args:
        host: of the endpoint.
        own_name: as gethostname says.
        resolved: addresses of `host`, as this machine resolves it.
        own: addresses of `own_name`.
        canonical: the resolver's canonical name of `own_name`, or empty.
    """
    if host in ("localhost", own_name, canonical):
        return True
    meant = set(resolved)
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_loopback:
            return True
        meant.add(str(address))
    return not meant.isdisjoint(own)
