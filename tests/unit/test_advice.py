"""Fixes of tables: one line, with commands in backticks."""

from __future__ import annotations

from nccl_doctor.api import Fix, On, Step, look, shell
from nccl_doctor.toolkit.advice import fix_of
from tests.support.rows import each_row

SET = Step(shell("export A=0 B=1"), On.EVERY, undo=shell("unset A B"), note="to see")


@each_row("text, fix", {
    "words": ("drain the host; reset the GPU", "drain the host; reset the GPU"),
    "a command": ("`nvidia-smi -L`", Fix(look(shell("nvidia-smi -L")))),
    "two, and words": (
        "`nvidia-smi -L` (all?); `dmesg`; reset it",
        Fix(look(shell("nvidia-smi -L"), "all?"), look(shell("dmesg")), alternatives=["reset it"]),
    ),
    "another way": (
        "`ulimit -n 9`; or `# docker run --ulimit nofile=9`",
        Fix(Step(shell("ulimit -n 9")), alternatives=[
            Fix(Step(shell("# docker run --ulimit nofile=9"))),
        ]),
    ),
    "words first": ("upgrade; or `export A=0 B=1` (to see)", Fix(text="upgrade", alternatives=[
        Fix(SET),
    ])),
    "words in between": (
        "`dmesg`; reset it; `nvidia-smi`",
        Fix(look(shell("dmesg")), alternatives=["reset it", Fix(look(shell("nvidia-smi")))]),
    ),
}.values())  # fmt: skip
def test_a_line_of_a_table(text, fix):
    assert fix_of(text) == fix
