"""Whose a folder of artifacts is that several servers share: the file `owner.id` in it says so.

A farm in SQLite needs none: it has the folder to itself, beside its database.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.owners import objection
from etfarm.server.artifacts.s3.errors import BlobsUnusable
from etfarm.server.state.identity import Identity

OWNER: Final = "owner.id"
"""Name of the file that has the identity of the farm."""
_MOST_CHARACTERS: Final = 100
"""Maximum number of characters that are read of it."""


def owner_of(folder: Path) -> Identity | None:
    """Return the farm that has claimed a folder; None if none has."""
    try:
        with (folder / OWNER).open(errors="replace") as file:
            return Identity.parse(file.read(_MOST_CHARACTERS))
    except FileNotFoundError:
        return None


def require_not_foreign(folder: Path, farm: Identity | None) -> None:
    """Check that no other farm has claimed a folder, nor this one restored elsewhere. One that is not claimed passes.

    Args:
        farm: the farm; None for one that is still to be made.

    Raises:
        BlobsUnusable: another farm has claimed it.
    """
    own = "give the farm a folder `artifacts` of its own"
    if (refused := objection(owner_of(folder), farm, f"the file {folder / OWNER}", own)) is not None:
        why, remedy = refused
        raise BlobsUnusable(f"Artifacts cannot be stored in {folder}: {why}.", f"{remedy[0].upper()}{remedy[1:]}.")


def claim(folder: Path, farm: Identity) -> None:
    """Claim a folder for a farm.

    Raises:
        BlobsUnusable: another farm has claimed it, or this one restored elsewhere.
        OSError: the claim cannot be written.
    """
    path, fresh = folder / OWNER, folder / f"{OWNER}.{os.getpid()}.{uuid.uuid4().hex}"
    fresh.write_text(farm.text)
    try:
        os.link(fresh, path)  # of several at one moment, the file system keeps one
    except FileExistsError:
        require_not_foreign(folder, farm)
        if owner_of(folder) != farm:  # of the database that this one was restored from
            fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
