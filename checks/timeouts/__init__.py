"""How long does each layer of this job wait for a late rank, and is it long enough?

What it checks
--------------
The time-outs that the job starts with, by its variables, its launcher, and the versions of torch,
DeepSpeed and wandb: a table (`run -v`, or --json) of what starts each clock, how many seconds it
has, what set it, and what happens when it expires. With --expect-load-seconds, the time that rank 0
works alone before the first barrier, each clock that runs meanwhile is compared with that time.

    layer          default                      what sets it
    rendezvous     900 s, with c10d 600 s       torchrun --rdzv-conf timeout=, join_timeout=
    c10d endpoint  60 s                         torchrun --rdzv-conf read_timeout=
    store          that of the process group    init_process_group(timeout=...)
    process group  NCCL 600 s, gloo 1800 s      init_process_group(timeout=...)
    new groups     NCCL 600 s, gloo 1800 s      new_group(timeout=...)
    watchdog       that of the process group    off with TORCH_NCCL_BLOCKING_WAIT=1
    heartbeat      480 s                        TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC
    NCCL           none                         -
    DeepSpeed      600 s (1800 s in old ones)   DEEPSPEED_TIMEOUT, in minutes
    W&B            30 s                         WANDB__SERVICE_WAIT

Why it matters
--------------
Much code lets one rank prepare what all of them need:

    if rank == 0:
        download_and_tokenize()
    dist.barrier()

The other ranks are not idle meanwhile: they wait in a collective, whose clock is the time-out of
the process group. When it expires the job ends with "Watchdog caught collective operation timeout"
or "wait timeout after 600000ms" on the ranks that did nothing wrong, though rank 0 was working and
nothing is broken; and it happens again after each restart, as half a download is seldom kept. If
the work comes before init_process_group, the others wait in the store, for the same time.

How to fix
----------
Type what the finding suggests. In the order of preference:

- Prepare before the job: a separate step, or a job that this one depends on, downloads and
  tokenizes once, into a folder that all hosts see.
- Wait without a clock that kills: let the others poll for a file that rank 0 writes at the end.
- A side group for this one barrier: slow = dist.new_group(backend="gloo",
  timeout=timedelta(hours=2)) on every rank, then dist.barrier(group=slow).
  dist.monitored_barrier(group=slow) names the ranks that did not come. Training keeps its short
  time-out.
- A longer time-out for all: init_process_group(timeout=timedelta(minutes=60)), DEEPSPEED_TIMEOUT=60
  for DeepSpeed, --ddp_timeout 3600 for the trainer of transformers. A real hang is then noticed
  that much later.

init_process_group(timeout=...) and DEEPSPEED_TIMEOUT do not reach other groups: those of new_group
and of a DeviceMesh have torch's default, and so has monitored_barrier, unless each gets a timeout
of its own (new_group(timeout=...), an Options with _timeout in backend_override of
init_device_mesh). A mesh dimension of all ranks is the default group.

A barrier right after init_process_group also guesses its GPU if none was chosen: call
torch.cuda.set_device(local_rank) before, or pass barrier(device_ids=[local_rank]). NCCL_TIMEOUT,
NCCL_BLOCKING_WAIT=1 and TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC do not lengthen the barrier.

When it is wrong
----------------
A time-out in the job's own code is not seen, nor are torchrun's options on its command line, but
for a command behind `--`: hence `likely`. A group of backend "cpu:gloo,cuda:nccl", or with no
backend named, has 1800 s in torch, not 600. A load in which each rank loads for itself concerns no
barrier and needs no longer time-out. Clocks that run only while a call hangs, or before the ranks
start, may be shorter: they are shown with -v and give no warning. What is known of NCCL comes from
its source and torch's. Not validated on hardware.

References
----------
PyTorch documentation of torch.distributed (init_process_group, barrier, monitored_barrier) and of
torchrun (--rdzv-conf); torch/distributed/constants.py; pytorch/pytorch issues 107177, 110957 and
124950; DeepSpeed pull requests 4405 and 8253; NVIDIA/nccl issues 708 and 1677.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nccl_doctor.api import Check, Cluster, Context, Finding, Layer, Untested
from nccl_doctor.toolkit.shared_kinds import TIMEOUT_TOO_SHORT
from nccl_doctor.toolkit.timeouts.rules import judge_timeouts
from nccl_doctor.toolkit.timeouts.waits import waits, waits_table

from .gather import Gathered, gather_timeouts


class TimeoutsFacts(Gathered):
    """Facts that `observe` returns; other checks read them."""

    waits: dict[str, Any]


class Timeouts(Check):
    """Reads what sets the time-outs, and compares them with the expected load."""

    name = "timeouts"
    layer = Layer.ENV
    kinds = (TIMEOUT_TOO_SHORT,)
    deadline_s = 60.0  # a cold import from a network file system

    def observe(self, ctx: Context) -> TimeoutsFacts:
        """The facts of `gather_timeouts`, and `waits`: the table made from them."""
        try:
            facts = gather_timeouts(
                ctx.env, ctx.job.launcher or ctx.launch.launcher, ctx.breadcrumb, ctx.job
            )
        except (ImportError, OSError) as error:
            raise Untested("torch cannot be imported") from error
        return {
            **facts,
            "waits": waits_table(waits(facts, ctx.backend, deepspeed=ctx.job.deepspeed)),
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on time-outs that are too short for the expected load, if any."""
        return judge_timeouts(cluster)
