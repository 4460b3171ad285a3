"""Scripts, styles and pictures: read and compressed once, when the page starts, and sent from memory."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MEDIA_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}  # fmt: skip
"""The endings of files that are sent, with their types; the folders also have templates and licences."""

BUNDLES: Final[Mapping[str, tuple[str, ...]]] = {
    "page.css": ("templates/theme.css", "app.css"),
    "page.js": ("app.js", "keys.js", "live.js"),
}
"""What every page needs, as one file of each kind: a request costs more than these files."""


@dataclass(frozen=True)
class StaticFile:
    """A file as it is sent."""

    content: bytes
    compressed: bytes
    """The content as gzip."""
    media_type: str


class StaticFiles:
    """The files of some folders by path. Their addresses have the files' digest, so that browsers may keep them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read all files.

        Args:
            folders: the first one with a path has the file.
        """
        contents = {name: content for folder in reversed(folders) for name, content in _read(folder)}
        for name, parts in BUNDLES.items():
            contents[name] = b"".join(_as_part(part, contents.pop(part)) for part in parts)
        self._files = {
            name: StaticFile(content, gzip.compress(content, mtime=0), MEDIA_TYPES[PurePosixPath(name).suffix])
            for name, content in contents.items()
        }
        digest = hashlib.sha256()
        for name, file in sorted(self._files.items()):
            digest.update(f"{name} {len(file.content)} ".encode() + file.content)
        self.version = digest.hexdigest()[:12]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a file.

        Raises:
            HTTPException: there is none.
        """
        path = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/")
        file = self._files.get(path)
        if file is None or scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404)
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "Accept-Encoding"}
        content = file.content
        if "gzip" in Headers(scope=scope).get("accept-encoding", ""):
            content = file.compressed
            headers["content-encoding"] = "gzip"
        await Response(content, headers=headers, media_type=file.media_type)(scope, receive, send)


def _read(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in MEDIA_TYPES and path.is_file():
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def _as_part(name: str, content: bytes) -> bytes:
    """Return a file as a part of a bundle: a script is a block, whose names the other scripts do not see."""
    return b"{\n%b\n}\n" % content if name.endswith(".js") else content
