"""Tokens, the rpc x role table, and what a server refuses to expose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme

from etfarm.server.access.tokens import Unauthenticated
from etfarm.server.config import Config
from etfarm.server.rpc.door import caller
from etfarm.server.rpc.door.roles import ADMIN, AGENT, ROLES, USER, VIEWER
from etfarm.server.rpc.door.token_file import LOCAL, BadTokenFile, read_tokens
from etfarm.v1.common_pb2 import Principal
from etfarm.wire.channel import parse_address
from etfarm.wire.errors import Kind
from tests.support.authentications import authentication
from tests.support.golden import Golden
from tests.support.refusals import refuses

ANN, BOARD = "a" * 24, "b" * 24


def token_file(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_a_token_file_maps_tokens_to_principals(tmp_path: Path) -> None:
    text = f"# the farm\n\nann ADMIN {ANN}  # she\n\tboard-7 agent {BOARD}\nu user {'u' * 16}\nv Viewer {'v' * 16}"
    tokens = authentication(tmp_path, token_file(tmp_path, text))

    def principal_of(token: str) -> Principal:
        return tokens.authenticate(f"Bearer {token}").principal

    assert principal_of(ANN) == Principal(name="ann", role=ADMIN)
    assert principal_of(BOARD) == Principal(name="board-7", role=AGENT)
    assert principal_of("u" * 16).role == USER
    assert principal_of("v" * 16).role == VIEWER
    assert ANN not in repr(vars(tokens)), "tokens are kept as hashes"


@pytest.mark.parametrize(
    "header", [None, "", ANN, f"Basic {ANN}", "Bearer ", f"Bearer {ANN}x", f"Bearer {ANN[:-1]}", "Bearer \u00e4"]
)
def test_a_call_without_a_known_token_is_refused(tmp_path: Path, header: str | None) -> None:
    tokens = authentication(tmp_path, token_file(tmp_path, f"ann admin {ANN}"))
    with pytest.raises(Unauthenticated, match="ETFARM_TOKEN") as refused:
        tokens.authenticate(header)
    assert refused.value.kind is Kind.UNAUTHENTICATED


@pytest.mark.parametrize("header", [None, "Bearer whatever"])
def test_a_server_without_tokens_takes_everybody_for_local(tmp_path: Path, header: str | None) -> None:
    assert authentication(tmp_path).authenticate(header).principal == LOCAL


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o610])
def test_a_token_file_that_others_may_read_is_refused_with_the_command_that_helps(tmp_path: Path, mode: int) -> None:
    path = token_file(tmp_path, f"ann admin {ANN}", mode)
    with pytest.raises(BadTokenFile, match=f"chmod 600 {path}"):
        read_tokens(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nobody\n",
        f"ann {ANN}",
        f"ann admin {ANN} more",
        f"\nann root {ANN}",
        "ann admin short",
        f"ann admin {ANN}\nbob viewer {ANN}",
        b"ann admin \xff\xfe" + b"x" * 20,
    ],
)
def test_a_token_file_of_another_form_is_refused_by_line_and_without_the_token(
    golden: Golden, tmp_path: Path, text: str | bytes
) -> None:
    with golden.refuses("BAD_TOKEN_FILE") as refused:
        read_tokens(token_file(tmp_path, text))
    assert ANN not in str(refused.value)


def test_a_token_file_that_is_not_there_is_named(golden: Golden, tmp_path: Path) -> None:
    with golden.refuses("BAD_TOKEN_FILE"):
        read_tokens(tmp_path / "nothing")


@pytest.mark.remedy("PERMISSION_DENIED")
@pytest.mark.parametrize("role", [ADMIN, USER, AGENT, VIEWER])
def test_every_row_of_the_table_admits_its_roles_only(role: Any) -> None:
    principal = Principal(name="p", role=role)
    for method, roles in ROLES.items():
        if role in roles:
            caller.authorize(principal, method)
            assert caller.caller() is principal
        else:
            with refuses("PERMISSION_DENIED") as refused:
                caller.authorize(principal, method)
            assert refused.value.metadata["rpc"] == method.rpartition(".")[2].replace("/", ".")
            for other in roles:
                caller.authorize(Principal(name="p", role=other), method)


def test_users_see_the_default_project_admins_everything_and_agents_nothing() -> None:
    def seen(role: Any, requested: str = "") -> tuple[str, caller.Scope]:
        caller.authorize(
            caller.resolve_default(Principal(name="p", role=role), requested), "/etfarm.v1.FarmService/GetServerInfo"
        )
        return caller.caller().project, caller.scope()

    assert seen(ADMIN) == ("default", caller.EVERYTHING)
    assert seen(ADMIN, "vision") == ("vision", caller.EVERYTHING)
    assert seen(AGENT) == ("", caller.Scope(frozenset()))
    assert seen(USER) == seen(VIEWER) == seen(USER, "default") == ("default", caller.Scope(frozenset({"default"})))
    with refuses("PROJECT_NOT_FOUND") as refused:
        seen(USER, "vision")
    assert refused.value.kind is Kind.NOT_FOUND


def test_a_method_without_a_row_is_allowed_to_no_role(golden: Golden) -> None:
    with golden.refuses("PERMISSION_DENIED"):
        caller.authorize(LOCAL, "/etfarm.v1.Nothing/Do")


def test_an_admin_may_call_everything_and_a_viewer_changes_nothing() -> None:
    assert all(ADMIN in roles for roles in ROLES.values())
    reading = ("Get", "List", "Watch", "TailLog", "Download", "Compare", "Check", "ServerReflectionInfo")
    for method, roles in ROLES.items():
        if VIEWER in roles:
            # A viewer may replace the secret of its own token.
            assert method.rpartition("/")[2].startswith(reading) or method.endswith("TokenService/Rotate"), method


def config(listen: str, **more: Any) -> Config:
    return Config(listen=parse_address(listen), data=Path("/nowhere"), **more)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:1", "[::1]:1", "unix:/run/x"])
def test_a_local_address_needs_nothing(listen: str) -> None:
    assert config(listen).check() is None  # type: ignore[func-returns-value]  # else it raises


def tls_files(folder: Path) -> dict[str, Path]:
    """Return the options of a certificate, its key, and the authority that clients' certificates are from."""
    authority = trustme.CA()
    identity = authority.issue_cert("farm.example")
    identity.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    identity.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "key.pem").chmod(0o600)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return {"tls_cert": folder / "cert.pem", "tls_key": folder / "key.pem", "tls_client_ca": folder / "ca.pem"}


@pytest.mark.remedy("EXPOSED")
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:1", "192.168.0.2:1", "board:1"])
def test_an_address_that_others_reach_needs_tls_and_tokens(golden: Golden, listen: str, tmp_path: Path) -> None:
    files = tls_files(tmp_path)
    config(listen, **files, tokens=Path("t")).check()
    with golden.refuses("EXPOSED") as refused:
        config(listen).check()
    assert refused.value.kind is Kind.INVALID_ARGUMENT
    assert "--insecure" in refused.value.remedy
    with golden.refuses("EXPOSED"):
        config(listen, **files).check()
    with golden.refuses("EXPOSED"):
        config(listen, tokens=Path("t")).check()
    config(listen, insecure=True).check()


@pytest.mark.remedy("INVALID_ARGUMENT")
@pytest.mark.parametrize("option", ["tls_cert", "tls_key", "tls_client_ca"])
def test_half_of_tls_is_refused_everywhere(option: str, tmp_path: Path) -> None:
    files = tls_files(tmp_path)
    with refuses("INVALID_ARGUMENT", match="--tls-cert and --tls-key"):
        config("127.0.0.1:0", insecure=True, **{option: files[option]}).check()
    config("127.0.0.1:0", insecure=True, **files).check()
