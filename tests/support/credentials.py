"""The credentials of a farm as companies run it: TLS files, an admin, two users in projects of their own, and agents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final

import grpc
import pytest
import trustme

from etfarm.client import Farm
from etfarm.v1 import common_pb2, token_pb2, token_pb2_grpc
from etfarm.wire.channel import Access
from etfarm.wire.names import PROJECT_VARIABLE, TLS_CA_VARIABLE, TOKEN_VARIABLE

WAIT_S: Final = 60.0
ADMIN: Final = "root"
USERS: Final = {"ann": "vision", "ben": "audio"}
"""The users, with their projects."""
RACK, OTHER = "rack", "other"
"""Principals of agents that a test plays itself."""
_ROLES: Final = {ADMIN: "admin", **dict.fromkeys(USERS, "user"), **dict.fromkeys((RACK, OTHER), "agent")}


class Credentials:
    """Files of credentials in a folder."""

    in_use: ClassVar[Credentials | None] = None
    """Those of the farms that are created at the moment; without, a farm has neither TLS nor tokens."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert("localhost", "127.0.0.1")
        self.authority, chain, key, self._tokens = (folder / name for name in ("ca.pem", "cert.pem", "key.pem", "tokens"))
        authority.cert_pem.write_to_path(self.authority)
        certificate.cert_chain_pems[0].write_to_path(chain)
        for private in (key, self._tokens):
            private.touch(mode=0o600)
        certificate.private_key_pem.write_to_path(key)
        self._tokens.write_text("".join(f"{name} {role} {_secret(name)}\n" for name, role in _ROLES.items()))
        self.serve = ("--tokens", str(self._tokens), "--tls-cert", str(chain), "--tls-key", str(key))
        """Options of `etfarm serve`."""

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables with which commands and libraries act as somebody."""
        variables = {TOKEN_VARIABLE: _secret(name), TLS_CA_VARIABLE: str(self.authority)}
        return variables | {PROJECT_VARIABLE: USERS.get(name, "")}

    def access(self, server: str, name: str) -> Access:
        """Return the access of somebody to a server."""
        return Access(server, _secret(name), self.authority, project=USERS.get(name, ""))

    def client(self, server: str, name: str) -> Farm:
        """Return the library's client of somebody; use it in a with statement."""
        return Farm(server, token=_secret(name), tls_ca=self.authority, project=USERS.get(name, ""))

    def create_projects(self, server: str) -> None:
        """Create the users' projects."""
        with self.client(server, ADMIN) as farm:
            for name, project in USERS.items():
                farm.create_project(project, [name])

    def new_agent(self, server: str, name: str) -> dict[str, str]:
        """Return the variables of a new agent, with a token that enrols it once."""
        request = token_pb2.CreateTokenRequest(principal=name, role=common_pb2.Role.ROLE_AGENT, enrolment=True)
        with grpc.secure_channel(server, grpc.ssl_channel_credentials(self.authority.read_bytes())) as channel:
            answer = token_pb2_grpc.TokenServiceStub(channel).Create(
                request, metadata=[("authorization", f"Bearer {_secret(ADMIN)}")], timeout=WAIT_S
            )
        return self.environment(ADMIN) | {TOKEN_VARIABLE: answer.secret}

    @contextmanager
    def used(self, name: str = ADMIN) -> Iterator[Credentials]:
        """Let farms that are created until the end of the block ask for these, and this process act as somebody."""
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in self.environment(name).items():
                patch.setenv(variable, value)
            patch.setattr(Credentials, "in_use", self)
            yield self


def _secret(name: str) -> str:
    return f"token-of-{name}-0123456789"
