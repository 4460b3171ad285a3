"""The proof with which a server shows an agent that it knows the agent's token; see FarmService.GetProof.

Tokens of agents have 256 random bits, so that neither hints nor proofs help to guess one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Final

METADATA: Final = "etfarm-proof-bin"
"""The request metadata with an encoded GetProofRequest."""
HINT_BYTES: Final = 16
NONCE_BYTES: Final = 32

_HINT: Final = b"etfarm token hint"
_PROOF: Final = b"etfarm farm proof"


def key_of(token: str) -> bytes:
    """Return the key that both sides have: the sha256 under which the server stores the token."""
    return hashlib.sha256(token.encode()).digest()


def hint_of(key: bytes) -> bytes:
    """Return what a server finds the key by; see GetProofRequest.hint."""
    return hmac.digest(key, _HINT, "sha256")[:HINT_BYTES]


def mac_of(key: bytes, nonce: bytes, server_nonce: bytes, farm_id: str, certificate: bytes) -> bytes:
    """Return FarmProof.mac.

    Args:
        certificate: sha256 of the server's certificate in DER; empty without TLS.
    """
    parts = (_PROOF, nonce, server_nonce, farm_id.encode(), certificate)
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def is_proof(mac: bytes, key: bytes, nonce: bytes, server_nonce: bytes, farm_id: str, certificate: bytes) -> bool:
    """Return whether `mac` is that of the other arguments."""
    return hmac.compare_digest(mac, mac_of(key, nonce, server_nonce, farm_id, certificate))


class Proofs:
    """What the servers of an agent's farm have proven so far.

    Args:
        farm_id: the id of the farm that the agent's token belongs to; empty if only its address is known.
        on_proven: called with the farm's id once a server of a list of addresses has proven to be the farm's.
    """

    def __init__(self, farm_id: str = "", on_proven: Callable[[str], None] = lambda farm_id: None) -> None:
        self.farm_id = farm_id
        self.certificates: dict[str, bytes] = {}
        """The certificates (PEM) with which servers have proven it, by address."""
        self.ask_again_s: dict[str, float] = {}
        """When a server that has proven nothing may be asked again, by address; in seconds of the monotonic clock."""
        self.unseen: dict[str, int] = {}
        """How often in a row the certificate of a server that gRPC reaches was not seen, by address."""
        self._on_proven = on_proven

    def prove(self, farm_id: str, address: str, certificate: bytes) -> None:
        """Record a proof.

        Args:
            certificate: PEM of the server's certificate; empty without TLS.
        """
        self.farm_id = farm_id
        if certificate:
            self.certificates[address] = certificate
        self._on_proven(farm_id)
