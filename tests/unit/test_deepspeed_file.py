"""Rules on DeepSpeed's configuration: its table of keys, its arithmetic, its contradictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.checks.deepspeed_config.arithmetic import MICRO, STEPS, TRAIN, batch_problems
from nccl_doctor.checks.deepspeed_config.conflicts import conflict_problems
from nccl_doctor.checks.deepspeed_config.keys import key_problems
from nccl_doctor.checks.deepspeed_config.offload import offload_problems
from nccl_doctor.checks.deepspeed_config.table import KINDS, Settings, table
from nccl_doctor.cli.job import DsConfigError, read
from tests.support.rows import each_row

pytestmark = pytest.mark.xdist_group("torch")

NEW = frozenset({"0.19.8"})
OLD = frozenset({"0.15.4"})
ZERO3: dict[str, Any] = {"stage": 3}


# --- the file ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not an object"),
        ('{"a": 1, "a": 2}', 'the key "a" is given twice'),
        ('{"a": {"b": 1, "b": 1}}', 'the key "b" is given twice'),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(DsConfigError) as error:
        read(str(path))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(DsConfigError, match=words):
            read(str(path))
    (tmp_path / "ds.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(DsConfigError, match="not UTF-8"):
        read(str(tmp_path / "ds.json"))


# --- the table ---


def test_the_table_is_well_formed() -> None:
    for path, section in table().sections.items():
        outer, _, name = path.rpartition(".")
        if path != "top":
            assert name in table().sections[outer or "top"].keys
        for key in section.keys.values():
            assert key.kind in KINDS
            assert bool(key.gone) <= bool(key.why)
            assert bool(key.values) == (key.kind == "word")


def test_every_key_of_the_installed_deepspeed_is_there() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config, offload_config

    zero = "zero_optimization"
    for path, model in {
        zero: config.DeepSpeedZeroConfig,
        f"{zero}.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        f"{zero}.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "hybrid_engine": HybridEngineConfig,
    }.items():
        known = {name for name, key in table().sections[path].keys.items() if not key.gone}
        there = {each for name, f in model.model_fields.items() for each in (name, f.alias or name)}
        assert there <= known, path


# --- keys ---


def keys(config: dict[str, Any], versions: frozenset[str] = NEW) -> list[tuple[str, str]]:
    found = list(key_problems(Settings(config, versions)))
    return [(each.code.removeprefix("deepspeed-config-"), each.severity.value) for each in found]


def test_a_usual_configuration_has_nothing_wrong() -> None:
    config = {
        TRAIN: "auto",
        MICRO: "auto",
        STEPS: "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu"},
            "overlap_comm": True,
            "reduce_bucket_size": 5e8,
            "stage3_prefetch_bucket_size": "auto",
            "sub_group_size": 1e9,
        },
        "activation_checkpointing": {"partition_activations": True},
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    }
    given_as = Settings(config, NEW)
    for rules in (key_problems, conflict_problems):
        assert list(rules(given_as)) == []
    assert list(batch_problems(given_as, 8, ())) == []


@each_row(
    ("config", "code", "severity", "words"),
    [
        ({"train_batchsize": 4}, "unknown-key", "warn", 'did you mean "train_batch_size"?'),
        ({"Train_Batch_Size": 4}, "unknown-key", "warn", 'did you mean "train_batch_size"?'),
        ({"zzz": 4}, "unknown-key", "warn", '"zzz" is not a key of DeepSpeed: it is ignored'),
        ({"stage": 3}, "unknown-key", "warn", "it belongs into zero_optimization"),
        ({"zero_optimization": {"stag": 3}}, "unknown-key", "fail", 'did you mean "stage"?'),
        ({"fp16": {"enable": True}}, "unknown-key", "fail", 'did you mean "enabled"?'),
        ({"optimizer": {"name": "Adam"}}, "unknown-key", "warn", "is not a key of optimizer"),
        ({"zero_optimization": {"stage": 4}}, "bad-value", "fail", "is 4, more than 3"),
        ({"zero_optimization": {"stage": "three"}}, "bad-value", "fail", "not a whole number"),
        ({"zero_optimization": {"stage": None}}, "bad-value", "fail", "is null, not null"),
        ({"zero_optimization": {"overlap_comm": "maybe"}}, "bad-value", "fail", "true or false"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "bad-value", "fail", "not above 0"),
        ({"fp16": True}, "bad-value", "fail", '"fp16" is true, not an object'),
        ({TRAIN: "32"}, "bad-value", "fail", 'is "32", not a whole number above 0'),
        ({TRAIN: 0}, "bad-value", "fail", "is 0, not a whole number above 0"),
        ({STEPS: float("inf")}, "bad-value", "fail", "is inf, not a whole number above 0"),
        ({"fp16": {"loss_scale": 10**400}}, "bad-value", "fail", "not a number"),
        ({STEPS: 1.5}, "bad-value", "fail", "is 1.5, not a whole number above 0"),
        ({"communication_data_type": "int8"}, "bad-value", "fail", "not one of fp16, bf16, fp32"),
        ({"elasticity": {}}, "deprecated-key", "fail", "elastic training was removed"),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "deprecated-key",
            "info",
            "offload_optimizer",
        ),
        ({"bfloat16": {"enabled": True}}, "deprecated-key", "info", 'an old name of "bf16"'),
    ],
)
def test_one_wrong_key(config: dict[str, Any], code: str, severity: str, words: str) -> None:
    (found,) = key_problems(Settings(config, NEW))
    assert (found.code, found.severity.value) == (f"deepspeed-config-{code}", severity)
    assert words in found.message
    assert found.fix


def test_how_bad_a_key_is_depends_on_the_version() -> None:
    assert keys({"amp": {}}, OLD) == [("deprecated-key", "info")]
    assert keys({"amp": {}}, frozenset()) == [("deprecated-key", "warn")]
    assert keys({"fp16": {"fused": True}}, OLD) == [("unknown-key", "warn")]
    assert keys({"zero_optimization": {"xyz": 1}}, OLD) == [("unknown-key", "fail")]
    newer = frozenset({"0.30.0"})
    assert keys({"xyz": 1}, newer) == [("unknown-key", "info")]
    assert keys({"zero_optimization": {"stag": 1}}, newer) == [("unknown-key", "warn")]


# --- contradictions ---


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


@each_row(
    ("config", "severity", "words"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fail", "both enabled"),
        ({"fp16": {"enabled": True}, "bfloat16": {"enabled": "true"}}, "fail", "both enabled"),
        (zero(stage=2, offload_param={"device": "cpu"}), "warn", "no effect with ZeRO stage 2"),
        (zero(offload_param={"device": "nvme"}), "fail", "has no nvme_path"),
        (zero(stage=1, offload_optimizer={"device": "nvme"}), "warn", "it goes to the CPU"),
        (zero(stage=0, offload_optimizer={"device": "cpu"}), "warn", "stage 0"),
        (zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "fail", "ratio 0.5"),
        (zero(cpu_offload=True, offload_optimizer={"device": "cpu"}), "fail", "which replaced it"),
        (zero(stage=1, legacy_stage1=True), "fail", "0.5.9"),
        (zero(compute_grad_norm=False), "fail", "needs ZeRO stage 1 or 2"),
        ({**zero(), "gradient_allreduce_op": "SUM"}, "fail", "refused with ZeRO stage 3"),
        ({"bf16": {"bf16_optimizer_states": True}}, "fail", "needs bf16_master"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "fail", "its stage is 0"),
        ({"optimizer": {"type": "AdamWW"}}, "fail", "did you mean AdamW?"),
        ({"optimizer": {"type": "SGD"}, **zero()}, "fail", "zero_allow_untested_optimizer"),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
            "warn",
            "max_grad_norm",
        ),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "fail", "was removed"),
        ({"scheduler": {"type": "WarmupLr", "params": {}}}, "fail", "did you mean WarmupLR?"),
        ({"scheduler": {"type": "WarmupLR"}}, "fail", "has no params"),
        ({"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}}, "fail", "tp_size is 2"),
        ({**zero(), "pipeline": {"stages": 2}}, "warn", "pipeline of 2 stages"),
        ({"zero_optimization": True}, "info", "the syntax of old versions"),
    ],
)
def test_keys_that_contradict_each_other(config: dict[str, Any], severity: str, words: str) -> None:
    (found,) = conflict_problems(Settings(config, NEW))
    assert found.severity.value == severity
    assert words in found.message
    assert found.fix


@each_row(
    "config",
    [
        {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}},
        {"fp16": {"enabled": True}, "bf16": {"enabled": False}},
        zero(stage="auto", offload_param={"device": "cpu"}),
        {"optimizer": {"type": "adamw"}, **zero()},
        {"optimizer": {"type": "SGD"}, "zero_allow_untested_optimizer": True, **zero()},
        {"optimizer": {"type": "SGD"}},
        zero(cpu_offload=True),
        {"zero_optimization": None, "optimizer": None, "scheduler": []},
    ],
)
def test_keys_that_go_together(config: dict[str, Any]) -> None:
    assert [p for p in conflict_problems(Settings(config, NEW)) if p.severity.value != "info"] == []


def test_elastic_training_of_old_versions() -> None:
    config = {"elasticity": {"enabled": True}, TRAIN: 4}
    (found,) = conflict_problems(Settings(config, OLD))
    assert "elasticity is enabled, but train_batch_size is set as well" in found.message
    config["elasticity"]["ignore_non_elastic_batch_info"] = True  # type: ignore[index]
    assert list(conflict_problems(Settings(config, OLD))) == []


def test_a_pipeline_in_the_mesh() -> None:
    (found,) = conflict_problems(Settings(zero()), (("pp", 4), ("dp", 2)))
    assert "4 stages is refused with ZeRO stage 3" in found.message


NAMES = sorted({name for section in table().sections.values() for name in section.keys})
ODD = st.sampled_from(
    [None, True, 0, -1, 2, 1.5, float("inf"), "auto", "", "9" * 400, 10**400, [], {}]
)
INNER = ODD | st.dictionaries(st.sampled_from(NAMES), ODD, max_size=3)
VALUES = ODD | st.dictionaries(st.sampled_from(NAMES), INNER, max_size=4)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5), st.integers(1, 64))
def test_whatever_stands_there_is_judged(config: dict[str, Any], world: int) -> None:
    read_as = Settings(config, NEW)
    found = [
        *key_problems(read_as),
        *batch_problems(read_as, world, (("dp", 1), ("tp", world))),
        *conflict_problems(read_as),
        *offload_problems(read_as, HOST, None, 1),
    ]
    assert all(each.message and "\n" not in each.fix for each in found)


HOST: dict[str, Any] = {
    "ops": {"cpu_adam": False, "async_io": False},
    "ninja": True,
    "compiler": True,
    "libaio": True,
    "locked": None,
    "paths": {},
}
