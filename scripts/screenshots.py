"""Make the pictures of docs/pictures from recordings of docs/samples, of runs on two hosts.

`failing.svg` and `healthy.svg` are a terminal with the report; `report.webp` is the page that
`--html` writes, in Chromium. Needs what the tests in a browser need.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

from tests.browser.chromium import Chromium  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
REPORTS = {
    "healthy": ROOT / "docs" / "samples" / "healthy.json.gz",
    "failing": ROOT / "docs" / "samples" / "one-way.json.gz",
}
COLUMNS = 100
TYPED = "$ nccl-doctor run --nnodes 2 --nproc-per-node 2 --node-rank 0 --master-addr nd0\n"
WIDE, HIGH = 1100, 960
"""Size of the page, in CSS pixels."""
FRAME = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, monospace }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">\
<rect width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
<rect fill="#1e1e24" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich's own, without the frame of a window, and without fonts from elsewhere."""


def on_a_terminal(*command: str) -> str:
    """What a command prints on a terminal of COLUMNS columns."""
    own, its = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "60"}
    env.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=env, cwd=ROOT):
        os.close(its)
        said = b"".join(_read(own))
    os.close(own)
    return said.decode().replace("\r\n", "\n")


def _read(terminal: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # EIO: the last one who wrote has ended
        while data := os.read(terminal, 1 << 16):
            yield data


def drawn(text: str, name: str) -> str:
    """A terminal with this text, as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="", code_format=FRAME, unique_id=name)
    return re.sub(r"\s*\n\s*", "\n", svg)


def photographed(page: Path, folder: Path) -> bytes:
    """The head of a page, as WebP, a third of the same PNG."""
    with Chromium(folder) as chromium:
        tab = chromium.tab()
        tab.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": WIDE, "height": HIGH, "deviceScaleFactor": 1, "mobile": False},
        )
        tab.call("Emulation.setScrollbarsHidden", hidden=True)
        tab.open(page)
        taken = tab.call("Page.captureScreenshot", format="webp", quality=80)
        return base64.b64decode(taken["data"])


def main() -> int:
    """Make all pictures."""
    PICTURES.mkdir(exist_ok=True)
    doctor = (sys.executable, "-m", "nccl_doctor", "report", "judge")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for name, report in REPORTS.items():
            text = TYPED + on_a_terminal(*doctor, str(report))
            (PICTURES / f"{name}.svg").write_text(drawn(text.rstrip(), name), encoding="utf-8")
        page = Path(place, "report.html")
        failing = str(REPORTS["failing"])
        subprocess.run([*doctor, failing, "--quiet", "--html", str(page)], cwd=ROOT, check=False)
        (PICTURES / "report.webp").write_bytes(photographed(page, Path(place)))
    for path in sorted(PICTURES.iterdir()):
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size >> 10} KiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
