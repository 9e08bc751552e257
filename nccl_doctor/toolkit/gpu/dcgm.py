"""Questions to NVIDIA's DCGM by its command `dcgmi`, and what it prints as JSON.

Source: NVIDIA/DCGM, dcgmi/Health.cpp, Diag.cpp and DcgmiOutput.cpp, and nvvs/NvvsJsonStrings.h, of
2.4.7, 3.3.9 and 4.6.0. The form of `dcgmi health -c -j` is the same in all three. That of `dcgmi
diag -j` has another name at its top since 4.0 ("DCGM Diagnostic", before "DCGM GPU Diagnostic"),
names a GPU by `gpu_ids`, `gpu_id`, then `entity_id`, and a warning is a text in 2, a list since 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from nccl_doctor.system.programs import ProgramEnd, find_program

_MOST_WORDS = 400
_UNREACHABLE = (
    "unable to establish a connection",
    "unable to connect to",
    "connection to the host",
)
UNWATCHED = "health watches not enabled"


class Incident(TypedDict):
    """A system that DCGM does not find healthy: `group` and `entity` (`GPU`, `3`), `system`
    (`Memory system`), `health` (`Warning` or `Failure`), and DCGM's `words`.
    """

    group: str
    entity: str
    system: str
    health: str
    words: str


class DiagResult(TypedDict):
    """A test of a diagnosis on one GPU, or on the host (`entity` is empty): `status` is `pass`,
    `fail`, `warn` or `skip`.
    """

    test: str
    entity: str
    status: str
    words: str


def refusal(said: ProgramEnd) -> str:
    """The line in which `dcgmi` says why it has no answer; empty if it does not."""
    lines = (line.strip() for line in said.text.splitlines())
    return next((line[:_MOST_WORDS] for line in lines if line.startswith("Error")), "")


def is_unreachable(said: ProgramEnd) -> bool:
    """True if no host engine answers."""
    return any(words in said.text.lower() for words in _UNREACHABLE)


def find_dcgmi(env: Mapping[str, str]) -> str | None:
    """Path of `dcgmi`, as this process would start it."""
    return find_program("dcgmi", env)


def json_in(text: str) -> dict[str, Any] | None:
    """The first JSON object of a text, which may have other lines around it; None if there is none.

    Deeply nested rubbish is none, too.
    """
    start = text.find("{")
    try:
        found, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return found if start >= 0 and isinstance(found, dict) else None


def overall_health(answer: Mapping[str, Any]) -> str | None:
    """`Healthy`, `Warning` or `Failure` of `dcgmi health -c -j`; None if it does not say."""
    value = _at(answer, "body", "Overall Health", "value")
    return value if isinstance(value, str) else None


def incidents_of(answer: Mapping[str, Any]) -> list[Incident]:
    """Each system of each GPU, switch or CPU that `dcgmi health -c -j` does not find healthy."""
    return [
        Incident(
            group=str(group),
            entity=str(entity),
            system=str(system),
            health=str(_at(seen, "value") or "?"),
            words=_sentence(_at(seen, "overflow")),
        )
        for group, entities in _items(_at(answer, "body"))
        for entity, parts in _items(_at(entities, "children"))
        for system, seen in _items(_at(parts, "children", "Errors", "children"))
    ]


def results_of(answer: Mapping[str, Any]) -> list[DiagResult]:
    """Each result of `dcgmi diag -j`."""
    return [
        DiagResult(
            test=str(_at(test, "name") or "?"),
            entity=_entity(result),
            status=str(_at(result, "status") or "?").lower(),
            words=_sentence(_at(result, "warnings")),
        )
        for top in answer.values()
        for category in _list(_at(top, "test_categories"))
        for test in _list(_at(category, "tests"))
        for result in _list(_at(test, "results"))
    ]


def runtime_error(answer: Mapping[str, Any]) -> str:
    """The reason why a diagnosis did not run; empty if it did."""
    said = [_at(top, "runtime_error") for top in answer.values()]
    return _sentence([each for each in said if each])


def _entity(result: Any) -> str:
    """`GPU 3`; empty for the host."""
    group = _at(result, "entity_group")
    for name in ("entity_id", "gpu_id", "gpu_ids"):
        value = _at(result, name)
        if value is not None and str(value).isdecimal():
            return f"{group or 'GPU'} {value}"
    return ""


def _sentence(said: Any) -> str:
    """Texts, or what stands under `warning` in records, as one line."""
    parts = [
        str(each.get("warning") or each.get("warnings") or "")
        if isinstance(each, dict)
        else str(each)
        for each in (said if isinstance(said, list) else [said] if said else [])
    ]
    return " ".join(" ".join(parts).split())[:_MOST_WORDS]


def _at(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
