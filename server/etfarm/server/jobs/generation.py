"""Plans of generation: from what a job requests and what a program's facts say, the points that an agent measures. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from etfarm.server.jobs.model import BadJob
from etfarm.v1 import common_pb2, compile_pb2, generation_pb2, job_pb2
from etfarm.wire import flows, generation, language_models
from etfarm.wire.errors import error_for
from etfarm.wire.measurement import WITH_GENERATION

SEED: Final = 1
"""Selects the tokens of all contexts and prompts, so that measurements of one model process the same text."""
DEFAULT_MAX_TIME_S: Final = 60.0
"""Time limit of the timed repetitions of a point, if the job sets none."""
DEFAULT_TRACED: Final = 30
"""Minimum number of traced executions, if the job sets none."""


_NO_INPUTS: Final[Mapping[str, common_pb2.Artifact]] = MappingProxyType({})


def check_request(spec: job_pb2.JobSpec) -> None:
    """Check a job's request for generation, as far as no program is needed.

    Raises:
        BadJob: a value is out of range, or the job has options that contradict it.
    """
    measurement = spec.measurement
    if not measurement.HasField("generation"):
        return
    requested = measurement.generation
    _require("tokens", requested.tokens, generation.MIN_TOKENS, generation.MAX_TOKENS)
    if requested.HasField("repetitions"):
        _require("repetitions", requested.repetitions, 1, generation.MAX_REPETITIONS)
    if requested.HasField("warmup"):
        _require("warmup", requested.warmup, 0, generation.MAX_REPETITIONS)
    for tokens in requested.prompt_tokens:
        _require("prompt_tokens", tokens, 1, generation.MAX_CONTEXT_TOKENS)
    for depth in requested.depths:
        if depth.WhichOneof("depth") == "share":
            _require("depths", depth.share, 0.0, 1.0)
        else:
            _require("depths", depth.tokens, 0, generation.MAX_CONTEXT_TOKENS)
    if requested.text:
        _require("text", len(requested.text), 2, generation.MAX_TEXT)
        if min(requested.text) < 0:
            raise BadJob("A token of `text` is negative.", "Give the ids of tokens, which are 0 or more.", field="text")
    if requested.accuracy_tokens:
        _require("accuracy_tokens", requested.accuracy_tokens, 2, generation.MAX_TOKENS)
    points = points_requested(measurement)
    if points > generation.MAX_POINTS:
        raise BadJob(
            f"{points} pairs of prompt length and depth were requested; at most {generation.MAX_POINTS} are allowed.",
            "Give fewer lengths or depths, or send several jobs.", limit=generation.MAX_POINTS,
        )  # fmt: skip
    repetitions = requested.repetitions if requested.HasField("repetitions") else generation.DEFAULT_REPETITIONS
    if (total := points * repetitions * requested.tokens) > generation.MAX_TIMED_TOKENS:
        raise BadJob(
            f"{total:,} tokens would be generated; at most {generation.MAX_TIMED_TOKENS:,} are allowed.",
            "Generate fewer tokens, or fewer repetitions.", limit=generation.MAX_TIMED_TOKENS,
        )  # fmt: skip
    if unfit := sorted(_contradicting(spec)):
        raise BadJob(
            f"`generation` cannot be combined with {', '.join(f'`{name}`' for name in unfit)}.",
            "Leave one of them out: generation has its own inputs, repetitions and limits.", field=unfit[0],
        )  # fmt: skip


def points_requested(measurement: job_pb2.Measurement) -> int:
    """Return the number of points of a request; an upper bound where the defaults depend on the program."""
    requested = measurement.generation
    prompts = len(requested.prompt_tokens) or len(generation.DEFAULT_PROMPT_TOKENS)
    return prompts * (len(requested.depths) or len(generation.DEFAULT_DEPTH_SHARES))


def plan(
    measurement: job_pb2.Measurement,
    facts: compile_pb2.ProgramFacts,
    name: str,
    inputs: Mapping[str, common_pb2.Artifact] = _NO_INPUTS,
) -> generation_pb2.GenerationPlan:
    """Return what an agent measures of a program.

    Args:
        measurement: has `generation`, which `check_request` accepts.
        name: the program's name, for errors.
        inputs: those of encoders, by method.

    Raises:
        BadJob: there are inputs for a method that is no encoder.
        NotALanguageModel: the program cannot generate text.
        CONTEXT_TOO_SHORT: a point does not fit into the program's context.
        TOKEN_OUTSIDE_VOCABULARY: the text has a token that the program does not.
    """
    requested = measurement.generation
    model = language_models.describe(facts, name, prefill=requested.prefill_method, decode=requested.decode_method)
    _add_inputs(model, inputs, name)
    points: dict[tuple[int, int], None] = {}  # without duplicates, in their order
    for prompt_tokens in _prompts(requested, model, name):
        for depth in _depths(requested, model, prompt_tokens, name):
            points[prompt_tokens, depth] = None
    return generation_pb2.GenerationPlan(
        model=model,
        points=[generation_pb2.GenerationPoint(prompt_tokens=prompt, depth=depth) for prompt, depth in points],
        generated_tokens=requested.tokens,
        repetitions=requested.repetitions if requested.HasField("repetitions") else generation.DEFAULT_REPETITIONS,
        warmup=requested.warmup if requested.HasField("warmup") else generation.DEFAULT_WARMUP,
        seed=SEED,
        max_time_s=measurement.max_time_s if measurement.HasField("max_time_s") else DEFAULT_MAX_TIME_S,
        trace_iterations=0 if measurement.no_profile else measurement.trace_iterations or DEFAULT_TRACED,
        score=_score(requested, model, name),
    )


def facts_of(plan: generation_pb2.GenerationPlan, facts: compile_pb2.ProgramFacts) -> compile_pb2.MethodFacts:
    """Return what the methods of a plan require of a device together, with the inputs and outputs of decode."""
    methods = [facts.methods[name] for name in flows.methods_of(plan.model)]
    together = compile_pb2.MethodFacts()
    together.CopyFrom(facts.methods[plan.model.decode_method])
    together.operators[:] = sorted({operator for method in methods for operator in method.operators})
    together.backends[:] = sorted({backend for method in methods for backend in method.backends})
    return together


def require_request(name: str, method: str, facts: compile_pb2.ProgramFacts) -> None:
    """Refuse to measure a method of a language model on inputs that a runner makes up, which are its largest.

    Raises:
        GENERATION_NOT_REQUESTED: the method takes tokens.
    """
    if not language_models.has_metadata(facts):
        return
    try:
        model = language_models.describe(facts, name, prefill=method, decode=method)
    except language_models.NotALanguageModel:
        return
    raise error_for(
        "GENERATION_NOT_REQUESTED",
        f"{name} is a language model. Without inputs, {method!r} would be measured on {model.max_prompt_tokens} made-up tokens, "
        "the most that it takes.",
        "Measure how it generates with `--generate 128` (generate=), or give the method's inputs with --inputs FILE.npz.",
        method=method,
    )


def _add_inputs(model: generation_pb2.LanguageModel, inputs: Mapping[str, common_pb2.Artifact], name: str) -> None:
    encoders = {encoder.method: encoder for encoder in model.flow.encoders}
    for method, artifact in sorted(inputs.items()):
        if method not in encoders:
            what = f"The encoders of {name} are {', '.join(encoders)}." if encoders else f"{name} has no encoder."
            raise BadJob(
                f"With generation, inputs are those of encoders, and {method!r} is none: prompts are drawn. {what}",
                "Leave the other inputs out, or prefix keys with an encoder's name, as in vision_encoder/0.", field="inputs",
            )  # fmt: skip
        encoders[method].inputs.CopyFrom(artifact)


def _score(
    requested: generation_pb2.GenerationOptions, model: generation_pb2.LanguageModel, name: str
) -> generation_pb2.ScorePlan | None:
    """Return which tokens to score: those of the text, or drawn ones; None if the job requests no accuracy."""
    tokens: Sequence[int] = requested.text
    if model.HasField("flow"):
        if tokens or requested.accuracy_tokens:
            raise BadJob(
                f"The tokens of {name} cannot be scored: its methods take embeddings instead of tokens.",
                "Leave --tokens and --accuracy-tokens out.",
            )
        return None
    if not tokens:
        count = requested.accuracy_tokens if requested.HasField("accuracy_tokens") else generation.DEFAULT_ACCURACY_TOKENS
        if not count:
            return None
        tokens = generation.draw_tokens(SEED, model.vocab_size, min(count, model.max_context_tokens))
    elif (largest := max(tokens)) >= model.vocab_size:
        index = list(tokens).index(largest)
        raise error_for(
            "TOKEN_OUTSIDE_VOCABULARY",
            f"Token {index:,} of the text is {largest:,}, but the vocabulary of {name} has {model.vocab_size:,}.",
            "Tokenize the text with the model's own tokenizer.", token=largest, index=index,
        )  # fmt: skip
    return generation_pb2.ScorePlan(
        tokens=tokens,
        window=model.max_context_tokens,
        logits_after=generation.logits_after(len(tokens), model.vocab_size),
        max_time_s=generation.MAX_SCORE_S,
        is_text=bool(requested.text),
    )


def _prompts(requested: generation_pb2.GenerationOptions, model: generation_pb2.LanguageModel, name: str) -> Sequence[int]:
    longest = model.max_context_tokens - flows.encoded_positions(model) - requested.tokens
    beside = _beside(model)
    if requested.prompt_tokens:
        for tokens in requested.prompt_tokens:
            if tokens > longest:
                raise error_for(
                    "CONTEXT_TOO_SHORT",
                    f"A prompt of {tokens:,} tokens{beside} and {requested.tokens:,} generated ones do not fit into the context "
                    f"of {name}, which has {model.max_context_tokens:,}.",
                    f"Generate fewer tokens, or give prompts of at most {max(longest, 0):,}.", context=model.max_context_tokens,
                )  # fmt: skip
            _require_chunks(tokens, model, name)
        return tuple(requested.prompt_tokens)
    longest -= longest % _chunk(model)
    if longest < 1:
        raise error_for(
            "CONTEXT_TOO_SHORT",
            f"{requested.tokens:,} generated tokens and a prompt{beside} do not fit into the context of {name}, which has "
            f"{model.max_context_tokens:,}.",
            "Generate fewer tokens.", context=model.max_context_tokens,
        )  # fmt: skip
    fitting = [tokens for tokens in generation.DEFAULT_PROMPT_TOKENS if tokens <= longest and tokens % _chunk(model) == 0]
    return fitting or [longest]


def _depths(
    requested: generation_pb2.GenerationOptions, model: generation_pb2.LanguageModel, prompt_tokens: int, name: str
) -> Iterator[int]:
    room = model.max_context_tokens - flows.encoded_positions(model) - requested.tokens - prompt_tokens
    chunk = _chunk(model)
    shares = [generation_pb2.ContextDepth(share=share) for share in generation.DEFAULT_DEPTH_SHARES]
    for depth in requested.depths or shares:
        if depth.WhichOneof("depth") == "share":
            tokens = round(depth.share * room)
            yield tokens - tokens % chunk
        elif depth.tokens > room:
            raise error_for(
                "CONTEXT_TOO_SHORT",
                f"A depth of {depth.tokens:,} tokens, a prompt of {prompt_tokens:,}{_beside(model)} and {requested.tokens:,} "
                f"generated tokens do not fit into the context of {name}, which has {model.max_context_tokens:,}.",
                f"Give a depth of at most {room:,}, or a share such as 75%.", context=model.max_context_tokens,
            )  # fmt: skip
        else:
            _require_chunks(depth.tokens, model, name)
            yield depth.tokens


def _beside(model: generation_pb2.LanguageModel) -> str:
    """Return what a prompt has besides its tokens, for sentences: ` with the 16 positions of 'vision_encoder'`."""
    encoders = model.flow.encoders
    names = " and ".join(repr(encoder.method) for encoder in encoders)
    return f" with the {flows.encoded_positions(model):,} positions of {names}" if encoders else ""


def _chunk(model: generation_pb2.LanguageModel) -> int:
    """Return the number that lengths must be a multiple of."""
    return 1 if model.dynamic_prompt else max(1, model.max_prompt_tokens)


def _require_chunks(tokens: int, model: generation_pb2.LanguageModel, name: str) -> None:
    chunk = _chunk(model)
    if tokens % chunk:
        raise error_for(
            "CONTEXT_TOO_SHORT",
            f"{model.prefill_method!r} of {name} takes exactly {chunk:,} tokens, and {tokens:,} is no multiple of it.",
            f"Give prompts and depths that are multiples of {chunk:,}.", chunk=chunk,
        )  # fmt: skip


def _contradicting(spec: job_pb2.JobSpec) -> Iterator[str]:
    """Yield the fields that have no meaning for generation."""
    if spec.methods:
        yield "methods"
    for field, _ in spec.measurement.ListFields():
        if field.name not in WITH_GENERATION:
            yield field.name


def _require(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise BadJob(f"`{field}` must be {least:,g} to {most:,g}, got {value:,g}.", "Choose a value in this range.", field=field)
