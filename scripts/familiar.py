"""Write nccl_doctor/gather/familiar.json: words that most messages hold, known to both ends.

They are taken from a report of many ranks or hosts in full (report show --format json --expand),
without anything that is not the program's own: names, addresses, paths, numbers. Its content is
part of the protocol: raise `PROTOCOL` of gather/envelope.py with every change.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "nccl_doctor" / "gather" / "familiar.json"
MOST = 1 << 15
"""Bytes that zlib can look back."""
_LARGE = 1_000_000
_OF_A_PLACE = re.compile(r"host-|dir-|user-|[/\\]|\d.*\d|^[0-9a-f:.]{6,}$", re.IGNORECASE)


def words_of(value: Any) -> Any:
    """The value with only what another machine may say too."""
    if isinstance(value, dict):
        return {key: words_of(each) for key, each in value.items() if not _OF_A_PLACE.search(key)}
    if isinstance(value, list):
        made = [words_of(each) for each in value]
        return [each for i, each in enumerate(made) if each not in made[:i]]
    if isinstance(value, str):
        return "" if _OF_A_PLACE.search(value) else value
    if isinstance(value, float):
        return 0.0
    return 0 if isinstance(value, int) and value > _LARGE else value


def letters(report: Any) -> list[Any]:
    """Contents of messages: of the rounds, then of a sign-in."""
    rounds: dict[tuple[str, str], Any] = {}
    alone: dict[str, Any] = {}
    for place in (*report["hosts"], *report["ranks"]):
        for check, outcomes in place["facts"].items():
            for name, outcome in outcomes.items():
                if name == "alone":
                    alone.setdefault(check, {name: words_of(outcome)})
                else:
                    rounds.setdefault((check, name), words_of(outcome))
    rank = words_of(report["ranks"][0])
    who = {key: rank[key] for key in ("launch", "env", "device", "backend", "joining")}
    host = {"name": "", "key": "", "addresses": []}
    return [*rounds.values(), {"token": "", "pid": 0, **who, "host": host, "facts": alone}]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    told = letters(json.loads(parser.parse_args().report.read_text()))
    TARGET.write_text("\n".join(map(json.dumps, told))[-MOST:] + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
