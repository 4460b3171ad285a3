"""The check of an uploaded runner bundle, which runs in a jailed child. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from etfarm.wire.bundles import check_archive


def check(archive: Path, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: return the manifest of an archive that agents can unpack.

    Raises:
        NotABundle, WrongArch: agents would refuse it.
    """
    return json.dumps(check_archive(archive).to_json()).encode()
