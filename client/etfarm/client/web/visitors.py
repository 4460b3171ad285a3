"""Visitors: who has signed in with a token of the farm, and the client that acts for them.

A browser has a cookie with a random number; the token stays in this process. Visitors with the same token share an account:
one client of the farm, and one watch per topic. The farm decides what a visitor may do.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import EtfarmError, Kind
from etfarm.client.models import ServerInfo
from etfarm.client.transport.server_wait import BRIEF_S
from etfarm.client.web.forms import CsrfTokens
from etfarm.client.web.live import Feeds, Render
from etfarm.client.web.options import WebOptions
from etfarm.client.web.turns import FairSlots, Refusals, TooManyRequests
from etfarm.wire.errors import error_for

CODE_TIMEOUT_S: Final = 900.0
"""Seconds for which the one-time link can be used."""
SWEEP_S: Final = 30.0
"""Pause between two searches for visitors whose time is up."""
MAX_SIGN_INS: Final = 8
"""Number of tokens that are tried at the farm at the same time."""
MAX_SIGN_INS_OF_ADDRESS: Final = 4
"""Number of these that come from one address; `MAX_WAITING` more of it wait."""
MAX_WAITING: Final = 32
WAIT_S: Final = 20.0
"""Seconds that a sign-in waits for others at most."""


@dataclass
class Account:
    """A token of the farm in use: its client, and the feeds that its visitors share."""

    digest: str
    farm: AsyncFarm
    feeds: Feeds
    info: ServerInfo
    """The server, and the principal and role of the token, when it was last asked."""
    visitors: set[str] = field(default_factory=set)
    streams: int = 0
    """Number of open event streams of all its visitors."""


@dataclass
class Visitor:
    """A browser that has signed in."""

    cookie: str = field(repr=False)
    account: Account
    started_s: float
    seen_s: float
    """Times of the monotonic clock."""
    streams: int = 0
    """Number of open event streams."""
    requests: int = 0
    """Number of requests in progress, but for event streams."""
    on_sign_out: set[asyncio.Event] = field(default_factory=set, repr=False)
    """Set when the visitor signs out: the events that open streams wait for."""

    @property
    def name(self) -> str:
        """The principal, as the farm names it."""
        return self.account.info.principal

    @property
    def role(self) -> str:
        """The role that the farm reports: ADMIN, USER or VIEWER."""
        return self.account.info.role.upper()

    @property
    def may_change(self) -> bool:
        """Whether the role lets the visitor submit and change something at all."""
        return self.role in ("ADMIN", "USER")

    @property
    def is_admin(self) -> bool:
        """Whether the visitor is an admin of the farm."""
        return self.role == "ADMIN"


class Visitors:
    """Everybody who has signed in."""

    def __init__(self, options: WebOptions, render: Render, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare without visitors.

        Args:
            render: renders the fragments of live values.
        """
        self.csrf = CsrfTokens()
        # A browser sends a host's cookies to every port of it, so that two farms must not have the same.
        prefix = "__Secure-" if options.is_secure else ""
        self.cookie_name = f"{prefix}etfarm-{secrets.token_hex(4)}"
        self._options = options
        self._render = render
        self._clock = clock
        self._visitors: dict[str, Visitor] = {}
        self._accounts: dict[str, Account] = {}
        self._sign_ins = FairSlots(MAX_SIGN_INS, MAX_SIGN_INS_OF_ADDRESS, MAX_WAITING, "sign-ins from here")
        self._refusals = Refusals(clock)
        self._codes: dict[str, tuple[str, float]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.streams = 0
        """Number of open event streams of all visitors."""

    async def sign_in(self, token: str, owner: str = "") -> Visitor:
        """Return a new visitor with this token; an empty one is for farms without tokens.

        Args:
            owner: what the visitor's address counts as; it alone waits for its refused sign-ins.

        Raises:
            EtfarmError: UNAUTHENTICATED; SERVER_UNREACHABLE; TOO_MANY_REQUESTS.
        """
        async with self._sign_ins.take(owner, WAIT_S):
            try:
                account = await self._open_account(token.strip())
            except EtfarmError as error:
                if error.kind is Kind.UNAUTHENTICATED and owner:
                    await asyncio.sleep(self._refusals.delay_s(owner))
                if not self._options.forwarded_key:
                    error.metadata.pop("retry_after_s", None)  # of the page, and not of this visitor
                raise
        now = self._clock()
        visitor = Visitor(secrets.token_urlsafe(32), account, now, now)
        self._visitors[visitor.cookie] = visitor
        account.visitors.add(visitor.cookie)
        while len(self._visitors) > self._options.max_sessions:
            # Of the account with the most sessions, so that one token cannot sign out everybody else.
            others = [each for each in self._visitors.values() if each is not visitor]
            await self.sign_out(min(others, key=lambda each: (-len(each.account.visitors), each.seen_s)))
        return visitor

    def create_code(self, token: str) -> str:
        """Return a code that signs in once with a token, for the one-time link."""
        code = secrets.token_urlsafe(24)
        self._codes[code] = (token, self._clock() + CODE_TIMEOUT_S)
        return code

    async def enter(self, code: str, owner: str = "") -> Visitor:
        """Return a new visitor for a one-time code.

        Raises:
            SIGN_IN_LINK_USED: there is no such code any more.
            EtfarmError: as `sign_in`.
        """
        token, until_s = self._codes.pop(code, ("", 0.0))
        if self._clock() > until_s:
            raise error_for(
                "SIGN_IN_LINK_USED",
                "The sign-in link was used before, or it is too old.",
                "Sign in with a token of the farm.",
            )
        return await self.sign_in(token, owner)

    def find(self, request: Request) -> Visitor | None:
        """Return the visitor that a request belongs to; None if it has none."""
        visitor = self._visitors.get(request.cookies.get(self.cookie_name, ""))
        if visitor is None or self.is_expired(visitor):
            return None
        visitor.seen_s = self._clock()
        return visitor

    @contextmanager
    def occupy(self, visitor: Visitor, *, is_stream: bool) -> Iterator[None]:
        """Count a request of a visitor, or an event stream, until the block ends.

        Raises:
            TooManyRequests: the visitor, the account or all visitors have too many.
        """
        options, account = self._options, visitor.account
        if not is_stream:
            if visitor.requests >= options.max_requests_of_visitor:
                raise TooManyRequests(
                    f"{visitor.requests} requests of yours are in progress.", "Wait for one of them, or close a tab.",
                    limit=options.max_requests_of_visitor,
                )  # fmt: skip
            visitor.requests += 1
            try:
                yield
            finally:
                visitor.requests -= 1
            return
        if (
            visitor.streams >= options.max_streams_of_visitor
            or account.streams >= options.max_streams_of_account
            or self.streams >= options.max_streams
        ):
            raise TooManyRequests("Too many pages are open.", "Close other tabs.", limit=options.max_streams_of_visitor)
        visitor.streams += 1
        account.streams += 1
        self.streams += 1
        try:
            yield
        finally:
            visitor.streams -= 1
            account.streams -= 1
            self.streams -= 1

    def is_expired(self, visitor: Visitor) -> bool:
        """Return whether the visitor has been signed out, or the time is up."""
        now = self._clock()
        options = self._options
        is_idle = not visitor.streams and now - visitor.seen_s > options.idle_timeout_s
        return is_idle or now - visitor.started_s > options.session_timeout_s or visitor.cookie not in self._visitors

    def now_s(self) -> float:
        """Return the time of the clock that visitors' times are measured with."""
        return self._clock()

    async def sign_out(self, visitor: Visitor) -> None:
        """End a visitor's session; the last one of an account closes its client and streams."""
        self._visitors.pop(visitor.cookie, None)
        for event in visitor.on_sign_out:
            event.set()
        account = visitor.account
        account.visitors.discard(visitor.cookie)
        if not account.visitors and self._accounts.get(account.digest) is account:
            del self._accounts[account.digest]
            await account.feeds.close()
            await account.farm.close()

    def set_cookie(self, response: Response, visitor_cookie: str) -> None:
        """Give a browser its cookie, which scripts and other sites cannot use."""
        response.set_cookie(
            self.cookie_name, visitor_cookie, path=f"{self._options.root_path}/", httponly=True, samesite="strict",
            secure=self._options.is_secure,
        )  # fmt: skip

    async def sweep(self) -> None:
        """Sign out those whose time is up, and end unused feeds, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for visitor in [each for each in self._visitors.values() if self.is_expired(each)]:
                await self.sign_out(visitor)
            for account in list(self._accounts.values()):
                await account.feeds.end_unused()
            now = self._clock()
            self._codes = {code: known for code, known in self._codes.items() if known[1] > now}

    async def close(self) -> None:
        """Sign out everybody."""
        for visitor in list(self._visitors.values()):
            await self.sign_out(visitor)
        await asyncio.gather(*self._closing)

    async def _open_account(self, token: str) -> Account:
        digest = hashlib.sha256(token.encode()).hexdigest()
        if (known := self._accounts.get(digest)) is not None:
            info = await known.farm.info()
            if self._accounts.get(digest) is known:
                known.info = info
                return known
        # An explicit token: the environment's, if any, belongs to whoever started this process.
        farm = AsyncFarm(self._options.server, token=token, tls_ca=self._options.tls_ca, server_wait_s=BRIEF_S)
        await farm.__aenter__()
        try:
            info = await farm.info()
        except BaseException:
            await farm.close()
            raise
        if (known := self._accounts.get(digest)) is not None:  # another sign-in was faster
            await farm.close()
            return known
        account = Account(digest, farm, Feeds(farm, self._render, lambda: self.refuse(digest)), info)
        self._accounts[digest] = account
        return account

    def refuse(self, digest: str) -> None:
        """Sign out the visitors of an account whose token the farm no longer accepts."""
        account = self._accounts.get(digest)
        if account is None:
            return
        refused = [visitor for visitor in self._visitors.values() if visitor.account is account]
        task = asyncio.create_task(self._sign_out_all(refused), name="refused account")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _sign_out_all(self, visitors: list[Visitor]) -> None:
        for visitor in visitors:
            await self.sign_out(visitor)


def visitor_of(request: Request) -> Visitor:
    """Return the visitor of a request.

    Raises:
        NOT_SIGNED_IN: the request belongs to no visitor.
    """
    visitor = request.scope.get("state", {}).get("visitor")
    if not isinstance(visitor, Visitor):
        raise error_for("NOT_SIGNED_IN", "You are not signed in.", "Sign in with a token of the farm.")
    return visitor


async def farm(request: Request) -> AsyncFarm:
    """Return the client that acts for the visitor.

    Raises:
        NOT_SIGNED_IN: the request belongs to no visitor.
    """
    return visitor_of(request).account.farm
