"""Programs that generate text, recognized by the facts of a .pte: its metadata methods and the inputs of its methods.

Sources: executorch/extension/llm/runner/constants.h and llm_runner_helper.cpp (names of metadata methods), export_llm and
optimum-executorch (signatures).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from etfarm.v1 import common_pb2, compile_pb2, generation_pb2
from etfarm.v1.compile_pb2 import MethodFacts, ValueSpec
from etfarm.wire import flows
from etfarm.wire.flows import NotALanguageModel as NotALanguageModel
from etfarm.wire.generation import MAX_CONTEXT_TOKENS

MAX_SEQ_LEN: Final = "get_max_seq_len"
"""The metadata method that every language model has: ExecuTorch's own runner refuses a program without it."""
_MAX_CONTEXT: Final = "get_max_context_len"
_VOCAB_SIZE: Final = "get_vocab_size"
_USE_KV_CACHE: Final = "use_kv_cache"

METADATA: Final = (MAX_SEQ_LEN, _MAX_CONTEXT, _VOCAB_SIZE, _USE_KV_CACHE)
"""The metadata methods that `describe` needs, as far as a program has them."""
END_TOKENS: Final = ("get_eos_ids", "get_eos_id")
"""Metadata methods that return the tokens that end a text."""

_METHODS: Final = (
    ("prefill", "decode"), ("prefill_forward", "kv_forward"), ("prefill", "forward"), (flows.DECODER, flows.DECODER),
    ("forward", "forward"),
)  # fmt: skip
"""Names of the methods for the prompt and for single tokens, in order of preference: of ExecuTorch's multimethod exports, its
Qualcomm and Core ML exports, of programs whose decoder takes embeddings, and of programs with one method."""

_INTEGERS: Final = ("int64", "int32")
MAX_VOCAB: Final = 1 << 24
"""Maximum number of different tokens, and of logits for a token."""


def has_metadata(facts: compile_pb2.ProgramFacts) -> bool:
    """Return whether a program has the metadata method of a language model."""
    return MAX_SEQ_LEN in read_metadata(facts)


def read_metadata(facts: compile_pb2.ProgramFacts) -> dict[str, int]:
    """Return the values of the methods without inputs that return one integer or boolean."""
    values: dict[str, int] = {}
    for name, method in facts.methods.items():
        if method.inputs or len(method.outputs) != 1 or not method.outputs[0].HasField("value"):
            continue
        scalar = method.outputs[0].value
        kind = scalar.WhichOneof("value")
        if kind in ("integer", "truth"):
            values[name] = int(getattr(scalar, kind))
    return values


def describe(facts: compile_pb2.ProgramFacts, name: str, *, prefill: str = "", decode: str = "") -> generation_pb2.LanguageModel:
    """Return how a program generates text.

    Args:
        name: the program's name, for errors.
        prefill, decode: the methods to use; empty to recognize them.

    Raises:
        NotALanguageModel: the program has no such methods, or their inputs are not tokens and positions.
    """
    metadata = read_metadata(facts)
    prefill, decode = _choose_methods(facts.methods, name, prefill, decode)
    model = _signature(facts.methods[decode], name, decode)
    model.prefill_method, model.decode_method = prefill, decode
    other = _signature(facts.methods[prefill], name, prefill)
    if (other.token_input, other.HasField("position_input"), other.position_input) != (
        model.token_input, model.HasField("position_input"), model.position_input
    ):  # fmt: skip
        raise NotALanguageModel(
            f"The methods {prefill!r} and {decode!r} of {name} take tokens and positions in different places.",
            "Export both with the same order of inputs.",
        )
    embeddings = {method: facts.methods[method].inputs[model.token_input] for method in (prefill, decode)}
    if len({flows.takes_embeddings(spec) for spec in embeddings.values()}) > 1:
        raise NotALanguageModel(
            f"Of the methods {prefill!r} and {decode!r} of {name}, one takes tokens and the other embeddings.",
            "Export both with the same inputs.",
        )
    model.positions = max(model.positions, other.positions)  # one position of a single token is a vector, too
    if (single := facts.methods[decode].inputs[model.token_input].dims[1]).min > 1:
        raise NotALanguageModel(
            f"The method {decode!r} of {name} takes {single.min:,} tokens at least, so it cannot generate one at a time.",
            "Export it with a length of 1, or with a dynamic length.", method=decode,
        )  # fmt: skip
    if metadata.get(_USE_KV_CACHE) == 0 or model.positions == generation_pb2.POSITION_INPUT_NONE:
        raise NotALanguageModel(
            f"{name} has no KV cache: it computes the whole text again for every token.",
            "Export it with a KV cache and an input with the position (export_llm: model.use_kv_cache=True).",
        )
    context = metadata.get(_MAX_CONTEXT) or metadata.get(MAX_SEQ_LEN) or 0
    if not 2 <= context <= MAX_CONTEXT_TOKENS:
        raise NotALanguageModel(
            f"{name} does not say how many tokens its context has, or says an impossible number: {context}.",
            f"Add the constant method {MAX_SEQ_LEN} (ModelSource.constant_methods).",
        )
    model.max_context_tokens = context
    tokens = facts.methods[prefill].inputs[other.token_input].dims[1]
    model.dynamic_prompt = tokens.min != tokens.max
    if tokens.max < 1 or not (model.dynamic_prompt or tokens.max <= context):
        raise NotALanguageModel(
            f"The method {prefill!r} of {name} takes {tokens.max:,} tokens, but the context has {context:,}.",
            "Export it with a length of 1 to that of the context, or with a dynamic length.", method=prefill,
        )  # fmt: skip
    model.max_prompt_tokens = min(tokens.max, context)
    # Compared before they are assigned: a file may have any numbers, and those of the message have 32 bits.
    width = max(_vocabulary_of(facts.methods[decode]), _vocabulary_of(facts.methods[prefill]))
    vocabulary = metadata.get(_VOCAB_SIZE) or _vocabulary_of(facts.methods[decode])
    if not (1 <= vocabulary <= MAX_VOCAB and width <= MAX_VOCAB):
        impossible = width if 1 <= vocabulary <= MAX_VOCAB else vocabulary
        raise NotALanguageModel(
            f"The size of {name}'s vocabulary is unknown or impossible: {impossible}.",
            f"Add the constant method {_VOCAB_SIZE} (ModelSource.constant_methods).",
        )
    model.vocab_size = vocabulary
    if facts.methods[decode].HasField("state_bytes"):
        model.kv_cache_bytes = facts.methods[decode].state_bytes
    for key in sorted(metadata):
        model.metadata[key] = metadata[key]
    for method, spec in embeddings.items():
        if flows.takes_embeddings(spec):
            model.flow.CopyFrom(flows.describe_flow(facts.methods, name, method, spec))
    return model


def _choose_methods(methods: Mapping[str, MethodFacts], name: str, prefill: str, decode: str) -> tuple[str, str]:
    """Return the methods for the prompt and for single tokens; a single chosen one is used for both."""
    if prefill or decode:
        chosen = prefill or decode, decode or prefill
    else:
        chosen = next((pair for pair in _METHODS if all(each in methods for each in pair)), ("", ""))
    missing = next((each for each in chosen if each not in methods), None)
    if missing is not None:
        known = sorted(each for each in methods if methods[each].inputs)
        what = (
            f"{name} has no method {missing!r}." if missing else f"{name} has no method whose name tells that it generates text."
        )
        raise NotALanguageModel(
            what,
            f"It has: {', '.join(known) or 'none with inputs'}. Choose with --prefill-method and --decode-method "
            "(Generate(prefill_method=, decode_method=)).",
            known=",".join(known),
        )
    return chosen


def _signature(method: MethodFacts, name: str, called: str) -> generation_pb2.LanguageModel:
    """Return the indices of the tokens and positions in the inputs of a method.

    Raises:
        NotALanguageModel: the method has other inputs, or does not return logits.
    """
    tokens = [index for index, spec in enumerate(method.inputs) if _is_tokens(spec) or flows.takes_embeddings(spec)]
    positions = [index for index, spec in enumerate(method.inputs) if _is_integers(spec) and len(spec.dims) == 1]
    if len(tokens) != 1 or len(positions) > 1 or len(method.inputs) != len(tokens) + len(positions):
        got = ", ".join(f"{spec.dtype or 'scalar'}{[dim.max for dim in spec.dims]}" for spec in method.inputs) or "none"
        raise NotALanguageModel(
            f"The method {called!r} of {name} must take tokens (int64[1, n]) or embeddings (float[1, n, width]) and their "
            f"position (int64[1] or int64[n]), and takes: {got}.",
            "Measure it with --inputs FILE.npz instead of --generate.", method=called,
        )  # fmt: skip
    if not method.outputs or not _is_logits(method.outputs[0]):
        raise NotALanguageModel(
            f"The method {called!r} of {name} must return logits, a floating-point tensor, as its first output.",
            "Measure it with --inputs FILE.npz instead of --generate.", method=called,
        )  # fmt: skip
    model = generation_pb2.LanguageModel(token_input=tokens[0], positions=generation_pb2.POSITION_INPUT_NONE)
    if positions:
        model.position_input = positions[0]
        is_vector = method.inputs[positions[0]].dims[0].max > 1
        model.positions = generation_pb2.POSITION_INPUT_VECTOR if is_vector else generation_pb2.POSITION_INPUT_START
    return model


def _is_integers(spec: ValueSpec) -> bool:
    return spec.kind == common_pb2.VALUE_KIND_TENSOR and spec.dtype in _INTEGERS


def _is_tokens(spec: ValueSpec) -> bool:
    return _is_integers(spec) and len(spec.dims) == 2 and spec.dims[0].min <= 1 <= spec.dims[0].max == 1


def _is_logits(spec: ValueSpec) -> bool:
    return spec.kind == common_pb2.VALUE_KIND_TENSOR and "float" in spec.dtype and bool(spec.dims)


def _vocabulary_of(method: MethodFacts) -> int:
    return method.outputs[0].dims[-1].max
