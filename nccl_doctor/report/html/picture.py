"""Picture of the network: the hosts in a ring, and in it the links and hosts that are to blame."""

from __future__ import annotations

import math

from nccl_doctor.model.report import Report
from nccl_doctor.report.html.markup import Html, element
from nccl_doctor.report.network import Network, Pair, network_of
from nccl_doctor.report.story import Checks

MOST_HOSTS = 16
"""Hosts of which each is drawn; of more, one sentence tells how many links fail."""
_MOST_LABELS = 4
"""Links with the name of their fault beside them; others of the same one are told by the colour."""
_WIDTH, _NODE = 360, 14
_SMALL, _LARGE, _FEW = 56, 110, 6
"""Half the height of the ring of a few hosts, and of more."""
_ACROSS = 130
"""Half its width."""
_INWARD = 0.2
"""Part of the way to the middle of the ring by which a label leaves its link."""
_LONGEST = 14
"""Characters of a name."""


def section(report: Report, checks: Checks) -> Html | None:
    """The section of the page; None where no link and no host is to blame, or there is one host."""
    network = network_of(report, checks)
    failing = _failing(report, network)
    if len(network.hosts) < 2 or not (failing or network.blamed):
        return None
    if len(network.hosts) > MOST_HOSTS:
        return element("p", _in_words(network, failing), class_="aside", id="picture")
    return element("figure", _drawn(network, failing), id="picture")


def _failing(report: Report, network: Network) -> dict[Pair, str]:
    """Links that a root cause names → its code."""
    codes = {cause.code for cause in report.root_causes}
    return {
        pair: next(code for code in link.blame if code in codes)
        for pair, link in sorted(network.links.items())
        if codes.intersection(link.blame)
    }


def _in_words(network: Network, failing: dict[Pair, str]) -> str:
    hosts = len(network.hosts)
    said = [f"{len(failing)} of {hosts * (hosts - 1)} links"] if failing else []
    said += [f"{len(network.blamed)} of {hosts} hosts"] if network.blamed else []
    return f"To blame: {' and '.join(said)}."


def _drawn(network: Network, failing: dict[Pair, str]) -> Html:
    places = _places(len(network.hosts))
    high = round(max(y for _, y in places) + _NODE + 30)
    pairs = [(a, b) for a in range(len(places)) for b in range(a)]
    good = [(a, b) for a, b in pairs if not {(a, b), (b, a)} & failing.keys()]
    arrow = element("path", d="M0 0 L8 4 L0 8 z", class_="bad-head")
    marker = element(
        "marker",
        arrow,
        id="arrow",
        viewBox="0 0 8 8",
        refX=8,
        refY=4,
        markerWidth=4,
        markerHeight=4,
        orient="auto-start-reverse",
    )
    named = ", ".join(f"{network.hosts[a]} to {network.hosts[b]}" for a, b in failing)
    words = f"The network of {len(network.hosts)} hosts"
    words += f"; these links fail: {named}" if named else ""
    return element(
        "svg",
        element("title", words),
        element("defs", marker),
        *(_line(places[a], places[b], "good-link") for a, b in good if _is_good(network, (a, b))),
        *_bad_links(places, failing),
        *(_host(network, at, place) for at, place in enumerate(places)),
        viewBox=f"0 0 {_WIDTH} {high}",
        role="img",
        class_="picture",
    )


def _is_good(network: Network, pair: Pair) -> bool:
    links = [network.at(each) for each in (pair, pair[::-1])]
    return any(link.is_known for link in links) and all(link.reach != "failed" for link in links)


def _places(count: int) -> list[tuple[float, float]]:
    """Middles of the hosts: two side by side, more in a ring, the first at the top."""
    middle, radius = _WIDTH / 2, _SMALL if count <= _FEW else _LARGE
    if count == 2:
        return [(middle - _ACROSS, 40.0), (middle + _ACROSS, 40.0)]
    turns = [2 * math.pi * at / count for at in range(count)]
    return [
        (middle + _ACROSS * math.sin(turn), radius + 34 - radius * math.cos(turn)) for turn in turns
    ]


def _bad_links(places: list[tuple[float, float]], failing: dict[Pair, str]) -> list[Html]:
    drawn: list[Html] = []
    labels: list[Html] = []
    told: set[str] = set()
    middle = [sum(place[i] for place in places) / len(places) for i in (0, 1)]
    for (a, b), code in failing.items():
        both = (b, a) in failing
        if both and b < a:
            continue  # one line for both directions
        drawn.append(_line(places[a], places[b], "bad-link", both=both))
        if code not in told and len(told) < _MOST_LABELS:
            told.add(code)
            half = [(places[a][i] + places[b][i]) / 2 for i in (0, 1)]
            x, y = ((1 - _INWARD) * half[i] + _INWARD * middle[i] for i in (0, 1))
            labels.append(element("text", f"✗ {code}", x=_at(x), y=_at(y - 6), class_="bad-label"))
    return [*drawn, *labels]


def _line(
    start: tuple[float, float], end: tuple[float, float], class_: str, *, both: bool | None = None
) -> Html:
    """A line between two hosts, up to their edges; an arrow unless `both` is None."""
    long = math.dist(start, end) or 1.0
    x, y = ((end[i] - start[i]) / long * (_NODE + 2) for i in (0, 1))
    return element(
        "line",
        x1=_at(start[0] + x),
        y1=_at(start[1] + y),
        x2=_at(end[0] - x),
        y2=_at(end[1] - y),
        class_=class_,
        marker_end=None if both is None else "url(#arrow)",
        marker_start="url(#arrow)" if both else None,
    )


def _host(network: Network, at: int, place: tuple[float, float]) -> Html:
    name, codes = network.hosts[at], network.blamed.get(at, ())
    x, y = place
    shown = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
    state = "bad-host" if codes else "gone-host" if at in network.absent else "host"
    below = y + _NODE + 14 if y > 2 * _NODE + 20 or len(network.hosts) == 2 else y - _NODE - 5
    mark = element("text", "✗", x=_at(x), y=_at(y + 5), class_="bad-mark") if codes else None
    title = f"{name}: {', '.join(codes)}" if codes else name
    return element(
        "g",
        element("title", title),
        element("circle", cx=_at(x), cy=_at(y), r=_NODE, class_=state),
        mark,
        element("text", shown, x=_at(x), y=_at(below)),
    )


def _at(number: float) -> float:
    return round(number, 1)
