"""`python -m nccl_doctor`, `torchrun … -m nccl_doctor` and the `nccl-doctor` script."""

from __future__ import annotations

import io
import os
import sys

import click

from nccl_doctor.cli import cli
from nccl_doctor.cli.words import PROGRAM


def main() -> None:
    """Run the command line; every error is one line on stderr.

    Exits with 2 on a usage or configuration error, 130 after Ctrl-C at the command line itself.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or pipe that cannot show a character must not cost the report.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        click.echo(f"{PROGRAM}: error: {message}", err=True)
        code = error.exit_code
    except click.Abort:
        click.echo(f"{PROGRAM}: interrupted", err=True)
        code = 130
    except BrokenPipeError:
        # The reader of a pipe had enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
