"""Databases of earlier versions of etfarm, which this one converts."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, create_engine, text

from etfarm.server.state import revisions
from etfarm.wire import digest
from etfarm.wire.release_0_1.messages import message_class
from etfarm.wire.series import encode_samples

NOW = "2025-01-02 03:04:05"
MIGRATIONS = Path(revisions.__file__).parent / "migrations"


def config_of(connection: Connection) -> Config:
    """Return what Alembic needs to convert the connection's database."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    return config


def database_of_0006(folder: Path, reports: int) -> Path:
    """Return a database of etfarm 0.1.0 with reports that have samples."""
    path = folder / "farm.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config = config_of(connection)
        command.upgrade(config, "0003")
        connection.execute(text(f"INSERT INTO jobs VALUES ('j', 1, '', 'ann', 'r', 0, x'', '{NOW}', '{NOW}', 0)"))
        for number in range(reports):
            report = message_class("Report")(id=f"r{number}", recipe="portable", state="SUCCEEDED")
            report.latency.samples_ns.extend([1000 + number] * 5)
            report.samples.digest, report.samples.size_bytes = digest.of_bytes(encode_samples([1000 + number] * 5)), 40
            report.profile.iterations = 1
            report.profile.times_ns.append(2000 + number)
            connection.execute(text(f"INSERT INTO cells VALUES ('c{number}', 'j', {number}, 'SUCCEEDED', 1, x'')"))
            connection.execute(
                text(f"INSERT INTO reports VALUES (:id, 'j', :cell, 'net', '', 'board', NULL, '{NOW}', :body)"),
                {"id": report.id, "cell": f"c{number}", "body": report.SerializeToString()},
            )
        command.upgrade(config, "0006")
    engine.dispose()
    return path
