"""Builds the site of the project's Markdown: build/site/, by zensical; `make docs`.

    python docs/build_site.py             every warning is an error
    python docs/build_site.py serve       built anew at each change, at http://localhost:8000

Pages are read where they stand on the repository's own pages: a copy of the Markdown files, and of
what these link to, keeps their folders, so that relative links hold in both places. The order of
pages is `nav` in mkdocs.yml.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "yamls", "llmfoundry", "benchmarks", "eval")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def sources() -> Iterator[Path]:
    """Every page, relative to the repository, and every file that a page links to."""
    pages = [*sorted(ROOT.glob("*.md"))]
    pages += [page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))]
    found = dict.fromkeys(pages)
    for page in pages:
        linked = ((page.parent / link).resolve() for link in LINK.findall(page.read_text()))
        found |= dict.fromkeys(file for file in linked if file.is_file())
    return (file.relative_to(ROOT) for file in found)


def copy(target: Path) -> None:
    """Copy all of them; one that has not changed is left alone."""
    wanted = {target / file: ROOT / file for file in sources()}
    for old in target.rglob("*"):
        if old.is_file() and old not in wanted:
            old.unlink()
    for new, file in wanted.items():
        new.parent.mkdir(parents=True, exist_ok=True)
        if not new.exists() or new.read_bytes() != file.read_bytes():
            shutil.copy(file, new)


def main(command: str = "build") -> int:
    """Copy the pages and call zensical; its exit status."""
    if importlib.util.find_spec("zensical") is None:
        print("zensical is not installed: `make docs` does so, with Python 3.11 or later")
        return 2
    copy(ROOT / "build" / "pages")
    options = ["--clean", "--strict"] if command == "build" else []
    return subprocess.call([sys.executable, "-m", "zensical", command, *options], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
