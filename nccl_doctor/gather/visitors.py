"""Messages in the store that were written without the key of the run, as rank 0 hears of them.

It lies under the names that everybody knows, where nobody of the run looks. A process of its own
reads it, for a short time, and says who claims to have written what: so none of it comes into the
process that makes the report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from nccl_doctor.gather.envelope import CLAIM_MAX, BadMessage, NotAuthentic, Seal
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.messages import Claimant
from nccl_doctor.gather.opening import MEETING, OPENING
from nccl_doctor.gather.refusals import KINDS, kind_of
from nccl_doctor.gather.store import ControlStore, StoreLost, StoreTimeout
from nccl_doctor.launch import identity
from nccl_doctor.system.helpers import send_foreign
from nccl_doctor.toolkit.net.interfaces import is_loopback
from nccl_doctor.toolkit.net.sock_diag import connections_at

READ_S = 1.0
"""Longest time to read what they wrote: 10 ms are usual, on a busy host a second."""
_PATIENCE_S = 2.0
_MOST = 64
"""Sign-ins without the key that are read."""
_TEXT_MAX = 255
_MEETING = ("coordinators", "coordinator/0", "doubts", "doubt/0", "server")
_RUN = ("seats", "layout", "roster", "order/0", "order/1", "deaths", "death/0", "departures")


def note_visitors(box: ControlStore, meeting: Seal, evidence: EvidenceLog) -> None:
    """Note who wrote without the key. `box`: the store of the run; `meeting`: the seal of what is
    said before.
    """
    work = partial(_told, box.host, box.port, box.prefix, (meeting, box.seal))
    try:
        said = json.loads(send_foreign("visitors", work, _PATIENCE_S))
    except (OSError, ValueError):  # then nothing is said of them
        return
    for each in said:
        who = Claimant(**each["who"])
        evidence.refusals.unsealed(each["key"], KINDS[each["code"]], each["words"], who)
    if said and identity.is_this_host(box.host):
        known = {a for seat in evidence.seats if (w := evidence.who(seat)) for a in w.addresses}
        remote = [each.remote for each in connections_at(box.port)]
        evidence.refusals.callers = unknown(remote, {*known, *identity.host_addresses()})


def unknown(addresses: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """Addresses of other hosts than those that are `known`, and than this one."""
    return tuple(sorted(each for each in {*addresses} - {*known} if not is_loopback(each)))


def _told(host: str, port: int, prefix: str, seals: tuple[Seal, Seal]) -> bytes:
    """Claims of those who wrote, in JSON."""
    found: list[dict[str, Any]] = []
    until = time.monotonic() + READ_S

    def note(key: str, error: BadMessage) -> None:
        claim = Claimant.of(error.value)
        who = {**vars(claim), "host": claim.host[:_TEXT_MAX]}
        found.append({"key": key, "code": kind_of(error).code, "words": str(error), "who": who})

    try:
        meeting = ControlStore(host, port, timeout_s=READ_S, prefix=MEETING, seal=seals[0]).public()
        run = meeting.beside(prefix, seals[1])
        seats = sorted(run.wait([f"seat/{seat}" for seat in range(_MOST)], 0.0))
        there = [*meeting.wait(_MEETING, 0.0), *run.wait(_RUN, 0.0)]
        for key in sorted(there):
            if key != "seats" or not seats:
                note(key, NotAuthentic("it was written without the key of this run (--key)"))
        for box, keys in ((meeting, [OPENING]), (run, seats)):
            for key in keys:
                if time.monotonic() > until:
                    break
                try:
                    box.get(key, 0.0, largest=CLAIM_MAX)
                except BadMessage as error:
                    note(key, error)
                except StoreTimeout:
                    continue
    except StoreLost:  # whoever needs the store will say so
        pass
    return json.dumps(found).encode()
