"""The `generate` command: what a runner is asked to do, and its answer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from etfarm.device_agents.runners import answers
from etfarm.wire.series import little_endian

_VALUE_BYTES: Final = 8
_PART_COLUMNS: Final = 4
"""Values of a method of a flow: executions and nanoseconds until the last logits of the prompt, and after."""
_MOST: Final = 1 << 50
"""Maximum of a counter, 13 days in nanoseconds: sums over all points and processes stay within 64 bits."""
COUNTERS: Final = (
    "cpu_ns", "voluntary_switches", "involuntary_switches", "minor_faults", "major_faults", "cpu_pressure_us",
)  # fmt: skip
"""Counters that a runner reads around a pass, in addition to `wall_ns`."""


@dataclass(frozen=True)
class GenerateRequest:
    """Repeated generation of text by two loaded methods, or by one that does both."""

    prefill_method: str
    """The method that processes several tokens."""
    decode_method: str
    """The method that processes one token."""
    context: Sequence[int]
    """Token ids: those that are in the context before the prompt, then those of the prompt."""
    depth: int
    """Number of tokens in the context before the prompt."""
    tokens: int
    """Number of tokens to generate."""
    repetitions: int
    warmup: int
    max_time_ns: int
    """No further repetition starts after this time; the first one is always completed."""
    token_input: int = 0
    """Index of the input with the tokens."""
    position_input: int = 1
    """Index of the input with the position of the first token, or of each."""
    max_chunk: int | None = None
    """Maximum number of tokens of one execution, if less than the program's."""
    reload: bool = False
    """Whether to load the methods again before each repetition."""
    embedding_method: str = ""
    """The method that computes the embeddings that the others take; empty if they take tokens."""
    encoders: Sequence[str] = ()
    """The methods whose embeddings begin each prompt; their inputs are set before."""

    @property
    def parts(self) -> list[str]:
        """The methods of a flow, each once, in the order of execution; empty if the methods take tokens."""
        if not self.embedding_method:
            return []
        return list(dict.fromkeys([*self.encoders, self.embedding_method, self.prefill_method, self.decode_method]))

    def arguments(self) -> list[tuple[str, str | int]]:
        """Return the command's arguments."""
        values: list[tuple[str, str | int]] = [
            ("prefill", self.prefill_method), ("decode", self.decode_method), ("token_input", self.token_input),
            ("position_input", self.position_input), ("depth", self.depth), ("tokens", self.tokens),
            ("repetitions", self.repetitions), ("warmup", self.warmup), ("max_time_ns", self.max_time_ns),
            ("reload", int(self.reload)),
        ]  # fmt: skip
        if self.max_chunk is not None:
            values.append(("max_chunk", self.max_chunk))
        if self.embedding_method:
            values += [("embedding", self.embedding_method), *(("encoder", name) for name in self.encoders)]
        return values

    def payload(self) -> bytes:
        """Return the command's payload."""
        return little_endian(array("i", self.context)).tobytes()

    @property
    def max_answer_bytes(self) -> int:
        """Maximum size of the answer's payload in bytes."""
        return self.repetitions * self.columns * _VALUE_BYTES

    @property
    def columns(self) -> int:
        """Number of values of a repetition: the prompt's time, each token's time and id, and the parts of a flow."""
        return 1 + 2 * self.tokens + _PART_COLUMNS * len(self.parts)


@dataclass(frozen=True)
class GeneratedPart:
    """A method's part in the repetitions."""

    method: str
    prefill_executions: int
    """Number of executions in each repetition, until the last logits of the prompt."""
    decode_executions: int
    """Number of executions after that."""
    prefill_ns: tuple[int, ...]
    """For each repetition, the time of these executions together."""
    decode_ns: tuple[int, ...]


@dataclass(frozen=True)
class Generated:
    """The completed repetitions. A counter that the kernel does not provide is None, never 0."""

    repetitions: int
    """Number of timed repetitions."""
    stop_reason: str
    """`ENOUGH` or `MAX_TIME`."""
    prefill_ns: array[int]
    """For each repetition, the time from the start of the prompt's first execution to its last logits."""
    token_ns: tuple[array[int], ...]
    """For each repetition, the time of each token: of the first one from the start of the prompt, of the others from the token
    before."""
    tokens: tuple[array[int], ...]
    """For each repetition, the generated tokens; type code `i`."""
    first_run_ns: int | None
    """Duration of the first execution of the prefill method after it was loaded; None if it was not executed."""
    warmup_ns: int
    """Time of the repetitions before the timed ones."""
    duration_ns: int
    """Time from the start of the first timed repetition to the end of the last."""
    wall_ns: int
    """Time between the two readings of the counters below."""
    cpu_ns: int | None
    voluntary_switches: int | None
    involuntary_switches: int | None
    minor_faults: int | None
    major_faults: int | None
    cpu_pressure_us: int | None
    peak_rss_bytes: int | None
    """As in `Measured`."""
    parts: tuple[GeneratedPart, ...] = ()
    """The methods of a flow, in the order of `GenerateRequest.parts`."""


def read_generated(event: Mapping[str, Any], payload: bytes, request: GenerateRequest) -> Generated:
    """Return the content of an answer.

    Raises:
        BadAnswer: fields are missing or invalid, or the payload does not have the requested shape.
    """
    repetitions = answers.whole(event, "repetitions", request.repetitions)
    values = little_endian(array("q", payload))
    columns, tokens = request.columns, request.tokens
    if not repetitions or len(values) != repetitions * columns:
        raise answers.BadAnswer(f"{len(values)} values for {repetitions} repetitions of {tokens} tokens")
    if min(values) < 0:
        raise answers.BadAnswer("a time or a token is negative")
    rows = [values[start : start + columns] for start in range(0, len(values), columns)]
    warmup_ns, duration_ns, wall_ns = (answers.whole(event, key, _MOST) for key in ("warmup_ns", "duration_ns", "wall_ns"))
    counters = {key: answers.optional_whole(event, key) for key in COUNTERS}
    if too_large := next((key for key, count in counters.items() if count is not None and count > _MOST), None):
        raise answers.BadAnswer(f"{too_large} is impossible: {counters[too_large]}")
    return Generated(
        repetitions,
        answers.text(event, "stop_reason"),
        array("q", [row[0] for row in rows]),
        tuple(row[1 : 1 + tokens] for row in rows),
        tuple(array("i", row[1 + tokens : 1 + 2 * tokens]) for row in rows),
        answers.optional_whole(event, "first_run_ns"),
        warmup_ns,
        duration_ns,
        wall_ns,
        **counters,
        peak_rss_bytes=answers.optional_whole(event, "peak_rss_bytes"),
        parts=tuple(_part(name, rows, 1 + 2 * tokens + _PART_COLUMNS * place) for place, name in enumerate(request.parts)),
    )


def _part(method: str, rows: Sequence[array[int]], column: int) -> GeneratedPart:
    """Return a method's part, which begins at a column of each row.

    Raises:
        BadAnswer: the number of executions is impossible, or not that of every repetition.
    """
    columns = [tuple(row[column + offset] for row in rows) for offset in range(_PART_COLUMNS)]
    before, prefill_ns, after, decode_ns = columns
    if len({*before}) > 1 or len({*after}) > 1 or max(before[0], after[0]) >= 1 << 31:
        raise answers.BadAnswer(f"{method!r} was executed {before[0]} and {after[0]} times, or not equally often")
    return GeneratedPart(method, before[0], after[0], prefill_ns, decode_ns)
