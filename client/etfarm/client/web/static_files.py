"""Scripts, styles and pictures: read and compressed once, when the page starts, and sent from memory."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MEDIA_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}  # fmt: skip
"""The endings of files that are sent, with their types; the folders also have templates and licences."""


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
        self._files = {name: file for folder in reversed(folders) for name, file in _read(folder)}
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


def _read(folder: Path) -> Iterator[tuple[str, StaticFile]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in MEDIA_TYPES and path.is_file():
            content = path.read_bytes()
            yield (
                path.relative_to(folder).as_posix(),
                StaticFile(content, gzip.compress(content, mtime=0), MEDIA_TYPES[path.suffix]),
            )
