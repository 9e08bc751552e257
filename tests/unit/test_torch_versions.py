"""The page of `make test-torch`: what each release of torch did, and where they differ."""

from __future__ import annotations

from scripts.torch_versions import FAULTS, Release, page
from tests.torches.forms import FORMS
from tests.torches.installs import NEWEST, OLDEST, VERSIONS

GOOD = Release(
    "2.4.1+cu121",
    dict.fromkeys(FORMS, "pass (4 s)"),
    passed=82,
    faults=list(FAULTS),
    answers={"time outs of a group": "1800 s", "a socket": "refused"},
)


def test_the_page_of_two_releases_of_which_one_is_good() -> None:
    bad = Release(
        "2.15.0+cu132",
        {**GOOD.forms, "alone": "fail (9 s): port-refused"},
        passed=81,
        failed=["tests/ranks/test_run.py::test_x"],
        faults=[],
        answers={**GOOD.answers, "a socket": "taken"},
    )
    assert (GOOD.is_good, bad.is_good) == (True, False)
    text = page({OLDEST: GOOD, NEWEST: bad}, {"2.6.0": "no wheel"}, "2026-11-28")
    assert "1 of 2 releases are good in all of it" in text
    assert "| alone | pass (4 s) | fail (9 s): port-refused |" in text
    assert "| tests | 82 of 82 | 81 of 82 |" in text
    assert f"- torch {NEWEST}: `tests/ranks/test_run.py::test_x`" in text
    assert "- torch 2.6.0 was not examined: no wheel" in text
    assert f"**A socket**\n\n- {OLDEST}: refused\n- {NEWEST}: taken" in text
    assert f"- {OLDEST}, {NEWEST}: 1800 s" in text


def test_the_releases_are_in_order() -> None:
    assert sorted(VERSIONS, key=lambda each: [*map(int, each.split("."))]) == list(VERSIONS)
