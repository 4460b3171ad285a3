"""A version after this one: the current tree with a higher version and one more migration, which adds a column and a table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from etfarm.server.state import revisions
from tests.support import source_tree

VERSION: Final = "99.0.0"
REVISION: Final = f"{int(revisions.HEAD) + 1:04}"
_ROOT: Final = Path(__file__).parents[2]
_STATE: Final = Path("server/etfarm/server/state")
_MIGRATION: Final = f'''"""Ratings of jobs."""

import sqlalchemy as sa
from alembic import op

revision = "{REVISION}"
down_revision = "{revisions.HEAD}"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("rating", sa.Integer(), nullable=False, server_default="0"))
    op.create_table("raters", sa.Column("name", sa.Text(), primary_key=True))
'''


def make_tree(folder: Path) -> Path:
    """Write the version's files to a new folder, and return it."""
    for package in source_tree.PACKAGES:
        shutil.copytree(_ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_ROOT / "pyproject.toml", folder)
    (folder / _STATE / "migrations" / "versions" / f"{REVISION}_ratings.py").write_text(_MIGRATION)
    head = folder / _STATE / "revisions.py"
    text = head.read_text()
    changed = text.replace(f'HEAD: Final = "{revisions.HEAD}"', f'HEAD: Final = "{REVISION}"')
    assert changed != text
    head.write_text(changed)
    source_tree.make_runnable(folder, VERSION)
    return folder
