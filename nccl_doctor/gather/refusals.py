"""Messages that were not taken: a finding for each sender, and the ranks that may be theirs.

Nobody else is blamed for them. A rank that is missing where a message was refused may have written
it, so its absence is no failure of the cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from nccl_doctor import __version__
from nccl_doctor.gather.envelope import BadMessage, NotAuthentic, OtherVersion
from nccl_doctor.gather.messages import MOST_REFUSED, Claimant, Reason
from nccl_doctor.model.findings import Confidence, Finding, Kind, Where
from nccl_doctor.model.kinds import (
    DOCTOR_DIFFERS,
    KEY_DIFFERS,
    MESSAGE_REFUSED,
    STRANGER_WRITES,
)

KINDS = {kind.code: kind for kind in (MESSAGE_REFUSED, KEY_DIFFERS, DOCTOR_DIFFERS)}
"""Kinds of findings on messages that were not taken."""
_WORDS_MAX = 300
_MOST_TOLD = 8
"""Messages without the seal that are told one by one."""
_MOST_KEPT = 100


def kind_of(error: ValueError) -> Kind:
    """Kind of finding for a message that could not be read."""
    if isinstance(error, OtherVersion):
        return DOCTOR_DIFFERS
    return KEY_DIFFERS if isinstance(error, NotAuthentic) else MESSAGE_REFUSED


@dataclass(frozen=True)
class _Refusal:
    key: str
    kind: Kind
    why: str
    who: Claimant
    where: Where | None


class Refusals:
    """Messages that one coordinator refused, by the key in the store."""

    def __init__(self) -> None:
        self._signing_in: dict[str, _Refusal] = {}
        self._unsealed: dict[str, _Refusal] = {}
        self._later: dict[str, _Refusal] = {}
        self._versions: dict[str, tuple[str, Where]] = {}
        self.callers: tuple[str, ...] = ()
        """Addresses that are connected to the store, and are no host's of the job."""

    def sign_in(self, key: str, error: ValueError) -> None:
        """A sign-in was refused."""
        value = error.value if isinstance(error, BadMessage) else None
        self.claim(key, error, Claimant.of(value))

    def claim(self, key: str, error: ValueError, who: Claimant) -> None:
        """Record that a sign-in was refused; its sender is not sure."""
        self._signing_in[key] = _Refusal(key, kind_of(error), _words(error), who, None)

    def unsealed(self, key: str, kind: Kind, words: str, who: Claimant) -> None:
        """A message does not have the seal of the run: as if it were not there, so it is none of
        those that are counted, but a reason why one of the run may be missing.
        """
        self._unsealed[key] = _Refusal(key, kind, _words(ValueError(words)), who, None)

    def answer(self, key: str, error: ValueError, where: Where) -> None:
        """An answer was refused, of a participant that had signed in."""
        self._later[key] = _Refusal(key, kind_of(error), _words(error), Claimant(), where)

    def version(self, key: str, version: str, where: Where) -> None:
        """A participant that signed in has another version, which we do understand."""
        self._versions[key] = (version, where)

    def knows(self, key: str) -> bool:
        """True if the message of this key was refused when it signed in."""
        return key in self._signing_in

    @property
    def all_told(self) -> int:
        """Number of refused messages that may explain why a participant is missing."""
        return len(self._signing_in) + len(self._unsealed)

    @property
    def count(self) -> int:
        """Number of refused sign-ins."""
        return len(self._signing_in)

    @property
    def seats(self) -> set[int]:
        """Seats whose sign-in was refused."""
        names = (key.partition("/") for key in self._signing_in)
        return {int(number) for name, _, number in names if name == "seat"}

    def reasons(self) -> dict[int, Reason]:
        """Seat → why its sign-in was not taken, for its sender."""
        told = ((each.partition("/")[2], refusal) for each, refusal in self._signing_in.items())
        found = {
            int(seat): Reason(refusal.kind.code, refusal.why)
            for seat, refusal in told
            if seat.isdecimal()
        }
        return dict(sorted(found.items())[:MOST_REFUSED])

    def code_of(self, rank: int | None, node: int | None) -> str:
        """Code of the finding that may explain why this rank is missing; empty if there is none.

        What a message says of its sender may be a lie: any that was refused may have been the one
        that is missing.
        """
        refused = [*self._signing_in.values(), *self._unsealed.values()]
        likely = sorted(refused, key=lambda each: _unlikely(each.who, rank, node))
        return next((each.kind.code for each in likely), "")

    def stand_for(self, ranks: Collection[int], nodes: Collection[int] = ()) -> bool:
        """True if all that are missing may be senders that were refused."""
        who = [each.who for each in self._signing_in.values()]
        unknown = sum(not each.is_known for each in who)
        lost = sum(not any(each.may_be(rank, None) for each in who) for rank in ranks)
        lost += sum(not any(each.may_be(None, node) for each in who) for node in nodes)
        return bool(who) and lost <= unknown

    def findings(
        self, ranks: Collection[int], hosts: Collection[str], *, missing: bool
    ) -> Iterator[Finding]:
        """Findings, one for each message. `ranks` and `hosts` did sign in: if another takes their
        name, they are not the place.

        What has no seal says nothing of the cluster, unless somebody is `missing`, who may have
        written it.
        """
        told = [*self._signing_in.values(), *self._later.values()]
        if missing:
            likely = sorted(self._unsealed.values(), key=lambda each: not each.who.is_known)
            by_kind = {each.kind.code: each for each in reversed(likely)}
            known = [each for each in likely[:_MOST_TOLD] if each.who.is_known]
            told += dict.fromkeys([*by_kind.values(), *known])
        elif self._unsealed:
            yield self._by_strangers()
        for each in told:
            where, says = each.where, ""
            if where is None:
                where = _place(each.who, ranks, hosts)
                says = "" if where else each.who.in_words()
            yield Finding(
                each.kind,
                f"{says}{each.why}",
                where,
                {"message": each.key},
                confidence=Confidence.LIKELY,
            )
        for version, place in self._versions.values():
            yield Finding(DOCTOR_DIFFERS, f"{version} here, {__version__} on rank 0", place)

    def _by_strangers(self) -> Finding:
        keys = sorted(self._unsealed)
        more = "" if len(keys) <= _MOST_TOLD else f" and {len(keys) - _MOST_TOLD} more"
        words = f"nothing of it was taken: {', '.join(keys[:_MOST_TOLD])}{more}"
        if self.callers:
            who = ", ".join(self.callers[:_MOST_TOLD])
            words += f"; connected to the port of the store, and no host of the job: {who}"
        evidence = {"messages": keys[:_MOST_KEPT], "addresses": list(self.callers[:_MOST_KEPT])}
        return Finding(STRANGER_WRITES, words, evidence=evidence, confidence=Confidence.LIKELY)


def _unlikely(who: Claimant, rank: int | None, node: int | None) -> int:
    return 0 if who.may_be(rank, node) else 2 if who.is_known else 1


def _words(error: ValueError) -> str:
    return " ".join(str(error).split())[:_WORDS_MAX]


def _place(who: Claimant, ranks: Collection[int], hosts: Collection[str]) -> Where:
    here = () if not who.host else (who.host,)
    if who.rank is not None and not who.is_host and who.rank not in ranks:
        return Where(hosts=here, ranks=(who.rank,))
    return Where(hosts=tuple(host for host in here if host not in hosts))
