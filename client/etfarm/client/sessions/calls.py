"""Inputs and outputs of a session's calls: arrays in a method's own order, arrays by position and name, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from etfarm.client.submit.inputs import in_order, value_of
from etfarm.v1 import common_pb2
from etfarm.wire import tensors, timings
from etfarm.wire.errors import error_for
from etfarm.wire.pt2 import InputType
from etfarm.wire.tensors import Scalar, Tensor, Value
from etfarm.wire.words import word_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from etfarm.v1 import session_pb2


class Outputs(list[Any]):
    """A method's outputs: a list in flattened order of NumPy arrays, or of Python numbers for scalar outputs.

    `y[0]` is an output by its position, `y["logits"]` by its name, `y.as_dict()` has all by name. `y.array(0)` and
    `y.array("logits")` are the same with the type of an array. Names are those of the model's outputs; the position
    as text, such as `"0"`, is the name of an output without one. Where a method has one output, `y.array()` is it, and
    numpy's functions take `y` itself.
    """

    names: tuple[str, ...]
    """Names parallel to the outputs."""
    run_ns: int | None
    """Duration of the execution on the device in nanoseconds, by the runner's clock; None for a loop's outputs."""

    def __init__(self, values: Sequence[Value], run_ns: int | None = None) -> None:
        """Wrap the values of a call; a session creates instances."""
        super().__init__(_plain(value) for value in values)
        self.names = tuple(value.name for value in values)
        self.run_ns = run_ns

    @overload
    def __getitem__(self, key: SupportsIndex | str, /) -> Any: ...
    @overload
    def __getitem__(self, key: slice, /) -> list[Any]: ...
    def __getitem__(self, key: SupportsIndex | slice | str, /) -> Any:
        """Return an output by its position or name.

        Raises:
            OUTPUT_UNKNOWN: no output, or more than one, has the name.
        """
        if not isinstance(key, str):
            return super().__getitem__(key)
        if self.names.count(key) != 1:
            raise error_for(
                "OUTPUT_UNKNOWN", f"There is no output {key!r}.", f"The outputs are {', '.join(self.names)}.", output=key
            )
        return super().__getitem__(self.names.index(key))

    def array(self, key: SupportsIndex | str | None = None) -> NDArray[Any]:
        """Return an output as an array; a scalar output is an array without dimensions.

        Args:
            key: the output's position or name; the only output when None.

        Raises:
            OUTPUT_UNKNOWN: no output, or more than one, has the name.
            SEVERAL_OUTPUTS: `key` is None, and there is not exactly one output.
        """
        import numpy as np

        if key is None and len(self) != 1:
            raise error_for("SEVERAL_OUTPUTS", f"There are {len(self)} outputs.", "Choose one: y[0].")
        return np.asarray(self[0 if key is None else key])

    def as_dict(self) -> dict[str, Any]:
        """Return the outputs by name, or by position as text where several outputs have the same name."""
        unique = (name if self.names.count(name) == 1 else str(place) for place, name in enumerate(self.names))
        return dict(zip(unique, self, strict=True))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the only output as an array.

        Raises:
            SEVERAL_OUTPUTS: there is not exactly one output.
        """
        import numpy as np

        return np.array(self.array(), dtype=dtype, copy=copy)


@dataclass(frozen=True)
class Loop:
    """The result of a timed pass on the device.

    Times are from the runner's monotonic clock.
    """

    method: str
    samples_ns: NDArray[np.int64] = field(repr=False)
    """Latency of each timed iteration, in the order measured: int64, nanoseconds."""
    warmup: int
    iterations: int
    duration_ns: int
    """Wall time of the timed pass, in nanoseconds."""
    stop_reason: str
    """`ENOUGH`, `MAX_TIME` or `MAX_SAMPLES`."""
    first_run_ns: int
    """Duration of the first execution after the method was loaded, in nanoseconds."""
    outputs: Outputs = field(repr=False)
    """The outputs of the last iteration."""

    @property
    def min_ns(self) -> int:
        """The latency of the fastest iteration, in nanoseconds."""
        return int(self.samples_ns.min())

    @property
    def p50_ns(self) -> float:
        """The median in nanoseconds; percentiles are interpolated linearly, as in numpy and in reports."""
        import numpy as np

        return float(np.percentile(self.samples_ns, 50))

    @property
    def p90_ns(self) -> float | None:
        """The 90th percentile; None below 10 samples, since no sample is then expected beyond it."""
        return self._percentile(90)

    @property
    def p99_ns(self) -> float | None:
        """The 99th percentile; None below 100 samples."""
        return self._percentile(99)

    @property
    def mean_ns(self) -> float:
        """The mean, in nanoseconds."""
        return float(self.samples_ns.mean())

    @property
    def stddev_ns(self) -> float | None:
        """The sample standard deviation (n - 1 in the denominator); None for a single sample."""
        return float(self.samples_ns.std(ddof=1)) if self.samples_ns.size > 1 else None

    def _percentile(self, percent: int) -> float | None:
        import numpy as np

        samples = self.samples_ns
        return float(np.percentile(samples, percent)) if timings.has_percentile(percent, samples.size) else None


def loop_of(method: str, measured: session_pb2.SessionMeasured, samples: bytes, outputs: Outputs) -> Loop:
    """Return the Loop of a SessionMeasured and its samples, which are int64 little-endian."""
    import numpy as np

    return Loop(
        method=method,
        samples_ns=np.frombuffer(samples, dtype="<i8").astype(np.int64, copy=False),
        warmup=measured.warmup,
        iterations=measured.iterations,
        duration_ns=measured.duration_ns,
        stop_reason=word_of(common_pb2.StopReason.DESCRIPTOR, measured.stop_reason) or "",
        first_run_ns=measured.first_run_ns,
        outputs=outputs,
    )


def flattened(
    method: str,
    described: session_pb2.SessionMethod | None,
    names: Sequence[str],
    positional: Sequence[Any],
    named: Mapping[str, Any],
) -> list[Value]:
    """Return a call's inputs in flattened order, with the memory layout that the program was exported for.

    Args:
        described: the program's description of the method; None if it has none.
        names: input names from the model that it was compiled from; empty if unknown.
        positional: the first inputs, in order.
        named: the others.

    Raises:
        UnknownInput, InputMissing, DuplicateInput: `named` does not match the inputs. The device checks the values.
        UserError: etfarm does not support a value's type.
    """
    specs = list(described.inputs) if described is not None else []
    own = [spec.name for spec in specs]
    names = names or (own if all(own) else [])
    arguments = {str(i): value for i, value in enumerate(positional)}
    listed = f": the inputs are {', '.join(names)}" if names else ""
    for key, value in {**arguments, **named}.items():
        if isinstance(value, str | bytes | Mapping):
            raise error_for(
                "UNSUPPORTED_INPUT",
                f"The input {key} is a {type(value).__name__}.",
                f"Give arrays, torch tensors or numbers{listed}.",
                place=key,
            )
    if not named:
        values = [value_of(names[i] if i < len(names) else str(i), value) for i, value in enumerate(positional)]
    else:
        by_key = {key: value_of(key, value) for key, value in {**arguments, **named}.items()}
        values = in_order(by_key, names, "The program", method)
    return [_laid_out(value, specs[i] if i < len(specs) else None) for i, value in enumerate(values)]


def types_of_program(
    described: session_pb2.SessionMethod, model: Sequence[InputType | None], values: Sequence[Value]
) -> list[InputType | None]:
    """Return the types of a method's inputs: dtypes of the program, since a recipe may change them, and sizes of its model.

    Args:
        model: types of the model that the program was compiled from, in flattened order; empty if unknown.
        values: values of the inputs, whose sizes are taken where those of the model are unknown: the device knows them.
    """
    types: list[InputType | None] = []
    for i, (spec, value) in enumerate(zip(described.inputs, values, strict=True)):
        known = model[i] if i < len(model) else None
        sizes = tuple(value.shape if isinstance(value, Tensor) else spec.shape) if known is None else known.sizes
        types.append(InputType(spec.dtype, sizes) if spec.kind == common_pb2.VALUE_KIND_TENSOR else None)
    return types


def _laid_out(value: Value, spec: session_pb2.SessionValue | None) -> Value:
    """Return the same elements in the program's dim order, and a Python number as a tensor if the program takes a tensor."""
    import numpy as np

    if spec is None or spec.kind != common_pb2.VALUE_KIND_TENSOR or spec.dtype not in tensors.ITEM_BYTES:
        return value
    if isinstance(value, Scalar):
        if value.value is None or len(spec.shape):
            return value
        return tensors.from_array(value.name, np.asarray(value.value, dtype=tensors.dtype_of(spec.dtype)))
    order = tuple(spec.dim_order)
    if len(order) != len(value.shape) or order == value.dim_order:
        return value
    return tensors.from_array(value.name, tensors.to_array(value), order)


def _plain(value: Value) -> Any:
    import numpy as np

    # Copy: the tensor's own bytes are read-only.
    return np.array(tensors.to_array(value)) if isinstance(value, Tensor) else value.value
