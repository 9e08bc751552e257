"""`python -m nccl_doctor`, `torchrun … -m nccl_doctor` and the `nccl-doctor` script."""

from __future__ import annotations

import sys
import traceback

import click

from nccl_doctor.cli import cli
from nccl_doctor.cli.help import PROGRAM
from nccl_doctor.cli.streams import CannotPrint, protect
from nccl_doctor.report.profiles import profile_of, unable
from nccl_doctor.toolkit.masking import masked
from nccl_doctor.toolkit.terminal import complain, in_github, inert, lines


def main() -> None:
    """Run the command line; every error is one line on stderr.

    Exits with 2 on a usage or configuration error, 3 where stdout cannot be written, 130 after
    Ctrl-C at the command line itself; in an exit profile, with what that system takes for "not
    known". A reader of stdout that left changes nothing.
    """
    profile = profile_of(sys.argv[1:])
    protect()
    try:
        code = cli.main(prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        message = masked(error.format_message())
        complain(f"error: {message}")
        code = _unable(profile, message, error.exit_code)
    except click.Abort:
        complain("interrupted")
        code = _unable(profile, "interrupted", 130)
    except CannotPrint as error:
        complain(f"error: cannot write to stdout: {error.strerror}")
        code = _unable(profile, "", 3)
    except Exception as error:
        sys.stderr.write(inert(lines(masked(traceback.format_exc()))))
        code = _unable(profile, f"internal error: {masked(repr(error))}", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _unable(profile: str, message: str, code: int) -> int:
    """The exit code of a call that has no report, `code` for ourselves; prints a profile's line."""
    answer = unable(profile, message)
    if answer is not None and answer.line and message:
        click.echo(inert(answer.line) if in_github() else answer.line)
    return code if answer is None else answer.code


if __name__ == "__main__":
    main()
