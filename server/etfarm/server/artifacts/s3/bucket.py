"""The objects of one bucket: each request is bounded, repeated when the server fails, and counted."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from etfarm.server.artifacts.s3.errors import (
    DENIED,
    LOOK,
    NO_BUCKET,
    BlobsUnavailable,
    BlobsUnusable,
    Failure,
    checked,
    code_of,
)
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.extras import require_extra
from etfarm.wire.chunks import spans
from etfarm.wire.retry_backoff import retry_backoff

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Store

T = TypeVar("T")

PIECE_BYTES: Final = 4 << 20
"""Size of the ranges in which an object is read."""
_AHEAD: Final = 3
"""Number of ranges of one object that are requested at a time."""
_PART_BYTES: Final = 16 << 20
"""Size from which an object is sent in parts, and size of each."""
_PARTS_AT_ONCE: Final = 3
_PAGE: Final = 1_000
"""Number of objects that are listed at a time, which is what S3 answers at most."""
_AT_ONCE: Final = 16
"""Maximum number of transfers at a time; further ones wait."""
_FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 5.0
PATIENCE_S: Final = 60.0
"""Time for which a failed request is repeated by default."""
SIGNED_S: Final = 300.0
"""Time for which a presigned URL can be used: long enough for clocks that differ by some minutes, since it is used at once."""
_CHECK_S: Final = 5.0
"""Time limit of a check."""

BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, math.inf)
"""Upper bounds by which the durations of operations are counted."""
_READS: Final = frozenset({"copy", "get", "head"})
"""Operations that need an object."""
_NO_CONDITIONS: Final = "NotImplemented"
"""Code of a server that does not compare before it writes."""
PROBE: Final = "probe"
"""Key of the object that a check writes."""


@dataclass
class BucketUse:
    """What a process has asked of a bucket since its start."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Numbers of operations, by name and outcome: ok, missing, or failed."""
    durations: Counter[tuple[str, float]] = field(default_factory=Counter)
    """Numbers of operations, by name and by the first of BOUNDS_S that they did not exceed."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Total time of operations by name, with the pauses between tries."""
    retries: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    signed: int = 0
    """Number of presigned URLs."""

    def count(self, operation: str, outcome: str, seconds: float) -> None:
        """Count an operation that ended."""
        self.requests[operation, outcome] += 1
        self.durations[operation, next(bound_s for bound_s in BOUNDS_S if seconds <= bound_s)] += 1
        self.seconds[operation] = self.seconds.get(operation, 0.0) + seconds


@dataclass(frozen=True)
class Stored:
    """An object."""

    key: str
    size_bytes: int
    changed_at: datetime


class Bucket:
    """A folder of a bucket.

    Args:
        patience_s: time for which a failed request is repeated.
        timeout_s: time limit of one request.
        presign: URL at which the readers of presigned URLs reach the server; empty to sign none.

    Raises:
        ExtraMissing: obstore is not installed.
    """

    def __init__(
        self, location: BucketLocation, *, patience_s: float = PATIENCE_S, timeout_s: float = 30.0, presign: str = ""
    ) -> None:
        require_extra("A bucket for artifacts", "scale", "obstore")
        self.location = location
        self.use = BucketUse()
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._store = self._open(timeout_s, location.endpoint)
        # The host is a part of what is signed.
        self._signer = self._open(timeout_s, presign) if presign else None

    def _open(self, timeout_s: float, endpoint: str) -> S3Store:
        from obstore.store import S3Store  # only where --blobs is given

        location, client = self.location, dict[str, Any]()
        client |= {"timeout": timedelta(seconds=timeout_s), "connect_timeout": timedelta(seconds=min(5.0, timeout_s))}
        client |= {"allow_http": endpoint.startswith("http://")}
        if location.authorities is not None:
            client["root_certificate"] = location.authorities
        settings: dict[str, Any] = {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint} if endpoint else {}
        if location.credentials.session_token:
            settings["session_token"] = location.credentials.session_token
        return S3Store(
            location.bucket,
            prefix=location.prefix or None,
            region=location.region,
            # Static credentials always: without them, obstore would ask the metadata service of a cloud's machine.
            access_key_id=location.credentials.access_key,
            secret_access_key=location.credentials.secret_key,
            skip_signature=False,
            virtual_hosted_style_request=False,
            disable_bulk_delete=True,
            checksum_algorithm="SHA256",  # the server compares what it stores
            client_options=client,  # type: ignore[arg-type]
            # Repeats a part of a transfer; `_attempt` repeats the rest.
            retry_config={
                "max_retries": 2,
                "retry_timeout": timedelta(seconds=timeout_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=_FIRST_PAUSE_S), "max_backoff": timedelta(seconds=1), "base": 2,
                },
            },
            **settings,
        )  # fmt: skip

    async def put(self, key: str, source: Path | bytes) -> None:
        """Store an object, which replaces one of the same key.

        Raises:
            BlobsUnavailable: the server failed.
        """
        import obstore

        size_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size
        async with self._turns:
            await self._attempt(
                "put",
                key,
                lambda: obstore.put_async(
                    self._store, key, source, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE,
                    use_multipart=size_bytes > _PART_BYTES,
                ),
            )  # fmt: skip
        self.use.sent_bytes += size_bytes

    async def create(self, key: str, data: bytes) -> None:
        """Store a small object, unless there is one of the same key already.

        Raises:
            BlobsUnavailable: the server failed.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        async def create() -> None:
            try:
                await obstore.put_async(self._store, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return
            except Exception as error:
                if code_of(error) != _NO_CONDITIONS:
                    raise
                await obstore.put_async(self._store, key, data, use_multipart=False)

        async with self._turns:
            await self._attempt("put", key, create)
        self.use.sent_bytes += len(data)

    async def has(self, key: str) -> bool:
        """Return whether there is an object, by a list: credentials need not permit to ask for one that is missing.

        Raises:
            BlobsUnavailable: the server failed.
        """
        return await self._attempt("list", key, lambda: self._lists(key))

    async def _lists(self, key: str) -> bool:
        import obstore

        async with asyncio.timeout(self._timeout_s):
            folder, before = key.rpartition("/")[0], key[:-1]
            page = await anext(obstore.list(self._store, folder, offset=before, chunk_size=_PAGE), None)
        return any(each["path"] == key for each in page or ())

    async def size(self, key: str) -> int | None:
        """Return an object's size in bytes; None if there is none.

        Raises:
            BlobsUnavailable: the server failed.
        """
        import obstore

        try:
            meta = await self._attempt("head", key, lambda: obstore.head_async(self._store, key))
        except FileNotFoundError:
            return None
        return int(meta["size"])

    async def pieces(self, key: str, size_bytes: int) -> AsyncIterator[bytes]:
        """Yield an object's bytes in pieces.

        Raises:
            FileNotFoundError: there is no such object.
            BlobsUnavailable: the server failed.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._turns)
            coming = deque[asyncio.Task[bytes]]()
            stack.callback(lambda: [task.cancel() for task in coming])
            for start, length in spans(0, size_bytes, PIECE_BYTES):
                coming.append(asyncio.create_task(self._piece(key, start, length)))
                if len(coming) == _AHEAD:
                    yield await coming[0]
                    coming.popleft()
            while coming:
                yield await coming[0]
                coming.popleft()

    async def _piece(self, key: str, start: int, length: int) -> bytes:
        import obstore

        async def get() -> bytes:
            answer = await obstore.get_async(self._store, key, options={"range": (start, start + length)})
            parts, received = [], 0
            # Not `get_range`, which receives as many bytes as the server announces, however few were requested.
            async for part in answer.stream(length):
                parts.append(part)
                if (received := received + len(part)) > length:
                    break
            if received != length:
                raise OSError(f"{received} bytes arrived instead of {length}")
            return b"".join(parts)

        piece = await self._attempt("get", key, get)
        self.use.received_bytes += length
        return piece

    async def text(self, key: str, most_bytes: int) -> str | None:
        """Return the beginning of a small object's text; None if there is no object.

        Raises:
            BlobsUnavailable: the server failed.
        """
        import obstore

        async def get() -> bytes:
            data = b""
            async for part in (await obstore.get_async(self._store, key)).stream(most_bytes):
                data += part
                if len(data) >= most_bytes:
                    break
            return data[:most_bytes]

        try:
            return (await self._attempt("get", key, get)).decode(errors="replace")
        except FileNotFoundError:
            return None

    async def delete(self, key: str) -> None:
        """Delete an object, if it exists.

        Raises:
            BlobsUnavailable: the server failed.
        """
        import obstore

        with suppress(FileNotFoundError):
            await self._attempt("delete", key, lambda: obstore.delete_async(self._store, key))

    async def move(self, key: str, to: str) -> None:
        """Rename an object, without its bytes leaving the server.

        Raises:
            FileNotFoundError: there is no such object.
            BlobsUnavailable: the server failed, or the object is too large for it to copy.
        """
        import obstore

        await self._attempt("copy", key, lambda: obstore.copy_async(self._store, key, to))
        await self.delete(key)

    async def list(self, prefix: str) -> AsyncIterator[Sequence[Stored]]:
        """Yield the objects of a folder in the order of their keys, some at a time.

        Whoever can write the bucket chooses the keys.

        Raises:
            BlobsUnavailable: the server failed, repeats itself, or lists a key that is no path.
        """
        import obstore

        async def get_page(after: str | None) -> Sequence[ObjectMeta] | None:
            async with asyncio.timeout(self._timeout_s):  # of all of its requests: a server may answer with empty pages
                return await anext(obstore.list(self._store, prefix, offset=after, chunk_size=_PAGE), None)

        after: str | None = None
        while page := await self._attempt("list", prefix, partial(get_page, after)):
            yield [Stored(each["path"], each["size"], each["last_modified"].astimezone(UTC)) for each in page]
            last = max(each["path"] for each in page)
            if after is not None and last <= after:
                raise self._unavailable("list", prefix, Failure("the server lists the same objects again", LOOK))
            after = last

    @property
    def signs(self) -> bool:
        """Whether it signs URLs."""
        return self._signer is not None

    async def sign(self, key: str) -> str:
        """Return a URL with which everybody can read an object, and nothing else, for SIGNED_S. Asks no server."""
        import obstore

        assert self._signer is not None
        self.use.signed += 1
        return str(await obstore.sign_async(self._signer, "GET", key, timedelta(seconds=SIGNED_S)))

    async def check(self) -> None:
        """Write, read and delete a small object, within 5 s.

        Raises:
            BlobsAway: the server does not answer.
            BlobsUnusable: it answers, and the bucket cannot be used.
        """
        probing = Bucket(self.location, patience_s=min(_CHECK_S, self._patience_s), timeout_s=_CHECK_S)
        key, read = f"{PROBE}-{random.randbytes(8).hex()}", b""
        with checked(), suppress(FileNotFoundError):
            try:
                async with asyncio.timeout(_CHECK_S):
                    # A server may create a bucket that is written, and its name may be misspelled.
                    await anext(probing.list(PROBE), None)
                    await probing.put(key, PROBE.encode())
                    read = b"".join([piece async for piece in probing.pieces(key, len(PROBE))])
                    await probing.delete(key)
            except TimeoutError:
                raise self._unavailable("check", key, Failure(f"it takes longer than {_CHECK_S:g} s", LOOK)) from None
        if read != PROBE.encode():
            raise BlobsUnusable(f"{self.location.place} does not return what was written there.", "Check the S3 server.")

    async def _attempt(self, operation: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        """Return a request's answer; repeat it while the server fails, with growing pauses, up to the patience."""
        from obstore.exceptions import BaseError

        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for wait_s in retry_backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S):
            try:
                answer = await call()
            except (BaseError, OSError) as error:
                cause = await self._cause(error, operation, key)
                failure = Failure.of(cause, self.location.bucket)
                if isinstance(cause, FileNotFoundError) and not failure.is_lasting:
                    self.use.count(operation, "missing", loop.time() - began_s)
                    raise cause from None
                if failure.is_lasting or loop.time() + wait_s > began_s + self._patience_s:
                    self.use.count(operation, "failed", loop.time() - began_s)
                    raise self._unavailable(operation, key, failure) from None
            else:
                self.use.count(operation, "ok", loop.time() - began_s)
                return answer
            self.use.retries += 1
            await asyncio.sleep(wait_s)
        raise AssertionError("pauses never end")

    async def _cause(self, error: Exception, operation: str, key: str) -> Exception:
        """Return what another request is answered where an answer does not say enough.

        That to a HEAD has no code: an object may be missing, or the whole bucket. SeaweedFS refuses to write where no bucket is.
        S3 refuses to read a missing object if the credentials may list only a part of the bucket.
        """
        import obstore
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        code = code_of(error)
        if code not in ("", DENIED) or not isinstance(error, (FileNotFoundError, PermissionDeniedError, UnauthenticatedError)):
            return error
        try:
            await obstore.get_async(self._store, key)
        except (BaseError, OSError) as of_get:
            if not code or code_of(of_get) == NO_BUCKET:
                error = of_get
        if operation in _READS and code_of(error) == DENIED:
            with suppress(BaseError, OSError):
                return error if await self._lists(key) else FileNotFoundError(key)
        return error

    def _unavailable(self, operation: str, key: str, failure: Failure) -> BlobsUnavailable:
        return BlobsUnavailable(f"The request {operation} of {key.rpartition('/')[2][:12]}", self.location.place, failure)
