"""Files that visitors have sent for a submission: kept in a folder of this process until they are submitted, or too old.

The page does not look into them: they go to the farm as they are, and a jailed process of the farm describes them.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, Protocol

from etfarm.client.errors import EtfarmError
from etfarm.client.submit.prepared import PreparedModel
from etfarm.wire.errors import error_for, error_of

MAX_OF_VISITOR: Final = 8
"""Number of a visitor's files; the oldest one is removed for another one."""
MAX_WAIT_S: Final = 60.0
"""Seconds that a browser may take to send the next part of a file."""
KEEP_S: Final = 3_600.0
"""Seconds for which a file is kept without being submitted."""
SWEEP_S: Final = 60.0
"""Pause between two searches for files that are too old."""
SUFFIXES: Final = (".pt2", ".pte")
MAX_NAME_CHARACTERS: Final = 120

_BUFFER_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Upload:
    """A file that a visitor has sent."""

    id: str
    owner: str = field(repr=False)
    """The cookie of its visitor."""
    account: str = field(repr=False)
    """Identifies the token of its visitor."""
    name: str
    """The file's name in the browser, without a folder."""
    path: Path
    size_bytes: int
    stored_s: float
    """Time of the monotonic clock."""
    model: PreparedModel = field(repr=False)
    """The file as the farm describes it."""


class Inspect(Protocol):
    """Function that has the farm describe a file."""

    def __call__(self, path: Path, *, name: str) -> Awaitable[PreparedModel]:
        """Return the file as a model with this name."""


class Uploads:
    """The files of all visitors. The sizes of an account's files together are bounded, and those of all."""

    def __init__(self, max_account_bytes: int, max_total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare without files.

        Args:
            max_account_bytes: maximum size of the files of all visitors with one token.
            max_total_bytes: maximum size of all files together.
        """
        self._max_account_bytes = max_account_bytes
        self._max_total_bytes = max_total_bytes
        self._clock = clock
        self._folder: Path | None = None
        self._uploads: dict[str, Upload] = {}
        self._arriving_bytes: Counter[str] = Counter()
        """Sizes of files that arrive, by account."""

    async def store(self, owner: str, account: str, name: str, chunks: AsyncIterator[bytes], inspect: Inspect) -> Upload:
        """Write a file while it arrives, and have the farm describe it.

        Args:
            owner: the cookie of the visitor, who alone can use it.
            account: identifies the visitor's token.
            name: the file's name in the browser.
            inspect: has the farm describe the file.

        Raises:
            EtfarmError: the farm refuses the file.
            BAD_UPLOAD: it is not a .pt2 or .pte, or it is empty.
            MODEL_FILE_STALLED: the browser stops sending.
            MODEL_FILE_NOT_STORED: there is no room for it.
        """
        name = _checked_name(name)
        identity = secrets.token_urlsafe(16)
        path = self._open_folder() / f"{identity}{PurePosixPath(name).suffix.lower()}"
        self._make_room(owner)
        size_bytes = 0
        try:
            with path.open("xb") as file:
                async for part in _gathered(chunks):
                    self._require_room(account, len(part))
                    self._arriving_bytes[account] += len(part)
                    size_bytes += len(part)
                    await _write(file, part)
            if not size_bytes:
                raise error_for("MODEL_FILE_REFUSED", "The file is empty.", "Choose another one.", name=name)
            model = await _inspected(inspect, path, name)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            self._arriving_bytes[account] -= size_bytes
            self._arriving_bytes += Counter()  # keeps positive ones
        upload = Upload(identity, owner, account, name, path, size_bytes, self._clock(), model)
        self._uploads[identity] = upload
        return upload

    def get(self, owner: str, identity: str) -> Upload:
        """Return a visitor's file.

        Raises:
            MODEL_FILE_GONE: the visitor has none of this id.
        """
        upload = self._uploads.get(identity)
        if upload is None or upload.owner != owner:
            raise error_for(
                "MODEL_FILE_GONE", "The file is not there: none was chosen, or it was sent long ago.", "Choose the file again."
            )
        return upload

    def remove(self, upload: Upload) -> None:
        """Delete a file."""
        self._uploads.pop(upload.id, None)
        upload.path.unlink(missing_ok=True)

    def remove_of(self, owner: str) -> None:
        """Delete a visitor's files."""
        for upload in self._of(owner):
            self.remove(upload)

    async def sweep(self) -> None:
        """Delete files that are too old, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._remove_old()

    def close(self) -> None:
        """Delete all files."""
        self._uploads.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _make_room(self, owner: str) -> None:
        """Delete files that are too old, and the visitor's oldest ones if there are too many."""
        self._remove_old()
        for upload in self._of(owner)[: 1 - MAX_OF_VISITOR]:
            self.remove(upload)

    def _of(self, owner: str) -> list[Upload]:
        return [upload for upload in self._uploads.values() if upload.owner == owner]

    def _remove_old(self) -> None:
        oldest_s = self._clock() - KEEP_S
        for upload in [each for each in self._uploads.values() if each.stored_s < oldest_s]:
            self.remove(upload)

    def _require_room(self, account: str, count_bytes: int) -> None:
        stored = list(self._uploads.values())
        of_account = sum(upload.size_bytes for upload in stored if upload.account == account) + self._arriving_bytes[account]
        of_all = sum(upload.size_bytes for upload in stored) + self._arriving_bytes.total()
        for used, limit, whose in (
            (of_account, self._max_account_bytes, "one user's"),
            (of_all, self._max_total_bytes, "all"),
        ):
            if used + count_bytes > limit:
                raise error_for(
                    "MODEL_FILE_NOT_STORED",
                    f"The page keeps at most {limit} bytes of {whose} files that wait for their submission.",
                    "Try again later, or use `etfarm bench`.", limit_bytes=limit,
                )  # fmt: skip

    def _open_folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="etfarm-web-"))
        return self._folder


async def _inspected(inspect: Inspect, path: Path, name: str) -> PreparedModel:
    """Return what the farm describes; its errors name the visitor's file, and not where the page keeps it."""
    try:
        return await inspect(path, name=name.rpartition(".")[0])
    except EtfarmError as error:
        message, remedy = (text.replace(str(path), name) for text in (error.message, error.remedy))
        raise error_of(error.fault, error.reason, message, remedy, kind=error.kind, stage=error.stage) from None


def _checked_name(name: str) -> str:
    """Return a file's name without folders.

    Raises:
        BAD_UPLOAD: it does not end with a known suffix.
    """
    name = name.replace("\\", "/").rpartition("/")[2].strip()
    if not name.lower().endswith(SUFFIXES) or name.startswith(".") or not name.isprintable():
        raise error_for(
            "MODEL_FILE_REFUSED",
            f"The file must be a .pt2 or a .pte, got {name[:80]!r}.",
            "Write a .pt2 with `torch.export.save(torch.export.export(model, inputs), \"model.pt2\")`.", name=name[:80],
        )  # fmt: skip
    if len(name) > MAX_NAME_CHARACTERS:
        raise error_for(
            "MODEL_FILE_REFUSED",
            f"The file's name must have at most {MAX_NAME_CHARACTERS} characters, got {len(name)}.",
            "Rename the file.",
        )
    return name


async def _gathered(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bytes in parts of at least a mebibyte, but for the last one.

    Raises:
        MODEL_FILE_STALLED: the next bytes do not come.
    """
    parts: list[bytes] = []
    gathered = 0
    while True:
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise error_for(
                "MODEL_FILE_STALLED", f"The browser sent nothing for {MAX_WAIT_S:g} s.", "Send the file again."
            ) from None
        if chunk is None:
            break
        parts.append(chunk)
        gathered += len(chunk)
        if gathered >= _BUFFER_BYTES:
            yield b"".join(parts)
            parts, gathered = [], 0
    if gathered:
        yield b"".join(parts)


async def _write(file: BinaryIO, part: bytes) -> None:
    try:
        await asyncio.to_thread(file.write, part)
    except OSError as error:
        raise error_for(
            "MODEL_FILE_NOT_STORED", f"The page cannot store the file: {error.strerror}.", "Tell who runs the page."
        ) from None
