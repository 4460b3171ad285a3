"""Programs that generate text are recognized by their metadata methods and inputs."""

from __future__ import annotations

import pytest

from etfarm.v1 import compile_pb2, generation_pb2
from etfarm.wire.generation import draw_tokens
from etfarm.wire.language_models import NotALanguageModel, describe, has_metadata
from tests.support.generated import CONTEXT, VOCABULARY, facts, method, tensor

TOKENS = tensor("int64", (0, 1), (0, CONTEXT - 1))
SINGLE = tensor("int64", 1, 1)
START = tensor("int64", 1)


def test_one_method_with_a_position_does_both() -> None:
    model = describe(facts(get_max_context_len=CONTEXT), "m")
    assert (model.prefill_method, model.decode_method, model.token_input, model.position_input) == ("forward", "forward", 0, 1)
    assert model.positions == generation_pb2.POSITION_INPUT_START and model.dynamic_prompt
    assert (model.max_prompt_tokens, model.max_context_tokens, model.vocab_size) == (CONTEXT - 1, CONTEXT, VOCABULARY)
    assert model.kv_cache_bytes == 1024 and model.metadata["use_kv_cache"] == 1


def test_a_position_for_each_token_is_a_vector() -> None:
    vector = facts({"forward": method(TOKENS, tensor("int64", (0, CONTEXT - 1)))})
    assert describe(vector, "m").positions == generation_pb2.POSITION_INPUT_VECTOR


@pytest.mark.parametrize("names", [("prefill", "decode"), ("prefill_forward", "kv_forward"), ("prefill", "forward")])
def test_two_methods_are_recognized_by_their_names(names: tuple[str, str]) -> None:
    prefill, decode = names
    model = describe(facts({prefill: method(tensor("int32", 1, 16), START), decode: method(SINGLE, START)}), "m")
    assert (model.prefill_method, model.decode_method) == names
    assert model.max_prompt_tokens == 16 and not model.dynamic_prompt


def test_methods_can_be_named() -> None:
    known = facts({"a": method(TOKENS, START), "b": method(SINGLE, START)})
    assert describe(known, "m", prefill="a", decode="b").decode_method == "b"
    assert describe(known, "m", decode="a").prefill_method == "a"
    with pytest.raises(NotALanguageModel, match="no method 'c'"):
        describe(known, "m", prefill="c")
    with pytest.raises(NotALanguageModel, match="no method whose name tells"):
        describe(known, "m")


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (facts(use_kv_cache=False), "no KV cache"),
        (facts({"forward": method(TOKENS)}), "no KV cache"),
        (facts({"forward": method(TOKENS, START, tensor("float32", 1))}), "must take tokens"),
        (facts({"forward": method(tensor("float32", 1, 3, 8, 8))}), "must take tokens"),
        (facts({"forward": method(TOKENS, START, logits="int64")}), "must return logits"),
        (facts({"forward": method(tensor("int64", 1, 8), START)}), "at least"),
        (facts({"prefill": method(START, TOKENS), "decode": method(SINGLE, START)}), "different places"),
        (facts(get_max_seq_len=0), "how many tokens"),
        (facts(get_max_seq_len=1 << 40), "how many tokens"),
        (facts(get_max_seq_len=-(1 << 62)), "how many tokens"),
        (facts(get_vocab_size=-5), "vocabulary"),
        (facts(get_vocab_size=1 << 40), "vocabulary"),
        (facts(get_vocab_size=-(1 << 62)), "vocabulary"),
        (facts({"prefill": method(tensor("int64", 1, CONTEXT + 1), START), "decode": method(SINGLE, START)}), "takes 65 tokens"),
        (facts({"forward": method(tensor("int64", 1, 0), START)}), "takes 0 tokens"),
        (facts({"prefill": method(SINGLE, START), "decode": method(tensor("int64", 1, 8), START)}), "'decode' of m takes 8"),
    ],
)  # fmt: skip
def test_other_programs_are_refused(known: compile_pb2.ProgramFacts, why: str) -> None:
    with pytest.raises(NotALanguageModel, match=why):
        describe(known, "m")


def test_an_image_model_has_no_metadata_of_a_language_model() -> None:
    assert has_metadata(facts())
    assert not has_metadata(compile_pb2.ProgramFacts(methods={"forward": method(tensor("float32", 1, 3, 8, 8))}))


def test_tokens_are_equal_for_equal_seeds_and_within_the_vocabulary() -> None:
    tokens = draw_tokens(1, 1000, 50)
    assert tokens.typecode == "i" and len(tokens) == 50 and min(tokens) >= 0 and max(tokens) < 1000 and len(set(tokens)) > 40
    assert draw_tokens(1, 1000, 20) == tokens[:20] and draw_tokens(2, 1000, 50) != tokens
    # Fixed forever: measurements of different versions process the same text.
    assert draw_tokens(1, 1 << 20, 3).tolist() == [154817, 978023, 152926]
