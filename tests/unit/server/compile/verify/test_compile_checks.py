"""What came out is run and compared, in real children: sizes, contents, state, and what is no fault of the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("executorch")

from etfarm.server.compile.verify import checks, executions, reference, trials  # noqa: E402 - needs torch
from etfarm.server.compile.verify.reference import ReferenceFailed  # noqa: E402
from etfarm.server.graphs import differences  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import tensors  # noqa: E402
from etfarm.wire.errors import UserError  # noqa: E402
from etfarm.wire.shared_state import written_buffers  # noqa: E402
from etfarm.wire.tensors import Scalar, Tensor  # noqa: E402
from tests.support import checking, models  # noqa: E402
from tests.support.checking import CheckRequest  # noqa: E402
from tests.support.compiling import compiled  # noqa: E402
from tests.support.exports import Unwritten  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="each test compiles in a child")]

in_children = pytest.mark.asyncio(loop_scope="session")


async def checked(workers: Workers, original: str, **more: Any) -> dict[str, Any]:
    request = CheckRequest(original, **more)
    async with await workers.run("tests.support.checking:check", request, deadline_s=120) as finished:
        result: dict[str, Any] = json.loads(finished.result)
    assert result["left"] == [], "temporary files"
    return result


def codes(result: dict[str, Any]) -> list[str]:
    return [warning["code"] for warning in result["warnings"]]


def ran_at(result: dict[str, Any]) -> list[tuple[str, list[str]]]:
    assert all(check["ran"] and not check["why"] for check in result["checks"])
    return [(check["inputs"], check["shapes"]) for check in result["checks"]]


@in_children
async def test_a_static_method_is_compared_at_its_example(workers: Workers) -> None:
    result = await checked(workers, "conv")
    assert ran_at(result) == [("EXAMPLE", ["1x3x8x8"])]
    [output] = result["checks"][0]["outputs"]
    assert output["output"] == "0"
    assert output["sqnr_db"] > 100
    assert output["max_abs_error"] < 1e-5
    assert result["warnings"] == []


@in_children
async def test_executions_that_differ_without_state_are_named_and_the_worse_counts(workers: Workers) -> None:
    result = await checked(workers, "unwritten")
    assert codes(result) == ["EXECUTIONS_DIFFER", "OUTPUTS_DIFFER"]
    message = "forward writes to no state, and yet a second execution on the server gives another "
    assert result["warnings"][0]["message"].startswith(message)
    assert "Compile with another recipe, such as portable, or" in result["warnings"][0]["message"]
    assert result["checks"][0]["outputs"][0]["max_abs_error"] > 0.05, "the first execution is right"


@in_children
async def test_executions_with_the_recipe_portable_do_not_differ(workers: Workers, tmp_path: Path) -> None:
    import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401 - registers quantized operators

    inputs = (torch.zeros(1, 2, 4, 4),)
    answer = await compiled(workers, tmp_path, lambda: torch.export.export(Unwritten(), inputs), "portable")
    assert answer.codes == []
    assert all(output["sqnr_db"] > 100 for check in answer.result["checks"] for output in check["outputs"])


class Filled(torch.nn.Module):
    """Sums a tensor of which one row is written."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Any) -> Any:
        y = self.make(4, 4)
        y[0] = x
        return y.sum(0)


@in_children
async def test_what_is_made_without_values_is_named_where_executions_differ(workers: Workers, tmp_path: Path) -> None:
    def exported(make: Callable[..., Any]) -> Any:
        return torch.export.export(Filled(make), (torch.ones(4),))

    sentence = executions.describe("forward", "", ["0"], exported(torch.empty), delegates=True)
    assert "torch.zeros in place of torch.empty" in sentence and "aten::empty at " in sentence and "self.make(4, 4)" in sentence
    for delegates in (True, False):
        sentence = executions.describe("forward", "", ["0"], exported(torch.zeros), delegates=delegates)
        assert "torch.empty" not in sentence and ("portable" in sentence) == delegates
    answer = await compiled(workers, tmp_path, lambda: exported(torch.zeros), "portable")
    assert answer.codes == []


@in_children
async def test_dynamic_dims_are_tried_at_both_ends(workers: Workers) -> None:
    result = await checked(workers, "dynamic")
    assert ran_at(result) == [("EXAMPLE", ["4x16"]), ("MIN", ["1x16"]), ("MAX", ["8x16"])]
    assert result["warnings"] == []


@in_children
async def test_derived_dims_follow_and_indices_stay_valid(workers: Workers) -> None:
    result = await checked(workers, "derived")
    assert ran_at(result) == [
        ("EXAMPLE", ["3", "6x3", "3"]), ("MIN", ["2", "4x3", "2"]), ("MAX", ["6", "12x3", "6"]),
    ]  # fmt: skip
    assert result["warnings"] == []


@in_children
async def test_sizes_that_a_guard_refuses_are_stepped_over(workers: Workers) -> None:
    result = await checked(workers, "stepped", portable=True)
    assert ran_at(result) == [("EXAMPLE", ["8x2"]), ("MIN", ["4x2"]), ("MAX", ["62x2"])]
    assert result["warnings"] == []


@in_children
async def test_numbers_keywords_and_several_outputs_are_compared(workers: Workers) -> None:
    result = await checked(workers, "dict_inputs")
    assert [(o["output"], o["equal"]) for o in result["checks"][0]["outputs"]] == [("sum", True), ("scale", True)]
    assert result["inputs"] == {"forward": "inputs-0.ett"}


@in_children
async def test_a_lost_initial_value_is_found(workers: Workers) -> None:
    result = await checked(workers, "counter")  # lowered without the pass that keeps it
    assert codes(result) == ["OUTPUTS_DIFFER"]
    assert "0 has 0.2 dB" in result["warnings"][0]["message"]
    assert "portable" in result["warnings"][0]["message"]
    assert result["checks"][0]["outputs"][0]["max_abs_error"] == 41


@in_children
@pytest.mark.parametrize(
    ("original", "why", "remedy"),
    [
        ("fft", "an operator refused its arguments (0x12)", "ExecuTorch has torch.fft.rfft only"),
        (
            "histogram",
            "kernel 'aten::histc.out' not found, of aten::histc at ",
            "with the bins' ends for torch.histc, whose last bin has its upper end too: ExecuTorch has no kernel",
        ),
        (
            "histograms",
            "kernels 'aten::histc.out', 'aten::polygamma.out' not found, of aten::histc at ",
            "whose last bin has its upper end too: ExecuTorch has no kernel",
        ),
        ("histograms", "; aten::polygamma at ", "ExecuTorch has no kernel"),
        ("unknown", "an operator has no kernel (0x14): kernel 'aten::_linalg_svd.U' not found", "outside of the model"),
        ("unplanned", "out of planned memory (0x21)", "narrower or static dims"),
    ],
)
async def test_what_compiles_and_cannot_run_is_refused(workers: Workers, original: str, why: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        await checked(workers, original, portable=True)
    assert caught.value.reason == "PROGRAM_CANNOT_RUN"
    assert why in caught.value.message
    assert remedy in caught.value.remedy


@in_children
async def test_what_runs_at_the_example_only_is_refused_with_the_shapes(workers: Workers) -> None:
    with pytest.raises(UserError) as caught:
        await checked(workers, "wider", lowered="dynamic")
    assert caught.value.reason == "PROGRAM_CANNOT_RUN"
    assert "at its largest inputs (x: 16x16)" in caught.value.message
    assert "narrow the dynamic dims" in caught.value.remedy


@in_children
async def test_inputs_beyond_the_budget_are_not_made(workers: Workers) -> None:
    result = await checked(workers, "dynamic", max_input_bytes=300)
    assert ran_at(result) == [("EXAMPLE", ["4x16"]), ("MIN", ["1x16"])]
    assert codes(result) == ["NOT_RUN_AT_MAXIMUM"]


@in_children
async def test_inputs_that_eager_refuses_say_nothing_against_the_program(workers: Workers) -> None:
    result = await checked(workers, "picks", portable=True)
    assert [(c["inputs"], c["ran"]) for c in result["checks"]] == [("EXAMPLE", True), ("MIN", False), ("MAX", True)]
    assert codes(result) == ["NOT_RUN_AT_MINIMUM"]
    assert "index out of range" in result["warnings"][0]["message"]


@in_children
@pytest.mark.parametrize(("quantized", "code"), [(False, "OUTPUTS_DIFFER"), (True, "LOW_ACCURACY")])
async def test_another_models_outputs_are_reported(workers: Workers, quantized: bool, code: str) -> None:
    result = await checked(workers, "other_conv", lowered="conv", quantized=quantized)
    assert codes(result) == [code]
    assert ": 0 has -" in result["warnings"][0]["message"]
    assert " dB" in result["warnings"][0]["message"]


@in_children
async def test_integers_of_another_dtype_are_reported_though_they_are_equal(workers: Workers) -> None:
    result = await checked(workers, "bytes", lowered="wide_bytes", portable=True)
    assert codes(result) == ["OUTPUTS_DIFFER"]
    assert "0 has the dtype int64 where the model gives uint8" in result["warnings"][0]["message"]


@in_children
async def test_a_random_model_is_not_blamed(workers: Workers) -> None:
    result = await checked(workers, "random", portable=True)
    assert codes(result) == ["NOT_COMPARED"]
    assert "does not repeat 0 " in result["warnings"][0]["message"]


@in_children
@pytest.mark.parametrize(("quantized", "code"), [(False, "OUTPUTS_DIFFER"), (True, "LOW_ACCURACY")])
async def test_a_random_output_does_not_hide_a_wrong_one(workers: Workers, quantized: bool, code: str) -> None:
    result = await checked(workers, "partly_random", lowered="negative_partly_random", portable=True, quantized=quantized)
    assert codes(result) == ["NOT_COMPARED", code]
    assert "0 has" in result["warnings"][1]["message"] and "1 has" not in result["warnings"][1]["message"]


@in_children
async def test_classes_that_half_precision_decides_by_chance_are_not_blamed(workers: Workers) -> None:
    result = await checked(workers, "classes", lowered="wide_classes", portable=True)
    assert result["checks"][0]["outputs"][0]["equal_share"] < differences.EQUAL_SHARE and codes(result) == []
    assert codes(await checked(workers, "classes", lowered="negative_classes", portable=True)) == ["OUTPUTS_DIFFER"]
    assert codes(await checked(workers, "wide_classes", lowered="negative_classes", portable=True)) == ["OUTPUTS_DIFFER"]


@in_children
async def test_what_sums_of_half_precision_choose_is_not_blamed_and_float32_is_compared(workers: Workers) -> None:
    result = await checked(workers, "chosen", portable=True)
    of_classes, of_pixels = result["checks"][0]["outputs"]
    assert of_classes["equal_share"] < differences.EQUAL_SHARE and of_pixels["sqnr_db"] < 20
    (warning,) = result["warnings"]
    assert warning["code"] == "NOT_COMPARED" and "decides 1, as where" in warning["message"]
    assert "compile the model in float32" in warning["message"]
    assert codes(await checked(workers, "chosen_in_float32", portable=True)) == []
    wrong = await checked(workers, "chosen", lowered="negative_chosen", portable=True)
    assert "OUTPUTS_DIFFER" in codes(wrong)


@in_children
async def test_a_tensor_that_is_returned_twice_is_listed_twice(workers: Workers) -> None:
    result = await checked(workers, "twice", lowered="negative_twice", portable=True)
    assert codes(result) == ["OUTPUTS_DIFFER"]
    message = result["warnings"][0]["message"]
    assert ": 0 has" in message and "; 1 has" in message


@in_children
async def test_rounding_by_another_number_of_threads_is_not_taken_for_chance(workers: Workers) -> None:
    program = checking.sums()
    example = trials.example(program)
    assert example is not None
    with checks.limit_threads(1):
        expected = reference.run_program(program, example.values)
    with checks.limit_threads(2):
        other = reference.run_program(program, example.values)
    assert expected != other, "this sum has to depend on the number of threads"
    assert not checks.find_unrepeatable(program, example, expected, 1)
    assert not checks.find_unrepeatable(program, example, expected, 2), "rounding by another order is not chance"
    result = await checked(workers, "sums", lowered="negative_sums", portable=True, quantized=True)
    assert codes(result) == ["LOW_ACCURACY"]


@in_children
async def test_constants_in_a_data_file_are_run_with(workers: Workers) -> None:
    result = await checked(workers, "conv", portable=True, external=True)
    assert ran_at(result) == [("EXAMPLE", ["1x3x8x8"])]
    assert result["warnings"] == []
    [(name, size)] = result["sizes"]["data_bytes"].items()
    assert name.endswith(".ptd")
    assert size >= 4 * (3 * 8 * 9 + 8 + 8 * 4 + 4)


@in_children
@pytest.mark.parametrize(
    ("original", "more", "why"),
    [
        ("conv", {"backends": ("CoreMLBackend",)}, "CoreMLBackend"),
        ("without_inputs", {"lowered": "conv"}, "no example inputs"),
        ("conv", {"portable": True, "external": True, "data_files": 2}, "2 data files"),
    ],
)
async def test_what_this_host_cannot_try_is_a_warning(workers: Workers, original: str, more: dict[str, Any], why: str) -> None:
    result = await checked(workers, original, **more)
    assert codes(result) == ["NOT_RUN_ON_HOST"]
    assert why in result["warnings"][0]["message"]
    assert result["checks"] == []


@in_children
async def test_where_a_programs_bytes_are(workers: Workers) -> None:
    result = (await checked(workers, "conv"))["sizes"]
    method = result["methods"]["forward"]
    assert result["delegate_bytes"] == method["delegate_bytes"] > 0
    assert result["constant_bytes"] >= 4 * (3 * 8 * 9 + 8 + 8 * 4 + 4), "weights that the delegate keeps as named data"
    assert result["program_bytes"] > 0
    assert sum(method["planned_bytes"]) > 0
    portable = (await checked(workers, "conv", portable=True))["sizes"]
    assert portable["delegate_bytes"] == portable["methods"]["forward"]["delegate_bytes"] == 0
    assert portable["constant_bytes"] >= 4 * (3 * 8 * 9 + 8 + 8 * 4 + 4)


def test_the_reference_leaves_state_as_it_was() -> None:
    program = models.counter()
    assert written_buffers(program) == {"count"}
    example = trials.example(program)
    assert example is not None
    first, second = (reference.run_program(program, example.values) for _ in range(2))
    assert first == second
    assert float(program.state_dict["count"]) == 41


@pytest.mark.remedy("REFERENCE_FAILED")
def test_inputs_that_eager_pytorch_refuses_are_an_error_and_those_of_the_example_run() -> None:
    program = checking.derived()
    example = trials.example(program)
    assert example is not None
    (index, *others) = example.values
    assert isinstance(index, Tensor)
    outside = replace(index, data=b"\x7f" * len(index.data))
    with pytest.raises(ReferenceFailed, match="inputs like the example inputs"):
        reference.run_program(program, [outside, *others])
    assert reference.run_program(program, example.values)


def test_contents_are_tiled_and_cropped_in_their_memory_order() -> None:
    data = bytes(range(6))  # [2, 3] stored column by column: [[0, 2, 4], [1, 3, 5]]
    result = trials._resized(Tensor("x", "uint8", (2, 3), data, (1, 0)), (3, 2))
    assert isinstance(result, Tensor)
    assert result.dim_order == (1, 0)
    assert tensors.to_array(result).tolist() == [[0, 2], [1, 3], [0, 2]]


def test_the_largest_of_a_derived_dim_is_within_its_range() -> None:
    program = checking.derived()
    example = trials.example(program)
    assert example is not None
    largest = next(iter(trials.extremes(program, example, "MAX")))
    assert isinstance(largest, trials.Trial)
    assert largest.words == "at its largest inputs (tokens: 6, pairs: 12x3, mask: 6)"
    assert tensors.to_array(largest.values[0]).tolist() == [4, 1, 3, 4, 1, 3]


def floats(*values: float, dtype: str = "float32") -> Tensor:
    return Tensor("y", dtype, (len(values),), np.array(values, dtype).tobytes())


def test_a_bias_does_not_pass_for_accuracy() -> None:
    result = differences.difference("y", floats(100, 101, 102), floats(101, 102, 103))
    assert result.report.sqnr_db == pytest.approx(40.09, abs=0.01)
    assert result.judged_db == pytest.approx(-1.76, abs=0.01)


@pytest.mark.parametrize(
    ("expected", "actual", "equal", "db", "wrong"),
    [
        (floats(1, 2), floats(1, 2), True, 300.0, ""),
        (floats(float("nan"), 2), floats(float("nan"), 2), True, 300.0, ""),
        (floats(1, 2), floats(1, float("nan")), False, None, "NaN"),
        (floats(1, 2), floats(1, 2, 3), False, None, "shape [3]"),
        (floats(0, 0), floats(0, 1), False, None, ""),
        (floats(), floats(), True, None, ""),
        (Scalar("n", 3), Scalar("n", 3), True, None, ""),
        (Scalar("n", None), Scalar("n", None), True, None, ""),
        (Scalar("n", None), Scalar("n", 1), False, None, "None"),
    ],
)
def test_outputs_of_every_kind_are_compared(expected: Any, actual: Any, equal: bool, db: float | None, wrong: str) -> None:
    result = differences.difference("y", expected, actual)
    assert result.report.equal is equal
    assert (result.report.sqnr_db if result.report.HasField("sqnr_db") else None) == db
    assert wrong in result.wrong
    assert bool(wrong) == bool(result.wrong)


@pytest.mark.parametrize(
    ("dtype", "error", "problem"),
    [
        ("float32", 1e-3, ""), ("float32", 2e-2, "y has 34.0 dB, where a float32 output mostly has over 100"),
        ("float16", 2e-2, ""), ("float16", 4e-2, "y has 28.0 dB, where a float16 output mostly has 45 to 65"),
        ("bfloat16", 4e-2, ""), ("bfloat16", 0.2, "y has 14.0 dB, where a bfloat16 output mostly has 30 to 45"),
    ],
)  # fmt: skip
def test_floats_are_judged_by_what_their_dtype_can_hold(dtype: str, error: float, problem: str) -> None:
    values = np.linspace(1, 2, 1001)
    reference, actual = (tensors.from_array("y", each.astype(tensors.dtype_of(dtype))) for each in (values, values * (1 + error)))
    problems = differences.find_problem(differences.difference("y", reference, actual), quantized=False)
    assert problems == problem or (problems[:8], problems[12:]) == (problem[:8], problem[12:]), problems


@pytest.mark.parametrize(
    ("actual", "quantized", "problem"),
    [
        ((1, 2, 3, 4), False, ""), ((1, 2, 3, 5), False, "y agrees in 75% of its integers only"), ((1, 2, 3, 5), True, ""),
        ((9, 2, 8, 5), True, "y agrees in 25% of its integers only"),
    ],
)  # fmt: skip
def test_integers_are_judged_by_how_many_agree(actual: tuple[int, ...], quantized: bool, problem: str) -> None:
    result = differences.difference("y", floats(1, 2, 3, 4, dtype="int64"), floats(*actual, dtype="int64"))
    assert not result.report.HasField("sqnr_db") and result.judged_db is None
    assert differences.find_problem(result, quantized=quantized) == problem


def test_large_integers_are_equal_only_if_they_are() -> None:
    one, other = (Tensor("y", "int64", (1,), n.to_bytes(8, "little")) for n in (1 << 60, (1 << 60) + 1))
    assert not differences.difference("y", one, other).report.equal
