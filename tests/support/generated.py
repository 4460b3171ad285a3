"""Facts of language models, results of agents that generated text, and reports of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, generation_pb2
from etfarm.wire.chunks import artifact_of
from tests.support.comparisons import report

CONTEXT = 64
VOCABULARY = 96


def tensor(dtype: str, *dims: int | tuple[int, int]) -> compile_pb2.ValueSpec:
    """Return a tensor with dims that are static, or dynamic from a minimum to a maximum."""
    ranges = [dim if isinstance(dim, tuple) else (dim, dim) for dim in dims]
    return compile_pb2.ValueSpec(
        kind=common_pb2.VALUE_KIND_TENSOR, dtype=dtype, dims=[compile_pb2.DimRange(min=low, max=high) for low, high in ranges]
    )


def method(*inputs: compile_pb2.ValueSpec, logits: str = "float32", state_bytes: int = 1024) -> compile_pb2.MethodFacts:
    """Return a method that returns logits."""
    return compile_pb2.MethodFacts(
        inputs=inputs, outputs=[tensor(logits, 1, VOCABULARY)], operators=["aten::add.out"], state_bytes=state_bytes
    )


def constant(value: int | bool) -> compile_pb2.MethodFacts:
    """Return a metadata method."""
    scalar = compile_pb2.Scalar(truth=value) if isinstance(value, bool) else compile_pb2.Scalar(integer=value)
    return compile_pb2.MethodFacts(outputs=[compile_pb2.ValueSpec(kind=common_pb2.VALUE_KIND_INT, value=scalar)])


def facts(methods: dict[str, compile_pb2.MethodFacts] | None = None, **metadata: int | bool) -> compile_pb2.ProgramFacts:
    """A decoder with one method, as export_llm writes it, unless other methods are given; `metadata` is added to its own."""
    known = methods or {"forward": method(tensor("int64", (0, 1), (0, CONTEXT - 1)), tensor("int64", 1))}
    values = {"get_max_seq_len": CONTEXT, "get_vocab_size": VOCABULARY, "use_kv_cache": True, **metadata}
    return compile_pb2.ProgramFacts(methods={**known, **{name: constant(value) for name, value in values.items()}})


def flow_facts(
    *,
    width: int = 32,
    dtype: str = "float32",
    encoders: tuple[str, ...] = ("vision_encoder",),
    **methods: compile_pb2.MethodFacts,
) -> compile_pb2.ProgramFacts:
    """An encoder of 16 positions, a token embedding and a decoder, as ExecuTorch names them; `methods` are added to these."""
    image = compile_pb2.MethodFacts(
        inputs=[tensor("float32", 1, 3, 16, 16)], outputs=[tensor(dtype, 1, 16, width)], operators=["aten::convolution.out"]
    )
    length = (0, CONTEXT - 1)
    embedding = compile_pb2.MethodFacts(
        inputs=[tensor("int64", 1, length)], outputs=[tensor("float32", 1, length, 32)], operators=["aten::embedding.out"]
    )
    decoder = method(tensor("float32", 1, length, 32), tensor("int64", 1))
    return facts({**dict.fromkeys(encoders, image), "token_embedding": embedding, "text_decoder": decoder, **methods})


def plan(*points: tuple[int, int], tokens: int = 4, repetitions: int = 3) -> generation_pb2.GenerationPlan:
    """Return a plan for `facts()`."""
    return generation_pb2.GenerationPlan(
        model=generation_pb2.LanguageModel(
            prefill_method="forward", decode_method="forward", max_prompt_tokens=CONTEXT - 1, vocab_size=VOCABULARY
        ),
        points=[generation_pb2.GenerationPoint(prompt_tokens=prompt, depth=depth) for prompt, depth in points or [(8, 0)]],
        generated_tokens=tokens,
        repetitions=repetitions,
    )


def flow_plan(*points: tuple[int, int], tokens: int = 4, repetitions: int = 3) -> generation_pb2.GenerationPlan:
    """A plan for `flow_facts()`."""
    asked = plan(*points, tokens=tokens, repetitions=repetitions)
    asked.model.prefill_method = asked.model.decode_method = "text_decoder"
    asked.model.flow.embedding_method = "token_embedding"
    asked.model.flow.encoders.add(method="vision_encoder", positions=16)
    return asked


def process(
    folder: Path, asked: generation_pb2.GenerationPlan, times: Sequence[Sequence[int]], *, tokens: Sequence[int] = ()
) -> agent_pb2.GenerationResult:
    """Return what a process sends: the times of each repetition of all points in order. Its files are in the folder, by digest.

    Args:
        tokens: those of every repetition; 0, 1, 2, ... if empty.
    """
    result = agent_pb2.GenerationResult()
    for number, point in enumerate(asked.points):
        own = times[number * asked.repetitions : (number + 1) * asked.repetitions]
        result.points.add(
            prompt_tokens=point.prompt_tokens, depth=point.depth, repetitions=len(own), prefill_ns=[row[0] - 20 for row in own]
        )
    if asked.model.HasField("flow"):
        _add_parts(result, asked, times)
    flat = [value for row in times for value in row]
    generated = list(tokens or range(asked.generated_tokens)) * len(times)
    for holder, data in ((result.token_ns, array("q", flat).tobytes()), (result.tokens, array("i", generated).tobytes())):
        holder.CopyFrom(artifact_of(data))
        (folder / holder.digest).write_bytes(data)
    return result


def _add_parts(result: agent_pb2.GenerationResult, asked: generation_pb2.GenerationPlan, times: Sequence[Sequence[int]]) -> None:
    """Add parts: of a prompt the encoder takes a half, of a token the decoder."""
    for number, point in enumerate(result.points):
        own = times[number * asked.repetitions : (number + 1) * asked.repetitions]
        for name, executions, before, after in (
            ("vision_encoder", 1, 2, 0),
            ("token_embedding", 1, 8, 10),
            ("text_decoder", 2, 4, 2),
        ):
            point.parts.add(
                method=name, prefill_executions=executions, decode_executions=asked.generated_tokens - 1 if after else 0,
                prefill_ns=[row[0] // before for row in own], decode_ns=[sum(row[1:]) // after if after else 0 for row in own],
            )  # fmt: skip


def point(decode: float, *runs: float, depth: int = 0, status: str = "VALID", reach: float = 0.01) -> dict[str, Any]:
    """Return a point of REPORT.generation whose prefill is ten times as fast as its decode."""

    def numbers(rate: float) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, interval, value in (
            ("ttft_ns", "ttft_ci95_ns", 1e9 / rate),
            ("prefill_tokens_per_s", "prefill_tokens_per_s_ci95", 10 * rate),
            ("decode_tokens_per_s", "decode_tokens_per_s_ci95", rate),
        ):
            values |= {name: value, interval: [value * (1 - reach), value * (1 + reach)]}
        return {**values, "verdict": {"status": status}}

    token_ns = [8e9 / decode, *[1e9 / decode] * 15]
    measured = [{"repetitions": 5, **numbers(run)} for run in runs or (decode,)]
    return {
        "prompt_tokens": 8, "depth": depth, "repetitions": 5 * len(measured), **numbers(decode), "token_ns": token_ns,
        "tokens_equal": True, "runs": measured,
    }  # fmt: skip


def flow_point(decode: float, **changes: Any) -> dict[str, Any]:
    """A point of a vision-language model."""
    encoder = {"method": "vision_encoder", "prefill_executions": 1, "prefill_ns": 5e6, "prefill_ci95_ns": [4.9e6, 5.1e6]}
    decoder = {
        "method": "text_decoder", "prefill_executions": 2, "prefill_ns": 2e6, "prefill_share": 0.2, "decode_executions": 15,
        "decode_ns": 9e6, "decode_share": 0.9,
    }  # fmt: skip
    return {**point(decode, **changes), "parts": [{**encoder, "prefill_share": 0.5}, decoder]}


def accuracy_of_logits(top1: float = 0.97, sqnr_db: float = 30.0, tokens: int = 1000, **changes: Any) -> dict[str, Any]:
    """Return how exactly a language model computes, against the program before quantization and the quantized one."""
    values = {
        "tokens": tokens, "top1_agreement": top1, "sqnr_db": sqnr_db, "kl_divergence": 0.02, "max_abs_error": 0.5,
        "generated_tokens": 16, "perplexity": 10.0, "perplexity_ratio": 1.1,
        "first_difference": {"index": 5, "token": 1, "reference_token": 2, "gap": 0.1},
    }  # fmt: skip
    references = [{"reference": name, **values} for name in ("program before quantization", "quantized program")]
    return {
        "tokens": tokens, "is_text": True, "perplexity": 11.0, "perplexity_tokens": tokens - 1, "references": references,
        **changes,
    }  # fmt: skip


def generated_report(
    cell: str, *points: dict[str, Any], accuracy_of_logits: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """Return a REPORT of a language model of its own."""
    own = {"program": {"digest": cell.ljust(64, "0"), "size_bytes": 1000}, "toolchain": {"torch": "2.13.0"}}
    model: dict[str, Any] = {
        "prefill_method": "forward", "decode_method": "forward", "max_prompt_tokens": 63, "max_context_tokens": CONTEXT,
        "vocab_size": VOCABULARY, "kv_cache_bytes": 32768,
    }  # fmt: skip
    if any("parts" in each for each in points):
        encoders = [{"method": "vision_encoder", "positions": 16}]
        model["flow"] = {"embedding_method": "token_embedding", "encoders": encoders}
    generation = {
        "model": model, "generated_tokens": 16, "points": list(points), "decode_execution": {"tokens": 1, "position": 8},
        **({"accuracy": accuracy_of_logits} if accuracy_of_logits else {}),
    }  # fmt: skip
    nothing: dict[str, Any] = {"latency": None, "accuracy": None}
    return report(cell, **{"compile": own, "generation": generation, **nothing, **changes})
