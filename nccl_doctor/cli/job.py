"""The record of the job from the options of `run`, with the files that they name.

The configuration of DeepSpeed is read as DeepSpeed reads it: JSON, or Hjson with comments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from nccl_doctor.model.job import Job
from nccl_doctor.system import files
from nccl_doctor.system.masking import masked_data
from nccl_doctor.toolkit.leaves import Leaves, TopologyError, read_leaves

_BESIDE_S = 90.0
"""Least time that --timeout is to leave beside a silence of --hold-idle."""


class DsConfigError(ValueError):
    """The file cannot be used; the text is one line that says why."""


def read(path: str) -> dict[str, Any]:
    """The configuration.

    Raises:
        DsConfigError: it cannot be read, is neither JSON nor Hjson, holds a key twice, or is not an
            object.
    """
    try:
        text = files.read(path, files.CONFIG_MAX).decode()
    except OSError as error:
        raise DsConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DsConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
    data = _parsed(path, text)
    if not isinstance(data, dict):
        raise DsConfigError(f"{path} is not an object: DeepSpeed wants {{…}} with its options")
    return data


def _parsed(path: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except _Twice as error:
        raise DsConfigError(f'{path}: the key "{error}" is given twice') from error
    except json.JSONDecodeError as error:
        strict = f"{path} is not JSON: {error}"
    except RecursionError as error:
        raise DsConfigError(f"{path} is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise DsConfigError(f"{path}: {error}") from error
    try:
        import hjson
    except ImportError:
        raise DsConfigError(strict) from None
    try:
        return hjson.loads(text, object_pairs_hook=_unique)
    except _Twice as error:
        raise DsConfigError(f'{path}: the key "{error}" is given twice') from error
    except (ValueError, RecursionError):
        raise DsConfigError(strict) from None


class _Twice(ValueError):
    pass


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


def job_of(ctx: click.Context, given: Mapping[str, Any], *, deepspeed: bool, first: bool) -> Job:
    """Record of a job.

    Args:
        ctx: of command `run`.
        given: its parameters.
        deepspeed: whether the command or the launcher of the job shows that it uses DeepSpeed.
        first: whether rank 0 may be here; the leaf switches are read there alone.

    Raises:
        click.UsageError: the DeepSpeed configuration or the topology cannot be used, or the run has
            too little time for --hold-idle.
    """
    path = given["deepspeed_config"]
    config = None
    if path is not None:
        try:
            config = masked_data(read(path))  # it goes into the report
        except DsConfigError as error:
            raise click.UsageError(f"--deepspeed-config: {error}", ctx) from error
    return Job(
        mesh=given["mesh"] or (),
        groups=given["groups"],
        deepspeed=deepspeed or path is not None,
        deepspeed_config=config,
        deepspeed_path=path or "",
        expect_load_s=given["expect_load_seconds"],
        dcgm_level=given["with_dcgm"],
        hold_idle_s=_hold_idle(ctx, given),
        leaves=_leaves(ctx, given["topology"]) if first and given["topology"] else (),
    )


def _leaves(ctx: click.Context, path: str) -> Leaves:
    """Leaf switches that the file of --topology tells."""
    try:
        return read_leaves(files.read(path, files.CONFIG_MAX).decode())
    except OSError as error:
        words = f"cannot read {path}: {error.strerror}"
    except UnicodeDecodeError as error:
        words = f"{path} is not UTF-8 text (byte {error.start})"
    except TopologyError as error:
        words = f"{path}: {error}"
    raise click.UsageError(f"--topology: {words}", ctx)


def _hold_idle(ctx: click.Context, given: Mapping[str, Any]) -> float | None:
    """Seconds of silence; the rest of the examination needs time too."""
    seconds: float | None = given["hold_idle"]
    if seconds is not None and seconds + _BESIDE_S > given["timeout"]:
        raise click.UsageError(
            f"--hold-idle {seconds:g} does not fit into --timeout {given['timeout']:g}: give "
            f"--timeout {seconds + _BESIDE_S:g} or more",
            ctx,
        )
    return seconds
