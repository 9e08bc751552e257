"""The network and ports that NCCL would use on a host, and why. Pure functions.

Source: `ncclNetInit` in NCCL's src/plugin/net.cc (plug-ins first, then verbs, then sockets; a
network is passed over where NCCL_NET names another, or where it finds no device), and
`ncclIbInitDevices` in src/transport/net_ib/init.cc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.toolkit.fabric.hca import HCA, is_disabled, rdma_admits
from nccl_doctor.toolkit.fabric.ports import speaks_verbs
from nccl_doctor.toolkit.nccl.conf import Setting

_NO_PLUGIN = "none"
_NOBODY = Setting("", "")


@dataclass(frozen=True)
class Road:
    """The network that carries data between hosts.

    `name` is `infiniband` (RoCE too), `sockets`, `plugin`, `efa` (through a plug-in), or `none`
    where NCCL_NET asks for verbs or libfabric and there is no port for it. `ports` are those of
    verbs or EFA that would be used. `lacks` says what alone keeps ports of this host from being
    used: `library`, `access` or `plugin`; else it is empty.
    """

    name: str
    reason: str
    ports: tuple[str, ...] = ()
    lacks: str = ""


_LIBFABRIC = "libfabric"
"""How the names end that aws-ofi-nccl has for NCCL_NET: `AWS Libfabric`, `Libfabric`."""
_BESIDE_VERBS = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX")
"""How names of settings begin of plug-ins that need no verbs device: Google's TCPXO and TCPX."""


@dataclass(frozen=True)
class Access:
    """Libraries and devices that this process can load and open.

    Attributes:
        library: why libibverbs cannot be loaded, or empty.
        barred: device → why it cannot be opened.
        plugin: the network plug-in that can be loaded; empty where none can; None: not tried.
    """

    library: str = ""
    barred: Mapping[str, str] | None = None
    plugin: str | None = None


def port_name(port: Mapping[str, Any]) -> str:
    """The name of a port, as `mlx5_0:1`."""
    return f"{port['device']}:{port['port']}"


def admitted(
    settings: Mapping[str, Setting], ports: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Ports from `rdma_ports`, each with `wanted`: whether NCCL's verbs network may use it, by
    NCCL_IB_HCA and its link layer, up or down.
    """
    hca = settings.get(HCA, _NOBODY).value
    return [
        {
            **port,
            "wanted": rdma_admits(hca, port["device"], int(port["port"])) and speaks_verbs(port),
        }
        for port in ports
    ]


def needs_plugin_alone(settings: Mapping[str, Setting]) -> str:
    """The first setting of a plug-in that needs no verbs device; empty where there is none."""
    return min((name for name in settings if name.startswith(_BESIDE_VERBS)), default="")


def efa_ports(
    settings: Mapping[str, Setting], ports: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The active ports of EFA, if a plug-in may use them: verbs alone cannot."""
    net = settings.get("NCCL_NET", _NOBODY).value.lower()
    free = not net and settings.get("NCCL_NET_PLUGIN", _NOBODY).value.lower() != _NO_PLUGIN
    if not (free or net.endswith(_LIBFABRIC)):
        return []
    return [port for port in ports if port["state"] == "ACTIVE" and not speaks_verbs(port)]


def choose_road(
    settings: Mapping[str, Setting],
    ports: Sequence[Mapping[str, Any]],
    access: Access | None = None,
) -> Road:
    """The network that NCCL would probably use.

    A plug-in that loads may still find nothing that it can use; without EFA the assumption is that
    NCCL then goes on without it, or that it uses the same verbs ports.

    Args:
        settings: from `nccl_settings`.
        ports: from `admitted`.
        access: what was tried.
    """
    access = access or Access()
    net = settings.get("NCCL_NET", _NOBODY).value
    if net.lower() == "socket":
        return Road("sockets", f"NCCL_NET={net}")
    efa = efa_ports(settings, ports)
    if net and net.lower() != "ib":
        return _by_efa(net, efa, access) if efa else Road("plugin", f"NCCL_NET={net}")
    active = [port for port in ports if port["state"] == "ACTIVE"]
    free = not net and settings.get("NCCL_NET_PLUGIN", _NOBODY).value.lower() != _NO_PLUGIN
    verbs = _by_verbs(settings, [port for port in active if port["wanted"]], access)
    alone = needs_plugin_alone(settings)
    if verbs.name == "sockets" and free and not efa and alone and access.plugin:
        return Road("plugin", f"{alone} is set, and {access.plugin} can be loaded")
    if verbs.name == "infiniband" or not efa:
        if net.lower() == "ib" and verbs.name == "sockets":
            return Road("none", f"NCCL_NET={net}, and {verbs.reason}", lacks=verbs.lacks)
        return verbs
    return _by_efa(net, efa, access)


def _by_efa(net: str, efa: Sequence[Mapping[str, Any]], access: Access) -> Road:
    barred = access.barred or {}
    if access.plugin == "":
        return Road("sockets", "EFA needs a plug-in, but none can be loaded", lacks="plugin")
    usable = tuple(port_name(port) for port in efa if port["device"] not in barred)
    if not usable:
        first = efa[0]["device"]
        said = f"no EFA device can be opened ({first}: {barred[first]})"
        if net:
            return Road("none", f"NCCL_NET={net}, and {said}", lacks="access")
        return Road("sockets", said, lacks="access")
    said = "EFA, if its plug-in loads"
    if net:
        said = f"NCCL_NET={net}"
    elif access.plugin:
        said = f"EFA, and {access.plugin} can be loaded"
    return Road("efa", said, usable)


def _by_verbs(
    settings: Mapping[str, Setting], wanted: Sequence[Mapping[str, Any]], access: Access
) -> Road:
    barred = access.barred or {}
    if is_disabled(settings):
        return Road("sockets", f"NCCL_IB_DISABLE={settings['NCCL_IB_DISABLE'].value}")
    if not wanted:
        return Road("sockets", "no verbs port is active and admitted")
    if access.library:
        return Road("sockets", f"libibverbs cannot be loaded: {access.library}", lacks="library")
    usable = tuple(port_name(port) for port in wanted if port["device"] not in barred)
    if not usable:
        first = next(iter(port["device"] for port in wanted))
        said = f"no verbs device can be opened ({first}: {barred[first]})"
        return Road("sockets", said, lacks="access")
    hca = settings.get(HCA, _NOBODY).value
    return Road("infiniband", f"{HCA}={hca}" if hca else "a verbs port is active", usable)
