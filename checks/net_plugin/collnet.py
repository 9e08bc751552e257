"""CollNet (SHARP): who asks for it, and whether the network plug-in has it. Pure.

Source: src/plugin/net.cc (the plug-in brings it), src/graph/tuning.cc and `topoGetAlgoInfo` in
src/enqueue.cc of NCCL 2.24.3 to 2.30.7; `ncclTopoTuneModel` in src/graph/tuning.cc of 2.18.3 to
2.23.4 ignores an NCCL_ALGO that leaves nothing but CollNet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    On,
    Severity,
    Step,
    shell,
)
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.nccl.plugin_versions import cuda_releases, takes_plugin
from nccl_doctor.toolkit.variables.values import as_strtoll
from nccl_doctor.toolkit.versions import release

_INSTALL = (
    "install a network plug-in with CollNet (nccl-rdma-sharp-plugins, in HPC-X) on every host"
)
ABSENT = Kind(
    "collnet-missing",
    Layer.SPEED,  # it explains no slow link: NCCL uses rings and trees, as it does everywhere
    "CollNet (SHARP) is asked for, and no plug-in has it",
    "NCCL silently uses rings and trees: the setting has no effect.",
    Fix(
        text=f"{_INSTALL}, and put its folder into LD_LIBRARY_PATH",
        alternatives=[Fix(Step(shell("unset NCCL_COLLNET_ENABLE NCCL_ALGO"), On.EVERY))],
    ),
    Severity.WARN,
)
REQUIRED = Kind(
    "collnet-only",
    Layer.ENV,
    "NCCL_ALGO leaves all-reduce nothing but CollNet (SHARP), and no plug-in has it",
    "The first all-reduce fails: `no algorithm/protocol available for function AllReduce`.",
    Fix(Step(shell("unset NCCL_ALGO"), On.EVERY), alternatives=[_INSTALL]),
)

_ENABLE, _ALGO = "NCCL_COLLNET_ENABLE", "NCCL_ALGO"
_OF_COLLNET = frozenset({"collnetdirect", "collnetchain"})
_ALGORITHMS = _OF_COLLNET | {"tree", "ring", "nvls", "nvlstree", "pat"}
_REFUSES = (2, 24)
"""First release that does not ignore an NCCL_ALGO that leaves nothing."""


def collnet_asked(settings: Mapping[str, Setting]) -> list[str]:
    """The settings that ask for CollNet, each with its origin."""
    asked = []
    enable, algo = settings.get(_ENABLE), settings.get(_ALGO)
    if enable is not None and as_strtoll(enable.value) == 1:
        asked.append(f"{_ENABLE}={enable.value} (by {enable.origin})")
    if algo is not None and leaves_only_collnet(algo.value):
        asked.append(f"{_ALGO}={algo.value} (by {algo.origin})")
    return asked


def leaves_only_collnet(algo: str) -> bool:
    """True if a value of NCCL_ALGO leaves all-reduce no algorithm but those of CollNet.

    A value that NCCL does not understand leaves what it leaves: that is another fault.
    """
    left: Collection[str] = _ALGORITHMS
    for entry in algo.lower().split(";"):
        function, _, names = entry.rpartition(":")
        named = {name for name in names.removeprefix("^").split(",") if name}
        if not named <= _ALGORITHMS:
            return False
        if function in ("", "allreduce"):
            left = _ALGORITHMS - named if names.startswith("^") else named
    return bool(left) and _OF_COLLNET.issuperset(left)


def without_collnet(
    cluster: Cluster, host: Host, facts: Mapping[str, Any], explained_by: str | None
) -> Iterator[Finding]:
    """Finding on a host that asks for CollNet and has no plug-in with it, without its place.

    `explained_by` is the code of a finding on why there is no plug-in. An older report does not say
    what was asked for.
    """
    asked = facts.get("collnet") or ()
    build = facts.get("build")
    # Another one of several may have it, and one that is linked in is not seen.
    several = "," in facts["plugin"] or facts["plugin"].upper().startswith("STATIC")
    if not asked or several:
        return
    releases = cuda_releases(cluster, host)
    has = (build or {}).get("collnet") or ()
    if has and (not releases or any(takes_plugin(nccl, has) for nccl in releases)):
        return
    what = "no network plug-in is loaded"
    if build is not None:
        what = f"{facts['loaded']} exports " + (
            ", ".join(f"ncclCollNetPlugin_v{each}" for each in has) or "no ncclCollNetPlugin_v*"
        )
    needed = cluster.world_size > 1 and any(each.startswith(f"{_ALGO}=") for each in asked)
    fails = needed and bool(releases) and all(release(nccl) >= _REFUSES for nccl in releases)
    # Within one host NCCL never uses it, whatever is asked for.
    if fails or cluster.is_multi_host():
        yield Finding(
            REQUIRED if fails else ABSENT,
            f"{', '.join(asked)}; {what}",
            evidence={"build": build, "nccl": sorted(releases)},
            explained_by=explained_by,
        )
