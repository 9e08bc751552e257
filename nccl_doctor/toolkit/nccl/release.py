"""Release of NCCL whose rules apply: where releases read their variables in different ways."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache

from nccl_doctor.toolkit.gpu.devices import torch_build
from nccl_doctor.toolkit.libraries import library_name
from nccl_doctor.toolkit.nccl.library import mapped_nccl, nccl_version
from nccl_doctor.toolkit.versions import release


@dataclass(frozen=True)
class NcclRelease:
    """A release of NCCL, or of RCCL; one that is not known has no number, and the newest rules."""

    number: tuple[int, ...] = ()
    rccl: bool = False

    @classmethod
    def parse(cls, version: str | None, *, rccl: bool = False) -> NcclRelease:
        """`"2.29.7"` as a release."""
        return cls(release(version), rccl)

    @property
    def home_by_variable(self) -> bool:
        """True if ~ is HOME; before 2.30.3 it is the home folder in the user database."""
        return not self.number or self.number >= (2, 30, 3)

    @property
    def reads_conf_file_variable(self) -> bool:
        """True if NCCL_CONF_FILE names a file that is read in place of ~/.nccl.conf."""
        return not self.number or self.number >= (2, 23, 4)

    @property
    def wants_carrier(self) -> bool:
        """True if it takes running interfaces only, and those of libvirt last."""
        return not self.number or self.number >= (2, 28, 3)

    @property
    def strips_carriage_return(self) -> bool:
        """True if a line of a configuration file may end as Windows writes it."""
        return self.home_by_variable  # both came in 2.30.3

    @property
    def subnet_inverted(self) -> bool:
        """True if NCCL_COMM_ID takes the first IPv4 address that is *not* in its subnet."""
        return not self.rccl and (2, 29, 2) <= self.number < (2, 30, 3)


def loaded_release() -> NcclRelease:
    """The release that torch has loaded into this process, or was linked with; loads nothing."""
    for path in mapped_nccl():
        version = _version_of(path)
        if version:
            return NcclRelease.parse(version, rccl=library_name(path) == "librccl")
    if "torch" not in sys.modules:
        return NcclRelease()
    build = torch_build()
    return NcclRelease.parse(build["nccl"], rccl=build["rocm"] is not None)


@lru_cache
def _version_of(path: str) -> str | None:
    try:
        return nccl_version(path)
    except OSError:  # its file was replaced since
        return None
