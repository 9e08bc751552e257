"""Completion of the command line by bash, zsh and fish, with click's own scripts and protocol.

The script calls the program with the line so far in the environment; `__main__` answers before it
does anything else.
"""

from __future__ import annotations

import os

import click
from click.shell_completion import ShellComplete, get_completion_class, shell_complete

from nccl_doctor.cli.help import ASK_EXITS, PROGRAM, Manual
from nccl_doctor.cli.params import FileName

VARIABLE = "_NCCL_DOCTOR_COMPLETE"
"""Set by the scripts: which shell asks."""
SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "PATH", "FILE|DIR", "FILE...")
_FILE_ARGUMENTS = ("file", "files", "old", "new")


@click.command(
    cls=Manual,
    short_help="Print the script that completes commands in a shell.",
    exits=ASK_EXITS,
    examples=(
        (
            "bash, with the package bash-completion",
            "nccl-doctor completion bash > \\\n"
            "    ~/.local/share/bash-completion/completions/nccl-doctor",
        ),
        (
            "zsh, with fpath+=~/.zfunc above compinit in ~/.zshrc",
            "nccl-doctor completion zsh > ~/.zfunc/_nccl-doctor",
        ),
        ("fish", "nccl-doctor completion fish > ~/.config/fish/completions/nccl-doctor.fish"),
    ),
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that lets a shell complete commands, options, files, checks and codes."""
    from nccl_doctor.cli import cli

    made = get_completion_class(shell)
    assert made is not None
    # Not `made.source`: that of bash starts a bash to ask for its version.
    click.echo(ShellComplete.source(made(cli, {}, PROGRAM, VARIABLE)))


def answer() -> int:
    """Exit code after telling the shell how the line goes on; of what breaks it hears nothing."""
    from nccl_doctor.cli import cli

    try:
        return shell_complete(cli, {}, PROGRAM, VARIABLE, os.environ[VARIABLE])
    except Exception:  # a line that is wrong so far, variables that are missing
        return 1


def complete_files(command: click.Command) -> None:
    """Let files be completed wherever a command, or one below it, takes one."""
    for param in command.params:
        takes = param.metavar in _FILES or (param.name or "") in _FILE_ARGUMENTS
        if takes and param.type == click.STRING:
            param.type = FileName()
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        complete_files(inner)
