"""Made-up shared libraries."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def compiled(path: Path, source: str) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    code = path.with_suffix(".c")
    code.write_text(source)
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, code], check=True
    )
    return path
