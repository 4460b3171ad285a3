"""The check of an uploaded wheel, which runs in a jailed child. Standard library only."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import Final

from etfarm.wire.errors import UserError

REMEDY: Final = "Give the .whl that `pip wheel --no-deps .` writes."
VERSION: Final = re.compile(r"[0-9][0-9A-Za-z.!+_-]{0,63}", re.ASCII)

_MAX_WHEEL_BYTES: Final = 256 << 20
_MAX_METADATA: Final = 1 << 20
_MAX_FILES: Final = 20_000
_AGENT: Final = "etfarm/device_agents/main.py"


class NotAWheel(UserError):
    """A file that is no wheel of etfarm."""

    reason = "NOT_A_WHEEL"


def check(wheel: Path, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: return the version of etfarm that a wheel has.

    Raises:
        NotAWheel: as `read_version`.
    """
    return read_version(wheel).encode()


def read_version(path: Path) -> str:
    """Return the version of etfarm that a wheel has. Blocks.

    Raises:
        NotAWheel: the file is not a wheel of etfarm with an agent.
    """
    try:
        if path.stat().st_size > _MAX_WHEEL_BYTES:
            raise NotAWheel(f"A wheel must have at most {_MAX_WHEEL_BYTES:,} bytes, got {path.stat().st_size:,}.", REMEDY)
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(names) > _MAX_FILES:
                raise NotAWheel(f"The archive must have at most {_MAX_FILES:,} files, got {len(names):,}.", REMEDY)
            metadata = [name for name in names if re.fullmatch(r"etfarm-[^/]+\.dist-info/METADATA", name)]
            if len(metadata) != 1 or _AGENT not in names:
                raise NotAWheel("The archive is not a wheel of etfarm.", REMEDY)
            with archive.open(metadata[0]) as file:
                headers = BytesHeaderParser().parsebytes(file.read(_MAX_METADATA))
    except NotAWheel:
        raise
    except Exception as error:  # noqa: BLE001 - zipfile raises what each compression raises
        raise NotAWheel(f"The artifact is not a wheel: {error}.", REMEDY) from None
    version = str(headers["Version"] or "")
    if str(headers["Name"] or "").lower() != "etfarm" or not VERSION.fullmatch(version):
        raise NotAWheel(f"The wheel is of {headers['Name']!r} {version[:80]!r}, not of etfarm.", REMEDY)
    return version
