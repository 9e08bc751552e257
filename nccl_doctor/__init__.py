"""nccl-doctor: the pre-flight doctor for distributed training clusters.

Observe what is true on every host and rank, gather it on rank 0, judge it with pure rules,
report one cause, one place, one fix.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nccl_doctor.cli.from_python import check as check

__version__ = "0.1.0"

# In a source tree the checks lie in a folder beside this package; in a wheel they lie inside it.
# Extending the path makes `nccl_doctor.checks` one and the same name in both.
_here = os.path.dirname(os.path.realpath(__file__))
_beside = os.path.dirname(_here)
if not os.path.isdir(f"{_here}/checks") and os.path.isfile(f"{_beside}/checks/__init__.py"):
    __path__.append(_beside)


def __getattr__(name: str) -> Any:
    """`nccl_doctor.check`, which is imported only where it is used."""
    if name == "check":
        from nccl_doctor.cli.from_python import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
