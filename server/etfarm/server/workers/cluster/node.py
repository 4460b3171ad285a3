"""A node's service: a pool of local children, the files of their requests, and what the children write.

It runs in an actor of Ray and does not know Ray. Its caller is the server's connector.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import json
import os
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from etfarm.server.workers import errors, output_files
from etfarm.server.workers.child_pool import URGENT
from etfarm.server.workers.cluster import relay_frames
from etfarm.server.workers.cluster.file_cache import FileCache
from etfarm.server.workers.cluster.relayed_child import RelayedChild
from etfarm.server.workers.errors import NodeLost
from etfarm.server.workers.jail.isolation import JailOptions
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.wire.errors import EtfarmError

LEASE_S: Final = 15.0
"""Time without a call for a child after which the child is ended: its server, or the way to it, is gone."""


class NodeService:
    """The children of one server on this node.

    Args:
        settings: JSON with `preload`, `limits`, `concurrency` and `required` (jail), as `Workers` takes them.
    """

    def __init__(self, settings: bytes) -> None:
        values = json.loads(settings)
        self._folder = _create_folder()
        files = self._folder / "files"
        files.mkdir()
        files.chmod(0o711)
        limits = Limits(**values["limits"])
        self._files = FileCache(files, reserve_bytes=limits.reserve_bytes)
        self._workers = Workers(
            preload=values["preload"],
            limits=limits,
            folder=self._folder / "children",
            concurrency=values["concurrency"],
            options=JailOptions(hidden=_secrets(self._folder), required=values["required"]),
        )
        self._most_children = values["concurrency"] + URGENT
        self._children: dict[str, RelayedChild] = {}
        self._methods: Mapping[str, Callable[[Any, bytes], Awaitable[bytes]]] = {
            "boot_id": self._boot_id, "start": self._start, "open": self._open, "write": self._write, "begin": self._begin,
            "poll": self._poll, "read": self._read, "close": self._close, "stop": self._stop,
        }  # fmt: skip

    async def call(self, method: str, arguments: bytes, data: bytes) -> bytes:
        """Call a method and return its answer, which may be an error, see `relay_frames`.

        What Ray raises for a call is then the end of this process, or of the node, and nothing else.
        """
        try:
            return relay_frames.encode_result(await self._methods[method](json.loads(arguments), data))
        except EtfarmError as error:
            return relay_frames.encode_error(error)
        except Exception as error:  # noqa: BLE001 - the server logs it
            if errors.is_disk_full(error):
                return relay_frames.encode_error(errors.child_disk_full("a compile node's task", str(error)))
            traceback.print_exception(error)
            return relay_frames.encode_error(errors.Defect(f"The call {method[:50]!r} of a compile node", error))

    async def _start(self, arguments: Any, data: bytes) -> bytes:
        """Start the pool, and return the jail of a child."""
        self._workers.start()
        self._watch = asyncio.create_task(self._end_abandoned(), name="leases")
        jail = await self._workers.describe_jail()
        await self._workers.ready()
        return jail.to_json()

    async def _boot_id(self, arguments: Any, data: bytes) -> bytes:
        return boot_id().encode()

    async def _open(self, arguments: Any, data: bytes) -> bytes:
        """Open a child with the files of its request, `{digest: size}`. Return the digests of missing files."""
        if len(self._children) >= self._most_children:
            raise NodeLost(arguments["task"], "", "it has no place for a further child")
        key = arguments["child"]
        self._children[key] = RelayedChild(self._workers, arguments["task"], time.monotonic)
        return json.dumps(self._files.hold(key, arguments["files"])).encode()

    async def _write(self, arguments: Any, data: bytes) -> bytes:
        self._child(arguments)
        for key in self._files.holders(arguments["digest"]) & self._children.keys():
            self._children[key].touch()  # those that wait for the file, too
        where = (arguments["child"], arguments["digest"], arguments["offset"])
        await asyncio.to_thread(self._files.write, *where, data, arguments["size"])
        return b""

    async def _begin(self, arguments: Any, data: bytes) -> bytes:
        """Begin a child with the bytes of its request. `files` has a digest, or null for a missing file, for each file."""
        absent = self._folder / "absent"
        files = [absent if digest is None else self._files.path(digest) for digest in arguments["files"]]
        self._child(arguments).begin(self._folder / "children", files, data)
        return b""

    async def _poll(self, arguments: Any, data: bytes) -> bytes:
        return relay_frames.join(await self._child(arguments).read())

    async def _read(self, arguments: Any, data: bytes) -> bytes:
        child = self._child(arguments)
        return await asyncio.to_thread(child.read_file, arguments["name"], arguments["offset"])

    async def _close(self, arguments: Any, data: bytes) -> bytes:
        """End a child if it still runs, and delete its folder."""
        try:
            if (child := self._children.pop(arguments["child"], None)) is not None:
                await child.end()
        finally:
            self._files.release(arguments["child"])
        return b""

    async def _stop(self, arguments: Any, data: bytes) -> bytes:
        self._watch.cancel()
        for key in list(self._children):
            await self._close({"child": key}, b"")
        await self._workers.stop()
        await asyncio.to_thread(output_files.delete, self._folder)
        return b""

    def _child(self, arguments: Any) -> RelayedChild:
        if (child := self._children.get(arguments["child"])) is None:
            raise NodeLost("", "", f"it ended a child that its server did not ask for within {LEASE_S:g} s")
        return child

    async def _end_abandoned(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            for key, child in list(self._children.items()):
                if time.monotonic() - child.used_at > LEASE_S:
                    await self.call("close", json.dumps({"child": key}).encode(), b"")  # its errors do not end the loop


def boot_id() -> str:
    """Return the kernel's id of this boot, which machines do not share and containers of one machine do."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _create_folder() -> Path:
    """Return a new folder of this process; delete those of processes that have ended."""
    base = Path(tempfile.gettempdir()) / f"etfarm-nodes-{os.geteuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.geteuid():
        raise RuntimeError(f"{base} belongs to another user")
    for old in base.iterdir():
        if (lock := _lock(old)) is not None:
            output_files.delete(old)
            os.close(lock)
    # Another process may take a folder for an old one, and delete it, before it is locked.
    while _lock(folder := Path(tempfile.mkdtemp(prefix="node-", dir=base))) is None:
        pass
    atexit.register(output_files.delete, folder)
    return folder


def _lock(folder: Path) -> int | None:
    """Lock a folder until this process ends. Return the lock's descriptor; None if another process has it or has deleted it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    os.close(descriptor)
    return None


def _secrets(folder: Path) -> tuple[Path, ...]:
    """Return what children must not see even if it is within the code: this folder, and Ray's token and sessions."""
    token = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return (folder, Path.home() / ".ray", Path(tempfile.gettempdir()) / "ray", *([Path(token)] if token else []))
