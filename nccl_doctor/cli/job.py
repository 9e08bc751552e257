"""The record of the job, from the options of `run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from nccl_doctor.cli.deepspeed_config import DsConfigError, read
from nccl_doctor.model.job import Job


def job_of(ctx: click.Context, given: Mapping[str, Any], *, deepspeed: bool) -> Job:
    """Record of a job; `deepspeed`: its command or launcher shows that it uses DeepSpeed.

    Raises:
        click.UsageError: the DeepSpeed configuration cannot be used.
    """
    path = given["deepspeed_config"]
    config = None
    if path is not None:
        try:
            config = read(path)
        except DsConfigError as error:
            raise click.UsageError(f"--deepspeed-config: {error}", ctx) from error
    return Job(
        mesh=given["mesh"] or (),
        groups=given["groups"],
        deepspeed=deepspeed or path is not None,
        deepspeed_config=config,
        deepspeed_path=path or "",
        expect_load_s=given["expect_load_seconds"],
    )
