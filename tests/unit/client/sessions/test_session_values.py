"""A session's inputs and outputs as the library takes and gives them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from etfarm.client.errors import EtfarmError
from etfarm.client.sessions.calls import Outputs, flattened, loop_of
from etfarm.v1 import common_pb2, session_pb2
from etfarm.wire import sessions
from etfarm.wire.tensors import Scalar, Tensor, from_array, to_array
from tests.support.refusals import refuses


def method(*inputs: session_pb2.SessionValue) -> session_pb2.SessionMethod:
    """Return a method of these inputs."""
    return session_pb2.SessionMethod(name="forward", inputs=inputs)


def tensor(name: str = "", dtype: str = "float32", shape: tuple[int, ...] = (2, 3), order: tuple[int, ...] = (0, 1)) -> object:
    """Return an input that is a tensor."""
    return session_pb2.SessionValue(name=name, kind=common_pb2.VALUE_KIND_TENSOR, dtype=dtype, shape=shape, dim_order=order)


X, Y = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arguments", "named"), [((X, Y), {}), ((X,), {"b": Y}), ((), {"b": Y, "a": X}), ((), {"1": Y, "0": X})], ids=range(4)
)
def test_inputs_come_in_order_by_name_or_both(arguments: tuple[object, ...], named: dict[str, object]) -> None:
    values = flattened("forward", method(tensor(), tensor()), ["a", "b"], arguments, named)  # type: ignore[arg-type]
    assert [value.name for value in values] == ["a", "b"]
    assert [to_array(value).tolist() for value in values if isinstance(value, Tensor)] == [X.tolist(), Y.tolist()]


def test_the_program_s_own_names_serve_where_the_model_s_are_not_known() -> None:
    described = method(tensor("left"), tensor("right"))  # type: ignore[arg-type]
    assert [value.name for value in flattened("forward", described, (), (), {"right": Y, "left": X})] == ["left", "right"]


@pytest.mark.parametrize(
    ("names", "values", "named", "words"),
    [
        (["a", "b"], (X,), {"c": Y}, "a, b"),
        (["a", "b"], (X, Y), {"a": X}, "name the input"),
        (["a", "b"], (X,), {"a": X}, "name the input"),
        (["a", "b"], (), {"b": Y}, "'a' is missing"),
        ([], (X,), {"b": Y}, "no input names"),
        ([], ({"x": X},), {}, "numbers"),
        (["x_a", "x_b"], (), {"x": {"a": X, "b": Y}}, "The input x is a dict. .* numbers: the inputs are x_a, x_b"),
        ([], (b"bytes",), {}, "numbers"),
    ],
    ids=range(8),
)
def test_invalid_or_duplicate_inputs_are_refused(
    names: list[str], values: tuple[object, ...], named: dict[str, object], words: str
) -> None:
    with pytest.raises(EtfarmError, match=words):
        flattened("forward", method(tensor(), tensor()), names, values, named)  # type: ignore[arg-type]


def test_arrays_are_laid_in_memory_as_the_program_takes_them() -> None:
    image = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    described = method(tensor(shape=(1, 2, 3, 4), order=(0, 2, 3, 1)))  # type: ignore[arg-type]
    for values in (image, torch.from_numpy(image), torch.from_numpy(image).to(memory_format=torch.channels_last)):
        (value,) = flattened("forward", described, (), (values,), {})
        assert isinstance(value, Tensor)
        assert value.dim_order == (0, 2, 3, 1)
        np.testing.assert_array_equal(to_array(value), image)
        assert value.data == np.ascontiguousarray(image.transpose(0, 2, 3, 1)).tobytes()


def test_numbers_are_scalars_unless_the_program_takes_a_tensor_without_dims() -> None:
    scalar = session_pb2.SessionValue(kind=common_pb2.VALUE_KIND_DOUBLE)
    values = flattened("forward", method(scalar, tensor(shape=(), order=(), dtype="int64")), (), (2, 3), {})  # type: ignore[arg-type]
    assert values == [Scalar("0", 2), from_array("1", np.asarray(3, np.int64))]


def test_bfloat16_comes_and_goes() -> None:
    values = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    (value,) = flattened("forward", method(tensor(dtype="bfloat16")), (), (values,), {})  # type: ignore[arg-type]
    (array,) = Outputs([value])
    assert array.dtype == ml_dtypes.bfloat16
    assert array.astype(np.float32).tolist() == values.float().tolist()


def test_outputs_have_places_and_names() -> None:
    outputs = Outputs([from_array("a", X), Scalar("n", 3), from_array("2", Y)])
    assert outputs["n"] == outputs[1] == 3
    assert outputs[0].tolist() == outputs["a"].tolist() == X.tolist()
    assert list(outputs.as_dict()) == ["a", "n", "2"]
    with pytest.raises(EtfarmError, match="a, n, 2"):
        outputs["b"]
    with pytest.raises(EtfarmError, match="3 outputs"):
        np.asarray(outputs)


def test_the_only_output_is_what_numpy_takes_it_for() -> None:
    outputs = Outputs([from_array("a", X)])
    np.testing.assert_array_equal(outputs, X)
    assert np.asarray(outputs, dtype=np.float64).dtype == np.float64
    outputs[0][0, 0] = 7.0
    assert np.asarray(outputs)[0, 0] == 7.0


def test_a_loop_has_percentiles_only_with_enough_samples() -> None:
    def loop(count: int) -> object:
        samples = np.arange(1, count + 1, dtype="<i8")
        return loop_of("forward", session_pb2.SessionMeasured(iterations=count), samples.tobytes(), Outputs([]))

    one, many = loop(1), loop(100)
    assert (one.min_ns, one.p50_ns, one.p90_ns, one.stddev_ns) == (1, 1.0, None, None)  # type: ignore[attr-defined]
    assert (many.min_ns, many.p50_ns, many.mean_ns) == (1, 50.5, 50.5)  # type: ignore[attr-defined]
    assert many.p90_ns == pytest.approx(90.1)  # type: ignore[attr-defined]
    assert many.p99_ns == pytest.approx(99.01)  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [0, 1, sessions.INLINE_BYTES, sessions.INLINE_BYTES + 1])
async def test_what_is_packed_is_unpacked_inline_or_by_digest(size: int) -> None:
    stored: dict[str, bytes] = {}

    async def store(data: bytes) -> common_pb2.Artifact:
        stored["x"] = data
        return common_pb2.Artifact(digest="x", size_bytes=len(data))

    async def fetch(artifact: common_pb2.Artifact) -> bytes:
        return stored[artifact.digest]

    data = bytes(size)
    packed = await sessions.pack(data, store)
    assert packed.HasField("artifact") == bool(stored) == (size > sessions.INLINE_BYTES)
    assert await sessions.unpack(packed, fetch) == data


def test_outputs_are_arrays_by_position_and_name_whatever_they_are() -> None:
    outputs = Outputs([from_array("a", X), Scalar("n", 3), from_array("2", Y)], run_ns=5)
    assert (outputs.names, outputs.run_ns) == (("a", "n", "2"), 5)
    for key in (0, "a", -3):
        np.testing.assert_array_equal(outputs.array(key), X)
    assert (outputs.array("n").shape, outputs.array(1).item()) == ((), 3)
    np.testing.assert_array_equal(outputs.array("2"), Y)
    with refuses("OUTPUT_UNKNOWN", match="The outputs are a, n, 2"):
        outputs.array("b")
    with refuses("SEVERAL_OUTPUTS"):
        outputs.array()
    only = Outputs([from_array("a", X)])
    np.testing.assert_array_equal(only.array(), X)
