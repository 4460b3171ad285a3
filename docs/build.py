#!/usr/bin/env python
"""Build the documentation strictly and check that no page loads anything from another host.

.venv/bin/python docs/build.py                # a gate: builds into a temporary folder and keeps nothing
.venv/bin/python docs/build.py --output site  # keeps the built pages
.venv/bin/python docs/build.py --serve        # shows them at http://127.0.0.1:8000 and follows changes
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

_LOADING: Final = {
    "script": ("src",), "link": ("href",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src", "srcset"),
    "video": ("src", "poster"), "audio": ("src",), "embed": ("src",), "object": ("data",), "use": ("href", "xlink:href"),
}  # fmt: skip
"""Attributes that a browser loads by itself; `a href` is followed by a person only."""
_REMOTE: Final = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
_REMOTE_IN_CSS: Final = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)


class _Page(HTMLParser):
    """What one page loads from another host."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect an element's remote addresses, and a mermaid block: the theme would fetch its renderer."""
        values = {name: value or "" for name, value in attrs}
        for name in _LOADING.get(tag, ()):
            if _REMOTE.match(values.get(name, "")):
                self.remote.append(f"<{tag} {name}={values[name]!r}>")
        if "mermaid" in values.get("class", "").split():
            self.remote.append(f"<{tag} class='mermaid'>, whose renderer comes from another host")
        self.remote += _REMOTE_IN_CSS.findall(values.get("style", ""))


def find_remote_references(site: Path) -> Iterator[str]:
    """Yield `FILE: reference` for everything that a built page would load from another host."""
    for page in sorted(site.rglob("*.html")):
        parser = _Page()
        parser.feed(page.read_text())
        yield from (f"{page.relative_to(site)}: {reference}" for reference in parser.remote)
    for style in sorted(site.rglob("*.css")):
        yield from (f"{style.relative_to(site)}: {address}" for address in _REMOTE_IN_CSS.findall(style.read_text()))


def main() -> int:
    """Build the site; exit code 1 where the build warns or a page needs the network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the built pages there")
    parser.add_argument("--serve", action="store_true", help="show the pages in a browser instead")
    arguments = parser.parse_args()
    mkdocs = [sys.executable, "-m", "mkdocs"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    if arguments.serve:
        return subprocess.run([*mkdocs, "serve"], cwd=ROOT, env=environment).returncode
    with tempfile.TemporaryDirectory(prefix="etfarm-site-") as temporary:
        site = arguments.output.resolve() if arguments.output else Path(temporary)
        built = subprocess.run([*mkdocs, "build", "--strict", "--quiet", "--site-dir", str(site)], cwd=ROOT, env=environment)
        if built.returncode:
            return 1
        pages = len(list(site.rglob("*.html")))
        if remote := list(find_remote_references(site)):
            print("The site must not load anything from another host:", *remote, sep="\n  ", file=sys.stderr)
            return 1
    print(f"{pages} pages, none of which loads anything from another host")
    return 0


if __name__ == "__main__":
    sys.exit(main())
