"""Can NCCL load the network plug-in that the environment asks for?

What it checks
--------------
Which library NCCL would look for (NCCL_NET_PLUGIN, else libnccl-net.so), whether the dynamic loader
can load it with all its dependencies, whether it exports an interface that this release of NCCL
accepts (`ncclNetPlugin_v*`), and whether NCCL_NET names a network that needs a plug-in; whether it
has CollNet (`ncclCollNetPlugin_v*`, collectives in the switches: SHARP), if NCCL_COLLNET_ENABLE=1
or NCCL_ALGO asks for it. The variables may also come from NCCL's configuration files. And whether
all hosts have the same plug-in (by a hash of both ends of its file), or none has one. The plug-in
is loaded in a separate process; NCCL is not loaded, and no network is used.

Why it matters
--------------
A plug-in that cannot be loaded is no error for NCCL: it is reported at NCCL_DEBUG=INFO only, and
NCCL uses sockets, many times slower. If NCCL_NET names the network, NCCL fails instead. If one host
has the plug-in and the others do not, they use different protocols, and NCCL fails or hangs; two
releases of one plug-in may do so too. A plug-in built for an older NCCL is silently ignored. One
that crashes or hangs while it is loaded takes the rank with it. CollNet comes with a plug-in only:
without one NCCL silently uses rings and trees; but since 2.24, if NCCL_ALGO leaves all-reduce
nothing but CollNet, the first all-reduce fails.

How to fix
----------
Install the plug-in in the image of every host (aws-ofi-nccl for EFA), and put its folder into
LD_LIBRARY_PATH before the job starts; the same release on every host, new enough for this NCCL. Or
unset the variables, if no plug-in is wanted. CollNet: nccl-rdma-sharp-plugins, which is in HPC-X.

When it is wrong
----------------
A plug-in that loads may still refuse to start if its fabric is missing, and one that has CollNet if
the switches have no SHARP. One that is linked into NCCL, or loaded by the job's own code, is not
seen. Variables of EFA may be left over in an image that also runs where there is no EFA. Which
interfaces an NCCL release accepts is known for some releases only; between them the plug-in gets
the benefit of the doubt. Plug-ins that each host compiled itself differ as files: that is only a
note if the file name and the interfaces are the same. If ranks of one host have different
variables, only those of its first rank are checked.
Not validated on hardware: tested on made-up clusters and on made-up libraries.

References
----------
NCCL user guide, environment variables (NCCL_NET, NCCL_NET_PLUGIN); NCCL src/plugin/plugin_open.cc
and src/plugin/net.cc, before 2.24 src/net.cc;
aws/aws-ofi-nccl on GitHub, README; ld.so(8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    OutcomeStatus,
    Severity,
    Skip,
    Step,
    export,
    shell,
)
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.nccl.plugin import PluginBuild, first_plugin, is_linked_in, plugin_build
from nccl_doctor.toolkit.nccl.plugin_builds import differing_builds, only_some_load, place_of_hosts
from nccl_doctor.toolkit.nccl.plugin_versions import cuda_releases, range_in_words, takes_plugin

from .collnet import ABSENT, REQUIRED, collnet_asked, without_collnet

NAMES = ("NCCL_NET_PLUGIN", "NCCL_NET")
BUILT_IN = ("socket", "ib")
"""Values of NCCL_NET, in any case, for which NCCL needs no plug-in."""
NO_PLUGIN = "none"
EFA = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "FI_EFA_SET_CUDA_SYNC_MEMOPS")
"""Variables that have an effect on NCCL only through the plug-in for libfabric."""

MISSING = Kind(
    "net-plugin-missing",
    Layer.ENV,
    "The network plug-in of NCCL cannot be used",
    "NCCL then silently uses sockets, or fails if NCCL_NET names the network.",
    "install the plug-in in the image, and put its folder into LD_LIBRARY_PATH",
    Severity.WARN,
)
DIFFERS = Kind(
    "net-plugin-differs",
    Layer.ENV,
    "Hosts have different network plug-ins of NCCL",
    "Hosts would use different networks, or different releases of one plug-in: NCCL fails or "
    "hangs, unless the plug-in finds no fabric and is not used.",
    Fix(export(NCCL_NET_PLUGIN="none"), alternatives=["have the same plug-in on every host"]),
    Severity.WARN,
)

CRASHES = Kind(
    "net-plugin-crashes",
    Layer.ENV,
    "A network plug-in of NCCL crashes or hangs the process that loads it",
    "NCCL loads it in every rank, whatever NCCL_NET is: the rank dies or hangs at its first "
    "communicator.",
    Fix(
        export(NCCL_NET_PLUGIN="none"),
        alternatives=["install a build of the plug-in that fits this image (NCCL, libfabric, UCX)"],
    ),
)
_LOAD = "load "


class NetPluginFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    plugin: str
    net: str
    asked: list[str]
    tried: list[list[str]]
    loaded: str | None
    build: PluginBuild | None
    collnet: list[str]


class NetPlugin(Check):
    """Loads the plug-in as NCCL would, and compares hosts."""

    name = "net_plugin"
    layer = Layer.ENV
    cost = "seconds"
    instant_without_gpu = True
    kinds = (MISSING, DIFFERS, CRASHES, ABSENT, REQUIRED)
    reads = ("nccl_library", "rdma")

    def observe(self, ctx: Context) -> NetPluginFacts:
        """`asked`: the variables that request a plug-in; `tried`: (library, error) in NCCL's order;
        `loaded`: the library that loads, or None; `build`: its `plugin_build`; `net`: the value of
        NCCL_NET; `collnet`: the settings that ask for CollNet.
        """
        if ctx.backend != "nccl":
            raise Skip("the job does not use NCCL")
        settings = nccl_settings(ctx.env, root=ctx.root)
        values = {name: at for name in NAMES if (at := settings.get(name)) and at.value}
        plugin, net = (values[name].value if name in values else "" for name in NAMES)
        asked = [f"{name}={at.value} (by {at.origin})" for name, at in values.items()]
        tried, loaded = first_plugin(plugin, ctx.breadcrumb)
        ctx.breadcrumb(f"read {loaded}")  # its own step: loading went well
        return {
            "plugin": plugin,
            "net": net,
            "asked": asked + [f"{name}={ctx.env[name]}" for name in EFA if ctx.env.get(name)],
            "tried": tried,
            "loaded": loaded or None,
            "build": plugin_build(loaded) if loaded else None,
            "collnet": collnet_asked(settings),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each host; then on hosts without the plug-in that others load, or with
        another one.
        """
        yield from _crashes(cluster)
        seen = [(rank.host, facts) for rank, facts in cluster.facts(self.name)]
        reported = set()
        # With EFA the plug-in has a fabric, and is used.
        efa = any(each["road"] == "efa" for _, each in cluster.facts("rdma"))
        mixed = efa and any(facts["loaded"] for _, facts in seen)
        for host, facts in seen:
            for finding in (*_asked_for(facts), *_left(cluster, host, facts)):
                reported.add(host.id)
                if mixed and not facts["loaded"]:  # this host by sockets, and others by EFA
                    finding = finding.replaced(severity=Severity.FAIL)
                yield finding.replaced(where=place_of_hosts([host]))
            why = MISSING.code if host.id in reported else None
            for finding in without_collnet(cluster, host, facts, why):
                yield finding.replaced(where=place_of_hosts([host]))
        use = [(host, facts) for host, facts in seen if facts["loaded"] and host.id not in reported]
        severity = Severity.FAIL if efa else None
        left = [(host, facts["loaded"]) for host, facts in seen if host.id not in reported]
        for finding in only_some_load(DIFFERS, left, len(seen), severity):
            tried = {host.label: facts["tried"] for host, facts in seen}
            yield finding.replaced(evidence={**finding.evidence, "tried": tried})
        yield from differing_builds(DIFFERS, [(host, facts.get("build")) for host, facts in use])


def _crashes(cluster: Cluster) -> Iterator[Finding]:
    for each in cluster.evidence("net_plugin"):
        end = each.outcome
        hung = end.status is OutcomeStatus.HUNG and end.state not in ("T", "t")
        died = end.status is OutcomeStatus.DIED and end.signal != "SIGKILL"
        if end.last_step.startswith(_LOAD) and (hung or died):
            library = end.last_step.removeprefix(_LOAD)
            how = f"did not load within {end.duration_s:.0f} s"
            if died:
                how = f"crashed the process that loaded it ({end.signal or end.exit_code})"
            yield Finding(
                CRASHES,
                f"{library} {how}",
                place_of_hosts([each.host]),
                {"stack": end.stack, "wchan": end.wchan, "log_tail": end.log_tail},
                confidence=Confidence.CERTAIN if died else Confidence.LIKELY,
            )


def _asked_for(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Finding on a requested plug-in that does not load, without its place."""
    named, wanted = _wish(facts)
    if facts["loaded"] or not (wanted and facts["asked"]) or is_linked_in(facts["plugin"]):
        return
    errors = "; ".join(error for _, error in facts["tried"]) or "NCCL_NET_PLUGIN=none"
    yield Finding(
        MISSING,
        f"{', '.join(facts['asked'])}; {errors}",
        evidence={"tried": facts["tried"]},
        fix=Fix(
            text=MISSING.fix,
            alternatives=[
                Fix(Step(shell("unset {:variable}", [a.partition("=")[0] for a in facts["asked"]])))
            ],
        ),
        severity=Severity.FAIL if named else Severity.WARN,
    )


def _wish(facts: Mapping[str, Any]) -> tuple[bool, bool]:
    """True if NCCL_NET names a network that needs a plug-in, and whether one may be used at all."""
    net = facts["net"].lower()
    named = bool(net) and net not in BUILT_IN
    return named, named or (not net and facts["plugin"].lower() != NO_PLUGIN)


def _left(cluster: Cluster, host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Finding on a plug-in that loads, but exports no interface that this NCCL accepts."""
    named, wanted = _wish(facts)
    versions = (facts.get("build") or {}).get("versions") or ()
    releases = cuda_releases(cluster, host)
    refuse = sorted(nccl for nccl in releases if versions and not takes_plugin(nccl, versions))
    if not (refuse and wanted):
        return
    severity = Severity.FAIL if named else Severity.WARN
    exports = ", ".join(f"ncclNetPlugin_v{each}" for each in versions)
    yield Finding(
        MISSING,
        f"{facts['loaded']} exports {exports}; "
        f"NCCL {refuse[0]} accepts {range_in_words(refuse[0])}",
        evidence={"nccl": refuse, **facts["build"]},
        fix="install a release of the plug-in that was built for this NCCL",
        # Not requested: NCCL uses its built-in networks.
        severity=severity if facts["asked"] else Severity.INFO,
    )
