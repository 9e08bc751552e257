"""Will NCCL find the network plug-in that the environment asks for?

What it checks
--------------
Which library NCCL would look for (NCCL_NET_PLUGIN, else libnccl-net.so), whether the dynamic loader
can load it with all that it needs, whether it exports an interface of NCCL (ncclNetPlugin_v*), and
whether NCCL_NET names a network that NCCL has only with a plug-in. The variables may also come from
NCCL's configuration files. And whether all hosts have a plug-in or none has. The plug-in is loaded
in a process of its own; NCCL is not, and no network is used.

Why it matters
--------------
A plug-in that cannot be loaded is no error to NCCL: it says so at NCCL_DEBUG=INFO only, and goes
over sockets, many times slower. Where NCCL_NET names the network, it fails instead. Where one host
has the plug-in and the others have not, they speak different languages, and NCCL fails or hangs.
One that crashes or hangs while it is loaded takes the rank with it.

How to fix
----------
Install the plug-in in the image of every host (aws-ofi-nccl for EFA), and put its folder into
LD_LIBRARY_PATH before the job starts. Or unset the variables, where no plug-in is meant.

When it is wrong
----------------
A plug-in that loads may still refuse to start, if its fabric is not there. One that is linked into
NCCL, or loaded by the job's own code, is not seen. Variables of EFA may be left over in an image
that also runs where there is no EFA.
Not validated on hardware: tested on made-up clusters and on made-up libraries.

References
----------
NCCL user guide, environment variables (NCCL_NET, NCCL_NET_PLUGIN); NCCL src/plugin/plugin_open.cc;
aws/aws-ofi-nccl on GitHub, README; ld.so(8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Host,
    Kind,
    Layer,
    OutcomeStatus,
    Severity,
    Skip,
    Where,
    first_plugin,
    nccl_settings,
)

NAMES = ("NCCL_NET_PLUGIN", "NCCL_NET")
BUILT_IN = ("socket", "ib")
"""Values of NCCL_NET, in any case, for which NCCL needs no plug-in."""
NO_PLUGIN = "none"
EFA = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "FI_EFA_SET_CUDA_SYNC_MEMOPS")
"""Variables that mean something to NCCL only through the plug-in for libfabric."""

MISSING = Kind(
    "net-plugin-missing",
    Layer.ENV,
    "The network plug-in of NCCL cannot be loaded",
    "NCCL then goes over sockets without a word, or fails where NCCL_NET names the network.",
    "install the plug-in in the image, and put its folder into LD_LIBRARY_PATH",
    Severity.WARN,
)
DIFFERS = Kind(
    "net-plugin-differs",
    Layer.ENV,
    "Some hosts have a network plug-in of NCCL, and others have not",
    "Each would speak its own network: NCCL fails or hangs, unless the plug-in finds no fabric and "
    "gives way.",
    "the same plug-in on every host, or export NCCL_NET_PLUGIN=none on every host",
    Severity.WARN,
)

CRASHES = Kind(
    "net-plugin-crashes",
    Layer.ENV,
    "A network plug-in of NCCL ends or stops the process that loads it",
    "NCCL loads it in every rank, whatever NCCL_NET says: the rank dies, or hangs, at its first "
    "communicator.",
    "export NCCL_NET_PLUGIN=none on every host, or install a build of the plug-in that fits this "
    "image (NCCL, libfabric, UCX)",
)
_LOAD = "load "


class NetPlugin(Check):
    """Load the plug-in as NCCL would, and compare hosts."""

    name = "net_plugin"
    layer = Layer.ENV
    cost = "seconds"
    kinds = (MISSING, DIFFERS, CRASHES)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`asked`: the variables that want a plug-in, `tried`: (library, error) in NCCL's order,
        `loaded`: the library that loads, or None; `net`: the value of NCCL_NET.
        """
        if ctx.backend != "nccl":
            raise Skip("the job does not use NCCL")
        settings = nccl_settings(ctx.env)
        told = {name: at for name in NAMES if (at := settings.get(name)) and at.value}
        plugin, net = (told[name].value if name in told else "" for name in NAMES)
        asked = [f"{name}={at.value} (by {at.origin})" for name, at in told.items()]
        tried, loaded = first_plugin(plugin, ctx.breadcrumb)
        return {
            "plugin": plugin,
            "net": net,
            "asked": asked + [f"{name}={ctx.env[name]}" for name in EFA if ctx.env.get(name)],
            "tried": tried,
            "loaded": loaded or None,
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Every host by itself; then those that lack what others have without being asked."""
        yield from _crashes(cluster)
        seen = [(rank.host, facts) for rank, facts in cluster.facts(self.name)]
        told = set()
        for host, facts in seen:
            for finding in _asked_for(facts):
                told.add(host.id)
                yield finding.replaced(where=_place([host]))
        without = [host for host, facts in seen if not facts["loaded"] and host.id not in told]
        having = [host for host, facts in seen if facts["loaded"]]
        libraries = {facts["loaded"] for _, facts in seen if facts["loaded"]}
        if without and having:
            efa = any(each["road"] == "efa" for _, each in cluster.facts("rdma"))
            tie = len(without) == len(having)
            odd = without if len(without) < len(having) else having
            yield Finding(
                DIFFERS,
                f"{len(having)} of {len(seen)} hosts load {' or '.join(sorted(libraries))}, "
                f"{len(without)} load none",
                _place(without + having if tie else odd),
                {host.label: facts["tried"] for host, facts in seen},
                # With EFA the plug-in has a fabric, and does not give way.
                severity=Severity.FAIL if efa else None,
                confidence=Confidence.POSSIBLE if tie else Confidence.LIKELY,
            )


def _crashes(cluster: Cluster) -> Iterator[Finding]:
    for each in cluster.evidence("net_plugin"):
        end = each.outcome
        hung = end.status is OutcomeStatus.HUNG and end.state not in ("T", "t")
        died = end.status is OutcomeStatus.DIED and end.signal != "SIGKILL"
        if end.last_step.startswith(_LOAD) and (hung or died):
            library = end.last_step.removeprefix(_LOAD)
            how = f"did not load within {end.duration_s:.0f} s"
            if died:
                how = f"ended the process that loaded it, by {end.signal or end.exit_code}"
            yield Finding(
                CRASHES,
                f"{library} {how}",
                _place([each.host]),
                {"stack": end.stack, "wchan": end.wchan, "log_tail": end.log_tail},
                confidence=Confidence.CERTAIN if died else Confidence.LIKELY,
            )


def _asked_for(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """What one host was asked for and has not. The place is added."""
    net, plugin = facts["net"].lower(), facts["plugin"].lower()
    named = bool(net) and net not in BUILT_IN
    wanted = named or (not net and plugin != NO_PLUGIN)
    if facts["loaded"] or not (wanted and facts["asked"]):
        return
    errors = "; ".join(error for _, error in facts["tried"]) or "NCCL_NET_PLUGIN=none"
    yield Finding(
        MISSING,
        f"{', '.join(facts['asked'])}; {errors}",
        evidence={"tried": facts["tried"]},
        fix=f"{MISSING.fix}; or unset {' '.join(a.partition('=')[0] for a in facts['asked'])}",
        severity=Severity.FAIL if named else Severity.WARN,
    )


def _place(hosts: Sequence[Host]) -> Where:
    return Where(hosts=tuple(sorted(host.label for host in hosts)))
