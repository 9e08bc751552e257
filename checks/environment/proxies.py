"""HTTP proxies: torch and NCCL never use them, other programs of the job do. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nccl_doctor.api import Confidence, Severity, Where, odd_ones_out, place_of

from .no_proxy import PROXIES
from .view import Placed, Problem, Seen, View, views_of

COVERED, DIFFERS = "proxy-covers-master", "env-differs"


def covers_master(view: View) -> Iterator[Problem]:
    """Problem if the job spans hosts and HTTP requests to the first host go through a proxy."""
    names = _set(view)
    if names and view.spans_hosts and view.facts.get("proxied"):
        yield Problem(
            COVERED,
            f"{' and '.join(names)} set, and no_proxy does not exclude MASTER_ADDR",
            'export no_proxy="$MASTER_ADDR,localhost,127.0.0.1${no_proxy:+,$no_proxy}", and add '
            "the other hosts of the job",
            Severity.INFO,
        )


def differing_proxies(seen: Seen) -> Iterator[Placed]:
    """Problem if some hosts, or some ranks of a host, have a proxy and others have none."""
    set_in = {at: bool(_set(view)) for at, view in views_of(seen).items()}
    if len(set(set_in.values())) < 2:
        return
    has = {seat: set_in[id(view)] for seat, (_, view) in seen.items()}
    of_host: dict[int, set[bool]] = {}
    for seat, (rank, _) in seen.items():
        of_host.setdefault(rank.host.id, set()).add(has[seat])
    whole = all(len(each) == 1 for each in of_host.values())
    places = {seat: rank.host.id if whole else seat for seat, (rank, _) in seen.items()}
    odd = odd_ones_out({place: has[seat] for seat, place in places.items()})
    if odd is None:
        return
    where = place_of(rank for seat, (rank, _) in seen.items() if places[seat] in odd.places)
    sides = {
        said: sorted({rank.host.label for seat, (rank, _) in seen.items() if has[seat] is side})
        for side, said in ((True, "a proxy"), (False, "no proxy"))
    }
    message = "no proxy; elsewhere a proxy variable (such as http_proxy) is set"
    if odd.usual is False:
        message = "a proxy variable (such as http_proxy) is set; elsewhere no proxy"
    if odd.tie:
        message = "a proxy variable (such as http_proxy) is set on one half, and not on the other"
    yield Placed(
        Problem(
            DIFFERS,
            message,
            "set http_proxy, https_proxy and no_proxy the same on every host, or on none",
            Severity.INFO,
            confidence=Confidence.POSSIBLE if odd.tie else Confidence.CERTAIN,
        ),
        Where(hosts=where.hosts) if whole else where,
        {"values": {"proxy": sides}},
    )


def _set(view: View) -> list[str]:
    return [each for name in PROXIES for each in (name, name.upper()) if view.is_set(each)]
