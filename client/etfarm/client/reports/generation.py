"""How a language model generates text: its rates of prefill and decode, at each prompt length and depth of the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etfarm.client.reports.compilation import ProgramFile
from etfarm.client.reports.enums import PositionInput
from etfarm.client.reports.error_facts import ErrorFacts
from etfarm.client.reports.json_object import JsonObject
from etfarm.client.reports.operators import Operators, Profile
from etfarm.client.reports.telemetry import Telemetry
from etfarm.client.reports.verdict import Verdict


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FlowEncoder(JsonObject):
    """A method that turns an image or sound into embeddings."""

    method: str = ""
    positions: int = 0
    """Number of positions in the context that its output has."""
    inputs: ProgramFile | None = None
    """The tensor file of its inputs; None if the runner generated them."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelFlow(JsonObject):
    """The methods that compute the embeddings of a decoder, as in vision-language models."""

    embedding_method: str = ""
    """The method that takes tokens."""
    encoders: tuple[FlowEncoder, ...] = ()
    """The methods whose outputs begin each prompt, in order."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LanguageModel(JsonObject):
    """A program that generates text, as its metadata methods and its inputs describe it."""

    prefill_method: str = ""
    """The method that processes the prompt."""
    decode_method: str = ""
    """The method that processes one token; may be `prefill_method`."""
    token_input: int = 0
    """Index of the tokens in the flattened inputs."""
    position_input: int | None = None
    """Index of the positions in the flattened inputs; None without one."""
    positions: PositionInput | None = None
    max_prompt_tokens: int = 0
    """Maximum number of tokens of one execution; a longer prompt is processed in chunks."""
    dynamic_prompt: bool = False
    """Whether an execution accepts fewer tokens than that."""
    max_context_tokens: int = 0
    """Maximum number of tokens in the context, with those that are generated."""
    vocab_size: int = 0
    """Number of different tokens."""
    kv_cache_bytes: int | None = None
    """Size of the tensors that keep the context, part of the planned memory; None if unknown."""
    metadata: Mapping[str, int] = field(default_factory=dict)
    """The values of metadata methods such as `get_max_seq_len`, by name."""
    flow: ModelFlow | None = None
    """The methods that compute embeddings, which the other methods take instead of tokens; None if they take tokens."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerationRun(JsonObject):
    """One process's measurement of a prompt length at a depth. Its intervals are over its repetitions."""

    repetitions: int = 0
    """Number of timed repetitions."""
    ttft_ns: float | None = None
    """Time to the first token, in nanoseconds."""
    ttft_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of its 95 % confidence interval; None below 3 repetitions."""
    prefill_tokens_per_s: float | None = None
    """Rate of prefill, in tokens per second."""
    prefill_tokens_per_s_ci95: tuple[float, float] | None = None
    """The lower and the upper bound of its 95 % confidence interval."""
    decode_tokens_per_s: float | None = None
    """Rate of decode, in tokens per second."""
    decode_tokens_per_s_ci95: tuple[float, float] | None = None
    """The lower and the upper bound of its 95 % confidence interval."""
    verdict: Verdict | None = None
    """Whether this process's numbers can be trusted."""
    telemetry: Telemetry | None = None
    """Counters over the timed repetitions."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerationPart(JsonObject):
    """A method's part in a point, if several methods generate text together. Its times include setting its inputs."""

    method: str = ""
    prefill_executions: int = 0
    """Number of executions for each prompt."""
    prefill_ns: float | None = None
    """Their time together, in nanoseconds; None without any."""
    prefill_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of its 95 % confidence interval; None with too few repetitions."""
    prefill_share: float | None = None
    """Its share of the time to the first token."""
    decode_executions: int = 0
    """Number of executions for the tokens after the first."""
    decode_ns: float | None = None
    """Their time for each token, in nanoseconds; None without any."""
    decode_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of its 95 % confidence interval."""
    decode_share: float | None = None
    """Its share of the time of a token after the first."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerationPoint(JsonObject):
    """Generation after one prompt length at one depth of the context.

    Each number is the geometric mean over the valid processes, and in a process over its repetitions. With three or more
    processes, intervals are over the processes, else over the repetitions.
    """

    prompt_tokens: int = 0
    """Length of the prompt."""
    depth: int = 0
    """Number of tokens in the context before the prompt."""
    repetitions: int = 0
    """Number of timed repetitions, of all processes together."""
    error: ErrorFacts | None = None
    """Why a process did not complete the point; None if all did."""
    ttft_ns: float | None = None
    """Time from the start of the prompt to the first token, in nanoseconds."""
    ttft_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of its 95 % confidence interval; None with too few repetitions."""
    prefill_tokens_per_s: float | None = None
    """Prompt length, with the positions of encoders, divided by the time until the prompt's last logits, in tokens per second."""
    prefill_tokens_per_s_ci95: tuple[float, float] | None = None
    """The lower and the upper bound of its 95 % confidence interval."""
    decode_tokens_per_s: float | None = None
    """Number of tokens after the first divided by their time, in tokens per second."""
    decode_tokens_per_s_ci95: tuple[float, float] | None = None
    """The lower and the upper bound of its 95 % confidence interval."""
    token_ns: tuple[float, ...] | None = None
    """Time of each generated token in nanoseconds, the median over repetitions: first the time to the first token, then one for
    each step of decode. None in histories."""
    tokens_equal: bool | None = None
    """Whether all repetitions generated the same tokens; None for a single one."""
    verdict: Verdict | None = None
    """Whether the numbers of this point can be trusted."""
    runs: tuple[GenerationRun, ...] = ()
    """The processes that measured the point, in order: one, or as many as `repeat`."""
    parts: tuple[GenerationPart, ...] = ()
    """What each method takes, in the order of execution, if several generate text together."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TracedExecution(JsonObject):
    """What a traced execution of a language model processed."""

    tokens: int = 0
    """Number of tokens."""
    position: int = 0
    """Position of the first token in the context."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FirstDifference(JsonObject):
    """Where the text that a device generated parts from the reference's."""

    index: int = 0
    """Index in the generated tokens."""
    position: int = 0
    """Position of the token in the context."""
    token: int = 0
    """The device's token."""
    reference_token: int = 0
    gap: float = 0.0
    """The reference's largest logit minus its second largest; where it is small, rounding decides."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerationReference(JsonObject):
    """The deviation of a language model on a device from one on the server, after given tokens."""

    reference: str = ""
    """What the device is compared with: `program before quantization`, `quantized program` or `same program on the server`."""
    tokens: int = 0
    """Number of tokens that both executed."""
    top1_agreement: float | None = None
    """Part of these tokens after which both find the same token most likely, 0 to 1."""
    logits_tokens: int = 0
    """Number of tokens after which all logits were compared."""
    sqnr_db: float | None = None
    """Signal-to-noise ratio of these logits together in dB, capped at 300 for an exact match."""
    max_abs_error: float | None = None
    """The largest absolute difference of these logits."""
    kl_divergence: float | None = None
    """Mean Kullback-Leibler divergence of the device's next-token distribution from the reference's, in nats."""
    perplexity: float | None = None
    """The reference's perplexity of the text; None for drawn tokens."""
    perplexity_ratio: float | None = None
    """The device's perplexity of the same tokens, divided by that."""
    generated_tokens: int = 0
    """Number of generated tokens that were compared with those that the reference would generate."""
    first_difference: FirstDifference | None = None
    """The first of them that differs; None if none does."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerationAccuracy(JsonObject):
    """How exactly a language model computes its logits after given tokens."""

    tokens: int = 0
    """Number of tokens that the device executed."""
    is_text: bool = False
    """Whether the job gave the tokens; else they are drawn and mean nothing."""
    perplexity: float | None = None
    """The device's perplexity of the text; None for drawn tokens."""
    perplexity_tokens: int = 0
    """Number of tokens that the perplexity is of: all but the first of each context."""
    references: tuple[GenerationReference, ...] = ()
    vocabulary: int = 0
    """Number of logits for each token."""
    error: ErrorFacts | None = None
    """Why the device scored no tokens; None if it did."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TracedEncoder(JsonObject):
    """The traced pass of an encoder of a vision-language program."""

    method: str = ""
    profile: Profile | None = None
    operators: Operators | None = None
    """The rows of the traced pass, in the order of execution."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Generation(JsonObject):
    """How a language model generates text."""

    model: LanguageModel | None = None
    generated_tokens: int = 0
    """Number of tokens that each repetition generated."""
    points: tuple[GenerationPoint, ...] = ()
    """One for each prompt length at each depth, in the order measured."""
    prefill_execution: TracedExecution | None = None
    """The execution that `prefill_profile` and `prefill_operators` are of; None if it was not traced."""
    decode_execution: TracedExecution | None = None
    """The execution that the report's `profile` and `operators` are of; None if it was not traced."""
    prefill_profile: Profile | None = None
    prefill_operators: Operators | None = None
    """The rows of the traced pass of prefill, in the order of execution."""
    accuracy: GenerationAccuracy | None = None
    """The accuracy of the logits and the perplexity; None if it was not requested or not measured."""
    encoders: tuple[TracedEncoder, ...] = ()
    """The traced passes of the encoders of a vision-language program."""
