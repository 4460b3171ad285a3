"""Vision-language programs are recognized by ExecuTorch's names of their methods, and misfits between methods are named."""

from __future__ import annotations

import pytest

from etfarm.v1 import compile_pb2, generation_pb2
from etfarm.wire.flows import encoded_positions, methods_of
from etfarm.wire.language_models import NotALanguageModel, describe
from tests.support.generated import CONTEXT, VOCABULARY, flow_facts, method, tensor

LENGTH = (0, CONTEXT - 1)
EMBEDDINGS = tensor("float32", 1, LENGTH, 32)


def output(inputs: list[compile_pb2.ValueSpec], *outputs: compile_pb2.ValueSpec) -> compile_pb2.MethodFacts:
    return compile_pb2.MethodFacts(inputs=inputs, outputs=outputs)


def test_an_encoder_an_embedding_and_a_decoder_are_one_model() -> None:
    model = describe(flow_facts(), "m")
    assert (model.prefill_method, model.decode_method) == ("text_decoder", "text_decoder")
    assert (model.token_input, model.position_input, model.positions) == (0, 1, generation_pb2.POSITION_INPUT_START)
    assert (model.max_prompt_tokens, model.dynamic_prompt, model.vocab_size) == (CONTEXT - 1, True, VOCABULARY)
    assert model.flow.embedding_method == "token_embedding"
    assert [(each.method, each.positions) for each in model.flow.encoders] == [("vision_encoder", 16)]
    assert methods_of(model) == ["vision_encoder", "token_embedding", "text_decoder"] and encoded_positions(model) == 16


def test_encoders_are_optional_and_may_be_two() -> None:
    both = describe(flow_facts(encoders=("audio_encoder", "vision_encoder")), "m")
    assert methods_of(both)[:2] == ["vision_encoder", "audio_encoder"] and encoded_positions(both) == 32
    text = describe(flow_facts(encoders=()), "m")
    assert methods_of(text) == ["token_embedding", "text_decoder"] and encoded_positions(text) == 0


def test_two_methods_may_take_embeddings() -> None:
    position = tensor("int64", 1)
    own = {"prefill": method(EMBEDDINGS, position), "decode": method(tensor("float32", 1, 1, 32), position)}
    model = describe(flow_facts(**own), "m")
    assert methods_of(model) == ["vision_encoder", "token_embedding", "prefill", "decode"]


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (flow_facts(width=24), r"'vision_encoder' of m returns float32\[1, 16, 24\], but 'text_decoder' takes float32\[1, <=6"),
        (flow_facts(dtype="float16"), r"'vision_encoder' of m returns float16\[1, 16, 32\], but"),
        (
            flow_facts(token_embedding=output([tensor("int64", 1, LENGTH)], tensor("float32", 1, LENGTH, 16))),
            r"'token_embedding' of m returns float32\[1, <=63, 16\], but 'text_decoder' takes float32\[1, <=63, 32\]",
        ),
        (flow_facts(token_embedding=output([tensor("int64", 1, 8)], EMBEDDINGS)), r"must take tokens, .* takes int64\[1, 8\]"),
        (flow_facts(token_embedding=output([], EMBEDDINGS)), "must take tokens, .* and takes nothing"),
        (flow_facts(token_embedding=output([tensor("int64", 1, LENGTH)])), "must return embeddings, .* returns no tensor"),
        (flow_facts(vision_encoder=output([], tensor("int64", 1, 16, 32))), r"return embeddings, .* returns int64\[1, 16, 32\]"),
        (
            flow_facts(vision_encoder=output([tensor("float32", (0, 4), 3)], tensor("float32", (0, 16), 32))),
            r"'vision_encoder' of m has a dynamic shape, float32\[<=4, 3\]",
        ),
        (flow_facts(vision_encoder=output([], tensor("float32", 1, 0, 32))), "returns 0 embeddings"),
        (flow_facts(vision_encoder=output([], tensor("float32", 1 << 30, 1 << 30, 32))), "embeddings; 1 to 1,048,576"),
        (flow_facts(prefill=method(EMBEDDINGS, tensor("int64", 1)), decode=method(tensor("int64", 1, 1), tensor("int64", 1))),
         "one takes tokens and the other embeddings"),
    ],
)  # fmt: skip
def test_methods_that_do_not_fit_each_other_are_refused(known: compile_pb2.ProgramFacts, why: str) -> None:
    with pytest.raises(NotALanguageModel, match=why):
        describe(known, "m")


def test_a_decoder_of_embeddings_needs_the_method_that_computes_them() -> None:
    known = flow_facts()
    del known.methods["token_embedding"]
    with pytest.raises(NotALanguageModel, match="takes embeddings of 32 values, and m has no method 'token_embedding'"):
        describe(known, "m")
