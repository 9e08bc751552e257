"""Survey of one host: its interfaces, and those that NCCL and gloo take.

By their own rules; and as NCCL itself says, where it was asked.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.model.check import Context
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.codec import encode
from nccl_doctor.toolkit.fabric.ports import rdma_ports
from nccl_doctor.toolkit.fabric.road import admitted, choose_road
from nccl_doctor.toolkit.nccl.answer import LibraryAnswer
from nccl_doctor.toolkit.nccl.conf import Setting, nccl_settings
from nccl_doctor.toolkit.nccl.interface_choice import (
    COMM_ID,
    MAX_INTERFACES,
    NCCL_VARIABLE,
    SOCKETS,
    Filter,
    InterfaceChoice,
    chosen,
    gloo_choice,
    nccl_choices,
    resolve_own,
    resolver,
    subnet_prefixes,
)
from nccl_doctor.toolkit.nccl.release import NcclRelease, loaded_release
from nccl_doctor.toolkit.net.interfaces import Interface, interfaces, line_rate
from nccl_doctor.toolkit.net.routes import gateways
from nccl_doctor.toolkit.variables.recorded import allowed
from nccl_doctor.toolkit.variables.table import rail_variables


class ComparedAnswer(TypedDict):
    """Answer of NCCL itself, and how it differs from the rules.

    `interface`, `address`, `names`, `read_otherwise`: as of `LibraryAnswer`; `expected`: what the
    rules say, empty for no interface. `from_files`: variables that it took from files, with the
    file; `readings`: variable → its `text`, and `value` and `taken` of its `ReadValue`. Only names
    that may be recorded; no other values, and no secrets in these.
    """

    library: str
    version: str
    result: int | None
    interface: str
    address: str
    error: str
    plugin: str
    used: list[str]
    from_files: dict[str, str]
    expected: list[str]
    differs: bool
    read_otherwise: list[str]
    names: list[str]
    readings: dict[str, dict[str, Any]]


class Survey(TypedDict):
    """Facts that `survey` returns, those of check `interfaces`."""

    interfaces: list[dict[str, Any]]
    choices: dict[str, dict[str, Any]]
    listen: list[dict[str, Any]]
    nccl_data: str
    lacking: dict[str, list[str]]
    asked: ComparedAnswer | None
    by_file: dict[str, Any] | None


def survey(
    env: Mapping[str, str],
    resolve_timeout_s: float = 3.0,
    root: Path = Path("/"),
    ask: Callable[[], LibraryAnswer | None] = lambda: None,
) -> Survey:
    """The choices of this host and the interfaces to choose from, as plain facts.

    `choices`: library → `InterfaceChoice`; `listen`: see `chosen`; `nccl_data`: name of the network
    that data takes between hosts, see `Road`; `interfaces`: the chosen ones, and at most
    `MAX_INTERFACES` more, each with its `subnets`, one for each address, the `gateways` of default
    routes that leave by it, and its line rate, `mbps`; `lacking`: see `lacking_cards`; `asked`: the
    answer of `ask`, which decides where it differs; `by_file`: what a configuration file says where
    the environment has NCCL_SOCKET_IFNAME and so wins: `value`, `origin` and `picks`, or None.
    """
    found = interfaces()
    prefixes = subnet_prefixes()
    release = loaded_release()
    settings = nccl_settings(env, root=root, release=release)
    ways = gateways(root)
    ports = rdma_ports(root / "sys/class/infiniband")
    resolve = resolver(resolve_timeout_s)
    by_rules = nccl_choices(found, settings, prefixes, release, resolve)
    answer = ask()
    bootstrap, sockets = by_rules if answer is None else by_answer(answer, *by_rules)
    gloo = gloo_choice(found, env, *resolve_own(resolve_timeout_s))
    listen = chosen((bootstrap, sockets, gloo), found)
    names = {entry["interface"] for entry in listen}
    shown = [each for each in found if each.name in names]
    shown += [each for each in found if each.name not in names][:MAX_INTERFACES]
    return {
        "interfaces": [
            {
                **encode(each),
                "subnets": _subnets(each, prefixes),
                "gateways": [way.address for way in ways if way.interface == each.name],
                "mbps": line_rate(each.name, root),
            }
            for each in shown
        ],
        "choices": {each.library: encode(each) for each in (bootstrap, sockets, gloo)},
        "listen": listen,
        "nccl_data": choose_road(settings, admitted(settings, ports)).name,
        "lacking": lacking_cards(settings, found),
        "asked": None if answer is None else _asked(answer, by_rules[0], settings),
        "by_file": _by_file(env, found, root, release),
    }


def _by_file(
    env: Mapping[str, str], nics: Sequence[Interface], root: Path, release: NcclRelease
) -> dict[str, Any] | None:
    """The choice of NCCL without NCCL_SOCKET_IFNAME in the environment, where a file has it."""
    if NCCL_VARIABLE not in env:
        return None
    left = {name: value for name, value in env.items() if name != NCCL_VARIABLE}
    settings = nccl_settings(left, root=root, release=release)
    if NCCL_VARIABLE not in settings:
        return None
    _, choice = nccl_choices(nics, settings, release=release)
    if choice.variable != NCCL_VARIABLE or choice.problem:
        return None
    picks = [list(pick) for pick in choice.picks]
    return {"value": choice.value, "origin": choice.origin, "picks": picks}


def lacking_cards(
    settings: Mapping[str, Setting], nics: Sequence[Interface]
) -> dict[str, list[str]]:
    """Variable → interfaces that it names to a plug-in and this host lacks, in their order.

    The variables are those that name one card for each rail. A name with which others begin counts
    as found, since it may mean them.
    """
    lacking = {}
    for name in rail_variables():
        value = settings[name].value if name in settings else ""
        named = Filter.parse(value.replace(" ", ""))
        absent = [
            each
            for each in named.names
            if not named.exclude and not any(nic.name.startswith(each) for nic in nics)
        ]
        if absent:
            lacking[name] = absent
    return lacking


_GIVEN = ("library", "version", "result", "interface", "address")


def other_answers(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Seat, as text → what NCCL itself said on that host, where it differs from the rules.

    Parameter `nccl` of a round whose participants choose by `survey`: see `given_answer`.
    """
    said = {str(rank.seat): facts.get("asked") for rank, facts in cluster.facts("interfaces")}
    return {
        seat: {name: asked[name] for name in _GIVEN}
        for seat, asked in said.items()
        if asked and asked["differs"]
    }


def given_answer(ctx: Context) -> LibraryAnswer | None:
    """NCCL's answer on this host, where a round gives it to this participant."""
    given = ctx.params.get("nccl", {}).get(str(ctx.seat))
    return LibraryAnswer(**given) if given else None


def by_answer(
    answer: LibraryAnswer, bootstrap: InterfaceChoice, sockets: InterfaceChoice
) -> tuple[InterfaceChoice, InterfaceChoice]:
    """The choices of NCCL, those by rules corrected by what NCCL itself says."""
    if not _differs(answer, bootstrap):
        return bootstrap, sockets
    said = replace(
        bootstrap,
        picks=((answer.interface, answer.address),) if answer.result == 0 else (),
        reason=f"NCCL {answer.version} itself says so" if answer.result == 0 else bootstrap.reason,
        problem="" if answer.result == 0 else "refused",
        names=(),
        left_out=(),
    )
    # Without NCCL_COMM_ID the bootstrap takes the first of those for data.
    return said, sockets if said.variable == COMM_ID else replace(said, library=SOCKETS)


def _differs(answer: LibraryAnswer, bootstrap: InterfaceChoice) -> bool:
    """True if NCCL takes another interface than by the rules, or refuses and these do not."""
    if answer.result is None or not (bootstrap.picks or bootstrap.problem):
        return False
    if answer.result:
        return not bootstrap.problem
    return bootstrap.picks[:1] != ((answer.interface, answer.address),)


def _asked(
    answer: LibraryAnswer, bootstrap: InterfaceChoice, settings: Mapping[str, Setting]
) -> ComparedAnswer:
    read = answer.result is not None
    origins = {
        name: settings[name].origin if name in settings else "" for name in answer.from_files
    }
    return {
        "library": answer.library,
        "version": answer.version,
        "result": answer.result,
        "interface": answer.interface,
        "address": answer.address,
        "error": answer.error,
        "plugin": answer.plugin,
        "used": list(answer.used),
        "from_files": {name: origins[name] for name in allowed(origins)},
        "expected": list(bootstrap.picks[0]) if bootstrap.picks else [],
        "differs": _differs(answer, bootstrap),
        "read_otherwise": list(allowed(dict.fromkeys(answer.read_otherwise(settings), "")))
        if read
        else [],
        "names": list(allowed(dict.fromkeys(answer.names, ""))),
        "readings": _readings(answer, settings),
    }


def _readings(answer: LibraryAnswer, settings: Mapping[str, Setting]) -> dict[str, dict[str, Any]]:
    """Variables that are set, as NCCL reads them."""
    texts = {name: settings[name].value for name in answer.readings if name in settings}
    values = allowed({name: answer.readings[name].value for name in texts})
    return {
        name: {"text": text, "value": values[name], "taken": answer.readings[name].taken}
        for name, text in allowed(texts).items()
    }


def _subnets(interface: Interface, prefixes: Mapping[str, int]) -> list[str]:
    return [
        str(ipaddress.ip_network(f"{address}/{prefixes[address]}", strict=False))
        for address in interface.addresses
        if address in prefixes
    ]
