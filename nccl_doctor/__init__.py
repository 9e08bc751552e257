"""nccl-doctor: the pre-flight doctor for distributed training clusters.

Observe what is true on every host and rank, gather it on rank 0, judge it with pure rules,
report one cause, one place, one fix.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nccl_doctor.cli.from_python import check as check

__version__ = "0.1.0"

# In a source tree the checks lie in a folder beside this package; in a wheel they lie inside it.
# Extending the path makes `nccl_doctor.checks` one and the same name in both.
_here = Path(__file__).resolve().parent
if not (_here / "checks").is_dir() and (_here.parent / "checks" / "__init__.py").is_file():
    __path__.append(str(_here.parent))


def __getattr__(name: str) -> Any:
    """`nccl_doctor.check`, which is imported only where it is used."""
    if name == "check":
        from nccl_doctor.cli.from_python import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
