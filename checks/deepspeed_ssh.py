"""Does deepspeed get the answer by ssh for which it asks before it starts a rank?

What it checks
--------------
Only for a line of `deepspeed` behind `--` that reads a hostfile and starts ranks on this host:
`ssh HOST hostname`, to the first host of the file, as deepspeed calls it.

Why it matters
--------------
With a hostfile deepspeed asks for this log-in even where the file names one host, the one on which
it runs, and ends without it. Without --master_addr it asks the host for its addresses, too, even
with --no_ssh or --no_ssh_check. It never gives up: a server that says nothing holds the job.

How to fix
----------
On one host: --no_ssh_check --master_addr 127.0.0.1 in the line of deepspeed, or no hostfile. On
several: a log-in without a password, or --master_addr with the address of the first host.

When it is wrong
----------------
The call is made with BatchMode=yes: a key that asks for its passphrase at the terminal, or a host
key that a person would confirm, is a failure here. No answer within 15 s is only likely to be one.

References
----------
DeepSpeed 0.19.8: main in deepspeed/launcher/runner.py; ssh(1), ssh_config(5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Skip,
    Step,
    Where,
    look,
    shell,
)
from nccl_doctor.system.programs import find_program, run_program

SSH_REFUSED = Kind(
    "deepspeed-ssh-failed",
    Layer.LAUNCH,
    "deepspeed cannot log in by ssh to the first host of its hostfile",
    "With a hostfile deepspeed logs in there first, even if that is this host, or ends.",
    Fix(
        Step(
            shell("# --no_ssh_check --master_addr 127.0.0.1"),
            note="in the line of deepspeed, for one host",
        ),
        alternatives=["leave out the hostfile", "let ssh log in without a password"],
    ),
)
_LIMIT_S = 15.0
_QUIET = ("-o", "PasswordAuthentication=no", "-o", "BatchMode=yes")
"""The first as deepspeed; with the second nobody is asked."""


class DeepspeedSsh(Check):
    """The log-in by ssh that deepspeed tries first."""

    name = "deepspeed_ssh"
    layer = Layer.LAUNCH
    cost = "seconds"
    deadline_s = _LIMIT_S + 6.0
    kinds = (SSH_REFUSED,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`host`: that is asked; `problem`: why there is no answer, or empty; `silent`: whether
        ssh did not end.
        """
        words = ctx.job.asks_ssh
        if not words:
            raise Skip("no line of deepspeed that reads a hostfile and starts ranks here")
        program = find_program("ssh", ctx.env)
        if program is None:
            return {"host": words[-1], "problem": "ssh is not installed", "silent": False}
        ctx.breadcrumb(f"ssh {words[-1]} hostname")
        limit_s = max(1.0, min(_LIMIT_S, ctx.left() - 4.0))
        said = run_program(program, [*_QUIET, *words, "hostname"], ctx.env, limit_s)
        lines = [line.strip() for line in said.text.splitlines() if line.strip()]
        ended = f"exit {said.code}" + (f": {lines[-1]}" if lines else "")
        return {
            "host": words[-1],
            "problem": said.problem or (ended if said.code else ""),
            "silent": bool(said.problem),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on hosts without an answer."""
        for rank, facts in cluster.facts(self.name):
            if not facts["problem"]:
                continue
            host = facts["host"]
            line = shell("# --no_ssh_check --master_addr 127.0.0.1")
            if cluster.nnodes > 1:
                line = shell("# --master_addr ADDRESS")
            by_hand = look(shell("ssh -o BatchMode=yes {} hostname", host), "has to work")
            yield Finding(
                SSH_REFUSED,
                f"deepspeed asks first for ssh {host} hostname: {facts['problem']}",
                Where(hosts=(rank.host.label,)),
                dict(facts),
                fix=Fix(
                    Step(line, note="in the line of deepspeed"),
                    alternatives=[Fix(by_hand)],
                ),
                confidence=Confidence.LIKELY if facts["silent"] else Confidence.CERTAIN,
            )
