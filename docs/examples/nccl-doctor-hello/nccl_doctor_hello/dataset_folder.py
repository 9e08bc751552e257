"""Is the data set there, and readable, on every host?

What it checks
--------------
The folder named by DATASET_DIR: that it exists, that this user can list it, and that all hosts see
the same number of entries. Without the variable there is nothing to check.

Why it matters
--------------
A rank whose data loader fails ends alone; the others wait for it in the next collective until the
process group times out.

How to fix
----------
Mount the data on the hosts that are named, or correct DATASET_DIR there.

When it is wrong
----------------
Hosts may be given different shards on purpose: then `--ignore dataset-differs`.

References
----------
scandir(3)
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from nccl_doctor.api import (
    ALONE,
    Check,
    Cluster,
    Context,
    Finding,
    Kind,
    Layer,
    OutcomeStatus,
    Severity,
    Skip,
    Where,
    odd_ones_out,
)

VARIABLE = "DATASET_DIR"
AT_MOST = 10_000  # entries that are counted: a listing must stay a matter of seconds
STEP = "listing the data set"

MISSING = Kind(
    "dataset-missing",
    Layer.HOST,
    "The data set folder is missing",
    "The data loader of every rank on this host fails, and the other hosts wait for it.",
    f"Mount the data set, or correct {VARIABLE}.",
)
UNREADABLE = Kind(
    "dataset-unreadable",
    Layer.HOST,
    "The data set folder cannot be read",
    "The data loader of every rank on this host fails or hangs, and the other hosts wait for it.",
    "Check the mount and the permissions of this user.",
)
DIFFERS = Kind(
    "dataset-differs",
    Layer.HOST,
    "Hosts see different data sets",
    "Ranks that run out of batches earlier leave the others waiting at the end of an epoch.",
    "Synchronise the copies, or give every host the same mount.",
    Severity.WARN,
)


class DatasetFolder(Check):
    """The folder named by DATASET_DIR, once per host."""

    name = "dataset_folder"
    layer = Layer.HOST
    kinds = (MISSING, UNREADABLE, DIFFERS)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`folder`; `errno`: name of the error or None; `entries`: how many, up to AT_MOST."""
        folder = ctx.env.get(VARIABLE)
        if not folder:
            raise Skip(f"{VARIABLE} is not set")
        ctx.breadcrumb(STEP)  # a dead network mount blocks here for ever
        try:
            with os.scandir(folder) as listing:
                entries = sum(1 for _ in itertools.islice(listing, AT_MOST))
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error))
            return {"folder": folder, "errno": name, "entries": 0}
        return {"folder": folder, "errno": None, "entries": entries}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Errors by host; then the odd ones out among those that could be listed."""
        counts: dict[str, int] = {}
        for item in cluster.evidence(self.name, ALONE):
            where = Where(hosts=(item.host.label,))
            facts = item.outcome.facts
            if item.outcome.status is OutcomeStatus.HUNG and item.outcome.last_step == STEP:
                yield Finding(UNREADABLE, "the folder does not answer", where)
            elif item.outcome.status is not OutcomeStatus.OK:
                continue
            elif facts["errno"] in ("ENOENT", "ENOTDIR"):
                fix = f"ls -ld {facts['folder']}"
                yield Finding(MISSING, f"{facts['folder']}: {facts['errno']}", where, fix=fix)
            elif facts["errno"]:
                yield Finding(UNREADABLE, f"{facts['folder']}: {facts['errno']}", where)
            else:
                counts[item.host.label] = int(facts["entries"])
        odd = odd_ones_out(counts)
        for host in odd.places if odd else ():
            usual = f"the others have {odd.usual}" if odd and not odd.tie else "a tie"
            message = f"{counts[host]} entries; {usual}"
            yield Finding(DIFFERS, message, Where(hosts=(host,)))
