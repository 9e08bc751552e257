"""A project's issue form, filled in from a report. Pure.

A form is a text file in `issues/`; `$name` stands for one of the fields below. What no report can
know is left for people to say, in words that cannot be taken for an answer.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple

from nccl_doctor.model.cluster import Cluster, Evidence, OutcomeStatus
from nccl_doctor.model.findings import Finding, Severity
from nccl_doctor.model.report import Report
from nccl_doctor.model.sections import Setup
from nccl_doctor.report.formats.markdown import code, fence_of, prose
from nccl_doctor.report.story import (
    MOST_PLACES,
    Checks,
    Story,
    and_more,
    fix_of,
    no_checks,
    sections_of,
    setups_of,
)
from nccl_doctor.system.terminal import lines, safe

UNKNOWN = "_(please fill in)_"
_NONE = "_(not in the report)_"
_LOG_LINES = 40
_MOST_COLLECTED = 200
_MOST_LOGS = 3
_STUCK = (OutcomeStatus.HUNG, OutcomeStatus.DIED, OutcomeStatus.RAISED)
_SETTINGS = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "UCX_", "FI_", "LD_LIBRARY_PATH")
_IMPACT = (  # words of finding codes, and what the form of NCCL calls it
    (("hang", "frozen", "silent"), "Application hang"),
    (("wrong-result",), "Data corruption"),
    (("slow", "bandwidth", "latency", "lossy", "throttled", "degraded"), "Lower performance"),
    (("failed", "crashed", "mismatch", "unavailable"), "Application crash"),
)


def projects() -> list[str]:
    """Names of the projects that have a form."""
    folder = files(__package__).joinpath("issues")
    return sorted(item.name[:-3] for item in folder.iterdir() if item.name.endswith(".md"))


def form_of(project: str) -> str:
    """The empty form of a project."""
    return files(__package__).joinpath(f"issues/{project}.md").read_text(encoding="utf-8")


def fill(form: str, report: Report, checks: Checks = no_checks, collected: str = "") -> str:
    """A form with what the report knows in it, as Markdown.

    Whatever was observed stands in code, where nothing is markup and nobody is notified. The
    `checks` are asked for what the form wants to know of software and hardware; `collected` is the
    output of `collect_env` on a host of the job.
    """
    printed = f"\n\n{_block(collected, _MOST_COLLECTED)}" if collected else UNKNOWN
    return Template(form).substitute(_fields(report, checks), collect_env=printed)


def asks_for_collect_env(form: str) -> bool:
    """True if the form wants the output of `collect_env`."""
    return "$collect_env" in form


def comment(text: str) -> str:
    """A text that cannot end the comment of Markdown in which it stands."""
    return re.sub(r"--!?>", "-- >", lines(text))


def _fields(report: Report, checks: Checks) -> dict[str, str]:
    cluster = report.cluster
    setup = setups_of(sections_of(report, checks))
    software = {name: _most(setup.get(name, ())) for name in _VERSIONS}
    loaded = _most(setup.get("nccl loaded", ()))
    nccl = loaded or software["nccl"]
    cuda = software["cuda"]
    title = report.root_causes[0].kind.title if report.root_causes else report.summary
    versions = [f"{name} {value}" for name, value in software.items() if value]
    return {
        **{name: code(value) if value else _NONE for name, value in software.items()},
        "title": prose(title),
        "impact": _impact(report),
        "nccl": code(f"{nccl}{f'+cuda{cuda}' if cuda and '+' not in nccl else ''}")
        if nccl
        else _NONE,
        "software": ", ".join(map(code, versions)) or _NONE,
        "command": code(report.run.command or "nccl-doctor run"),
        "launcher": code(report.run.launcher or "none"),
        "backend": code(cluster.backend),
        "scale": f"{cluster.world_size} ranks on {cluster.nnodes} "
        f"host{'s' if cluster.nnodes != 1 else ''}",
        "gpus": _gpus(setup.get("gpus", ())),
        "network": _network(setup),
        "settings": _settings(cluster),
        "findings": _findings(report),
        "logs": _logs(cluster),
        "warning": _warning(cluster),
        "config": _config(cluster),
        "unknown": UNKNOWN,
    }


_VERSIONS = ("torch", "cuda", "rocm", "nccl", "python", "driver", "deepspeed")
_NETWORK = ("RDMA port", "interface")
"""Names of `Setup`s."""


def _most(said: Sequence[Setup]) -> str:
    """The most frequent text; empty if there is none."""
    texts = Counter(each.value for each in said if isinstance(each.value, str) and each.value)
    return texts.most_common(1)[0][0] if texts else ""


def _impact(report: Report) -> str:
    codes = [finding.code for finding in report.findings if not finding.explained_by]
    codes += [finding.code for finding in report.findings]
    for found in codes:
        for words, impact in _IMPACT:
            if any(word in found for word in words):
                return impact if impact != "Lower performance" else f"{impact} than expected"
    return f"-- Please specify -- {UNKNOWN}"


def _gpus(said: Sequence[Setup]) -> str:
    """Models and how many of each a host has, where hosts are alike once."""
    kinds = Counter(str(each.value) for each in said)
    lines = [f"{value} on {count} host{'s' if count > 1 else ''}" for value, count in kinds.items()]
    return ", ".join(map(code, lines[:MOST_PLACES])) or _NONE


def _network(setup: Mapping[str, Sequence[Setup]]) -> str:
    """Interfaces that NCCL and gloo would use, and ports of RDMA, of the first host that tells."""
    parts: list[str] = []
    for name in _NETWORK:
        said = setup.get(name, ())
        of_first = [each for each in said if each.host == said[0].host]
        parts += [_inline(each.value) for each in of_first[:MOST_PLACES]]
    return "; ".join(map(code, parts)) or _NONE


def _inline(item: Any) -> str:
    if not isinstance(item, Mapping):
        return str(item)
    values = {name: value for name, value in item.items() if value not in (None, "", [], False)}
    return ", ".join(f"{name} {_inline_value(value)}" for name, value in values.items())[:300]


def _inline_value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _settings(cluster: Cluster) -> str:
    """Variables that steer the libraries, as the first rank has them; how many ranks differ."""
    if not cluster.present:
        return _block(_NONE)
    own = [_own(dict(rank.env)) for rank in cluster.present]
    lines = [f"{name}={value}" for name, value in sorted(own[0].items())]
    others = sum(env != own[0] for env in own)
    if others:
        lines.append(f"(other values on {others} of {len(own)} ranks)")
    return _block("\n".join(lines) or "(none of NCCL, torch, gloo, CUDA, UCX or libfabric is set)")


def _own(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_SETTINGS)}


def _findings(report: Report) -> str:
    story, lines = Story(report), [f"{prose(report.summary)}\n"]
    for each in map(story.of, story.causes[:MOST_PLACES]):
        lines.append(f"- {prose(each.finding.kind.title)} {code(each.finding.code)}")
        lines += [f"  - where: {code(each.where)}"] if each.where else []
        lines.append(f"  - seen: {code(each.finding.message)}")
    more = and_more(len(story.causes) - MOST_PLACES)
    return "\n".join([*lines, *([f"- {more}"] if more else [])])


def _stuck(cluster: Cluster) -> Iterator[Evidence]:
    facts = [*(host.facts for host in cluster.hosts), *(rank.facts for rank in cluster.ranks)]
    for check in {check: None for each in facts for check in each}:
        for item in cluster.evidence(check):
            if item.outcome.status in _STUCK:
                yield item


def _logs(cluster: Cluster) -> str:
    """Output and stacks of the first observers that hung or died."""
    blocks = []
    for item in _stuck(cluster):
        text = "\n".join(filter(None, (item.outcome.log_tail, item.outcome.stack)))
        if text:
            said = f"rank {item.rank.rank}, {item.outcome.status.value}: {item.outcome.last_step}"
            blocks.append(f"{code(said)}\n\n{_block(text)}")
        if len(blocks) == _MOST_LOGS:
            break
    return "\n\n".join(blocks) or "No rank left a log in the examination."


def _warning(cluster: Cluster) -> str:
    for item in _stuck(cluster):
        for line in item.outcome.log_tail.splitlines():
            if "NCCL WARN" in line:
                return code(line)
    return _NONE


def _config(cluster: Cluster) -> str:
    config = cluster.job.deepspeed_config
    if config is None:
        return f"DeepSpeed's configuration: {UNKNOWN}"
    return f"DeepSpeed's configuration:\n\n{_block(json.dumps(config, indent=1, default=str))}"


def _block(text: str, most: int = _LOG_LINES) -> str:
    """A code block that its own text cannot end, of the last lines."""
    clean = "\n".join(lines(line) for line in text.splitlines()[-most:])
    fence = fence_of(clean, 3)
    return f"{fence}text\n{clean}\n{fence}"


# Whether a finding is a fault of the project that an issue is to be written for. Pure.
#
# Most issues about hangs in NCCL and torch are faults of a cluster. A library may be at fault
# only where its own work failed, and nothing below explains why.


NAMES = {"deepspeed": "DeepSpeed", "nccl": "NCCL", "pytorch": "PyTorch"}
_WORK = frozenset(
    (
        *("group-init-failed", "group-init-hang"),
        *("collective-failed", "collective-hang", "collective-wrong-result", "rank-crashed"),
    )
)
"""Codes of what a library did, or did not do; everything else was observed without it."""
_REPAIRED = {
    "nccl-known-bug": "nccl",
    "torch-known-hang": "pytorch",
    "device-id-multi-group-hang": "pytorch",
}
"""Codes of faults that the project knows."""
_FIRST = {
    "nccl": "the newest NCCL, and all_reduce_perf of nccl-tests on the same hosts: if it does not "
    "fail too, PyTorch has a part in it",
    "pytorch": "the newest torch, and with NCCL all_reduce_perf of nccl-tests on the same hosts: "
    "if that fails too, it is no fault of PyTorch",
    "deepspeed": "the same without DeepSpeed (torch.distributed alone, as in this examination)",
}


class FormAnswer(NamedTuple):
    """Answer in one line of words; `no`: the report says that it is not the project's fault."""

    no: bool
    words: str


def upstream_fault(project: str, report: Report) -> FormAnswer:
    """True if what the report found is a fault of the project."""
    name = NAMES[project]
    heard = [cause for cause in report.root_causes if cause.level is not Severity.INFO]
    worst = min((cause.level.order for cause in heard), default=0)  # a warning explains no failure
    causes = [cause for cause in heard if cause.level.order == worst]
    known = [cause for cause in causes if _REPAIRED.get(cause.code) == project]
    work = [cause for cause in causes if cause.code in _WORK]
    rest = [cause for cause in causes if cause not in known and cause not in work]
    if not causes:
        measured = "found nothing wrong" if report.verdict in ("pass", "warn") else "is incomplete"
        words = (
            f"not known: this report {measured}; say what the job itself does, and where it ends"
        )
        return FormAnswer(False, words)
    if rest:
        words = (
            f"no: {_codes(rest)} is a matter of this cluster, its settings or the job, and {name} "
            f"cannot repair it. First: {safe(fix_of(rest[0]))}"
        )
        return FormAnswer(True, words)
    if known:
        words = f"yes, and it is known there: {_codes(known)}. First: {safe(fix_of(known[0]))}"
        return FormAnswer(False, words)
    if project == "nccl" and "nccl" not in report.cluster.backend:
        backend = safe(report.cluster.backend)
        return FormAnswer(
            True, f"no: NCCL took no part in {_codes(work)}; the backend was {backend}"
        )
    words = f"perhaps: nothing that was examined explains {_codes(work)}. Try before: "
    return FormAnswer(False, words + _FIRST[project])


def _codes(causes: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(safe(cause.code) for cause in causes))
