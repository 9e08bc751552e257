"""Write docs/machines.md: what the program says of the machines in tests/machines/gallery."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.machines.gallery import machines  # noqa: E402
from tests.machines.page import page  # noqa: E402
from tests.machines.program import Gallery  # noqa: E402
from tests.machines.tools import build, folders  # noqa: E402


def main() -> None:
    """Write the page."""
    with folders() as (hosts, shm):
        gallery = Gallery(hosts, build(hosts), shm)
        (ROOT / "docs/machines.md").write_text(page(gallery, machines()), encoding="utf-8")


if __name__ == "__main__":
    main()
