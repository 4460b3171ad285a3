"""FarmService.GetProof: the proof that the server knows an agent's token, for a caller who has sent none."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from etfarm.server.access.tokens import LoadedTokens
from etfarm.v1.farm_pb2 import FarmProof, GetProofRequest
from etfarm.wire.errors import error_for
from etfarm.wire.farm_proof import HINT_BYTES, METADATA, NONCE_BYTES, mac_of


class Prover:
    """The proofs of one server.

    Only the metadata of a call are read. Tokens of a `--tokens` file are never proven: people may have chosen them, and guesses
    could be tried on a proof.

    Args:
        certificate: returns the sha256 of the server's certificate; empty without TLS.
    """

    def __init__(self, tokens: LoadedTokens, certificate: Callable[[], bytes]) -> None:
        self._tokens = tokens
        self._certificate = certificate

    def knows(self, metadata: Any) -> bool:
        """Return whether a call with these metadata asks about a token that there is."""
        return self._tokens.key_of_hint(_read(metadata).hint) is not None

    async def prove(self, metadata: Any) -> FarmProof:
        """Return the answer to a call with these metadata.

        Raises:
            BAD_PROOF_REQUEST: they are not those of GetProof.
            TOKENS_NOT_READ: this server cannot prove anything yet.
        """
        request = _read(metadata)
        if (len(request.hint), len(request.nonce)) != (HINT_BYTES, NONCE_BYTES):
            raise error_for(
                "BAD_PROOF_REQUEST",
                f"The metadata `{METADATA}` must be a GetProofRequest: {HINT_BYTES} bytes of hint, {NONCE_BYTES} of nonce.",
                "Use an agent of the server's version.",
            )
        # An agent may have enrolled at the leader a moment ago, and ends for good where it is told that its token is unknown.
        knows = self._tokens.key_of_hint(request.hint) is not None or await self._tokens.catch_up()
        if not (farm_id := self._tokens.farm_id) or not knows:
            raise error_for("TOKENS_NOT_READ", "This server has not read the farm's tokens yet.", "Try again.")
        unknown, server_nonce = secrets.token_bytes(32), secrets.token_bytes(NONCE_BYTES)
        key = self._tokens.key_of_hint(request.hint) or unknown
        mac = mac_of(key, request.nonce, server_nonce, farm_id, self._certificate())
        return FarmProof(farm_id=farm_id, server_nonce=server_nonce, mac=mac)


def _read(metadata: Any) -> GetProofRequest:
    """Return the request in the metadata of a call; an empty one if they have none."""
    sent = next((value for name, value in metadata or () if name == METADATA), b"")
    try:
        return GetProofRequest.FromString(sent)
    except (DecodeError, TypeError):
        return GetProofRequest()
