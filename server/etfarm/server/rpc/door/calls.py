"""The running calls: limits per principal, and cancellation once a token or membership is no longer valid."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from etfarm.server.access.tokens import Credential, Unauthenticated
from etfarm.server.rpc.door.caller import Resolve
from etfarm.v1.common_pb2 import Principal
from etfarm.wire.errors import EtfarmError, Kind, UserError

MAX_CALLS: Final = 4096
"""Maximum number of concurrent calls of one principal: an agent has a stream, sessions and transfers for each of 300 phones."""


class TooManyCalls(UserError):
    """A principal with the maximum number of open calls."""

    reason = "TOO_MANY_CALLS"
    kind = Kind.RESOURCE_EXHAUSTED


class ProjectsChanged(UserError):
    """A running call that may read a project which its caller is no longer a member of."""

    reason = "PROJECTS_CHANGED"
    kind = Kind.UNAVAILABLE


class Call:
    """One call after its authentication."""

    def __init__(self, method: str, credential: Credential, principal: Principal, task: asyncio.Task[Any]) -> None:
        self.method = method
        self.credential = credential
        self.principal = principal
        self.ending: EtfarmError | None = None
        """Error with which the server ended the call and cancelled its handler: the token became invalid, or the caller left a
        project."""
        self.abort_sending: Callable[[EtfarmError], Awaitable[None]] | None = None
        """Function that sends the status of a call whose handler waits for gRPC to send a response that the caller may never
        read."""
        self.is_handled = False
        """Whether a handler runs, which may be cancelled. Before and after it, gRPC receives the request or sends the response: a
        call that is cancelled then ends without a status, for which its caller waits."""
        self._task = task
        self._aborting: asyncio.Task[None] | None = None

    def end(self, error: EtfarmError) -> None:
        """Cancel the handler, or prevent its start if it does not run yet; the caller gets the error."""
        self.ending = error
        if self.abort_sending is None:
            if self.is_handled:
                self._task.cancel()
        else:
            self._aborting = asyncio.create_task(self._abort(self.abort_sending, error), name="end of a call")

    async def _abort(self, abort: Callable[[EtfarmError], Awaitable[None]], error: EtfarmError) -> None:
        # gRPC takes the status before it is cancelled, and sends it after the responses that are already being sent.
        sending = asyncio.ensure_future(abort(error))
        await asyncio.sleep(0)
        self._task.cancel()
        await sending

    def recover(self) -> EtfarmError:
        """Return `ending`, and clear the cancellation of the handler's task so that it can send the error."""
        assert self.ending is not None
        self._task.uncancel()
        return self.ending


class Calls:
    """The running calls of a server.

    Args:
        is_valid: returns whether calls with a credential may continue.
        resolve: returns a principal with the projects that it currently sees.
    """

    def __init__(self, is_valid: Callable[[Credential], bool], resolve: Resolve, most: int = MAX_CALLS) -> None:
        self._is_valid = is_valid
        self._resolve = resolve
        self._most = most
        self._running: set[Call] = set()
        self._of_principal: Counter[str] = Counter()

    def begin(self, method: str, credential: Credential, principal: Principal) -> Call:
        """Register a call, which the current task handles, until that task ends.

        Raises:
            TooManyCalls: the principal has too many open calls.
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
                    ProjectsChanged(f"{call.principal.name} is no longer a member of a project of this call.", "Call again.")
                )
