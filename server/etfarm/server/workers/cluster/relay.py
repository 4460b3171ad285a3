"""One child of the cluster, as the connector relays it: its files to the node, its bytes and files to the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import uuid
from asyncio.streams import FlowControlMixin
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from etfarm.server.workers import errors
from etfarm.server.workers.channel import frames
from etfarm.server.workers.channel.room import require_room
from etfarm.server.workers.cluster import relay_frames
from etfarm.server.workers.cluster.file_cache import ArrivingFile, FileDiffers
from etfarm.server.workers.cluster.nodes import Node, NodeState
from etfarm.server.workers.ordered_process import Ends
from etfarm.wire import digest as digests
from etfarm.wire.errors import EtfarmError, Fault
from etfarm.wire.shielding import shielded

CALL_S: Final = 30.0
"""Time after which a node that does not answer counts as lost."""

_MAX_REASON: Final = 400
_SENDERS: Final = 4
"""Number of files that are sent to a node for one child at a time."""


class NodeGone(Exception):
    """A node does not answer."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(why)
        self.node = node


@dataclass
class Sending:
    """A file that children need on a node which lacks it."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    children: int = 0
    """Number of children that send it, or wait for the one that does."""
    is_done: bool = False
    """Whether the node has it."""


async def answer_of(reference: Any) -> Any:
    """Return what a call of Ray answers. Ray's client fails in its own thread when a future that it sets was cancelled."""
    return await shielded(asyncio.wrap_future(reference.future()))


def explain(error: BaseException) -> str:
    """Return what Ray says of an error, without the indented ids of what it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line and not line[0].isspace()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:_MAX_REASON]


class RayNode:
    """A node of the cluster with the actor on it.

    Args:
        on_change: called with each new state.
        on_defect: called with each error that is a defect of etfarm, on the node or here.
    """

    def __init__(
        self, node: Node, on_change: Callable[[Node], None], on_defect: Callable[[EtfarmError], None] = lambda _: None
    ) -> None:
        self.node = node
        self.actor: Any = None
        self.running = 0
        """Number of children on the node."""
        self.lost = asyncio.Event()
        self._on_change = on_change
        self.on_defect = on_defect
        self._sending: dict[str, Sending] = {}
        on_change(node)

    def change(self, state: NodeState, detail: str = "", **more: Any) -> bool:
        """Change the node's state, and report it if it is another one. Return whether it is."""
        changed = replace(self.node, state=state, detail=detail, **more)
        if changed == self.node:
            return False
        self.node = changed
        self._on_change(changed)
        return True

    async def call(self, method: str, arguments: Any, data: bytes = b"", *, timeout_s: float = CALL_S) -> bytes:
        """Call a method of the node's service.

        Raises:
            EtfarmError: the service raised it.
            BadAnswer: the node answered with anything else.
            NodeGone: the node did not answer, or Ray reports that it or the actor has ended.
        """
        if (actor := self.actor) is None:
            raise NodeGone(self.node.name, "Its service has ended.")
        encoded = json.dumps(arguments).encode()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await answer_of(actor.call.remote(method, encoded, data))
        except TimeoutError:
            raise self._lose(actor, f"It did not answer for {timeout_s:g} s.") from None
        except Exception as error:  # the service answers with its own errors
            raise self._lose(actor, explain(error)) from error
        try:
            return relay_frames.decode_answer(answer)
        except EtfarmError as error:
            if error.reason == errors.Defect.reason:
                self.on_defect(error)
            raise

    def _lose(self, actor: Any, why: str) -> NodeGone:
        # A call of an earlier actor may end after the node has another one.
        if self.node.state is NodeState.READY and self.actor is actor:
            self.change(NodeState.LOST, why)
            self.lost.set()
        return NodeGone(self.node.name, why)

    def refuse(self, why: str) -> NodeGone:
        """Take a node that sent what no node sends out of use, so that what it had to do is done on another one."""
        if self.node.state is NodeState.READY:
            self.change(NodeState.REFUSED, why)
            self.lost.set()
        return NodeGone(self.node.name, why)

    @contextlib.asynccontextmanager
    async def sending(self, digest: str) -> AsyncIterator[Sending]:
        """Hold the right to send a file, which several children may need at a time."""
        sending = self._sending.setdefault(digest, Sending())
        sending.children += 1
        try:
            async with sending.turn:
                yield sending
        finally:
            sending.children -= 1
            if not sending.children:
                del self._sending[digest]


async def relay(order: dict[str, Any], choose: Callable[[], RayNode], ends: Ends) -> None:
    """Run one child on a node. The daemon's hang-up kills it; without a status report, what ran it was lost."""
    channel, log, status = ends
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    hang_up, reporter = await asyncio.open_unix_connection(sock=status)
    lines = await _open_log(log)
    work = asyncio.create_task(_run(order, choose, reader, writer, lines), name=f"relay of {order['task']}")
    cancelled = asyncio.create_task(hang_up.read(), name=f"hang-up of {order['task']}")
    try:
        await asyncio.wait({work, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
        if not work.cancelled():
            reporter.write(work.result())
    finally:
        work.cancel()
        cancelled.cancel()
        for end in (writer, lines, reporter):  # the report last, since its end means the child's
            end.close()


async def _open_log(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(FlowControlMixin, os.fdopen(descriptor, "wb", buffering=0))
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _run(
    order: dict[str, Any],
    choose: Callable[[], RayNode],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    lines: asyncio.StreamWriter,
) -> bytes:
    """Return the status report of a child that has ended."""
    try:
        node = choose()
    except NodeGone as error:
        return _report_loss(error)
    node.running += 1
    try:
        return await _run_on(node, order, reader, writer, lines)
    except NodeGone as error:
        return _report_loss(error)
    except ConnectionError:
        return b""  # the daemon has hung up
    except errors.BadAnswer as error:
        return _report_loss(node.refuse(error.message))
    except EtfarmError as error:
        if error.fault is not Fault.FARM:  # a child's errors arrive on its channel
            return _report_loss(node.refuse("It blamed somebody else for an error of its own."))
        is_lost = error.reason == errors.NodeLost.reason
        return _report_loss(NodeGone(node.node.name, error.metadata.get("why", ""))) if is_lost else _report_error(error)
    except Exception as error:  # noqa: BLE001 - reported as a defect
        if errors.is_disk_full(error):
            return _report_error(errors.child_disk_full(order["task"], str(error)))
        defect = errors.Defect(f"The relay of {order['task']} to a compile node", error)
        node.on_defect(defect)
        return _report_error(defect)
    finally:
        node.running -= 1


async def _run_on(
    node: RayNode,
    order: dict[str, Any],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    lines: asyncio.StreamWriter,
) -> bytes:
    names, request = await frames.read(reader), await frames.read(reader)
    if names is None or request is None:
        raise ConnectionError("the daemon hung up before it had sent the request")
    files = await asyncio.to_thread(_describe, [Path(name) for name in json.loads(names[1])])
    child = uuid.uuid4().hex
    try:
        sizes = {file[0]: file[1] for file in files if file is not None}
        opened = await node.call("open", {"child": child, "task": order["task"], "files": sizes})
        missing = relay_frames.decode_missing(opened)
        await _send_files(node, child, {file[0]: file for file in files if file is not None and file[0] in missing}.values())
        digests_of = [None if file is None else file[0] for file in files]
        await node.call("begin", {"child": child, "files": digests_of}, request[1])
        report, listed = await _follow(node, child, writer, lines, most_bytes=order["file_bytes"])
        for name, size, digest in listed:
            await _fetch_file(node, child, Path(order["folder"]), name, size, digest, order["reserve_bytes"])
        return report
    finally:
        if node.node.state is NodeState.READY:
            await asyncio.shield(_close(node, child))


async def _close(node: RayNode, child: str) -> None:
    with contextlib.suppress(NodeGone, EtfarmError):  # an error that is a defect is in the log
        await node.call("close", {"child": child})


async def _follow(
    node: RayNode, child: str, writer: asyncio.StreamWriter, lines: asyncio.StreamWriter, *, most_bytes: int
) -> tuple[bytes, list[tuple[str, int, str]]]:
    """Pass on what a child writes. Return its supervisor's report, and its files with sizes and digests."""
    report = b""
    while True:
        for kind, data in relay_frames.split(await node.call("poll", {"child": child})):
            if kind == relay_frames.CHANNEL:
                writer.write(data)
                await writer.drain()
            elif kind == relay_frames.LOG:
                lines.write(data)
                await lines.drain()
            elif kind == relay_frames.STATUS:
                relay_frames.require_report(data)
                report = data
            elif kind == relay_frames.END:
                return report, relay_frames.decode_files(data, most_bytes=most_bytes)


def _describe(paths: list[Path]) -> list[tuple[str, int, Path] | None]:
    """Return the digest, size and path of each file; None for those that do not exist."""
    # The store names its files by their digests, which the node verifies.
    return [
        (path.name if digests.is_digest(path.name) else digests.of_file(path), path.stat().st_size, path)
        if path.is_file()
        else None
        for path in paths
    ]


async def _send_files(node: RayNode, child: str, files: Iterable[tuple[str, int, Path]]) -> None:
    """Send files, several at a time, since there may be tens of thousands of small ones."""
    waiting = iter(files)

    async def send_on() -> None:
        for file in waiting:
            await _send_file(node, child, *file)

    senders = [asyncio.create_task(send_on()) for _ in range(_SENDERS)]
    try:
        await asyncio.gather(*senders)
    finally:
        for sender in senders:
            sender.cancel()
        await asyncio.wait(senders)


async def _send_file(node: RayNode, child: str, digest: str, size: int, path: Path) -> None:
    async with node.sending(digest) as sending:
        if sending.is_done:
            return
        with path.open("rb") as file:
            offset = 0
            while True:
                data = await asyncio.to_thread(file.read, relay_frames.PIECE_BYTES)
                where = {"child": child, "digest": digest, "offset": offset, "size": size}
                await node.call("write", where, data)
                offset += len(data)
                if offset >= size:
                    sending.is_done = True
                    return
                if not data:
                    raise FileDiffers("A stored file is shorter than it was.", "Retry the job.")


async def _fetch_file(node: RayNode, child: str, folder: Path, name: str, size: int, digest: str, reserve_bytes: int) -> None:
    """Write a child's file to the daemon's folder of the child.

    Raises:
        BadAnswer: the file has another size or digest than the node listed.
        DISK_FULL: the disk has no room.
    """
    path = folder / name
    require_room(folder, size + reserve_bytes)
    file = ArrivingFile(path)
    with contextlib.closing(file):
        while file.size_bytes < size:
            data = await node.call("read", {"child": child, "name": name, "offset": file.size_bytes})
            if len(data) != min(relay_frames.PIECE_BYTES, size - file.size_bytes):
                raise errors.BadAnswer(f"The child's file {name[:100]!r} does not have the {size} bytes of its list.")
            await asyncio.to_thread(file.append, data)
    if file.digest != digest:
        raise errors.BadAnswer(f"The child's file {name[:100]!r} arrived with another digest.")


def _report_loss(gone: NodeGone) -> bytes:
    return json.dumps({"lost": gone.node, "why": str(gone)}).encode()


def _report_error(error: EtfarmError) -> bytes:
    return json.dumps({"error": errors.to_json(error).decode()}).encode()
