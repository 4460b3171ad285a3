"""`etfarm tokens`: create, list, revoke and rotate the tokens of a farm."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.connection import Connection, Server
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.outcome import STDOUT
from etfarm.client.cli.terminal.capabilities import in_a_line, put, tell
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.admin.access import Token

_ABOUT = (
    "Create, list, revoke and rotate the tokens that let people and agents in. Admins only; anyone may rotate their own "
    "token. Create the first admin's token on the server's machine, with `etfarm tokens init NAME`."
)

_ENROLMENT_LIFETIME = "1d"

Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result there as JSON; - is stdout.")]


def main(argv: list[str]) -> int:
    """Run `etfarm tokens`."""
    commands: dict[str, Command] = {"create": create, "list": list_, "revoke": revoke, "rotate": rotate}
    return execute(commands, argv, "tokens", _ABOUT)


def create(
    connection: Server,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the person, script or agent that the token is for.")],
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="admin, user, viewer or agent. [user]")] = "",
    agent: Annotated[
        bool, typer.Option("--agent", help="Create a one-time token, which `etfarm agent` exchanges for one of its own.")
    ] = False,
    expires: Annotated[
        str,
        typer.Option(
            "--expires", metavar="TIME", help="How long the token is valid, such as 30d, 12h or 90m. [no expiry; --agent: 1d]"
        ),
    ] = "",
    project: Annotated[
        list[str] | None, typer.Option("--project", metavar="P", help="Make NAME a member of this project; repeatable.")
    ] = None,
    json: Json = None,
) -> None:
    """Create a token and print its secret. The secret is not shown again."""
    from etfarm.client.admin.access import AccessControl

    if role not in ("", "admin", "user", "viewer", "agent"):
        raise error_for("USAGE", f"--role must be admin, user, viewer or agent, got {role!r}.", value=role)
    if agent and role not in ("", "agent"):
        raise error_for("USAGE", f"--agent requires the role agent, got --role {role}.", "Leave one of the two out.")
    _check(json)
    lifetime = expires or (_ENROLMENT_LIFETIME if agent else "")
    lifetime_s = options.seconds_of("--expires", lifetime) if lifetime else None

    token, secret = connection.call_stubs(
        lambda stubs: AccessControl(stubs).create_token(
            name, role or ("agent" if agent else "user"), lifetime_s=lifetime_s, projects=project or (), enrolment=agent
        )
    )
    _show_secret(token, secret, json)


def list_(
    listing: Annotated[JsonListing, Key("tokens")],
    connection: Connection,
    all_: Annotated[bool, typer.Option("--all", help="One-time tokens that were used, too.")] = False,
) -> None:
    """List the tokens without their secrets, newest first; those of the server's --tokens file come last."""
    from etfarm.client.admin.access import AccessControl
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units

    known = connection.call_stubs(lambda stubs: AccessControl(stubs).tokens())
    tokens = listing.record([token for token in known if all_ or token.state != "used"])
    if listing.is_on_stdout:
        return
    now = datetime.now(UTC)
    rows = [
        (
            token.id,
            token.principal,
            token.role,
            token.kind,
            token.state,
            units.ago(token.created_at, now),
            token.expires_at.astimezone().strftime("%Y-%m-%d %H:%M") if token.expires_at else "-",
            units.ago(token.last_used_at, now),
            token.agent_id or "-",
        )
        for token in tokens
    ]
    heads = ("ID", "NAME", "ROLE", "KIND", "STATE", "CREATED", "EXPIRES", "LAST USED", "AGENT")
    output.show_table(heads, rows, shrink=("NAME", "AGENT"))
    if used := len(known) - len(tokens):
        tell(f"{used} used one-time token{'s' if used > 1 else ''}: --all lists {'them' if used > 1 else 'it'}, too.")


def revoke(
    connection: Connection,
    token: Annotated[
        str, typer.Argument(metavar="ID|NAME", help="The token's id, or the name that it alone has; see `etfarm tokens list`.")
    ],
) -> None:
    """Revoke a token at once, and end the calls that use it."""
    from etfarm.client.admin.access import AccessControl

    ended = connection.call_stubs(lambda stubs: AccessControl(stubs).revoke_token(token))
    print(in_a_line(f"Revoked: {ended.id} of {ended.principal} ({ended.role})."))


def rotate(
    connection: Connection,
    token: Annotated[str, typer.Argument(metavar="ID", help="The token's id; your own token when left out.")] = "",
    json: Json = None,
) -> None:
    """Replace a token's secret at once, and print the new one. It is not shown again."""
    from etfarm.client.admin.access import AccessControl

    _check(json)
    _show_secret(*connection.call_stubs(lambda stubs: AccessControl(stubs).rotate_token(token)), json)


def _show_secret(token: Token, secret: str, json: str | None) -> None:
    """Print the secret alone on stdout, for scripts, and its description on stderr."""
    if json is not None:
        _write(json, _document(token) | {"secret": secret})
    if json != STDOUT:
        until = f", until {token.expires_at.astimezone():%Y-%m-%d %H:%M}" if token.expires_at else ""
        use = "for one enrolment" if token.kind == "enrolment" else f"of {token.principal} ({token.role})"
        sentence = in_a_line(f"Token {token.id} {use}{until}. It is not shown again; set ETFARM_TOKEN to it:")
        print(sentence, file=sys.stderr, flush=True)
        print(in_a_line(secret))


def _document(token: Token) -> dict[str, object]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in vars(token).items()}


def _check(file: str | None) -> None:
    """Check that the file can be written, before the server creates a secret that would be lost."""
    from etfarm.client.cli.files import require_writable

    if file not in (None, STDOUT):
        require_writable(Path(str(file)))


def _write(file: str, document: object) -> None:
    import json

    from etfarm.client.cli.files import write_whole

    text = json.dumps(document, indent=2) + "\n"
    if file == STDOUT:
        put(text)
        return
    before = os.umask(0o077)  # only this user may read the secret
    try:
        write_whole(Path(file), text.encode())
    finally:
        os.umask(before)
