"""NCCL_IB_HCA: which ports NCCL may use. Pure functions.

Source: `ncclIbInitDevices` in NCCL's src/transport/net_ib/init.cc, and `parseStringList` and
`matchIfList` in src/misc/utils.cc.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nccl_doctor.model.check import Context, Skip
from nccl_doctor.toolkit.nccl.conf import Setting, nccl_settings

HCA = "NCCL_IB_HCA"
TURNS_OFF = ("NCCL_IB_DISABLE", "NCCL_NET")
"""What `rdma_off` reads."""


@dataclass(frozen=True)
class HcaEntry:
    """One name of the list, as NCCL reads it: `port` None stands for any port."""

    name: str
    port: int | None = None

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


@dataclass(frozen=True)
class HcaList:
    """A value of NCCL_IB_HCA: `^` excludes, `=` (after it) means whole names, else prefixes."""

    exclude: bool = False
    exact: bool = False
    entries: tuple[HcaEntry, ...] = ()

    @classmethod
    def parse(cls, text: str) -> HcaList:
        """Read a value; what follows the port (rail and plane) is left out."""
        exclude = text.startswith("^")
        text = text[exclude:]
        exact = text.startswith("=")
        entries = []
        for part in text[exact:].split(","):
            name, *rest = part.split(":")
            if name:
                entries.append(HcaEntry(name, _port(rest[0]) if rest and rest[0] else None))
        return cls(exclude, exact, tuple(entries))

    def hits(self, entry: HcaEntry, device: str, port: int | None = None) -> bool:
        """True if one name of the list matches this port; None stands for some port."""
        same = device == entry.name if self.exact else device.startswith(entry.name)
        return same and (None in (entry.port, port) or entry.port == port)

    def admits(self, device: str, port: int | None = None) -> bool:
        """True if NCCL may use this port; an empty list means every port."""
        listed = not self.entries or any(self.hits(each, device, port) for each in self.entries)
        return listed != self.exclude


def rdma_admits(hca: str, device: str, port: int | None = None) -> bool:
    """True if a value of NCCL_IB_HCA lets NCCL use a port of a device; None: some port."""
    return HcaList.parse(hca).admits(device, port)


def rdma_off(settings: Mapping[str, Setting]) -> str:
    """The setting that turns RDMA off in NCCL, as `NAME=value`; empty if there is none.

    Args:
        settings: from `nccl_settings`.
    """
    if is_disabled(settings):
        return f"NCCL_IB_DISABLE={settings['NCCL_IB_DISABLE'].value}"
    net = settings.get("NCCL_NET")
    return f"NCCL_NET={net.value}" if net is not None and net.value.lower() == "socket" else ""


def is_disabled(settings: Mapping[str, Setting]) -> bool:
    """True if NCCL_IB_DISABLE is set to anything but 0, as NCCL reads numbers."""
    told = settings.get("NCCL_IB_DISABLE")
    return told is not None and bool(_whole(told.value))


def _port(text: str) -> int:
    """The number of a port, read as atoi does: other text is 0, which no port has."""
    found = re.match(r"\s*\d+", text)
    return int(found.group()) if found else 0


def _whole(text: str) -> int:
    """The number of a text, read as strtoll does: other text is 0."""
    try:
        return int(text, 0)
    except ValueError:
        return 0


def rdma_settings(ctx: Context) -> dict[str, Setting]:
    """The settings from `nccl_settings`, for a job that may use RDMA.

    Raises:
        Skip: it does not use NCCL, or a setting turns RDMA off.
    """
    if ctx.backend != "nccl":
        raise Skip("the job does not use NCCL")
    settings = nccl_settings(ctx.env, root=ctx.root)
    if off := rdma_off(settings):
        raise Skip(f"{off} turns RDMA off")
    return settings
