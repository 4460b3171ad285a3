"""Tokens of the `--tokens` file, and credentials of `authorization` headers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from etfarm.server.access.tokens import Unauthenticated, key_of
from etfarm.server.rpc.door.roles import ADMIN
from etfarm.v1 import common_pb2
from etfarm.v1.common_pb2 import Principal
from etfarm.wire.errors import UserError
from etfarm.wire.private import read_secret

MAX_BYTES: Final = 16 << 20
"""Maximum size of a token file."""
LOCAL: Final = Principal(name="local", role=ADMIN)
"""The principal of every caller of a server without tokens, which only this machine can reach."""


class BadTokenFile(UserError):
    """A token file that cannot be used."""

    reason = "BAD_TOKEN_FILE"


def read_tokens(path: Path) -> dict[bytes, Principal]:
    """Return the principals of a file by the hashes of their tokens. Each line is `NAME ROLE TOKEN`; `#` starts a comment.

    Raises:
        BadTokenFile: the file cannot be read, other users may read or change it, or a line is malformed.
    """
    try:
        text = read_secret(path, BadTokenFile, MAX_BYTES + 1).decode()
    except OSError as error:
        raise BadTokenFile(f"The token file {path} cannot be read: {error.strerror}.", "Check --tokens.") from None
    except UnicodeDecodeError:
        raise BadTokenFile(f"The token file {path} is not UTF-8 text.", "Check --tokens.") from None
    if len(text) > MAX_BYTES:
        raise BadTokenFile(f"The token file {path} has more than {MAX_BYTES >> 20} MiB.", "Check --tokens.")
    by_hash: dict[bytes, Principal] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 3 or words[1].upper() not in ("ADMIN", "USER", "AGENT", "VIEWER") or len(words[2]) < 16:
            raise BadTokenFile(
                f"Line {number} of {path} is not NAME ROLE TOKEN.",
                "ROLE is admin, user, agent or viewer; TOKEN has 16 characters or more (try `openssl rand -hex 24`).",
            )
        if key_of(words[2]) in by_hash:
            raise BadTokenFile(f"Line {number} of {path} repeats the token of an earlier line.", "Give each line its own token.")
        by_hash[key_of(words[2])] = Principal(name=words[0], role=common_pb2.Role.Value(f"ROLE_{words[1].upper()}"))
    if not by_hash:
        raise BadTokenFile(f"The token file {path} has no token.", "Add a line NAME ROLE TOKEN.")
    return by_hash


def sent_key(header: str | None) -> bytes:
    """Return the key of an `authorization` header's token. Tokens are looked up by hash, so timing reveals nothing.

    Raises:
        Unauthenticated: the header has no bearer token.
    """
    if header is None or not header.startswith("Bearer "):
        raise Unauthenticated("This server requires a token, and the call has none.", "Set ETFARM_TOKEN.")
    return key_of(header.removeprefix("Bearer ").strip())


def unknown_token() -> Unauthenticated:
    """Return the error for an unknown token."""
    return Unauthenticated("The server does not know this token.", "Check ETFARM_TOKEN with the farm's admin.")
