"""Environment variables and words that may be recorded, and secrets that are masked in them.

An allow-list, never a full dump: what is not about the launch, the network or the GPU stays out of
facts, reports and support tickets.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

MASK = "***"

_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "UCX_", "FI_", "OMPI_", "SLURM_", "PET_")
_NAMES = frozenset(
    {
        "LD_LIBRARY_PATH",
        # Who am I in the job, in the words of every launcher.
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "NNODES", "CROSS_RANK", "CROSS_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    }
)
_PERSONAL = re.compile(r"USER|ACCOUNT|COMMENT|_UID$|_GID$|_GROUP$")
"""In names of SLURM_ variables: who the user is, and whatever was typed as a comment."""
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_TOLD = re.compile(
    r"""((?:token|secret|password|passwd|passphrase|(?:api|access|private|account)[_-]?key)
    [\w-]*['"]?\s*[=:]\s*(?:bearer\s+)?['"]?)(?!['"\s,;)\]}])[^\s'",;)\]}]+
    |(\bbearer\s+)[\w.~+/=-]{8,}
    |\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ASIA)[\w-]{12,}""",
    re.IGNORECASE | re.VERBOSE,
)
"""In free text: a value behind a word that speaks of a secret, and tokens known by their shape."""


def allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be recorded.

    The value of a variable whose name speaks of a token, key, secret or password becomes `***`, and
    so do credentials inside a URL. Bytes that are not UTF-8 become escapes.
    """
    return {
        name: MASK if _SECRET.search(name) else _CREDENTIALS.sub(MASK, _text(value))
        for name, value in sorted(environ.items())
        if _is_allowed(name)
    }


def masked(text: str) -> str:
    """Free text, as of a log, without secrets: credentials in a URL, values that are said to be a
    token, key or password, and what has the shape of one, become `***`.
    """

    def hide(match: re.Match[str]) -> str:
        return (match[1] or match[2] or "") + MASK

    return _TOLD.sub(hide, _CREDENTIALS.sub(MASK, text))


def _is_allowed(name: str) -> bool:
    if name.startswith("SLURM_") and _PERSONAL.search(name):
        return False
    return name in _NAMES or name.startswith(_PREFIXES)


def _text(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode()


def command_line(argv: Sequence[str]) -> str:
    """Command line for the report: of a command after `--` only its first word, because its
    arguments may hold secrets.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:at], argv[at + 1 :]
    more = " …" if command[1:] else ""
    return shlex.join(own) + (f" -- {shlex.quote(command[0])}{more}" if command else "")
