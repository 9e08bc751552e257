"""The links between hosts as a heat map: a row for each caller, a column for each listener."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.report import Report
from nccl_doctor.report.html.markup import Html, element, fold, table, together
from nccl_doctor.report.network import Link, Network, Pair, network_of, show_latency, show_rate
from nccl_doctor.report.story import Checks, and_more, shortened
from nccl_doctor.toolkit.leaves import leaf_switch
from nccl_doctor.toolkit.slurm import host_ranges

# The links of many hosts in blocks: one cell for all links between two blocks, as its worst one.
#
# A block is what hangs on a leaf switch, where the user or the scheduler tells the switches, else
# so many hosts in order of their ranks.


MOST_BLOCKS = 64
_BADNESS = ("", "ok", "failed")


@dataclass(frozen=True)
class BlockLink(Link):
    """All links from one block to another: the worst value of each quantity among them.

    `tried` of `whole` are known, `failed` do not work, and `blamed` are named by a finding.
    """

    tried: int = 0
    whole: int = 0
    failed: int = 0
    blamed: int = 0

    def in_words(self) -> str:
        """All of it, on one line."""
        parts = [f"{self.tried} of {self.whole} links tried"]
        if self.failed:
            parts.append(f"{self.failed} fail: {self.words}")
        if self.rtt_us is not None:
            parts.append(f"longest round trip {show_latency(self.rtt_us)}")
        if self.rate is not None:
            parts.append(f"lowest bandwidth {show_rate(self.rate)}")
        if self.blamed:
            parts.append(f"{self.blamed} blamed by {', '.join(self.blame)}")
        return ", ".join(parts)


def in_blocks(network: Network, cluster: Cluster) -> Network:
    """The same network with blocks for hosts, at most `MOST_BLOCKS` of them.

    Its links are `BlockLink`s; one from a block to itself holds the links inside of it.
    """
    blocks = _blocks(network, cluster)
    block_of = {host: number for number, (_, hosts) in enumerate(blocks) for host in hosts}
    between: dict[Pair, list[Link]] = {}
    for (start, end), link in network.links.items():
        between.setdefault((block_of[start], block_of[end]), []).append(link)
    sizes = [len(hosts) for _, hosts in blocks]
    labels = tuple(label for label, _ in blocks)
    links = {
        (a, b): _worst_of(labels[a], labels[b], found, sizes[a] * (sizes[b] - (a == b)))
        for (a, b), found in sorted(between.items())
    }
    blamed: dict[int, dict[str, None]] = {}
    for host, codes in sorted(network.blamed.items()):
        blamed.setdefault(block_of[host], {}).update(dict.fromkeys(codes))
    absent = frozenset(n for n, (_, hosts) in enumerate(blocks) if network.absent.issuperset(hosts))
    return Network(labels, links, {n: tuple(codes) for n, codes in blamed.items()}, absent)


def worst_links(network: Network, most: int) -> list[Link]:
    """The worst links: those that fail, those that are blamed, then those that are slow or late by
    most, compared with the usual.
    """

    def goodness(link: Link) -> tuple[bool, bool, float]:
        rate, usual_rate = link.rate, network.usual_rate or 0.0
        rtt_us, usual_rtt_us = link.rtt_us, network.usual_rtt_us or 0.0
        shares = [rate / usual_rate] if rate is not None and usual_rate else []
        shares += [usual_rtt_us / rtt_us] if rtt_us else []
        return link.reach != "failed", not link.blame, min(shares, default=1.0)

    known = (link for _, link in sorted(network.links.items()) if link.is_known or link.blame)
    return sorted(known, key=goodness)[:most]


def _blocks(network: Network, cluster: Cluster) -> list[tuple[str, tuple[int, ...]]]:
    """Label and hosts, by position, of each block; hosts that only findings know are the last."""
    first: dict[int, int] = {}
    leaf_of: dict[int, str] = {}
    leaves = cluster.job.leaves
    for rank in cluster.ranks:
        number = rank.seat if rank.rank is None else rank.rank
        first[rank.host.id] = min(number, first.get(rank.host.id, number))
        leaf_of[rank.host.id] = leaf_of.get(rank.host.id) or leaf_switch(rank, leaves)
    ids = [host.id for host in cluster.hosts]
    places = range(len(network.hosts))
    last = len(first) * len(places)
    order = sorted(places, key=lambda at: (first.get(ids[at], last) if at < len(ids) else last, at))
    above = {at: leaf_of.get(ids[at], "") for at in places if at < len(ids)}
    here = {at for at in above if at not in network.absent}
    if here and (all if not leaves else any)(above[at] for at in here):
        return _by_leaf(order, above)
    size = -(-len(order) // MOST_BLOCKS)
    parts = [tuple(order[at : at + size]) for at in range(0, len(order), size)]
    return [(_ranges(network, hosts), hosts) for hosts in parts]


def _by_leaf(order: Sequence[int], leaves: Mapping[int, str]) -> list[tuple[str, tuple[int, ...]]]:
    """Blocks of a leaf each, or of neighbouring ones where there are too many."""
    below: dict[str, list[int]] = {}
    for at in order:  # a host that never came hangs where nobody knows
        below.setdefault(leaves.get(at, ""), []).append(at)
    names = list(below)
    size = -(-len(names) // MOST_BLOCKS)
    parts = [names[at : at + size] for at in range(0, len(names), size)]
    return [
        (
            " – ".join(dict.fromkeys((part[0] or "unknown", part[-1] or "unknown"))),
            tuple(host for name in part for host in below[name]),
        )
        for part in parts
    ]


def _ranges(network: Network, hosts: Sequence[int]) -> str:
    return shortened([network.hosts[at] for at in hosts], host_ranges)


def _worst_of(start: str, end: str, links: Sequence[Link], whole: int) -> BlockLink:
    worst = max(links, key=lambda link: _BADNESS.index(link.reach))
    return BlockLink(
        start,
        end,
        reach=worst.reach,
        words=worst.words,
        rtt_us=max((link.rtt_us for link in links if link.rtt_us is not None), default=None),
        rate=min((link.rate for link in links if link.rate is not None), default=None),
        segments=sum(link.segments for link in links),
        lost=sum(link.lost for link in links),
        blame=tuple(dict.fromkeys(code for link in links for code in link.blame)),
        tried=sum(link.is_known for link in links),
        whole=whole,
        failed=sum(link.reach == "failed" for link in links),
        blamed=sum(bool(link.blame) for link in links),
    )


MOST_HOSTS = 64
"""Hosts of a whole map; of more, the map shows blocks of them, and each finding has a map of the
hosts at the ends of its links."""
_MOST_OF_A_FINDING, _MOST_MAPS = 24, 4
"""Hosts of the map of a finding of such a network, and findings that have one."""
_WORST = 20
"""Links of such a network that are listed."""
_MOST_WRITTEN = 16
"""Hosts of a map with values in its cells."""
_MOST_LINKS = 200
"""Blamed links that are listed."""
_LATE = (1.25, 2.0, 4.0, 10.0)
"""Times the usual round-trip time: steps of the scale."""
_SLOW = (0.8, 0.5, 1 / 3, 0.1)
"""Of the usual bandwidth: steps of the scale."""
_UNKNOWN = "n"
_SPEED = {"latency-high", "link-slow", "link-lossy", "host-slow"}


@dataclass(frozen=True)
class Quantity:
    """Quantity that a map can show: `letter` begins the classes of its cells and its scale."""

    letter: str
    name: str
    text: Callable[[Link], str]
    step: Callable[[Link], str]


@dataclass(frozen=True)
class NetworkMap:
    """Some hosts of a network, by position, with the title of the map."""

    title: str
    hosts: tuple[int, ...]
    note: str = ""


def section(report: Report, checks: Checks) -> Html | None:
    """The section of the page; None where there is no link to speak of."""
    network = network_of(report, checks)
    if len(network.hosts) < 2:
        return None
    views = _views(network)
    first = _first_view(network)
    parts: list[Html] = [element("p", _summary(network))]
    is_large = len(network.hosts) > MOST_HOSTS
    if is_large:
        blocks = in_blocks(network, report.cluster)
        whole = NetworkMap("All hosts", tuple(range(len(blocks.hosts))), _OF_BLOCKS)
        parts += _draw(blocks, whole, views, first, _MOST_MAPS)
    for number, each in enumerate(maps_of(network)):
        parts += _draw(network, each, views, first, number)
    parts.append(_scales())
    parts += _listed(network, is_large)
    return element("section", element("h2", "Links between hosts"), *parts, id="links")


def maps_of(network: Network) -> list[NetworkMap]:
    """One map of all hosts; or, of many hosts, one for each of the first kinds of findings that
    name links.
    """
    if len(network.hosts) <= MOST_HOSTS:
        return [NetworkMap("", tuple(range(len(network.hosts))))]
    maps = []
    for code, pairs in list(network.by_code().items())[:_MOST_MAPS]:
        often = Counter(end for pair in pairs for end in pair)
        worst = sorted(often, key=lambda host: (-often[host], host))[:_MOST_OF_A_FINDING]
        chosen = sorted(worst)
        inside = sum(pair[0] in chosen and pair[1] in chosen for pair in pairs)
        note = f"{len(pairs)} links of {len(often)} hosts"
        if inside < len(pairs):
            note += f"; shown: the {len(chosen)} hosts with most of them, {inside} links"
        maps.append(NetworkMap(code, tuple(chosen), note))
    return maps


def _summary(network: Network) -> str:
    known = [link for link in network.links.values() if link.is_known]
    blamed = [link for link in network.links.values() if link.blame]
    whole = len(network.hosts) * (len(network.hosts) - 1)
    parts = [
        f"{len(network.hosts)} hosts, {whole} links, one for each direction: {len(known)} tried, "
        f"{len(blamed)} blamed by a finding"
    ]
    if network.usual_rtt_us is not None:
        parts.append(f"usual round trip {show_latency(network.usual_rtt_us)}")
    if network.usual_rate is not None:
        parts.append(f"usual bandwidth of one connection {show_rate(network.usual_rate)}")
    if len(network.hosts) > MOST_HOSTS:
        parts.append("a map of blocks of hosts, and one for each kind of finding that names links")
    return "; ".join(parts) + "."


def _views(network: Network) -> tuple[Quantity, ...]:
    def late(link: Link) -> str:
        if link.rtt_us is None:
            return _UNKNOWN
        usual = network.usual_rtt_us or 0.0
        return str(sum(link.rtt_us > usual * step for step in _LATE))

    def slow(link: Link) -> str:
        if link.rate is None:
            return _UNKNOWN
        usual = network.usual_rate or 0.0
        return str(sum(link.rate < usual * step for step in _SLOW))

    return (
        Quantity("r", "reachability", _reach_text, _reach_step),
        Quantity("l", "latency", lambda link: show_latency(link.rtt_us), late),
        Quantity("b", "bandwidth", lambda link: show_rate(link.rate), slow),
    )


def _reach_step(link: Link) -> str:
    return {"ok": "0", "failed": "4"}.get(link.reach, _UNKNOWN)


def _reach_text(link: Link) -> str:
    return {"ok": "ok", "failed": link.words or "fails"}.get(link.reach, "")


def _first_view(network: Network) -> str:
    """The first view to show: that of failures, then of slow links, else of known values."""
    links = network.links.values()
    if any(
        link.reach == "failed" or (link.blame and not set(link.blame) & set(_SPEED))
        for link in links
    ):
        return "r"
    named = [*(link.blame for link in links), *network.blamed.values()]
    codes = {code for each in named for code in each if code in _SPEED}
    if codes:
        return "l" if codes == {"latency-high"} else "b"
    return "r" if any(link.reach for link in links) or not links else "b"


_OF_BLOCKS = (
    "Each cell is the worst of all links from one block of hosts to another, or inside of one."
)


def _draw(
    network: Network, each: NetworkMap, views: Sequence[Quantity], first: str, number: int
) -> list[Html]:
    """A map below its title."""
    switches: list[Html] = []
    for view in views:
        name = f"view-{number}-{view.letter}"
        switches.append(
            element(
                "input",
                type="radio",
                name=f"view-{number}",
                id=name,
                class_=f"pick pick-{view.letter}",
                checked=view.letter == first,
            )
        )
        switches.append(element("label", view.name, for_=name))
    written = len(each.hosts) <= _MOST_WRITTEN
    head = element(
        "tr",
        element("td", "from \\ to", class_="corner"),
        *(_host(network, host, "col") for host in each.hosts),
    )
    rows = (
        element(
            "tr",
            _host(network, start, "row"),
            *(_cell(network, (start, end), views, written) for end in each.hosts),
        )
        for start in each.hosts
    )
    heat = element(
        "table",
        element(
            "caption",
            "Row: the host that calls or sends. Column: the host that answers or receives.",
        ),
        element("thead", head),
        element("tbody", *rows),
        class_="heat" if written else "heat small",
    )
    scroll = element("div", heat, class_="scroll", tabindex=0)
    live = element("p", class_="chosen", role="status", hidden=True)
    above = [element(name, text) for name, text in (("h3", each.title), ("p", each.note)) if text]
    return [*above, element("div", *switches, scroll, live, class_="map")]


def _host(network: Network, host: int, scope: str) -> Html:
    label, codes = network.hosts[host], network.blamed.get(host, ())
    title = label
    if codes:
        title += f": blamed by {', '.join(codes)}"
    if host in network.absent:
        title += ": never signed in"
    mark = element("b", "✗", class_="mark") if codes else None
    classes = " ".join(
        name for name, on in (("blamed", codes), ("absent", host in network.absent)) if on
    )
    name = element("span", mark, label)
    return element("th", name, scope=scope, title=title, class_=classes or None)


def _cell(network: Network, pair: Pair, views: Sequence[Quantity], written: bool) -> Html:
    if pair[0] == pair[1] and pair not in network.links:
        return element("td", class_="self")
    link = network.at(pair)
    classes = [f"{view.letter}{view.step(link)}" for view in views]
    texts: list[Html] = []
    if written:
        texts = [_text(view, link) for view in views]
    mark = element("b", "✗", class_="mark") if link.blame else None
    words = f"{link.start} → {link.end}: {link.in_words()}"
    return element(
        "td",
        mark,
        *texts,
        class_=" ".join([*classes, *(["blamed"] if link.blame else [])]),
        title=words,
        data_from=link.start,
        data_to=link.end,
    )


def _text(view: Quantity, link: Link) -> Html:
    """The value of a cell; of how a link fails, a phone shows a mark in place of the words."""
    words = view.text(link)
    if view.letter != "r" or link.reach != "failed":
        return element("i", words, class_=f"v{view.letter}")
    mark = None if link.blame else element("b", "✗", class_="short")
    return element("i", element("span", words, class_="long"), mark, class_="vr")


def _scales() -> Html:
    """Legend of the colours."""
    late = [f"up to {_LATE[0]:g} × the usual", *(f"more than {step:g} ×" for step in _LATE)]
    slow = [f"at least {_SLOW[0]:.0%} of the usual", *(f"less than {step:.0%}" for step in _SLOW)]
    lines = (
        ("reachability", "r", [("0", "reachable"), ("4", "fails"), (_UNKNOWN, "not tried")]),
        ("latency", "l", [*zip("01234", late, strict=True), (_UNKNOWN, "not measured")]),
        ("bandwidth", "b", [*zip("01234", slow, strict=True), (_UNKNOWN, "not measured")]),
    )
    rows = [
        element(
            "p",
            element("b", name),
            *(
                together(element("span", class_=f"swatch s{step}"), words)
                for step, words in ((step, f" {words} ") for step, words in items)
            ),
        )
        for name, _, items in lines
    ]
    marked = element("p", element("b", "✗", class_="mark"), " and a frame: named by a finding")
    return fold("Meaning of the colours", *rows, marked, class_="legend")


def _listed(network: Network, is_large: bool) -> Iterator[Html]:
    """Table of the blamed links, for readers that cannot point at a cell; of many hosts that of the
    worst links, whether anything blames them or not.
    """
    blamed = [link for _, link in sorted(network.links.items()) if link.blame]
    shown = worst_links(network, _WORST) if is_large else blamed[:_MOST_LINKS]
    if shown:
        yield element("h3", f"The {len(shown)} worst links" if is_large else "Blamed links")
        yield _links(shown)
    if more := and_more(len(blamed) - sum(bool(link.blame) for link in shown)):
        words = " that are blamed" if is_large else ""
        yield element("p", f"{more}{words} (all of them in the JSON report)")


def _links(links: Sequence[Link]) -> Html:
    return table(
        ("from", "to", "blamed by", "reachability", "latency", "bandwidth", "lost"),
        (
            (
                link.start,
                link.end,
                ", ".join(link.blame) or "–",
                _reach_text(link) or "not tried",
                show_latency(link.rtt_us) or "–",
                show_rate(link.rate) or "–",
                f"{link.lost} of {link.segments}" if link.segments else "–",
            )
            for link in links
        ),
    )
