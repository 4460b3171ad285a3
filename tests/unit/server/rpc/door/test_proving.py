"""The proof that a server knows an agent's token: whom it convinces, and that it tells nobody which tokens there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from etfarm.server.access.tokens import LoadedTokens
from etfarm.server.rpc.door.interceptor import PROOFS, AuthErrorInterceptor
from etfarm.server.rpc.door.proving import Prover
from etfarm.server.rpc.door.roles import PROOF
from etfarm.v1.farm_pb2 import FarmProof, GetProofRequest
from etfarm.wire.farm_proof import METADATA, hint_of, is_proof, key_of
from tests.support.authentications import authentication
from tests.support.golden import Golden
from tests.support.refusals import refuses

TOKEN, FARM, CERTIFICATE, NONCE = "etf_of-an-agent", "the-farm", b"c" * 32, b"n" * 32


HINTS = {hint_of(key_of(TOKEN)): key_of(TOKEN)}


class Tokens(LoadedTokens):
    """Tokens by their hints; `later` are known in addition when all have been read again, None if they cannot be."""

    def __init__(
        self,
        farm_id: str = FARM,
        hints: Mapping[bytes, bytes] = HINTS,
        later: Mapping[bytes, bytes] | None = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.farm_id = farm_id
        self._hints = dict(hints)
        self.later = later

    async def catch_up(self) -> bool:
        self._hints |= self.later or {}
        return self.later is not None


def metadata(token: str = TOKEN, nonce: bytes = NONCE) -> tuple[tuple[str, bytes], ...]:
    return ((METADATA, GetProofRequest(hint=hint_of(key_of(token)), nonce=nonce).SerializeToString()),)


def convinces(proof: FarmProof, *, token: str = TOKEN, nonce: bytes = NONCE, certificate: bytes = CERTIFICATE) -> bool:
    return is_proof(proof.mac, key_of(token), nonce, proof.server_nonce, proof.farm_id, certificate)


async def test_a_proof_convinces_who_sees_the_same_certificate_and_asked_for_it() -> None:
    proof = await Prover(Tokens(), lambda: CERTIFICATE).prove(metadata())
    assert proof.farm_id == FARM and convinces(proof)
    assert not convinces(proof, certificate=b"r" * 32)  # a relay's
    assert not convinces(proof, certificate=b"")
    assert not convinces(proof, nonce=b"o" * 32)
    assert not convinces(proof, token="etf_of-another")
    assert not convinces(FarmProof(farm_id="another", server_nonce=proof.server_nonce, mac=proof.mac))
    assert not convinces(FarmProof(farm_id=FARM, server_nonce=b"s" * 32, mac=proof.mac))


async def test_an_unknown_token_gets_an_answer_that_looks_the_same_and_convinces_nobody() -> None:
    prover = Prover(Tokens(), lambda: CERTIFICATE)
    known = [await prover.prove(metadata()) for _ in range(2)]
    unknown = [await prover.prove(metadata("etf_of-another")) for _ in range(2)]
    for first, second in (known, unknown):
        # Nothing repeats, from which one could see whether the key is the same again.
        assert first.mac != second.mac and first.server_nonce != second.server_nonce
    assert {(len(proof.mac), len(proof.server_nonce), proof.farm_id) for proof in known + unknown} == {(32, 32, FARM)}
    assert not any(convinces(proof, token="etf_of-another") for proof in unknown)


@pytest.mark.remedy("TOKENS_NOT_READ")
async def test_a_token_that_was_created_a_moment_ago_is_waited_for() -> None:
    assert convinces(await Prover(Tokens(hints={}, later=HINTS), lambda: CERTIFICATE).prove(metadata()))
    tokens = Tokens(hints={}, later=None)
    with refuses("TOKENS_NOT_READ"):  # an agent that is told that its token is unknown ends for good
        await Prover(tokens, lambda: CERTIFICATE).prove(metadata())
    tokens.later = HINTS
    assert convinces(await Prover(tokens, lambda: CERTIFICATE).prove(metadata())), "the agent's next try"


@pytest.mark.remedy("BAD_PROOF_REQUEST")
@pytest.mark.parametrize(
    "sent", [(), ((METADATA, b""),), ((METADATA, b"\xff" * 40),), ((METADATA, "text"),), metadata(nonce=b"short"),
             metadata(nonce=b"n" * 1000)],
)  # fmt: skip
async def test_other_metadata_are_refused(sent: tuple[tuple[str, bytes], ...], golden: Golden) -> None:
    with golden.refuses("BAD_PROOF_REQUEST"):
        await Prover(Tokens(), lambda: CERTIFICATE).prove(sent)
    assert convinces(await Prover(Tokens(), lambda: CERTIFICATE).prove(metadata()))


async def test_a_server_that_has_not_read_the_tokens_says_so(golden: Golden) -> None:
    with golden.refuses("TOKENS_NOT_READ"):
        await Prover(Tokens(farm_id=""), lambda: b"").prove(metadata())


def test_a_question_about_a_known_token_is_urgent_and_only_some_of_them_are(tmp_path: Path) -> None:
    prover = Prover(Tokens(), lambda: CERTIFICATE)
    interceptor = AuthErrorInterceptor(authentication(tmp_path), clock=lambda: 0.0, prover=prover)

    class Context:
        def __init__(self, token: str) -> None:
            self._token = token

        def invocation_metadata(self) -> Any:
            return metadata(self._token)

    assert not any(interceptor.is_urgent(PROOF, Context("etf_of-another")) for _ in range(PROOFS))
    assert not interceptor.is_urgent("/etfarm.v1.JobService/Get", Context(TOKEN))
    assert all(interceptor.is_urgent(PROOF, Context(TOKEN)) for _ in range(PROOFS))
    assert not interceptor.is_urgent(PROOF, Context(TOKEN))
