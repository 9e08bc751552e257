"""Bring pages and links from outside of docs/ into the site: a hook of mkdocs (mkdocs.yml).

A page links files as GitHub reads them, relative to itself in the repository. In the site, the
pages at the root of the repository are pages too; other files are not in it: a link to one leads
to the repository if `repo_url` says where that is, and is text if not.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FROM_THE_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
FENCED = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that lie at the root of the repository."""
    from mkdocs.structure.files import File

    for name in FROM_THE_ROOT:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Write a page as the site needs it."""
    folder = Path(page.file.abs_src_path).parent
    return as_in_the_site(markdown, folder, page.file.src_uri, config.repo_url or "")


def as_in_the_site(markdown: str, folder: Path, uri: str, repository: str) -> str:
    """The text of page `uri`, which lies in `folder`, for a Markdown that indents by four."""
    parts = FENCED.split(markdown)  # every second one is code
    for i in range(0, len(parts), 2):
        text = with_links(parts[i], folder, uri, repository)
        parts[i] = re.sub(r"^ {2,3}(?=- )", " " * 4, text, flags=re.MULTILINE)
    return "".join(parts)


def with_links(markdown: str, folder: Path, uri: str, repository: str) -> str:
    """A text of page `uri` with links that are right in the site."""

    def link(found: re.Match[str]) -> str:
        picture, text, file, fragment = found[1], found[2], found[3], found[4] or ""
        target = (folder / file).resolve()
        if (target / "README.md").is_file():
            target /= "README.md"
        here = _uri(target)
        if here is not None:
            path = posixpath.relpath(here, posixpath.dirname(uri) or ".")
            return f"{picture}[{text}]({path}{fragment})"
        if not (target.exists() and target.is_relative_to(ROOT)):
            return found[0]  # mkdocs says that it leads nowhere
        if not repository:
            return text
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{target.relative_to(ROOT).as_posix()})"

    return LINK.sub(link, markdown)


def _uri(target: Path) -> str | None:
    """Where a file is in the site."""
    if target.is_relative_to(DOCS) and target.is_file():
        return target.relative_to(DOCS).as_posix()
    if target.parent == ROOT and target.name in FROM_THE_ROOT:
        return target.name
    return None
