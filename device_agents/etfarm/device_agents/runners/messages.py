"""The parts of a runner's messages that hold values and samples: `native/PROTOCOL.md` describes them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any, Final

from etfarm.device_agents.runners import answers, errors
from etfarm.device_agents.runners.generation import COUNTERS
from etfarm.device_agents.runners.process import Argument, Event
from etfarm.device_agents.runners.protocol import Measured, TensorInfo
from etfarm.wire.tensors import Scalar, Tensor, Value

SAMPLE_BYTES: Final = 8


def encode_input(index: int, value: Value, expected: str) -> tuple[list[tuple[str, Argument]], bytes | None]:
    """Return the arguments and the payload of an `input` command."""
    arguments: list[tuple[str, Argument]] = [("index", index)]
    if isinstance(value, Tensor):
        arguments += [
            ("dtype", value.dtype),
            ("shape", ",".join(map(str, value.shape))),
            ("dim_order", ",".join(map(str, value.dim_order))),
        ]
        return arguments, value.data
    scalar = value.value
    if expected == "double" and isinstance(scalar, int) and not isinstance(scalar, bool):
        scalar = float(scalar)  # files that hold 2 for the float 2.0
    match scalar:
        case None:
            return [*arguments, ("kind", "none")], None
        case bool():
            return [*arguments, ("kind", "bool"), ("value", int(scalar))], None
        case int():
            return [*arguments, ("kind", "int"), ("value", scalar)], None
        case float():
            return [*arguments, ("kind", "double"), ("value", scalar.hex())], None


def read_values(event: Event, payload: bytes, stage: str) -> list[Value]:
    """Return the tensors and scalars that an event describes and its payload holds."""
    values: list[Value] = []
    for head in answers.events(event, "values"):
        name = answers.text(head, "name") or str(answers.whole(head, "index"))
        match answers.text(head, "kind"):
            case "tensor" if (dtype := answers.text(head, "dtype")) != "unsupported":
                offset, size = answers.whole(head, "offset"), answers.whole(head, "size_bytes")
                shape, order = (answers.wholes(head, key, answers.MOST_DIMS) for key in ("shape", "dim_order"))
                values.append(Tensor(name, dtype, shape, payload[offset : offset + size], order))
            case "int":
                number = int(answers.text(head, "value"))
                if not -(1 << 63) <= number < 1 << 63:
                    raise answers.BadAnswer(f"an integer of {number.bit_length()} bits")
                values.append(Scalar(name, number))
            case "double":
                values.append(Scalar(name, float.fromhex(answers.text(head, "value"))))
            case "bool":
                values.append(Scalar(name, answers.text(head, "value") == "1"))
            case "none":
                values.append(Scalar(name, None))
            case kind:
                raise errors.ProgramFailed(
                    stage, f"output {name} is of a kind or dtype ({kind}) that etfarm does not carry", "NotSupported", ()
                )
    return values


def read_tensor_info(value: Mapping[str, Any]) -> TensorInfo:
    """Return the description of a method's input or output."""
    index, kind = answers.whole(value, "index"), answers.text(value, "kind")
    if kind != "tensor":
        return TensorInfo(index, kind)
    return TensorInfo(
        index,
        "tensor",
        answers.text(value, "name"),
        answers.text(value, "dtype"),
        answers.wholes(value, "shape", answers.MOST_DIMS),
        answers.wholes(value, "dim_order", answers.MOST_DIMS),
        answers.whole(value, "size_bytes"),
        answers.truth(value, "planned"),
        answers.optional_truth(value, "dynamic"),
    )


def read_measured(event: Event, payload: bytes) -> Measured:
    """Return the result of a timed pass."""
    numbers = {key: answers.whole(event, key) for key in ("warmup", "first_run_ns", "iterations", "duration_ns", "wall_ns")}
    counters = {key: answers.optional_whole(event, key) for key in (*COUNTERS, "peak_rss_bytes", "warmup_ns")}
    return Measured(
        **numbers,
        **counters,  # type: ignore[arg-type]
        stop_reason=answers.text(event, "stop_reason"),
        samples_ns=read_samples(payload),
        steady=answers.optional_truth(event, "steady"),
    )


def read_samples(payload: bytes) -> array[int]:
    """Return the times in a payload.

    Raises:
        BadAnswer: a time is negative.
        ValueError: the payload ends within a time.
    """
    samples = array("q")
    samples.frombytes(payload)
    if sys.byteorder == "big":
        samples.byteswap()
    if samples and min(samples) < 0:
        raise answers.BadAnswer("a sample is negative")
    return samples
