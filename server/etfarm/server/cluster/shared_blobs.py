"""Where a server's blobs are, as a name that is the same for all servers of a farm: only one place can be the farm's."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.blobs import MARKS
from etfarm.wire.private import make_private

_FILE: Final = "farm.id"


def identify_folder(folder: Path) -> str:
    """Return the name of a folder of blobs, which a file in it has: servers may mount a shared folder at different places."""
    make_private(folder, MARKS)
    path = folder / _FILE
    if not path.exists():
        fresh = folder / f"{_FILE}.{os.getpid()}.{uuid.uuid4().hex}"
        fresh.write_text(f"{uuid.uuid4()}\n")
        try:
            os.link(fresh, path)  # unlike a replacement, it keeps what another server wrote at the same moment
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return f"folder {path.read_text().strip()}"
