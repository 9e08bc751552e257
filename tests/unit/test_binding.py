"""The table of who binds the default group to a device, and what it advises."""

from __future__ import annotations

import inspect
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from nccl_doctor.api import Confidence
from nccl_doctor.toolkit.groups import binding
from nccl_doctor.toolkit.groups.binding import Binding, as_observed, binding_advice, binds
from tests.support.rows import each_row

pytestmark = pytest.mark.xdist_group("torch")

OFFICIAL = "2.13.0+cu130"


def on_cuda(
    deepspeed: str | None, torch: str = OFFICIAL, world: int = 8, use: str | None = None
) -> Binding:
    return binds(deepspeed, torch, "nccl", "cuda", world, use_nccl2=use)


@each_row(
    ("deepspeed", "accelerator", "world", "expected"),
    [
        (None, "cuda", 8, False),
        ("0.9.5", "cuda", 8, False),
        ("0.17.2", "cuda", 8, False),
        ("0.17.3", "cuda", 8, True),
        ("0.17.5", "cuda", 8, True),
        ("0.17.6", "cuda", 8, True),
        ("0.19.8", "cuda", 8, True),
        # Other accelerators; the CPU's device is None.
        ("0.17.2", "xpu", 8, False),
        ("0.17.3", "cpu", 8, False),
        ("0.17.5", "npu", 8, None),
        ("0.17.6", "npu", 8, False),
        ("0.19.8", "cpu", 8, False),
        ("0.19.8", "", 8, None),
        ("0.17.2", "", 8, False),
        # A world of one rank.
        ("0.17.3", "cuda", 1, True),
        ("0.19.5", "cuda", 1, True),
        ("0.19.6", "cuda", 1, True),
        ("0.19.7", "cuda", 1, False),
        ("0.19.8", "cuda", 1, False),
        # Builds from a commit on the way to a release in which it changed.
        ("0.17.3+abc1234", "cuda", 8, None),
        ("0.17.4+abc1234", "cuda", 8, True),
        ("0.17.6+abc1234", "cuda", 8, True),
        ("0.17.6+abc1234", "npu", 8, None),
        ("0.19.7+abc1234", "cuda", 1, None),
        ("0.19.7+abc1234", "cuda", 8, True),
        ("0.19.7rc1", "cuda", 1, None),
        ("0.17.3.post1", "cuda", 8, True),
        ("unknown", "cuda", 8, None),
    ],
)
def test_deepspeed_by_version_accelerator_and_world(
    deepspeed: str | None, accelerator: str, world: int, expected: bool | None
) -> None:
    found = binds(deepspeed, OFFICIAL, "nccl", accelerator, world)
    assert found.binds is expected
    assert found.by == (("deepspeed",) if expected else ())
    assert bool(found.since) is bool(expected)
    assert found.why


@each_row(
    ("torch", "expected"),
    [
        ("2.1.2+cu121", False),
        ("2.2.2", False),
        ("2.3.0a0+40ec155e58.nv24.3", False),  # before 2.3.0, by PEP 440
        ("2.3.0+cu121", True),
        ("2.5.1", True),
        # The gate: after 2.6.0, before 2.7.1.
        ("2.6.0a0+df5bbc09d1.nv24.12", True),
        ("2.6.0.dev20241112+cu124", True),
        ("2.6.0", True),
        ("2.6.0+cu124", False),
        ("2.6.0.post1", False),
        ("2.6.1", False),
        ("2.7.0a0+79aa17489c.nv25.4", False),
        ("2.7.0+cu126", False),
        ("2.7.1a0+git123", False),
        ("2.7.1rc2", False),
        ("2.7.1", True),
        ("2.7.1+cu126", True),
        ("2.8.0a0+5228986c39.nv25.5", True),
        ("2.13.0+cpu", True),
        ("2.14.1+cu130", True),
        ("not a version", None),
    ],
)
def test_deepspeed_by_torch(torch: str, expected: bool | None) -> None:
    assert on_cuda("0.19.8", torch).binds is expected
    assert on_cuda("0.17.3", torch).binds is expected


@each_row(
    ("torch", "backend", "use", "expected"),
    [
        ("2.14.0+cu130", "nccl", None, False),
        ("2.14.0+cu130", "nccl", "1", False),  # the new process group, but no device of its own
        ("2.15.0+cu132", "nccl", None, True),
        ("2.15.0", "nccl", "1", True),
        ("2.15.0+cu132", "nccl", "0", False),
        ("2.15.0+cu132", "nccl2", "0", True),
        ("2.15.0+cu132", "nccl-legacy", None, False),
        ("2.15.0+cu132", "gloo", None, False),
        ("2.15.0+cu132", "cpu:gloo,cuda:nccl", None, True),
        ("2.15.0a0+git12ab", "nccl", None, None),
        ("2.15.0a0+git12ab", "nccl", "0", False),
        ("2.15.0+rocm7.1", "nccl", None, None),
        ("2.16.0+cu132", "nccl", None, True),
    ],
)
def test_torch_by_itself(torch: str, backend: str, use: str | None, expected: bool | None) -> None:
    found = binds(None, torch, backend, "cuda", 8, use_nccl2=use)
    assert found.binds is expected
    assert found.by == (("torch",) if expected else ())


def test_both_may_bind_and_the_one_that_does_decides() -> None:
    assert on_cuda("0.19.8", "2.15.0+cu132").by == ("deepspeed", "torch")
    assert on_cuda("0.19.8", "2.15.0+cu132", use="0").by == ("deepspeed",)
    assert on_cuda("0.17.2", "2.15.0+cu132").by == ("torch",)
    assert on_cuda("unknown", "2.15.0+cu132").by == ("torch",)


def test_a_version_that_nobody_has_read_is_said_to_be_one() -> None:
    assert "0.20.0 is newer than 0.19.8" in on_cuda("0.20.0").how
    assert "torch 2.16.0 is newer than 2.15" in on_cuda("0.19.8", "2.16.0").how
    assert "newer" not in on_cuda("0.19.8", "2.15.1+cu132").how
    sure = binding_advice(on_cuda("0.20.0"), "0.20.0", OFFICIAL, 8)
    assert sure.confidence is Confidence.POSSIBLE


def advise(
    deepspeed: str | None, torch: str, world: int = 8, use: str | None = None
) -> binding.Advice:
    return binding_advice(on_cuda(deepspeed, torch, world, use), deepspeed, torch, world)


def test_the_advice_is_the_one_for_these_versions() -> None:
    first = advise("0.18.0", OFFICIAL)
    assert "before deepspeed.init_distributed()" in first.text
    assert "NCCL2" not in first.text
    assert first.confidence is Confidence.LIKELY
    assert "open-instruct" in first.how

    both = advise("0.18.0", "2.15.0+cu132")
    assert "bound_device_id to None" in both.text
    assert "TORCH_DIST_USE_NCCL2=0 for every rank and also call" in both.text
    assert both.confidence is Confidence.POSSIBLE
    assert "not run on a GPU" in both.how

    alone = advise("0.17.2", "2.15.0+cu132")
    assert "TORCH_DIST_USE_NCCL2=0" in alone.text
    assert "deepspeed.init_distributed" not in alone.text

    assert "before deepspeed.init_distributed()" in advise("0.18.0", "2.15.0", use="0").text
    assert advise("0.17.2", OFFICIAL).text.startswith("nothing")
    assert advise("0.19.8", "2.7.0+cu126").text.startswith("nothing")
    assert "0.19.7 or newer" in advise("0.19.5", OFFICIAL, world=1).text
    # A release without that fault, where the group was bound all the same.
    seen = as_observed(on_cuda("0.19.8", world=1), True, False)
    assert "or newer" not in binding_advice(seen, "0.19.8", OFFICIAL, 1).text
    assert "print torch.distributed.group.WORLD.bound_device_id" in advise("x", OFFICIAL).text


def test_the_advice_rests_on_what_was_seen() -> None:
    told = on_cuda("0.18.0")
    kept = binding_advice(told, "0.18.0", OFFICIAL, 8, kept=True)
    assert "was seen here" in kept.how
    lost = binding_advice(told, "0.18.0", OFFICIAL, 8, kept=False)
    assert "before deepspeed.init_distributed()" not in lost.text
    assert lost.confidence is Confidence.POSSIBLE


def test_what_is_seen_counts_for_more_than_the_table() -> None:
    told = on_cuda("0.18.0")
    assert as_observed(told, True, False).how == "seen on the group itself"
    other = as_observed(told, False, False)
    assert (other.binds, other.by) == (False, ())
    assert other.how.endswith("though by the table of versions it would be bound")
    # Nobody passed a device to the group that torch formed: so torch binds.
    assert as_observed(on_cuda("0.17.2"), True, True).by == ("torch",)
    assert as_observed(on_cuda("0.17.2"), True, False).by == ("deepspeed",)
    assert as_observed(on_cuda("0.18.0", "2.15.0"), True, True).by == ("deepspeed", "torch")
    assert as_observed(on_cuda("x"), True, None).by == ()


@each_row(
    "text", ["2.6.0", "2.6.0+cu124", "2.6.0a0", "2.6.0.dev1", "2.6.0.post1", "2.6.0rc1.dev2+x",
             "2.5.9", "2.6.1", "2.7.0a0+1.nv25", "2.7.1rc1", "2.7.1", "2.7.1+a", "2.10", "3"],
)  # fmt: skip
def test_versions_are_ordered_as_deepspeed_orders_them(text: str) -> None:
    version = pytest.importorskip("packaging.version")
    mine = binding._parse(text)
    assert mine is not None
    for pivot in ("2.6.0", "2.7.1", "2.3"):
        theirs = version.parse(text)
        assert binding._before(mine, pivot) is (theirs < version.parse(pivot))
        assert binding._after(mine, pivot) is (theirs > version.parse(pivot))


def test_the_installed_deepspeed_is_as_its_row_says() -> None:
    spec = find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("DeepSpeed is not installed")
    version = metadata.version("deepspeed")
    source = (Path(spec.origin).parent / "comm" / "torch.py").read_text(encoding="utf-8")
    parsed = binding._parse(version)
    assert parsed is not None
    (row,) = binding._rows(parsed, binding._table()["deepspeed"], between=False)
    assert ("update(device_id=" in source) is (row["accelerators"] != "none")
    assert ("device_name() == 'cuda'" in source) is (row["accelerators"] == "cuda")
    assert ("known_world_size(world_size) != 1" in source) is (not row["alone"])
    gate = binding._table()["gate"]
    assert f'version.parse("{gate["after"]}") < version.parse(torch.__version__)' in source
    assert f'< version.parse("{gate["before"]}")' in source
    assert "if not torch.distributed.is_initialized():" in source


def test_the_installed_torch_is_as_its_row_says() -> None:
    import torch
    from torch.distributed import distributed_c10d as c10d

    has_own_device = "bound_device_id = device\n" in inspect.getsource(c10d)
    use = binds(None, torch.__version__, "nccl", "cuda", 2)
    assert use.binds in (has_own_device, None)
