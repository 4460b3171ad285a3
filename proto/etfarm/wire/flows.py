"""Flows of several methods that generate text together, such as encoder, token embedding and decoder of a vision-language model.

Sources: executorch/extension/llm/runner/constants.h and multimodal_prefiller.cpp (names of methods, order of inputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from etfarm.v1 import common_pb2, generation_pb2
from etfarm.v1.compile_pb2 import MethodFacts, ValueSpec
from etfarm.wire.errors import UserError

ENCODERS: Final = ("vision_encoder", "audio_encoder")
"""Names of the methods that turn an image or a sound into embeddings, in the order in which they begin a prompt."""
EMBEDDING: Final = "token_embedding"
"""Name of the method that turns tokens into embeddings."""
DECODER: Final = "text_decoder"
"""Name of the method that takes embeddings and positions, and returns logits."""
_FLOATS: Final = ("float32", "float16", "bfloat16")
_MAX_POSITIONS: Final = 1 << 20


class NotALanguageModel(UserError):
    """A program that does not generate text, or not in a way that etfarm can measure."""

    reason = "NOT_A_LANGUAGE_MODEL"


def takes_embeddings(spec: ValueSpec) -> bool:
    """Return whether an input of a decoder is embeddings: a floating-point tensor of shape [1, n, width]."""
    is_float = spec.kind == common_pb2.VALUE_KIND_TENSOR and spec.dtype in _FLOATS
    return is_float and len(spec.dims) == 3 and spec.dims[0].max == 1


def describe_flow(methods: Mapping[str, MethodFacts], name: str, decoder: str, embeddings: ValueSpec) -> generation_pb2.ModelFlow:
    """Return the methods that compute the embeddings of a decoder.

    Args:
        methods: all methods of the program.
        name: the program's name, for errors.
        decoder: the method that takes the embeddings.
        embeddings: its input.

    Raises:
        NotALanguageModel: no method embeds tokens, or the output of a method does not fit the decoder.
    """
    if EMBEDDING not in methods:
        raise NotALanguageModel(
            f"{decoder!r} of {name} takes embeddings of {embeddings.dims[2].max:,} values, and {name} has no method "
            f"{EMBEDDING!r} that computes them from tokens.",
            "Export all methods of the model into one .pte (ModelSource.flow).", method=decoder,
        )  # fmt: skip
    _require_fit(EMBEDDING, _output(methods[EMBEDDING], EMBEDDING, name), decoder, embeddings, name)
    _require_tokens(methods[EMBEDDING], name)
    flow = generation_pb2.ModelFlow(embedding_method=EMBEDDING)
    for encoder in ENCODERS:
        if encoder in methods:
            output = _output(methods[encoder], encoder, name)
            _require_fit(encoder, output, decoder, embeddings, name)
            _require_static(methods[encoder], encoder, name)
            flow.encoders.add(method=encoder, positions=prod(dim.max for dim in output.dims[:-1]))
    return flow


def methods_of(model: generation_pb2.LanguageModel) -> list[str]:
    """Return the methods that generate text together, each once, in the order of execution."""
    encoders = [encoder.method for encoder in model.flow.encoders]
    names = [*encoders, model.flow.embedding_method, model.prefill_method, model.decode_method]
    return list(dict.fromkeys(name for name in names if name))


def encoded_positions(model: generation_pb2.LanguageModel) -> int:
    """Return the number of positions at the beginning of each prompt that encoders fill."""
    return sum(encoder.positions for encoder in model.flow.encoders)


def _output(method: MethodFacts, called: str, name: str) -> ValueSpec:
    """Return the embeddings that a method computes: its first output."""
    spec = method.outputs[0] if method.outputs else ValueSpec()
    if spec.kind != common_pb2.VALUE_KIND_TENSOR or spec.dtype not in _FLOATS or len(spec.dims) < 2:
        raise NotALanguageModel(
            f"The method {called!r} of {name} must return embeddings, float[..., width], as its first output, and returns "
            f"{_shown(spec)}.",
            "Return one row of values for each position of the context.", method=called,
        )  # fmt: skip
    return spec


def _require_fit(called: str, output: ValueSpec, decoder: str, embeddings: ValueSpec, name: str) -> None:
    if (output.dtype, output.dims[-1].max) != (embeddings.dtype, embeddings.dims[-1].max):
        raise NotALanguageModel(
            f"{called!r} of {name} returns {_shown(output)}, but {decoder!r} takes {_shown(embeddings)}.",
            "Export both with embeddings of one width and dtype.", method=called, decoder=decoder,
        )  # fmt: skip


def _require_tokens(method: MethodFacts, name: str) -> None:
    spec = method.inputs[0] if len(method.inputs) == 1 else ValueSpec()
    is_row = spec.dtype in ("int64", "int32") and len(spec.dims) == 2 and spec.dims[0].max == 1
    if not is_row or not spec.dims[1].min <= 1 <= spec.dims[1].max:
        takes = ", ".join(map(_shown, method.inputs)) or "nothing"
        raise NotALanguageModel(
            f"The method {EMBEDDING!r} of {name} must take tokens, int64[1, n] with a dynamic n or with 1, and takes {takes}.",
            "Export it with a dynamic length.", method=EMBEDDING,
        )  # fmt: skip


def _require_static(method: MethodFacts, called: str, name: str) -> None:
    """Require an encoder whose inputs and output have one shape, which is then the number of its positions."""
    values = [*method.inputs, method.outputs[0]]
    if dynamic := next((spec for spec in values if any(dim.min != dim.max for dim in spec.dims)), None):
        raise NotALanguageModel(
            f"The method {called!r} of {name} has a dynamic shape, {_shown(dynamic)}: the length of a prompt is not fixed.",
            "Export the encoder with static shapes.", method=called,
        )  # fmt: skip
    positions = prod(dim.max for dim in method.outputs[0].dims[:-1])
    if not 1 <= positions <= _MAX_POSITIONS:
        raise NotALanguageModel(
            f"The method {called!r} of {name} returns {positions:,} embeddings; 1 to {_MAX_POSITIONS:,} are possible.",
            "Return one row of values for each position of the context.", method=called,
        )  # fmt: skip


def _shown(spec: ValueSpec) -> str:
    """Return a value's dtype and shape: `float32[1, 16, 32]`, `int64[1, <=63]`."""
    sizes: Sequence[str] = [str(dim.max) if dim.min == dim.max else f"<={dim.max}" for dim in spec.dims]
    return f"{spec.dtype or 'no tensor'}[{', '.join(sizes)}]" if spec.dtype else "no tensor"
