"""What holds of the rules on environment variables whatever is set."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import Severity
from nccl_doctor.toolkit.variables.table import AUTO, table
from tests.support.environments import Env, judge

DEFAULTS = sorted(
    (name, row.default)
    for name, row in table().variables.items()
    if row.default not in (None, AUTO) and not row.gone and not row.deprecated_by
)


@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["nccl", "gloo"]),
    st.sampled_from(["2.30.7", "2.19.3", None]),
)
def test_defaults_written_out_are_harmless(random: Random, backend: str, nccl: str | None) -> None:
    envs: list[Env] = [
        dict(random.sample(DEFAULTS, random.randint(0, len(DEFAULTS))))
        for _ in range(random.randint(1, 4))
    ]
    found = judge(envs, backend=backend, nccl=nccl, infiniband=True)
    assert {each.level for each in found} <= {Severity.INFO}
    assert not [each for each in found if each.code == "env-differs"]


def test_all_defaults_at_once_are_harmless() -> None:
    assert (
        judge([dict(DEFAULTS)] * 2, nproc=2, nccl="2.33.1", torch="2.15.0", infiniband=True) == []
    )


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*table().variables, "NCCL_NONSENSE"]),
            st.sampled_from(["", "0", "1", "-1", "true", "x", "'1'", "^a;b:c", "9" * 30, "é"]),
            max_size=12,
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["nccl", "gloo"]),
)
def test_any_values_are_judged(envs: list[Env], backend: str) -> None:
    for each in judge(envs, backend=backend):
        assert each.where
        assert each.fix


def test_a_large_cluster_is_judged_in_time() -> None:
    env: Env = {name: default for name, default in DEFAULTS[:60] if default is not None}
    envs = [env] * 399 + [{**env, "NCCL_ALGO": "Ring"}]
    (found,) = (each for each in judge(envs) if each.code == "env-differs")
    assert found.where.hosts == ("nd399",)
