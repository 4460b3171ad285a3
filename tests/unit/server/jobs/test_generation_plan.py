"""What an agent measures of a language model, and requests that contradict themselves or the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from etfarm.server.jobs.generation import (
    check_request,
    facts_of,
    plan,
    require_request,
)
from etfarm.server.jobs.model import BadJob
from etfarm.v1 import common_pb2, compile_pb2, generation_pb2, job_pb2
from etfarm.v1.generation_pb2 import ContextDepth, GenerationOptions
from etfarm.wire.generation import logits_after
from etfarm.wire.measurement import WITH_GENERATION
from tests.support.generated import facts, flow_facts, method, tensor
from tests.support.new_fields import with_new_fields
from tests.support.refusals import refuses


def measurement(tokens: int = 16, depths: tuple[int | float, ...] = (), **changes: Any) -> job_pb2.Measurement:
    chosen = [ContextDepth(share=each) if isinstance(each, float) else ContextDepth(tokens=each) for each in depths]
    own = {name: changes.pop(name) for name in ("prompt_tokens", "repetitions", "warmup", "decode_method") if name in changes}
    return job_pb2.Measurement(generation=GenerationOptions(tokens=tokens, depths=chosen, **own), **changes)


def points(asked: generation_pb2.GenerationPlan) -> list[tuple[int, int]]:
    return [(point.prompt_tokens, point.depth) for point in asked.points]


def test_defaults_are_those_of_llama_bench_where_the_context_allows_it() -> None:
    large = facts({"forward": method(tensor("int64", 1, (1, 2047)), tensor("int64", 1))}, get_max_seq_len=2048)
    asked = plan(measurement(128), large, "m")
    assert points(asked) == [(128, 0), (128, 1344), (512, 0), (512, 1056)], "75 % of what the prompt and the tokens leave"
    assert (asked.repetitions, asked.warmup, asked.generated_tokens, asked.trace_iterations) == (5, 1, 128, 30)
    assert points(plan(measurement(16), facts(), "m")) == [(48, 0)], "the longest prompt that fits"


def test_drawn_tokens_are_scored_unless_there_is_a_text() -> None:
    drawn = plan(measurement(), facts(), "m").score
    assert len(drawn.tokens) == drawn.window == 64 and not drawn.is_text and max(drawn.tokens) < 96
    assert (
        len(drawn.logits_after) == 32 and drawn.logits_after[-1] == 63 and sorted(set(drawn.logits_after)) == drawn.logits_after
    )
    request = measurement()
    request.generation.text.extend([1, 95, 3] * 100)
    asked = plan(request, facts(), "m").score
    assert list(asked.tokens) == [1, 95, 3] * 100 and asked.is_text and asked.window == 64
    none = measurement()
    none.generation.accuracy_tokens = 0
    assert not plan(none, facts(), "m").HasField("score")
    large = measurement()
    large.generation.accuracy_tokens = 4096
    assert len(plan(large, facts(), "m").score.tokens) == 64, "no more than the context has"


@pytest.mark.remedy("TOKEN_OUTSIDE_VOCABULARY")
def test_a_token_outside_the_vocabulary_is_refused() -> None:
    request = measurement()
    request.generation.text.extend([1, 96])
    with refuses("TOKEN_OUTSIDE_VOCABULARY", match="Token 1 of the text is 96, but the vocabulary of m has 96"):
        plan(request, facts(), "m")
    request.generation.text[1] = 95
    plan(request, facts(), "m")


def test_the_logits_of_a_large_vocabulary_are_fewer() -> None:
    assert logits_after(64, 1 << 24) == [63] and len(logits_after(64, 128_256)) == 32 and logits_after(3, 96) == [0, 1, 2]


@pytest.mark.parametrize(("text", "count"), [([1], None), ([1, -1], None), ([1] * 16_385, None), ([], 1), ([], 4097)])
def test_impossible_texts_are_refused(text: list[int], count: int | None) -> None:
    asked = measurement()
    asked.generation.text.extend(text)
    if count is not None:
        asked.generation.accuracy_tokens = count
    with pytest.raises(BadJob):
        check_request(job_pb2.JobSpec(measurement=asked))


def test_depths_are_tokens_or_shares_of_the_room() -> None:
    assert points(plan(measurement(16, (0, 20, 1.0), prompt_tokens=[8]), facts(), "m")) == [(8, 0), (8, 20), (8, 40)]
    assert points(plan(measurement(16, (0, 0.0), prompt_tokens=[8, 8]), facts(), "m")) == [(8, 0)], "each once"


def test_the_options_of_the_measurement_are_in_the_plan() -> None:
    asked = plan(measurement(repetitions=2, warmup=0, max_time_s=5.0, trace_iterations=7), facts(), "m")
    assert (asked.repetitions, asked.warmup, asked.max_time_s, asked.trace_iterations) == (2, 0, 5.0, 7)
    assert plan(measurement(no_profile=True), facts(), "m").trace_iterations == 0


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (measurement(60, prompt_tokens=[8]), "prompts of at most 4"),
        (measurement(64), "do not fit"),
        (measurement(16, (41,), prompt_tokens=[8]), "depth of at most 40"),
    ],
)
def test_what_does_not_fit_into_the_context_is_refused(asked: job_pb2.Measurement, why: str) -> None:
    with refuses("CONTEXT_TOO_SHORT") as refused:
        plan(asked, facts(), "m")
    assert why in f"{refused.value.message} {refused.value.remedy}" and refused.value.metadata["context"] == "64"


@pytest.mark.remedy("CONTEXT_TOO_SHORT")
def test_a_static_prompt_needs_whole_chunks() -> None:
    static = facts({"prefill": method(tensor("int64", 1, 16), tensor("int64", 1)), "decode": method(*[tensor("int64", 1, 1)] * 1,
                    tensor("int64", 1))})  # fmt: skip
    assert points(plan(measurement(16, (0.75,)), static, "m")) == [(48, 0)]
    assert points(plan(measurement(8, (0.9,), prompt_tokens=[16]), static, "m")) == [(16, 32)], "a depth of whole chunks"
    with refuses("CONTEXT_TOO_SHORT", match="no multiple"):
        plan(measurement(16, prompt_tokens=[20]), static, "m")
    assert sorted(facts_of(plan(measurement(16), static, "m"), static).operators) == ["aten::add.out"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (job_pb2.JobSpec(measurement=measurement(1)), "tokens"),
        (job_pb2.JobSpec(measurement=measurement(5000)), "tokens"),
        (job_pb2.JobSpec(measurement=measurement(repetitions=0)), "repetitions"),
        (job_pb2.JobSpec(measurement=measurement(repetitions=1000)), "repetitions"),
        (job_pb2.JobSpec(measurement=measurement(warmup=-1)), "warmup"),
        (job_pb2.JobSpec(measurement=measurement(prompt_tokens=[0])), "prompt_tokens"),
        (job_pb2.JobSpec(measurement=measurement(16, (1.5,))), "depths"),
        (job_pb2.JobSpec(measurement=measurement(16, (-1,))), "depths"),
        (job_pb2.JobSpec(measurement=measurement(16), methods=["forward"]), "methods"),
        (job_pb2.JobSpec(measurement=measurement(16, interleave=True)), "interleave"),
        (job_pb2.JobSpec(measurement=measurement(16, numerics=True)), "numerics"),
        (job_pb2.JobSpec(measurement=measurement(16, iterations=5)), "iterations"),
        (job_pb2.JobSpec(measurement=job_pb2.Measurement(warmup=0, generation={"tokens": 16})), "warmup"),
        (job_pb2.JobSpec(measurement=measurement(16, min_time_s=1)), "min_time_s"),
        (job_pb2.JobSpec(measurement=measurement(16, max_samples=5)), "max_samples"),
        (job_pb2.JobSpec(measurement=measurement(16, max_warmup_s=5)), "max_warmup_s"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(spec: job_pb2.JobSpec, field: str) -> None:
    with pytest.raises(BadJob) as refused:
        check_request(spec)
    assert refused.value.metadata["field"] == field


def test_the_contract_names_what_can_be_combined_with_generation() -> None:
    text = (Path(job_pb2.__file__).parent / "job.proto").read_text()
    named = text.partition("executions of a method. Only ")[2].partition("can be combined with it")[0]
    fields = job_pb2.Measurement.DESCRIPTOR.fields_by_name
    assert {"generation", *re.findall(r"`(\w+)`", named)} == WITH_GENERATION.intersection(fields)
    together = {"no_profile": True, "cores": "0", "repeat": 2, "trace_iterations": 5, "max_time_s": 5.0}
    check_request(job_pb2.JobSpec(measurement=measurement(16, **together)))


def test_a_new_field_is_refused_with_generation() -> None:
    spec = with_new_fields(job_pb2.JobSpec.DESCRIPTOR, job_pb2.Measurement.DESCRIPTOR)()
    spec.measurement.new_measurement = "set"
    check_request(spec)
    spec.measurement.generation.tokens = 16
    with refuses("BAD_JOB", match="`generation` cannot be combined with `new_measurement`"):
        check_request(spec)


def test_a_request_is_bounded() -> None:
    with pytest.raises(BadJob, match="at most 32"):
        check_request(job_pb2.JobSpec(measurement=measurement(prompt_tokens=list(range(1, 40)))))
    with pytest.raises(BadJob, match="1,000,000"):
        check_request(job_pb2.JobSpec(measurement=measurement(4096, repetitions=100)))
    check_request(job_pb2.JobSpec(measurement=job_pb2.Measurement(iterations=3)))


@pytest.mark.remedy("GENERATION_NOT_REQUESTED")
def test_a_language_model_is_not_measured_on_made_up_tokens() -> None:
    with refuses("GENERATION_NOT_REQUESTED") as refused:
        require_request("m", "forward", facts())
    assert "63 made-up tokens" in refused.value.message and "--generate" in refused.value.remedy
    assert points(plan(measurement(16), facts(), "m"))
    require_request("m", "get_vocab_size", facts())
    require_request("m", "forward", compile_pb2.ProgramFacts(methods={"forward": method(tensor("float32", 1, 3))}))


def test_tokens_of_a_model_that_takes_embeddings_are_not_scored() -> None:
    assert not plan(measurement(16), flow_facts(), "m").HasField("score")
    for field, value in (("text", [1, 2, 3]), ("accuracy_tokens", 8)):
        asked = measurement(16)
        asked.generation.MergeFrom(GenerationOptions(**{field: value}))  # type: ignore[arg-type]
        with pytest.raises(BadJob, match="take embeddings"):
            plan(asked, flow_facts(), "m")


def test_the_positions_of_an_encoder_are_part_of_each_prompt() -> None:
    asked = plan(measurement(16, (0, 1.0), prompt_tokens=[8]), flow_facts(), "m")
    assert points(asked) == [(8, 0), (8, 24)], "64 - 16 generated - 8 of the prompt - 16 of the image"
    assert points(plan(measurement(16), flow_facts(), "m")) == [(32, 0)], "the longest prompt that fits"
    assert sorted(facts_of(asked, flow_facts()).operators) == ["aten::add.out", "aten::convolution.out", "aten::embedding.out"]
    with refuses("CONTEXT_TOO_SHORT") as refused:
        plan(measurement(16, prompt_tokens=[40]), flow_facts(), "m")
    assert "A prompt of 40 tokens with the 16 positions of 'vision_encoder'" in refused.value.message
    assert "prompts of at most 32" in refused.value.remedy
    with refuses("GENERATION_NOT_REQUESTED", match="language model"):
        require_request("m", "text_decoder", flow_facts())
    require_request("m", "vision_encoder", flow_facts())
    require_request("m", "token_embedding", flow_facts())


def test_only_encoders_have_inputs() -> None:
    picture = common_pb2.Artifact(digest="a" * 64, size_bytes=5)
    (encoder,) = plan(measurement(), flow_facts(), "m", {"vision_encoder": picture}).model.flow.encoders
    assert encoder.inputs == picture
    assert not plan(measurement(), flow_facts(), "m").model.flow.encoders[0].HasField("inputs")
    with pytest.raises(BadJob, match=r"'text_decoder' is none: prompts are drawn\. The encoders of m are vision_encoder\."):
        plan(measurement(), flow_facts(), "m", {"text_decoder": picture})
    with pytest.raises(BadJob, match=r"m has no encoder\."):
        plan(measurement(), facts(), "m", {"forward": picture})
