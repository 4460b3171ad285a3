"""Convert a data folder of etfarm 0.1 or 0.2, which were never published, for etfarm 0.3:

    python docs/upgrade/convert.py FOLDER

FOLDER is the data folder of a server or of an agent that has been stopped. Run it with the Python in which etfarm 0.3 is
installed. A conversion that is interrupted, or that fails, changes nothing and can be run again.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from release_0_1.convert import converted
from sqlalchemy import text

from etfarm.server.config import DATABASE
from etfarm.server.state import damage, sqlite
from etfarm.server.state.folder import locked
from etfarm.server.state.revisions import OLDEST
from etfarm.v1 import agent_pb2
from etfarm.wire.errors import EtfarmError

HERE: Final = Path(__file__).parent
OLD_REVISIONS: Final = sorted(path.name.partition("_")[0] for path in (HERE / "versions").glob("[0-9]*.py"))
DIGEST_BYTES: Final = 32
OLD_RESULT: Final = ".result"
"""Suffix of the results that an agent of etfarm 0.1 keeps until a server acknowledges them."""
RESULT: Final = ".result2"
"""The same of later versions."""


def convert_server(folder: Path, *, to: str = OLDEST) -> str:
    """Convert the database of a server's data folder; return a sentence about it.

    Args:
        to: the revision to convert it to.

    Raises:
        FolderInUse: a server runs in the folder.
        DatabaseDamaged, DATABASE_FOREIGN, DATABASE_TOO_NEW: the database cannot be used.
    """
    path = folder / DATABASE
    with locked(folder):
        damage.check(path, to, [*OLD_REVISIONS, to])
        with sqlite.connected(path) as connection, connection.begin():
            revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
            if revision == to:
                return f"{path} needs no conversion."
            config = Config()
            config.set_main_option("script_location", str(HERE))
            config.attributes |= {"connection": connection, "data": folder}
            command.upgrade(config, to)
    return f"{path} is converted from revision {revision} to {to}."


def convert_agent(results: Path) -> str:
    """Convert the results that an agent has not delivered; return a sentence about them."""
    old = sorted(results.glob(f"*{OLD_RESULT}"))
    for path in old:
        data = path.read_bytes()
        digest, message = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(message).digest() == digest:  # otherwise the agent deletes it, as it does with all damaged ones
            body = converted(agent_pb2.RunResult, message).SerializeToString()
            part = path.with_suffix(".part")
            part.write_bytes(hashlib.sha256(body).digest() + body)
            part.replace(path.with_suffix(RESULT))
            path.unlink()
    return f"{results} has {len(old)} results that were converted."


def main() -> int:
    """Convert the folder of the command line, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder: Path = parser.parse_args().folder
    try:
        if (folder / DATABASE).is_file():
            print(convert_server(folder))
        elif (folder / "results").is_dir():
            print(convert_agent(folder / "results"))
        else:
            parser.error(f"{folder} is not the data folder of a server or an agent: it has neither {DATABASE} nor results.")
    except EtfarmError as error:
        print(f"{error} {error.remedy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
