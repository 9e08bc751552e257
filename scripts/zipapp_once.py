"""In the one file: has Python compile each module once, and not twice.

The importer for archives compiles a module to learn the name of its file, throws the result away,
and compiles it again to run it. Compiling is most of what a start takes.
"""

from __future__ import annotations

import os
import sys
from zipimport import zipimporter


def compile_once() -> None:
    """Import what lies in this archive by an importer that knows its file names."""
    archive = __loader__.archive

    def importer(path: str) -> zipimporter:
        if path != archive and not path.startswith(archive + os.sep):
            raise ImportError(f"not in {archive}", path=path)
        return _Importer(path)

    sys.path_hooks.insert(0, importer)
    sys.path_importer_cache.pop(archive, None)


class _Importer(zipimporter):
    def get_filename(self, fullname: str) -> str:
        """As it stands in the archive, which holds sources alone."""
        end = f"{os.sep}__init__.py" if self.is_package(fullname) else ".py"
        return f"{self.archive}{os.sep}{self.prefix}{fullname.rpartition('.')[2]}{end}"
