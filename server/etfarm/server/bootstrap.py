"""The command `etfarm tokens init`, which creates the first admin's token in the server's database."""

from __future__ import annotations

import argparse
import asyncio
import getpass
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from etfarm.server.access.audit import AuditLog, Entry
from etfarm.server.access.tokens import TOKENS_CHANGED, TokenTable
from etfarm.server.arguments import parse_command
from etfarm.server.artifacts.left_behind import require_known
from etfarm.server.artifacts.s3.options import add_blob_options, location_of
from etfarm.server.config import DATABASE
from etfarm.server.operation.data_option import add_data_option, add_database_option, data_of
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import WAIT_S, create_database
from etfarm.server.state.folder import MARKS
from etfarm.v1.common_pb2 import ROLE_ADMIN
from etfarm.wire.errors import EtfarmError, UserError, error_for
from etfarm.wire.private import close_umask, make_private


def admin_exists(admins: Sequence[str]) -> EtfarmError:
    """Return the error of a first admin's token where there are admins already."""
    is_one, names = len(admins) == 1, ", ".join(admins)
    who, whose = ("That admin creates", "the token is") if is_one else ("Each of them creates", "their tokens are")
    return error_for(
        "ADMIN_EXISTS",
        f"The farm has {'an admin' if is_one else f'{len(admins)} admins'} already: {names}.",
        f"{who} further tokens with `etfarm tokens create NAME --role admin`. If {whose} lost, add --another.",
        admins=names,
    )  # fmt: skip


def main(argv: list[str]) -> int:
    """Run `etfarm tokens init`."""
    parser = argparse.ArgumentParser(
        prog="etfarm tokens init",
        description="Create an admin's token in the server's own files and print its secret, which is not shown again. Use it "
        "for the first admin, or, with --another, when all admins' tokens are lost; the server may be running. From then on the "
        "server asks every caller for a token.",
    )
    parser.add_argument("name", metavar="NAME", help="name of the admin: letters, digits, dots, dashes and underscores")
    parser.add_argument("--another", action="store_true", help="create the token although there are admins already")
    add_data_option(parser)
    add_database_option(parser)
    add_blob_options(parser, "bucket that has the artifacts, as for `etfarm serve`")
    arguments, _ = parse_command(parser, argv)
    url, folder = arguments.database, data_of(arguments)
    close_umask()
    try:
        make_private(folder, MARKS)
    except OSError as error:
        raise UserError(f"The data folder {folder} cannot be used: {error.strerror}.", "Choose another --data.") from None
    require_known(folder, folder / DATABASE, url, WAIT_S, location_of(arguments))
    print(asyncio.run(_create(folder, url, arguments.name, is_another=arguments.another)))
    return 0


async def _create(folder: Path, url: DatabaseUrl | None, name: str, *, is_another: bool) -> str:
    """Create an admin's token and return its secret.

    Raises:
        ADMIN_EXISTS: there are admins, and none was to be added.
    """
    database = create_database(folder / DATABASE, url)
    try:
        await database.open()
        tokens = TokenTable(database, _now)
        if not is_another and (admins := await tokens.admins()):
            raise admin_exists(admins)
        token, secret = await tokens.create(name, ROLE_ADMIN, by=f"etfarm tokens init ({getpass.getuser()})")
        audit = AuditLog(database, _now, asyncio.get_running_loop().time)
        audit.record(Entry("TokenService.Create", "OK", subject=f"{name} {token.id}", detail="etfarm tokens init"))
        await audit.flush(durable=True)
    finally:
        database.close()
    # Signals a running server to read the tokens again.
    (folder / TOKENS_CHANGED).touch()
    return secret


def _now() -> datetime:
    return datetime.now(UTC)
