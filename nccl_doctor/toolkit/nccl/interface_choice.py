"""Interfaces and addresses that NCCL and gloo would choose on this host, by their own rules.

NCCL: `bootstrapNetInit` in src/bootstrap.cc, `ncclFindInterfaces` in src/misc/socket.cc and
`ncclOsFindInterfaces` in src/os/linux.cc (src/misc/socket.cc before 2.29); the rules have been the
same since 2.3, but for those that `NcclRelease` tells apart. `make test-nccl` compares them with
NCCL itself. gloo: `createDefaultDevice` of ProcessGroupGloo.cpp in PyTorch and
gloo/transport/tcp/device.cc.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from nccl_doctor.model.codec import Part
from nccl_doctor.toolkit import host
from nccl_doctor.toolkit.fabric.ports import rdma_ports, speaks_verbs
from nccl_doctor.toolkit.nccl.comm_id import CommId, Resolver, comm_id, no_names
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.nccl.release import NcclRelease
from nccl_doctor.toolkit.net.interfaces import (
    Interface,
    first_bindable,
    is_alone,
    is_link_local,
    is_loopback,
)
from nccl_doctor.toolkit.net.names import look_up

BOOTSTRAP = "nccl-bootstrap"
SOCKETS = "nccl-sockets"
GLOO = "gloo"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
COMM_ID = "NCCL_COMM_ID"
MAX_INTERFACES = 16
"""NET/Socket takes no more than this many interfaces, nor names in a list (MAX_IFS)."""

_AUTO = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
"""Filters that NCCL tries in turn if the user names none; a subnet hint comes after the first."""
_AUTO_BEFORE = ("ib", "^docker,lo", "docker", "lo")
"""The same before 2.28.3."""


@dataclass(frozen=True)
class InterfaceChoice:
    """The interfaces and addresses that one library would listen on.

    `picks` are (interface, address), in the library's order. `variable` is the one that decided,
    empty if the library chose by itself; `reason` is the rule. `problem` is `missing` (the names
    match no interface here), `down` (an interface is not running, though some releases take it,
    or has no address), `invalid`
    (the value is no address) or empty; `names` are the interfaces at fault. `left_out` are
    interfaces that the user named in full with others, and that the library silently skips because
    they are not running.
    """

    library: Annotated[str, Part.APART]
    picks: tuple[tuple[str, str], ...]
    reason: str
    variable: str = ""
    value: str = ""
    origin: str = ""
    problem: str = ""
    names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filter:
    """NCCL's interface list: `^` excludes, `=` (after it) means whole names, else prefixes."""

    exclude: bool
    exact: bool
    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Read a value of NCCL_SOCKET_IFNAME; what follows a colon (a port) is ignored."""
        exclude = text.startswith("^")
        text = text[exclude:]
        exact = text.startswith("=")
        names = [part.partition(":")[0] for part in text[exact:].split(",")]
        return cls(exclude, exact, tuple(filter(None, names))[:MAX_INTERFACES])

    def admits(self, interface: str) -> bool:
        """True if an interface of this name may be used; an empty list matches every name."""
        listed = not self.names or any(
            interface == name if self.exact else interface.startswith(name) for name in self.names
        )
        return listed != self.exclude


def nccl_choices(
    nics: Sequence[Interface],
    settings: Mapping[str, Setting],
    prefixes: Mapping[str, int] | None = None,
    release: NcclRelease = NcclRelease(),  # noqa: B008 it is frozen
    resolve: Resolver = no_names,
) -> tuple[InterfaceChoice, InterfaceChoice]:
    """The choices of NCCL: for its bootstrap (one address), and for data over sockets (all).

    Args:
        nics: in the order of getifaddrs.
        settings: from `nccl_settings`.
        prefixes: address → length of its subnet prefix, in the order of getifaddrs, for
            NCCL_COMM_ID.
        release: whose rules apply.
        resolve: addresses of a host that NCCL_COMM_ID names; None where the resolver is silent.
    """
    prefixes = prefixes or {}
    given = settings.get(COMM_ID)
    root = None if given is None else comm_id(given.value, resolve)
    seen = _NcclHost(nics, prefixes, release, root)
    sockets = _nccl_sockets(nics, settings, seen)
    if given is not None and root is not None:
        picks = seen.hinted()
        problem = "" if picks or root.unknown else "missing" if root.address else "invalid"
        bootstrap = InterfaceChoice(
            BOOTSTRAP,
            picks,
            f"not known: looking up {root.name} took too long" if root.unknown else seen.rule,
            COMM_ID,
            given.value,
            given.origin,
            problem,
        )
        return bootstrap, sockets
    first = InterfaceChoice(
        BOOTSTRAP,
        sockets.picks[:1],
        f"the first of: {sockets.reason}",
        sockets.variable,
        sockets.value,
        sockets.origin,
        sockets.problem,
        sockets.names,
        sockets.left_out,
    )
    return first, sockets


def _nccl_sockets(
    nics: Sequence[Interface], settings: Mapping[str, Setting], seen: _NcclHost
) -> InterfaceChoice:
    family = settings.get("NCCL_SOCKET_FAMILY", Setting("", "")).value
    user = settings.get(NCCL_VARIABLE)
    if user and len(user.value) > 1:
        wanted = Filter.parse(user.value)
        picks = seen.running(wanted, family)
        known = tuple(each.name for each in nics if wanted.admits(each.name))
        stopped = seen.stopped(picks)
        problem = "down" if stopped else "" if picks else "down" if known else "missing"
        names = stopped if picks else known or wanted.names
        used = {name for name, _ in picks}
        asked = () if wanted.exclude else wanted.names
        left_out = tuple(name for name in known if picks and name in asked and name not in used)
        return InterfaceChoice(
            SOCKETS,
            picks,
            "every running interface that the list allows",
            NCCL_VARIABLE,
            user.value,
            user.origin,
            problem,
            names,
            left_out,
        )
    for index, text in enumerate(_AUTO if seen.release.wants_carrier else _AUTO_BEFORE):
        picks = seen.running(Filter.parse(text), family)
        if picks:
            stopped = seen.stopped(picks)
            problem = "down" if stopped else ""
            rule = f"NCCL's own rule {text!r}"
            return InterfaceChoice(SOCKETS, picks, rule, problem=problem, names=stopped)
        picks = seen.hinted() if index == 0 else ()
        if picks:
            setting = settings[COMM_ID]
            return InterfaceChoice(
                SOCKETS, picks, seen.rule, COMM_ID, setting.value, setting.origin
            )
    return InterfaceChoice(SOCKETS, (), "no interface is running", problem="down")


def _usable(address: str, family: str) -> bool:
    is_v6 = ":" in address
    if family in ("AF_INET", "AF_INET6") and is_v6 != (family == "AF_INET6"):
        return False
    return not (is_v6 and is_loopback(address))


@dataclass(frozen=True)
class _NcclHost:
    """A host as NCCL sees it: interfaces in the order of getifaddrs, and NCCL_COMM_ID."""

    nics: Sequence[Interface]
    prefixes: Mapping[str, int]
    release: NcclRelease
    root: CommId | None

    @property
    def rule(self) -> str:
        if self._inverted:
            defect = "a defect of NCCL 2.29.2 to 2.29.7"
            return f"the first interface outside of the subnet of NCCL_COMM_ID ({defect})"
        return "the first interface in the subnet of NCCL_COMM_ID"

    @property
    def _inverted(self) -> bool:
        root = self.root
        is_v4 = root is not None and "." in root.address and ":" not in root.address
        return self.release.subnet_inverted and is_v4

    def running(self, wanted: Filter, family: str) -> tuple[tuple[str, str], ...]:
        """First usable address of each running interface that the filter allows.

        Some releases take interfaces that are not running as well.
        """
        picks = []
        for each in self.nics:
            usable = [address for address in each.addresses if _usable(address, family)]
            runs = each.running or not self.release.wants_carrier
            if runs and usable and wanted.admits(each.name):
                picks.append((each.name, usable[0]))
        return tuple(_listed(picks, self.prefixes)[:MAX_INTERFACES])

    def stopped(self, picks: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """Name of the first interface, if it is not running."""
        first = [name for name, _ in picks[:1]]
        return tuple(each.name for each in self.nics if each.name in first and not each.running)

    def hinted(self) -> tuple[tuple[str, str], ...]:
        """(interface, address) by the hint of NCCL_COMM_ID, at most one."""
        if self.root is None or not self.root.address:
            return ()
        is_v6 = ":" in self.root.address
        known = any(each.name == self.root.zone for each in self.nics)
        zone = self.root.zone if known else ""
        pairs = [
            (each.name, address)
            for each in self.nics
            for address in each.addresses
            if (":" in address) == is_v6
        ]
        for name, address in _listed(pairs, self.prefixes):
            # A link-local address is compared with its link.
            own_zone = name if is_v6 and is_link_local(address) else ""
            prefix = self.prefixes.get(address)
            fits = own_zone == zone and _shares_subnet(address, self.root.address, prefix)
            if fits != self._inverted:
                return ((name, address),)
        return ()


def _listed(pairs: Iterable[tuple[str, str]], prefixes: Mapping[str, int]) -> list[tuple[str, str]]:
    """(interface, address) as getifaddrs lists them: IPv4 first, and by the order of `prefixes`."""
    order = {address: index for index, address in enumerate(prefixes)}
    return sorted(pairs, key=lambda pair: (":" in pair[1], order.get(pair[1], len(order))))


def _shares_subnet(address: str, other: str, prefix: int | None) -> bool:
    if prefix is None:
        return address == other
    net = ipaddress.ip_network(f"{address}/{prefix}", strict=False)
    return ipaddress.ip_address(other) in net


def gloo_choice(
    nics: Sequence[Interface],
    env: Mapping[str, str],
    host_name: str,
    resolved: Sequence[str] | None,
) -> InterfaceChoice:
    """The choice of gloo: GLOO_SOCKET_IFNAME, else an own address that the host name resolves to.

    GLOO_SOCKET_IFNAME is a comma list of whole names, each of which must exist.

    Args:
        nics: of this host.
        env: the process environment; gloo reads no file.
        host_name: as gethostname says.
        resolved: addresses of the host name in resolver order, from `resolve_own`; None if the
            resolver did not answer in time.
    """
    value = env.get(GLOO_VARIABLE, "")
    if len(value) > 1:
        by_name = {each.name: each for each in nics}
        names = [name for name in value.split(",") if name]
        missing = tuple(name for name in names if name not in by_name)
        there = [by_name[name] for name in names if name in by_name]
        down = tuple(each.name for each in there if not each.running or not each.addresses)
        picks = tuple((each.name, each.addresses[0]) for each in there if each.addresses)
        return InterfaceChoice(
            GLOO,
            picks,
            "the first address of every interface in the list",
            GLOO_VARIABLE,
            value,
            "environment",
            "missing" if missing else "down" if down else "",
            missing or down,
        )
    if resolved is None:
        return InterfaceChoice(GLOO, (), f"not known: looking up {host_name} took too long")
    owners = {address: each.name for each in nics for address in each.addresses}
    address = first_bindable(resolved, owners)
    if address:
        pick = (owners.get(address, "lo"), address)
        return InterfaceChoice(GLOO, (pick,), f"the host name {host_name} resolves to {address}")
    reason = f"the host name {host_name} resolves to no address of this host: gloo's fallback"
    return InterfaceChoice(GLOO, (("lo", "127.0.0.1"),), reason)


def resolve_own(timeout_s: float) -> tuple[str, tuple[str, ...] | None]:
    """(host name, its addresses as the resolver orders them).

    The addresses are empty if the name does not resolve, and None if that took longer than
    `timeout_s`.
    """
    found = look_up(host.host_name(), timeout_s)
    answers = tuple(dict.fromkeys(answer.partition("%")[0] for answer in found.answers))
    return found.query, None if found.timed_out else answers


def subnet_prefixes() -> dict[str, int]:
    """Address of this host → length of its subnet prefix in bits."""
    return {entry.address: entry.prefix for entry in host.addresses() if entry.prefix is not None}


def neighbourhood(own: str) -> str:
    """Network of an own address; empty where it holds no other address, or none is known."""
    prefix = subnet_prefixes().get(own)
    network = "" if prefix is None else str(ipaddress.ip_network(f"{own}/{prefix}", strict=False))
    return "" if not network or is_alone(network) else network


def has_infiniband(root: Path = Path("/")) -> bool:
    """True if a verbs device (InfiniBand or RoCE, not EFA) has an active port."""
    return any(
        port["state"] == "ACTIVE" and speaks_verbs(port)
        for port in rdma_ports(root / "sys/class/infiniband")
    )


def chosen(choices: Iterable[InterfaceChoice], nics: Sequence[Interface]) -> list[dict[str, Any]]:
    """Every address to be tested once: `{"interface", "address", "roles": [library, …]}`.

    Loopback addresses are left out. If nothing is left, the first running interface is used with
    the role `fallback`, so that the network is tested although the choice is bad.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        for name, address in choice.picks:
            if not is_loopback(address):
                found.setdefault((name, address), []).append(choice.library)
    if not found:
        for each in nics:
            usable = [a for a in each.addresses if not is_loopback(a) and not is_link_local(a)]
            if each.running and usable:
                found[(each.name, usable[0])] = ["fallback"]
                break
    return [
        {"interface": name, "address": address, "roles": roles}
        for (name, address), roles in found.items()
    ]


def resolver(timeout_s: float) -> Resolver:
    """Function that asks the resolver of this host, and waits for `timeout_s` at most."""

    def resolve(name: str) -> Sequence[str] | None:
        found = look_up(name, timeout_s)
        return None if found.timed_out else found.answers

    return resolve
