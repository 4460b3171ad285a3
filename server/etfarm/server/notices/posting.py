"""One POST of a notice, in a thread: to the address that was checked, signed, and over within its time limit.

`http.client` and `ssl` of the standard library are used, since they let the caller provide the connected socket. The usual HTTP
libraries resolve the host's name themselves, after the check, and follow redirects and proxies unless told otherwise.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from etfarm.server.notices.addresses import AllowList, Resolve, Target, resolve
from etfarm.server.notices.errors import HostRefused

MAX_ANSWER: Final = 300
"""Number of bytes of an answer that are read and kept."""
SIGNATURE: Final = "X-Etfarm-Signature"

_CONNECT_S: Final = 5.0
_FINAL_STATUSES: Final = frozenset({300, 301, 302, 303, 305, 307, 308, 410})
"""Statuses after which further tries are useless: redirects, which are not followed, and Gone."""


@dataclass(frozen=True)
class Outcome:
    """The end of one try."""

    status: int | None = None
    """HTTP status; None without an answer."""
    error: str = ""
    """Why the notice was not delivered; empty if it was."""
    answer: str = ""
    """The beginning of the answer."""
    is_final: bool = False
    """Whether further tries are useless."""


@dataclass(frozen=True)
class Poster:
    """The settings of all tries.

    Args:
        allowed: the hosts that an admin lists.
        context: how TLS verifies a receiver.
        lookup: resolves names.
        deadline_s: time limit of a try, from the start of the connection to the end of the answer.
        version: the server's version, for the header User-Agent.
    """

    allowed: AllowList
    context: ssl.SSLContext
    lookup: Resolve
    deadline_s: float
    version: str

    def post(self, target: Target, body: bytes, secret: str, time_s: int, headers: Mapping[str, str]) -> Outcome:
        """Send a notice and return what came of it. Blocks; never raises for what a receiver or a network does.

        Args:
            secret: signs the body.
            time_s: the time of this try, in seconds since 1970, which is signed too.
            headers: further headers.
        """
        try:
            address = resolve(target, self.allowed, self.lookup)
        except HostRefused as error:
            return Outcome(error=error.message, is_final=True)
        except (OSError, UnicodeError) as error:
            return Outcome(error=f"{target.host} cannot be resolved: {getattr(error, 'strerror', None) or error}.")
        connection = _Connection(target, address, self.context, self.deadline_s)
        connection.watch()
        try:
            connection.putrequest("POST", target.path, skip_host=True, skip_accept_encoding=True)
            signed = {
                "Host": target.origin.partition("://")[2],
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Connection": "close",
                "User-Agent": f"etfarm/{self.version}",
                SIGNATURE: signature(secret, time_s, body),
                **headers,
            }
            for name, value in signed.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            outcome = _outcome(response.status, response.read(MAX_ANSWER))
            connection.require_time()  # http.client takes the end of a stream that was cut for the end of the headers
            return outcome
        except (OSError, http.client.HTTPException, ValueError) as error:
            if connection.timed_out:
                return Outcome(error=f"{target.origin} did not answer within {self.deadline_s:g} s.")
            return Outcome(error=f"{target.origin}: {_describe(error)}.")
        finally:
            connection.finish()


def signature(secret: str, time_s: int, body: bytes) -> str:
    """Return the value of the signature's header: `t=TIME,v1=HEX`, the HMAC-SHA256 of `TIME.BODY`."""
    digest = hmac.new(secret.encode(), f"{time_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={time_s},v1={digest}"


def tls_context(authorities: bytes | None = None) -> ssl.SSLContext:
    """Return a context that verifies receivers with the system's authorities and these further ones (PEM)."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authorities is not None:
        context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
    return context


class _Connection(http.client.HTTPConnection):
    """A connection to a given address that is cut at its deadline, whatever it waits for."""

    def __init__(self, target: Target, address: str, context: ssl.SSLContext, deadline_s: float) -> None:
        super().__init__(target.host, target.port, timeout=deadline_s)
        self._target = target
        self._address = address
        self._context = context
        self._deadline_s = deadline_s
        self.timed_out = False
        # A timeout of a socket is one of a single read: a receiver that sends a byte now and then would hold the thread for ever.
        self._timer = threading.Timer(deadline_s, self._cut)
        self._timer.daemon = True
        self._open: socket.socket | None = None

    def watch(self) -> None:
        self._timer.start()

    def connect(self) -> None:
        self._open = socket.create_connection((self._address, self._target.port), timeout=min(_CONNECT_S, self._deadline_s))
        self._open.settimeout(self._deadline_s)
        if self._target.scheme == "https":
            secured = self._context.wrap_socket(
                self._open, server_hostname=self._target.host, do_handshake_on_connect=False
            )  # fmt: skip
            self._open = secured
            # The timer may have found the socket that this one replaces.
            self.require_time()
            secured.do_handshake()
        self.sock = self._open
        self.require_time()

    def require_time(self) -> None:
        if self.timed_out:
            raise TimeoutError

    def finish(self) -> None:
        self._timer.cancel()
        self.close()
        if self._open is not None:
            self._open.close()

    def _cut(self) -> None:
        self.timed_out = True
        if self._open is not None:
            try:
                # Below TLS, whose own goodbye would wait for the peer.
                socket.socket.shutdown(self._open, socket.SHUT_RDWR)
            except OSError:
                return  # it was closed in the meantime


def _outcome(status: int, data: bytes) -> Outcome:
    answer = data.decode("utf-8", "replace")
    if 200 <= status < 300:
        return Outcome(status, answer=answer)
    what = "redirects, which are not followed" if 300 <= status < 400 else "refuses the notice"
    return Outcome(status, f"The receiver answered with {status}: it {what}.", answer, status in _FINAL_STATUSES)


def _describe(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return f"it does not speak HTTP ({type(error).__name__})"
