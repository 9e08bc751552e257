"""Can NCCL load its plug-ins for tuning, profiling and variables?

What it checks
--------------
Which libraries NCCL would look for (NCCL_TUNER_PLUGIN, else libnccl-tuner.so; NCCL_PROFILER_PLUGIN,
else libnccl-profiler.so; NCCL_ENV_PLUGIN, else libnccl-env.so), whether the dynamic loader can load
each with all its dependencies, whether it exports an interface that this release of NCCL accepts
(`ncclTunerPlugin_v*`, `ncclProfiler_v*`, `ncclEnvPlugin_v*`), and whether all hosts have the same
tuner and the same plug-in for variables (by a hash of both ends of the file), or none has one. The
variables may also come from NCCL's configuration files. Each library is loaded in a process of its
own; NCCL is not loaded, and no function of the plug-in is called. Check `net_plugin` does the same
for network plug-ins.

Why it matters
--------------
NCCL loads these libraries in every rank, also where nobody asked for them: one that crashes or
hangs while it is loaded takes the rank with it. One that cannot be loaded, or was built for another
NCCL, is reported at NCCL_DEBUG=INFO only, and NCCL goes on without it: slower than the cloud's own
tuner would make it, without the settings of the plug-in for variables, without the profile. Every
rank asks its own tuner for the algorithm: if hosts have different tuners, ranks of one collective
may choose different algorithms, which hangs.

How to fix
----------
Install the plug-in in the image of every host, and put its folder into LD_LIBRARY_PATH before the
job starts; the same release on every host, new enough for this NCCL. Or unset the variables, or set
them to none, if no plug-in is wanted.

When it is wrong
----------------
A plug-in that loads may still crash when NCCL calls it. One that is linked into the program
(STATIC_PLUGIN), and one that a plug-in for variables names, are not seen. Which interfaces an NCCL
release accepts is known for some releases only; between them the plug-in gets the benefit of the
doubt. Tuners that each host compiled itself differ as files: that is only a note if the file name
and the interfaces are the same. If ranks of one host have different variables, only those of its
first rank are checked.
Not validated on hardware: tested on made-up clusters and on made-up libraries.

References
----------
NCCL user guide, environment variables (NCCL_TUNER_PLUGIN, NCCL_PROFILER_PLUGIN, NCCL_ENV_PLUGIN);
NCCL plugins/tuner/README.md, plugins/profiler/README.md, plugins/env/README.md;
src/plugin/plugin_open.cc, tuner.cc, profiler.cc and env.cc; ld.so(8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    Severity,
    Skip,
    Step,
    Untested,
    export,
    shell,
)
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.nccl.plugin import (
    CRASHED,
    ENV,
    HUNG,
    NET,
    NO_PLUGIN,
    PROFILER,
    TUNER,
    UNTRIED,
    PluginTrial,
    PluginType,
    is_linked_in,
    try_plugin,
)
from nccl_doctor.toolkit.nccl.plugin_builds import differing_builds, only_some_load, place_of_hosts
from nccl_doctor.toolkit.nccl.plugin_versions import (
    cuda_releases,
    knows_plugin,
    range_in_words,
    takes_plugin,
)

MISSING = Kind(
    "nccl-plugin-missing",
    Layer.ENV,
    "A plug-in of NCCL cannot be used",
    "NCCL says so at NCCL_DEBUG=INFO only, and goes on without the tuning, the settings or the "
    "profile that it would give.",
    "install the plug-in in the image, and put its folder into LD_LIBRARY_PATH",
    Severity.WARN,
)
CRASHES = Kind(
    "nccl-plugin-crashes",
    Layer.ENV,
    "A plug-in of NCCL crashes or hangs the process that loads it",
    "NCCL loads it in every rank: the rank dies or hangs at its first communicator.",
    "set the variable of the plug-in to none on every host, or install a build of the plug-in that "
    "fits this image",
)
DIFFERS = Kind(
    "nccl-plugin-differs",
    Layer.ENV,
    "Hosts have different plug-ins of NCCL for tuning or variables",
    "Each rank asks its own plug-in: ranks of one collective may choose different algorithms or "
    "settings, and then hang.",
    "the same plug-in on every host, or none on every host",
    Severity.WARN,
    effects=(Effect.DIFFERENCE,),
)
_TYPES: Mapping[str, PluginType] = {"tuner": TUNER, "profiler": PROFILER, "env": ENV}
_SHARED = ("tuner", "env")
"""Those that all ranks need alike; a profile may be taken on one host only."""
_PATIENCE_S = 10.0
_TUNER_IN_NET = replace(TUNER, variable=NET.variable, prefix=NET.prefix, several=True)
"""A tuner that is packed into the network plug-in, where NCCL looks if it finds no other."""


class Plugin(PluginTrial):
    """Facts of one type: `asked` is the variable with its origin, empty if it is not set;
    `instead`: the network plug-in whose tuner NCCL would use in its place, or None.
    """

    asked: str
    instead: PluginTrial | None


class NcclPluginsFacts(TypedDict):
    """Facts that `observe` returns: type of the plug-in → what was found."""

    plugins: dict[str, Plugin]


class NcclPlugins(Check):
    """Loads each plug-in as NCCL would, in a child of its own, and compares hosts."""

    name = "nccl_plugins"
    layer = Layer.ENV
    cost = "seconds"
    instant_without_gpu = True
    kinds = (MISSING, CRASHES, DIFFERS)
    reads = ("nccl_library",)
    deadline_s = 60.0  # each of them may take its time

    def observe(self, ctx: Context) -> NcclPluginsFacts:
        """A type that is turned off, or is linked into the program, is not there."""
        if ctx.backend != "nccl":
            raise Skip("the job does not use NCCL")
        settings = nccl_settings(ctx.env, root=ctx.root)
        found: dict[str, Plugin] = {}
        for name, of in _TYPES.items():
            setting = settings.get(of.variable)
            value = setting.value if setting else ""
            if value.lower() == NO_PLUGIN or is_linked_in(value):
                continue
            trial = try_plugin(value, of, ctx.breadcrumb, _PATIENCE_S)
            asked = f"{of.variable}={value} (by {setting.origin})" if setting and value else ""
            net = settings.get(NET.variable)
            lost = of is TUNER and asked and not trial["loaded"] and not trial["fault"]
            instead = (
                try_plugin(net.value if net else "", _TUNER_IN_NET, ctx.breadcrumb, _PATIENCE_S)
                if lost
                else None
            )
            found[name] = {**trial, "asked": asked, "instead": instead}
        facts: NcclPluginsFacts = {"plugins": found}
        for each in found.values():
            if each["fault"] == UNTRIED:
                raise Untested(": ".join(each["tried"][-1]), facts)
        return facts

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each host, then on hosts whose plug-ins differ from those of the others."""
        for name, of in _TYPES.items():
            usable = []
            for rank, facts in cluster.facts(self.name):
                plugin = facts["plugins"].get(name)
                releases = cuda_releases(cluster, rank.host)
                if plugin is not None and not (releases and _unknown_to(releases, of)):
                    finding = _problem(plugin, of, releases)
                    if finding is not None:
                        yield finding.replaced(where=place_of_hosts([rank.host]))
                        continue
                usable.append((rank.host, plugin))
            if name in _SHARED:
                yield from _between(usable)


def _unknown_to(releases: Set[str], of: PluginType) -> bool:
    return not any(knows_plugin(nccl, of) for nccl in releases)


def _problem(plugin: Mapping[str, Any], of: PluginType, releases: Set[str]) -> Finding | None:
    """Finding on one plug-in of one host, without its place."""
    asked, tried, loaded = plugin["asked"], plugin["tried"], plugin["loaded"]
    evidence = {"tried": tried}
    # The job runs as well without a profile.
    severity = Severity.INFO if of is PROFILER else None
    if plugin["fault"] in (CRASHED, HUNG):
        return Finding(
            CRASHES,
            " ".join(tried[-1]) + (f"; {asked}" if asked else ""),
            evidence=evidence,
            fix=Fix(
                export(**{of.variable: "none"}),
                alternatives=["install a build of the plug-in that fits this image"],
            ),
            confidence=Confidence.LIKELY if plugin["fault"] == HUNG else Confidence.CERTAIN,
        )
    versions = (plugin["build"] or {}).get("versions") or ()
    refuse = sorted(nccl for nccl in releases if not takes_plugin(nccl, versions, of))
    if loaded and versions and refuse:
        exports = ", ".join(f"{of.symbol}{each}" for each in versions)
        return Finding(
            MISSING,
            f"{loaded} exports {exports}; NCCL {refuse[0]} accepts {range_in_words(refuse[0], of)}",
            evidence={"nccl": refuse, **plugin["build"]},
            fix="install a release of the plug-in that was built for this NCCL",
            severity=severity if asked else Severity.INFO,
        )
    if loaded or not asked or plugin["fault"]:
        return None
    errors = "; ".join(error for _, error in tried)
    instead = plugin["instead"] or {}
    if instead.get("loaded"):
        errors += f"; NCCL uses the tuner in {instead['loaded']}"
        severity = Severity.INFO
    return Finding(
        MISSING,
        f"{asked}; {errors}",
        evidence=evidence,
        fix=Fix(
            text=MISSING.fix, alternatives=[Fix(Step(shell("unset {:variable}", of.variable)))]
        ),
        severity=severity,
    )


def _between(usable: list[tuple[Host, Mapping[str, Any] | None]]) -> Iterator[Finding]:
    """Findings on hosts that load another plug-in than the others, or alone load one."""
    yield from only_some_load(
        DIFFERS,
        [(host, plugin["loaded"] if plugin else None) for host, plugin in usable],
        len(usable),
    )
    yield from differing_builds(DIFFERS, [(host, (p or {}).get("build")) for host, p in usable])
