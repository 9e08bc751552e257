"""`python -m nccl_doctor`, `torchrun … -m nccl_doctor` and the `nccl-doctor` script.

Little is imported before the supervisor stands: a signal before that meets a bare interpreter.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nccl_doctor.system import tick

if TYPE_CHECKING:
    from nccl_doctor.system import supervisor

_EXAMINES_S = 120.0
"""Time limit of a command that examines, until it has read its own; the default of --timeout."""
_READS_S = 600.0
"""Time limit of every other command. Ten thousand ranks are judged in a fraction of it."""
_COMMANDS = ("run", "env", "checks", "explain", "report", "schema", "completion")

_KEEP = "keep"
"""First word of the process that a run with --autopsy becomes, as `cli.keep` writes it."""
_PAUSE = "--pause="
"""Option with the seconds to wait, as `cli.retry` writes it."""
_COMPLETE = "_NCCL_DOCTOR_COMPLETE"
"""Set by the scripts of `completion`, which name it too."""


def main() -> None:
    """Run the command line in a process that is watched; exits with its exit code."""
    if _COMPLETE in os.environ:  # a shell asks, at every press of a key
        from nccl_doctor.cli.completion import answer

        sys.exit(answer())
    arguments = sys.argv[1:]
    if arguments[:1] == [_KEEP] and len(arguments) > 2:  # lasts as long as the job
        from nccl_doctor.cli import keep

        keep.main(arguments[1:])
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    command = next((word for word in own if word in _COMMANDS), "")
    examines = command in ("run", "env") and not {"-h", "--help"} & set(own)
    if examines:
        _pause(own)
    limit_s = _limit(own, examines=examines)
    speaks = examines and tick.wanted(own)
    if speaks:
        tick.start(limit_s, "examining this host" if command == "env" else "examining the cluster")
    from nccl_doctor.system import supervisor  # from here on, what is imported takes time

    terms = supervisor.Terms(
        limit_s=limit_s,
        keeps=examines,
        speaks=speaks,
        hands_over=own != arguments,
        unable=_unable_for(own),
        tell_death=_tell_death,
    )
    sys.exit(supervisor.watch(program, terms))


def program() -> int:
    """Run the command line, as `command_line`, without looking for garbage all the time."""
    from nccl_doctor.toolkit.frames import with_room_for_frames
    from nccl_doctor.toolkit.garbage import collected_rarely

    with collected_rarely():
        return with_room_for_frames(command_line)


def command_line() -> int:
    """Run the command line; every error is one line on stderr, and a usage error is followed by the
    usage line of the command.

    Returns: the exit code. 2 on a usage or configuration error, 3 where stdout cannot be written
        or where something else than this program wants to end it; in an exit profile, what that
        system takes for "not known". A reader of stdout that left changes nothing.
    """
    import traceback

    import click

    from nccl_doctor.cli import cli
    from nccl_doctor.cli.help import PROGRAM, usage_of
    from nccl_doctor.system.masking import masked
    from nccl_doctor.system.shortage import shortage_of
    from nccl_doctor.system.terminal import CannotPrint, complain, inert, lines, protect

    unable = _unable_for(sys.argv[1:])

    def without_report(message: str, code: int) -> int:
        made, line = unable(message, code)
        if line and message:
            click.echo(line)
        return made

    protect()
    try:
        code = cli.main(prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        message = masked(error.format_message())
        complain(f"error: {message}")
        if isinstance(error, click.UsageError) and error.ctx:
            complain(usage_of(error.ctx))
        code = without_report(message, error.exit_code)
    except click.Abort:
        complain("interrupted")
        code = without_report("interrupted", 130)
    except CannotPrint as error:
        complain(f"error: cannot write to stdout: {error.strerror}")
        code = without_report("", 3)
    except SystemExit as error:  # of foreign code: no command of ours ends like this
        message = f"something tried to end this process: SystemExit({error.code!r})"
        complain(f"error: {message}")
        code = without_report(message, 3)
    except Exception as error:
        if scarce := shortage_of(error):
            complain(f"error: {scarce.words}; {scarce.fix}")
            code = without_report(scarce.words, 3)
        else:
            sys.stderr.write(inert(lines(masked(traceback.format_exc()))))
            code = without_report(f"internal error: {masked(repr(error))}", 3)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code if isinstance(code, int) else 0


def _tell_death(about: Mapping[str, Any], name: str) -> None:
    """Tell the coordinator that a participant was killed."""
    from nccl_doctor.gather.context import Key
    from nccl_doctor.gather.ends import tell_killed

    host, port = about["meeting"]
    key = Key(bytes.fromhex(about["secret"]), about["lasts"]) if about["secret"] else None
    tell_killed((host, port), {**about["death"], "signal": name}, key, about["run"])


def _limit(arguments: Sequence[str], *, examines: bool) -> float:
    """Seconds until the deadline, by the words of the command line alone."""
    if "--relay" in arguments or (not examines and "-" in arguments):
        return float("inf")  # whoever writes our standard input ends first
    if not examines:
        return _READS_S
    given = [word.partition("=")[2] for word in arguments if word.startswith("--timeout=")]
    given += [after for word, after in pairwise(arguments) if word == "--timeout"]
    try:
        seconds = float(given[-1]) if given else _EXAMINES_S
    except ValueError:
        return _EXAMINES_S
    return seconds if seconds > 0 else _EXAMINES_S


def _pause(arguments: Sequence[str]) -> None:
    """Wait as long as --pause says, which an attempt gives to the next one (`cli.retry`)."""
    import time

    for word in arguments:
        if word.startswith(_PAUSE):
            try:
                time.sleep(float(word.removeprefix(_PAUSE)))
            except KeyboardInterrupt:
                sys.exit(130)
            except (OverflowError, ValueError):
                return  # click says so


def _unable_for(arguments: Sequence[str]) -> supervisor.Unable:
    """Function that answers for a call without a report, as its exit profile wants it."""
    if not any(word.startswith("--exit-profile") for word in arguments):
        return lambda message, code: (code, "")
    from nccl_doctor.report.profiles import profile_of, unable
    from nccl_doctor.system.terminal import in_github, inert

    profile = profile_of(arguments)

    def answer(message: str, code: int) -> tuple[int, str]:
        made = unable(profile, message)
        if made is None:
            return code, ""
        return made.code, inert(made.line) if in_github() else made.line

    return answer


if __name__ == "__main__":
    main()
