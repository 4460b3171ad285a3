"""The running calls: their principals, the limit of each principal, and the end of calls with their token or membership."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from etfarm.server.access.tokens import Credential
from etfarm.server.rpc.door.caller import Resolve
from etfarm.server.rpc.door.token_file import Unauthenticated
from etfarm.v1.common_pb2 import Principal
from etfarm.wire.errors import EtfarmError, Kind, UserError

MAX_CALLS: Final = 4096
"""Maximum number of concurrent calls of one principal: an agent has a stream, sessions and transfers for each of 300 phones."""


class TooManyCalls(UserError):
    """A principal has too many open calls."""

    reason = "TOO_MANY_CALLS"
    kind = Kind.RESOURCE_EXHAUSTED


class ProjectsChanged(UserError):
    """The caller of a call that runs is no longer a member of a project that the call may read."""

    reason = "PROJECTS_CHANGED"
    kind = Kind.UNAVAILABLE


class Call:
    """One call, from authentication on."""

    def __init__(self, method: str, credential: Credential, principal: Principal, task: asyncio.Task[Any]) -> None:
        self.method = method
        self.credential = credential
        self.principal = principal
        self.ending: EtfarmError | None = None
        """Why the server ended the call and cancelled its handler: the token is no longer valid, or the caller left a project."""
        self.abort_sending: Callable[[EtfarmError], Awaitable[None]] | None = None
        """Sends the status of a call while its handler waits for gRPC to send an answer that the caller may never read."""
        self.is_handled = False
        """Whether a handler runs, which may be cancelled. Before and after it gRPC receives the request and sends the answer; a
        call that is cancelled there ends without a status, and its caller waits for one."""
        self._task = task
        self._aborting: asyncio.Task[None] | None = None

    def end(self, error: EtfarmError) -> None:
        """Cancel the handler, which does not start if it does not run yet; the caller gets the error."""
        self.ending = error
        if self.abort_sending is None:
            if self.is_handled:
                self._task.cancel()
        else:
            self._aborting = asyncio.create_task(self._abort(self.abort_sending, error), name="end of a call")

    async def _abort(self, abort: Callable[[EtfarmError], Awaitable[None]], error: EtfarmError) -> None:
        # gRPC takes the status before it is cancelled, and sends it after the answers that are on their way.
        sending = asyncio.ensure_future(abort(error))
        await asyncio.sleep(0)
        self._task.cancel()
        await sending

    def recover(self) -> EtfarmError:
        """Return `ending` and let the handler's task continue, so that it can send the error."""
        assert self.ending is not None
        self._task.uncancel()
        return self.ending


class Calls:
    """The running calls of a server.

    Args:
        is_valid: whether calls with a credential may go on.
        resolve: gives a principal the projects that it sees now.
    """

    def __init__(self, is_valid: Callable[[Credential], bool], resolve: Resolve, most: int = MAX_CALLS) -> None:
        self._is_valid = is_valid
        self._resolve = resolve
        self._most = most
        self._running: set[Call] = set()
        self._of_principal: Counter[str] = Counter()

    def begin(self, method: str, credential: Credential, principal: Principal) -> Call:
        """Count a call, which the current task answers, until that task ends.

        Raises:
            TooManyCalls: the principal has too many.
        """
        name = principal.name
        if self._of_principal[name] >= self._most:
            raise TooManyCalls(
                f"{name} has {self._most} calls open, which is the limit.", "Wait for some of them to end.", limit=self._most
            )
        task = asyncio.current_task()
        assert task is not None
        call = Call(method, credential, principal, task)
        self._running.add(call)
        self._of_principal[name] += 1

        def release(_: object) -> None:
            self._running.discard(call)
            self._of_principal[name] -= 1
            if not self._of_principal[name]:
                del self._of_principal[name]

        task.add_done_callback(release)
        return call

    def end_invalid(self) -> None:
        """End the calls whose token was revoked, replaced or removed, or has expired, and those that see a former project."""
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
                    ProjectsChanged(f"{call.principal.name} is no longer a member of a project of this call.", "Call again.")
                )
