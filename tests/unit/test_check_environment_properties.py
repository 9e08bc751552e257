"""What holds of the rules on environment variables whatever is set."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import Severity
from nccl_doctor.toolkit.variables.table import AUTO, table
from nccl_doctor.toolkit.versions import release
from tests.support.environments import Env, judge


def defaults(nccl: str | None) -> list[tuple[str, str]]:
    """Variable → default, with a release of NCCL."""
    now = release(nccl)
    rows = [r.at(now) if r.library == "nccl" else r for r in table().variables.values()]
    told = ((r.name, r.default) for r in rows if not r.gone and not r.deprecated_by)
    return sorted((name, text) for name, text in told if text not in (None, AUTO))


@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["nccl", "gloo"]),
    st.sampled_from(["2.30.7", "2.19.3", None]),
)
def test_defaults_written_out_are_harmless(random: Random, backend: str, nccl: str | None) -> None:
    known = defaults(nccl)
    envs: list[Env] = [
        dict(random.sample(known, random.randint(0, len(known))))
        for _ in range(random.randint(1, 4))
    ]
    found = judge(envs, backend=backend, nccl=nccl, infiniband=True)
    assert {each.level for each in found} <= {Severity.INFO}
    assert not [each for each in found if each.code == "env-differs"]


def test_all_defaults_at_once_are_harmless() -> None:
    envs = [dict(defaults("2.33.1"))] * 2
    assert judge(envs, nproc=2, nccl="2.33.1", torch="2.15.0", infiniband=True) == []


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
    env: Env = dict(defaults("2.30.7")[:60])
    envs = [env] * 399 + [{**env, "NCCL_ALGO": "Ring"}]
    (found,) = (each for each in judge(envs) if each.code == "env-differs")
    assert found.where.hosts == ("nd399",)
