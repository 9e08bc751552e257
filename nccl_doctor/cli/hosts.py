"""Options of `run` for the hosts and ranks of the job, and where they hang in the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from nccl_doctor.cli.params import HostName, LocalRanks, Number
from nccl_doctor.model.codec import MAX_RANKS

F = TypeVar("F", bound=Callable[..., Any])


def host_options(function: F) -> F:
    """The options."""
    for option in reversed(
        (
            click.option(
                "--nnodes", type=Number(1, most=MAX_RANKS), help="Number of hosts. [default: 1]"
            ),
            click.option(
                "--node-rank",
                type=Number(0, most=MAX_RANKS),
                help="Index of this host. [default: 0]",
            ),
            click.option(
                "--nproc-per-node",
                type=LocalRanks(),
                help="Number of ranks on this host. [default: auto: one per GPU, or 2 without a "
                "GPU]",
            ),
            click.option(
                "--master-addr", type=HostName(), help="Host of rank 0. [default: localhost]"
            ),
            click.option(
                "--master-port",
                type=Number(1, 65535),
                help="Port on that host. [default: 29500; with one host, a free port]",
            ),
            click.option(
                "--standalone",
                is_flag=True,
                help="This host alone, as for torchrun: the same as --nnodes 1.",
            ),
            click.option(
                "--hostfile",
                metavar="FILE",
                help="Start nccl-doctor over ssh on every host in FILE; lines are `host slots=N`, "
                "as for deepspeed.",
            ),
            click.option(
                "--topology",
                metavar="FILE",
                help="Leaf switches of the network, in the form of Slurm's topology.conf: lines "
                "are `SwitchName=leaf1 Nodes=gpu[001-016]`. Read on the host of rank 0. Of more "
                "than 64 hosts, some below each two leaf switches call each other. [default: the "
                "switches that Slurm tells]",
            ),
            click.option("--relay", is_flag=True, hidden=True),
            click.option("--voices-from", type=Number(2, MAX_RANKS), hidden=True),
        )
    ):
        function = option(function)
    return function
