"""The running calls: limits per principal, cancellation once a token or membership is no longer valid, and unread responses."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import grpc
from grpc.aio import ServicerContext

from etfarm.server.access.tokens import Credential, Unauthenticated
from etfarm.server.rpc.door.caller import Resolve
from etfarm.v1.common_pb2 import Principal
from etfarm.wire.errors import EtfarmError, Kind, UserError, error_for

MAX_CALLS: Final = 4096
"""Maximum number of concurrent calls of one principal: an agent has a stream, sessions and transfers for each of 300 phones."""

MAX_UNREAD: Final = 32
"""Maximum number of a principal's reads (see `is_read`) that are answered at a time, and of its responses of any rpc that wait to
be read for longer than `READ_S`. A response of a few MiB is in memory until its caller has read it."""

MAX_WAITING_READS: Final = 512
"""Maximum number of a principal's reads that wait for their turn: an agent asks for each of 300 phones. gRPC has already received
part of their requests."""

READ_S: Final = 10.0
LEAST_BYTES_PER_S: Final = 32 << 10
"""Time for which a response may wait to be read, and rate at which it must be read then, once `MAX_UNREAD` wait."""

_SMALL_READS: Final = frozenset({"GetServerInfo", "GetUploadStatus", "GetSecret"})
"""Reads with an answer of a few hundred bytes, which never waits to be read."""


def is_read(method: str) -> bool:
    """Return whether a method may answer with megabytes: it has the standard name of one that reads."""
    name = method.rpartition("/")[2]
    return name.startswith(("Get", "List", "Find", "Compare")) and name not in _SMALL_READS


class TooManyCalls(UserError):
    """A principal with the maximum number of open calls."""

    reason = "TOO_MANY_CALLS"
    kind = Kind.RESOURCE_EXHAUSTED


class Call:
    """One call after its authentication."""

    def __init__(
        self, method: str, credential: Credential, principal: Principal, task: asyncio.Task[Any], clock: Callable[[], float]
    ) -> None:
        self.method = method
        self.credential = credential
        self.principal = principal
        self.ending: EtfarmError | None = None
        """Error with which the server ended the call and cancelled its handler: the token became invalid, or the caller left a
        project."""
        self.abort_sending: Callable[[EtfarmError], Awaitable[None]] | None = None
        """Function that sends the status of a call whose handler waits for gRPC to send a response that the caller may never
        read."""
        self.is_stream = False
        """Whether it has many responses: such a call, as a watch, may last as long as its caller wishes."""
        self.is_handled = False
        """Whether a handler runs, which may be cancelled. Before and after it, gRPC receives the request or sends the response: a
        call that is cancelled then ends without a status, for which its caller waits."""
        self.peer = ""
        """gRPC's name of the caller's connection; empty if it has calls of others, too."""
        self.is_closing = False
        """Whether that connection will be closed."""
        self.release: Callable[[], None] = lambda: None
        """Function to call at the call's end."""
        self.unread_bytes = 0
        self.unread_since_s: float | None = None
        """Size of the response that gRPC sends, and when that began; None while it sends none."""
        self.task = task
        """The task that handles it."""
        self._clock = clock
        self._aborting: asyncio.Task[None] | None = None

    def begin_sending(self, size_bytes: int) -> None:
        """Record that gRPC begins to send a response of this size."""
        self.unread_bytes, self.unread_since_s = size_bytes, self._clock()

    async def write(self, context: ServicerContext[Any, Any], response: bytes) -> None:
        """Send an encoded response, which may wait to be read."""
        self.begin_sending(len(response))
        await context.write(response)
        self.unread_since_s = None

    def end(self, error: EtfarmError) -> None:
        """Cancel the handler, or prevent its start if it does not run yet; the caller gets the error."""
        self.ending = error
        if self.abort_sending is None:
            if self.is_handled:
                self.task.cancel()
        else:
            self._aborting = asyncio.create_task(self._abort(self.abort_sending, error), name="end of a call")

    async def _abort(self, abort: Callable[[EtfarmError], Awaitable[None]], error: EtfarmError) -> None:
        # gRPC takes the status before it is cancelled, and sends it after the responses that are already being sent.
        sending = asyncio.ensure_future(abort(error))
        await asyncio.sleep(0)
        self.task.cancel()
        with suppress(grpc.aio.InternalError):  # the call has ended by itself
            await sending

    def recover(self) -> EtfarmError:
        """Return `ending`, and clear the cancellation of the handler's task so that it can send the error."""
        assert self.ending is not None
        self.task.uncancel()
        return self.ending


class Calls:
    """The running calls of a server.

    Args:
        is_valid: returns whether calls with a credential may continue.
        resolve: returns a principal with the projects that it currently sees.
        clock: returns seconds on a monotonic clock.
        close: closes a connection by gRPC's name of its peer.
    """

    def __init__(
        self,
        is_valid: Callable[[Credential], bool],
        resolve: Resolve,
        most: int = MAX_CALLS,
        clock: Callable[[], float] = time.monotonic,
        close: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self._is_valid = is_valid
        self._resolve = resolve
        self._most = most
        self._clock = clock
        self._close = close
        self._refusal: EtfarmError | None = None
        """Error of calls that begin after the end of all."""
        self._running: set[Call] = set()
        self._of_principal: Counter[str] = Counter()
        self._reads: dict[str, asyncio.Semaphore] = {}
        self._waiting: Counter[str] = Counter()
        """Reads that wait for their turn, by principal."""

    def begin(self, method: str, credential: Credential, principal: Principal) -> Call:
        """Register a call, which the current task handles, until that task ends.

        Raises:
            TooManyCalls: the principal has too many open calls.
            EtfarmError: that of `finish`.
        """
        if self._refusal is not None:
            raise self._refusal
        name = principal.name
        if self._of_principal[name] >= self._most:
            raise TooManyCalls(
                f"{name} has {self._most} calls open, which is the limit.", "Wait for some of them to end.", limit=self._most
            )
        task = asyncio.current_task()
        assert task is not None
        call = Call(method, credential, principal, task, self._clock)
        self._running.add(call)
        self._of_principal[name] += 1

        def release(_: object) -> None:
            self._running.discard(call)
            call.release()
            self._of_principal[name] -= 1
            if not self._of_principal[name]:
                del self._of_principal[name]
                self._reads.pop(name, None)

        task.add_done_callback(release)
        return call

    async def take_turn(self, call: Call) -> None:
        """Wait until a principal has room for one more read, before its request is received; the room is free after the call.

        Raises:
            TooManyCalls: too many of its reads wait already.
        """
        name = call.principal.name
        if self._waiting[name] >= MAX_WAITING_READS:
            raise TooManyCalls(
                f"{name} has {MAX_WAITING_READS} reads waiting, which is the limit.",
                "Read the responses of earlier ones.",
                limit=MAX_WAITING_READS,
            )
        turns = self._reads.setdefault(name, asyncio.Semaphore(MAX_UNREAD))
        self._waiting[name] += 1
        try:
            await turns.acquire()
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]
        call.release = turns.release

    def sending(self, call: Call, serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        """Return a serializer of a call's responses that notes when gRPC begins to send one."""

        def noted(response: Any) -> bytes:
            data = serialize(response)
            # Health checks write their few bytes themselves, and do not say when these are sent.
            if call.abort_sending is not None or not call.is_handled:
                call.begin_sending(len(data))
            return data

        return noted

    async def finish(self, error: EtfarmError, wait_s: float) -> None:
        """End all calls: streams at once, others if they do not end by themselves in time. No more begin.

        Their callers get the error. gRPC would cancel what is open at its server's end, as if the callers had done so.
        """
        self._refusal = error
        for only_streams in (True, False):
            for call in self._running:
                if call.ending is None and (call.is_stream or not only_streams):
                    call.end(error)
            if self._running:
                await asyncio.wait([call.task for call in self._running], timeout=wait_s)

    def look(self) -> None:
        """End the calls that may not continue."""
        self.end_invalid()
        self.close_unread()

    def close_unread(self) -> None:
        """Close connections with responses that are read too slowly, of principals with more of them than may wait.

        gRPC cannot end a call whose response waits: it would send the status after the response.
        """
        now = self._clock()
        unread: defaultdict[str, list[Call]] = defaultdict(list)
        for call in self._running:
            if call.unread_since_s is not None and not call.is_closing:
                unread[call.principal.name].append(call)
        excessive: set[str] = set()
        for name, calls in unread.items():
            excess = len(calls) + self._waiting[name] - MAX_UNREAD
            slow = [call for call in calls if call.peer and now > _read_by_s(call)]
            excessive |= {call.peer for call in sorted(slow, key=_read_by_s)[: max(excess, 0)]}
        for call in self._running if excessive else ():
            call.is_closing |= call.peer in excessive
        for peer in excessive:
            self._close(peer)

    def end_invalid(self) -> None:
        """End calls with tokens that were revoked, replaced or removed or have expired, and those that see a former project."""
        projects: dict[bytes, frozenset[str]] = {}
        for call in list(self._running):
            key = call.credential.key
            if call.ending is not None:
                continue
            if not self._is_valid(call.credential):
                call.end(
                    Unauthenticated(
                        "The token of this call was revoked, replaced or has expired.", "Set ETFARM_TOKEN to a valid one."
                    )
                )
                continue
            if key not in projects:
                projects[key] = frozenset(self._resolve(call.credential.principal, "").projects)
            if not projects[key].issuperset(call.principal.projects):
                call.end(
                    error_for(
                        "PROJECTS_CHANGED",
                        f"{call.principal.name} is no longer a member of a project of this call.",
                        "Call again.",
                    )
                )


def _read_by_s(call: Call) -> float:
    """Return when a response should have been read."""
    assert call.unread_since_s is not None
    return call.unread_since_s + READ_S + call.unread_bytes / LEAST_BYTES_PER_S
