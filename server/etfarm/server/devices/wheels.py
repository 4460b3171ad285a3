"""Wheels of etfarm, to which agents are upgraded: their versions, and the one that the operator configured."""

from __future__ import annotations

import asyncio
import re
import zipfile
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.store import Store
from etfarm.wire import digest as digests
from etfarm.wire.errors import UserError

MAX_WHEEL_BYTES: Final = 256 << 20

_MAX_METADATA: Final = 1 << 20
_MAX_FILES: Final = 20_000
_VERSION: Final = re.compile(r"[0-9][0-9A-Za-z.!+_-]{0,63}", re.ASCII)
_AGENT: Final = "etfarm/device_agents/main.py"
_REMEDY: Final = "Give the .whl that `pip wheel --no-deps .` writes."


class NotAWheel(UserError):
    """A file that is no wheel of etfarm."""

    reason = "NOT_A_WHEEL"


@dataclass(frozen=True)
class AgentWheel:
    """The wheel of `etfarm serve --agent-wheel`, as it was when the server started."""

    path: Path
    version: str
    """Its version of etfarm."""
    digest: str

    @classmethod
    def read(cls, path: Path) -> AgentWheel:
        """Return the wheel in a file. Blocks.

        Raises:
            NotAWheel: there is no such file, or it is not a wheel of etfarm with an agent.
        """
        if not path.is_file():
            raise NotAWheel(f"There is no wheel {path}.", _REMEDY)
        return cls(path, read_version(path), digests.of_file(path))

    async def put(self, store: Store, owner: str, holder: str) -> None:
        """Store the wheel as an upload of a principal, unless it is stored.

        Raises:
            NotAWheel: the file has changed since the server started.
            DiskFull: the store cannot write.
        """
        if await store.has(self.digest):
            return
        remedy = "Restart the server, or give the wheel with --wheel."
        try:
            data = await asyncio.to_thread(self.path.read_bytes)
        except OSError as error:
            raise NotAWheel(f"{self.path} cannot be read any more: {error.strerror}.", remedy) from None
        if await asyncio.to_thread(digests.of_bytes, data) != self.digest:
            raise NotAWheel(f"{self.path} has changed since the server started.", remedy)
        await store.put(data, owner, holder=holder)


def read_version(path: Path) -> str:
    """Return the version of etfarm that a wheel has. Blocks.

    Raises:
        NotAWheel: the file is not a wheel of etfarm with an agent.
    """
    try:
        if path.stat().st_size > MAX_WHEEL_BYTES:
            raise NotAWheel(f"A wheel must have at most {MAX_WHEEL_BYTES:,} bytes, got {path.stat().st_size:,}.", _REMEDY)
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(names) > _MAX_FILES:
                raise NotAWheel(f"The archive must have at most {_MAX_FILES:,} files, got {len(names):,}.", _REMEDY)
            metadata = [name for name in names if re.fullmatch(r"etfarm-[^/]+\.dist-info/METADATA", name)]
            if len(metadata) != 1 or _AGENT not in names:
                raise NotAWheel("The archive is not a wheel of etfarm.", _REMEDY)
            with archive.open(metadata[0]) as file:
                headers = BytesHeaderParser().parsebytes(file.read(_MAX_METADATA))
    except NotAWheel:
        raise
    except Exception as error:  # noqa: BLE001 - zipfile raises what each compression raises
        raise NotAWheel(f"The artifact is not a wheel: {error}.", _REMEDY) from None
    version = str(headers["Version"] or "")
    if str(headers["Name"] or "").lower() != "etfarm" or not _VERSION.fullmatch(version):
        raise NotAWheel(f"The wheel is of {headers['Name']!r} {version[:80]!r}, not of etfarm.", _REMEDY)
    return version
