"""What only breaks the job later is no cause of what the examination saw, and has none there."""

from __future__ import annotations

from dataclasses import replace

from nccl_doctor.api import Effect, Finding, Layer, Where
from nccl_doctor.judge.causes import explain, root_causes
from tests.support.clusters import make_cluster
from tests.support.verdicts import GROUP, HOST

LATER = replace(HOST, code="low-later", layer=Layer.ENV, effects=(Effect.JOB_ONLY,))
HERE = Where(hosts=("nd0", "nd1"))


def test_a_hang_is_not_explained_by_what_comes_later() -> None:
    found = [Finding(LATER, "short", HERE), Finding(GROUP, "hang", Where(hosts=("nd1",)))]
    codes = {f.code: f.explained_by for f in explain(found, make_cluster())}
    assert codes == {LATER.code: None, GROUP.code: None}
    soon = replace(LATER, effects=())
    found[0] = Finding(soon, "broken", HERE)
    codes = {f.code: f.explained_by for f in explain(found, make_cluster())}
    assert codes[GROUP.code] == soon.code


def test_a_broken_host_does_not_explain_it_away() -> None:
    found = explain([Finding(HOST, "broken", HERE), Finding(LATER, "short", HERE)], make_cluster())
    assert {f.code for f in root_causes(found)} == {HOST.code, LATER.code}
