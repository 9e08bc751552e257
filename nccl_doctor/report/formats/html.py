"""The report as one page for a browser: one HTML file, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from nccl_doctor.model.report import Report
from nccl_doctor.report.html import facts, findings, matrix, picture, timeline
from nccl_doctor.report.html.markup import Html, element, together
from nccl_doctor.report.story import Checks, no_checks


def render(report: Report, checks: Checks = no_checks) -> str:
    """One page, ASCII only: the verdict and what to fix first, everything else below.

    Style and script stand in the page, and the page itself forbids the browser to load or send
    anything. All that is essential is there without the script. Nothing in the report is trusted:
    every value is escaped.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"nccl-doctor: {report.verdict.upper()}: {report.summary}"),
        element("link", rel="icon", href="data:,"),
        element("style", Html(style)),
    )
    main = element(
        "main",
        picture.section(report, checks),
        findings.measured(report, checks),
        *findings.sections(report),
        matrix.section(report, checks),
        timeline.section(report),
        findings.groups_section(report),
        findings.checks(report),
        facts.section(report),
        findings.pages_section(report, checks),
    )
    body = element("body", findings.header(report, checks), main, element("script", Html(script)))
    page = together(Html("<!doctype html>\n"), element("html", head, body, lang="en"), Html("\n"))
    # Style and script are ASCII themselves, so that references stand in text and attributes alone.
    return page.encode("ascii", "xmlcharrefreplace").decode()


@cache
def _asset(name: str) -> str:
    return files("nccl_doctor.report.html").joinpath(name).read_text("ascii")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("ascii")).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
