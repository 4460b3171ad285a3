"""Authentication of a server whose database has no tokens."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etfarm.server.access.tokens import TokenTable
from etfarm.server.rpc.door.authentication import Authentication


def authentication(folder: Path, file: Path | None = None) -> Authentication:
    """Return the authentication by a token file; without one, every caller is LOCAL."""

    def now() -> datetime:
        return datetime.now(UTC)

    database: Any = None  # its tokens are never loaded
    return Authentication(file, TokenTable(database, now), folder / "changed", now)
