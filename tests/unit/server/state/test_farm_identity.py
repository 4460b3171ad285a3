"""A farm of before farms had an id gets the same one as each of its backups."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from sqlalchemy import create_engine, text

from etfarm.server.state.identity import farm_id
from etfarm.server.transfer.database import FarmDatabase
from tests.support.old_database import NOW, config_of


def _converted(path: Path, *tokens: str) -> str:
    """Return the id that a database of before gets, which has these tokens."""
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        command.upgrade(config_of(connection), "0018")
        for second, token in enumerate(tokens):
            row = {"id": token, "secret": token.encode(), "at": NOW[:-1] + str(second)}
            connection.execute(
                text(
                    "INSERT INTO tokens (id, principal, role, secret_hash, enrolment, created_at, created_by) "
                    "VALUES (:id, 'rack', 'agent', :secret, 0, :at, 'root')"
                ),
                row,
            )
    engine.dispose()
    database = FarmDatabase(path)
    database.open()
    with database.connected() as connection:
        return farm_id(connection)


def test_a_backup_of_before_gets_the_id_of_its_farm(tmp_path: Path) -> None:
    farm, backup = _converted(tmp_path / "farm", "b", "a", "later"), _converted(tmp_path / "backup", "b", "a")
    assert farm == backup
    others = {_converted(tmp_path / name, *tokens) for name, *tokens in (("other", "a", "b"), ("empty",), ("new",))}
    assert len(others | {farm}) == 4
