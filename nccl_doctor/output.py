"""Put a report where it was asked for: a file, or a stream."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from nccl_doctor.options import Options
from nccl_doctor.report import jsonfmt, text
from nccl_doctor.report.model import Report

_PIPE_WIDTH = 100


def save(report: Report, path: str) -> None:
    """Write the JSON report; `-` is stdout. A reader sees the old file or the whole new one.

    Raises:
        OSError: the folder is not there or not writable.
    """
    rendered = jsonfmt.render(report)
    if path == "-":
        sys.stdout.write(rendered)
        sys.stdout.flush()
        return
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(rendered)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def print_report(report: Report, options: Options, stream: TextIO) -> None:
    """Print the report for people; width, colour and marks as the stream can take them."""
    terminal = stream.isatty()
    width = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if terminal else _PIPE_WIDTH
    encoding = (stream.encoding or "ascii").lower().replace("-", "")
    stream.write(
        text.render(
            report,
            width=width,
            color=terminal and not os.environ.get("NO_COLOR"),
            verbose=options.verbosity > 0,
            quiet=options.quiet,
            ascii=not encoding.startswith("utf"),
        )
    )
    stream.flush()
