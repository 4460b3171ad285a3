"""PT2E quantization of exported programs in a child of its own: int8, close, traceable, the same each time."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from etfarm.server.reports.trace.graph import read_record  # noqa: E402 - needs torch
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.v1 import compile_pb2  # noqa: E402
from etfarm.wire import recipes, tensors  # noqa: E402
from etfarm.wire.errors import EtfarmError, Fault  # noqa: E402
from etfarm.wire.recipes import Recipe  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.compiling import (  # noqa: E402
    DYNAMIC,
    FOUR_BIT,
    STATIC,
    WIDTH,
    compiled,
    run,
    sample,
    sqnr_db,
    text_decoder,
    with_quantizer,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow(reason="each test quantizes and compiles in two children"),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """How well integers fit hangs on what they were calibrated with, which must not hang on the tests before."""
    torch.manual_seed(1)


def images(folder: Path, count: int = 8) -> list[Path]:
    result = []
    for seed in range(count):
        torch.manual_seed(seed)
        result.append(sample(folder / f"{seed}.ett", torch.randn(1, 3, 8, 8)))
    return result


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", [STATIC, "xnnpack_pt2e_int8_static_per_tensor"])
async def test_a_sample_that_is_not_finite_is_named(workers: Workers, tmp_path: Path, recipe: str, value: float) -> None:
    samples = images(tmp_path, 2)
    samples.append(sample(tmp_path / "bad.ett", torch.full((1, 3, 8, 8), value)))
    with pytest.raises(EtfarmError) as caught:
        await compiled(workers, tmp_path / "c", models.conv, recipe, calibration={"forward": samples})
    assert (caught.value.reason, caught.value.fault, caught.value.stage) == ("CALIBRATION_NOT_FINITE", Fault.USER, "QUANTIZE")
    assert caught.value.message.startswith("Calibration sample 2 of forward has NaN or infinity in 'image'")


async def test_int8_of_a_pt2_is_int8_and_close(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.conv, STATIC, calibration={"forward": images(tmp_path)})
    assert one.stages == ["QUANTIZE", "TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]
    assert [(e["stage"], e["phase"]) for e in one.events[:4]] == [
        ("QUANTIZE", "START"), ("QUANTIZE", "END"), ("TORCH_EXPORT", "START"), ("TORCH_EXPORT", "END"),
    ]  # fmt: skip
    assert any("dequantize" in o["op"] for o in one.result["delegation"]["forward"]["operators"])
    assert not one.codes
    assert one.result["facts"] is not None
    assert one.result["facts"]["methods"]["forward"]["outputs"][0]["name"] == "0"
    torch.manual_seed(0)
    program = models.conv().module()
    torch.manual_seed(99)
    inputs = torch.randn(1, 3, 8, 8)
    actual, expected = run(one.pte, [inputs])[0], program(inputs)
    assert not torch.equal(actual, expected)
    assert sqnr_db(expected, actual) > 20


class Joined(torch.nn.Module):
    """Joins values of two ranges."""

    def __init__(self, join: Callable[[Any], Any], width: int = 16) -> None:
        super().__init__()
        self.small = torch.nn.Linear(8, 8)
        self.large = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(width, 4)
        self.join = join

    def forward(self, x: Any) -> Any:
        return self.head(self.join([self.small(x), self.large(x * 9)]))


async def ran_joined(workers: Workers, folder: Path, network: Any, recipe: str | Recipe) -> None:
    """Compile a joining network, whose program joins in its one delegate, and gives what the model gives."""
    network = network.eval()
    samples = [sample(folder / f"{seed}.ett", torch.randn(2, 8)) for seed in range(8)]
    inputs = torch.randn(2, 8)
    one = await compiled(
        workers, folder / "c", lambda: torch.export.export(network, (inputs,)), recipe, calibration={"forward": samples}
    )
    assert sqnr_db(network(inputs).detach(), run(one.pte, [inputs])[0]) > 20
    delegation = one.result["delegation"]["forward"]
    assert delegation["subgraphs"] == 1
    assert {row["op"]: row["delegated"] for row in delegation["operators"]}["aten_cat_default"] == 1


@pytest.mark.parametrize("name", ["concat", "concatenate", "hstack", "vstack", "row_stack", "column_stack", "dstack", "stack"])
async def test_operands_of_two_ranges_run_joined_by_each_operator_that_joins(workers: Workers, tmp_path: Path, name: str) -> None:
    def join(values: Any) -> Any:
        joined = getattr(torch, name)(values, 1) if name.startswith("concat") else getattr(torch, name)(values)
        return joined.flatten(1) if name == "dstack" else joined

    await ran_joined(workers, tmp_path, Joined(join, 8 if name in ("vstack", "row_stack", "stack") else 16), STATIC)


async def test_operands_of_two_ranges_run_joined_by_a_cat_in_fp32(workers: Workers, tmp_path: Path) -> None:
    recipe = with_quantizer(STATIC, 'skip_operators = [":cat"]')
    await ran_joined(workers, tmp_path, Joined(lambda values: torch.cat(values, 1)), recipe)


async def test_a_single_calibration_input_is_reported(workers: Workers, tmp_path: Path) -> None:
    assert "FEW_CALIBRATION_INPUTS" in (await compiled(workers, tmp_path, models.conv, STATIC)).codes


async def test_a_quantized_program_has_the_same_bytes_in_every_child(workers: Workers, tmp_path: Path) -> None:
    files = images(tmp_path)
    one = await compiled(workers, tmp_path / "a", models.conv, STATIC, calibration={"forward": files})
    other = await compiled(workers, tmp_path / "b", models.conv, STATIC, calibration={"forward": files})
    assert one.quantized_files["forward.pt2"] == other.quantized_files["forward.pt2"]
    assert one.pte == other.pte


async def test_what_calibration_left_in_a_buffer_is_not_the_programs_beginning(workers: Workers, tmp_path: Path) -> None:
    vectors = [sample(tmp_path / f"{n}.ett", torch.randn(n, WIDTH)) for n in (2, 5, 24)]
    one = await compiled(workers, tmp_path, {"text_decoder": text_decoder}, STATIC, calibration={"text_decoder": vectors})
    assert "INITIALIZED_MUTABLE_BUFFERS" in one.codes
    torch.manual_seed(0)
    program = text_decoder().module()
    inputs = torch.randn(9, WIDTH)
    expected, actual = program(inputs), run(one.pte, [inputs], "text_decoder")[0]
    assert abs(float((expected - actual).mean())) < 0.1


@pytest.mark.filterwarnings("ignore:This API and all of its related functionality")
async def test_source_lines_and_debug_handles_are_those_without_the_file_between(workers: Workers, tmp_path: Path) -> None:
    """A quantized program goes through a .pt2 to the next child; ExportSession has it in memory."""
    one = await compiled(workers, tmp_path, models.conv, STATIC, calibration={"forward": images(tmp_path)})
    ours = tmp_path / "ours.etrecord"
    ours.write_bytes(one.files["model.etrecord"])
    theirs = in_one_process(images(tmp_path), tmp_path)
    record, expected = read_record(ours, "forward"), read_record(theirs, "forward")
    assert record.nodes == expected.nodes
    assert record.handles == expected.handles
    assert any(node.source for nodes in record.nodes.values() for node in nodes)


def in_one_process(calibration: list[Path], folder: Path) -> Path:
    """Return the same without files between quantization, export and lowering."""
    from etfarm.server.compile.lower import build, etrecord, lowering, quantize
    from etfarm.server.compile.program import places

    torch.manual_seed(0)
    program = models.conv()
    recipe = recipes.parse(STATIC)
    how = build.quantization(recipe, "forward")
    module = quantize.quantize(program, how, recipe.name, "forward", calibration)
    again = {"forward": quantize.export_again(module, program, False)}
    pipeline = lowering.Pipeline(("TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"), etrecord=True)
    stages = lowering.Stages(lambda event: None, again, compile_pb2.Compilation())
    lowered = lowering.lower(again, build.export_recipe(recipe, ["forward"]), pipeline, "tiny", stages, places.undelegated)
    etrecord.save(lowered.manager.get_etrecord(), again, {}, folder / "theirs.etrecord")
    return folder / "theirs.etrecord"


async def test_fp32_operators_are_reported_with_their_line(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.conv, DYNAMIC)
    assert one.codes == ["STAYED_FP32"]
    assert one.quantized is not None
    assert "1 x conv2d" in one.quantized["warnings"][0]["message"]
    (row,) = one.quantized["stayed_fp32"]["forward"]
    assert (row["op"], row["count"]) == ("conv2d", 1)
    assert row["places"][0]["source"] is not None
    assert row["places"][0]["source"]["code"] == "x = torch.relu(self.conv(image))"


@pytest.mark.parametrize(
    "leaves",
    [(torch.zeros(1, 3, 9, 9),), (torch.zeros(1, 3, 8),), (torch.zeros(1, 3, 8, 8, dtype=torch.int32),),
     (torch.zeros(1, 3, 8, 8), torch.zeros(1)), (3,)],
    ids=["size", "rank", "dtype", "count", "number"],
)  # fmt: skip
async def test_a_calibration_sample_that_does_not_fit_is_refused(
    workers: Workers, tmp_path: Path, leaves: tuple[Any, ...]
) -> None:
    files = [*images(tmp_path, 1), sample(tmp_path / "bad.ett", *leaves)]
    with pytest.raises(EtfarmError, match="Calibration sample 1 does not fit forward") as caught:
        await compiled(workers, tmp_path, models.conv, STATIC, calibration={"forward": files})
    assert caught.value.reason == "CALIBRATION_MISMATCH"
    assert caught.value.fault is Fault.USER


async def test_modules_that_a_file_names_stay_in_fp32(workers: Workers, tmp_path: Path) -> None:
    recipe = recipes.from_toml(
        'recipe = "xnnpack_fp32"\n[[quantizers]]\nname = "xnnpack"\nper_channel = true\nskip_modules = ["conv"]\n'
    )
    one = await compiled(workers, tmp_path, models.conv, recipe, calibration={"forward": images(tmp_path)})
    assert one.quantized is not None
    assert [row["op"] for row in one.quantized["stayed_fp32"]["forward"]] == ["conv2d"]


class Pair(torch.nn.Module):  # type: ignore[misc]
    """Two linears, and the product of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b: torch.Tensor = self.b(a)
        return a @ b.transpose(-1, -2)


def pair() -> Any:
    return torch.export.export(Pair().eval(), (torch.randn(4, 8),))


async def test_layers_left_in_fp32_behind_a_quantized_module_are_reported(workers: Workers, tmp_path: Path) -> None:
    recipe = recipes.from_toml('partitioners = ["xnnpack"]\nquantizers = [{ name = "xnnpack", only_modules = ["a"] }]\n')
    one = await compiled(workers, tmp_path, pair, recipe)
    assert one.quantized is not None
    rows = one.quantized["stayed_fp32"]["forward"]
    assert [(row["op"], row["places"][0]["module"]) for row in rows] == [("linear", "b"), ("matmul", None)]
    assert "STAYED_FP32" in one.codes


async def test_products_that_xnnpack_has_in_fp32_only_are_reported_for_a_model_that_the_client_quantized(
    workers: Workers, tmp_path: Path
) -> None:
    whole = await compiled(workers, tmp_path / "server", pair, STATIC)
    assert whole.quantized is not None
    assert [row["op"] for row in whole.quantized["stayed_fp32"]["forward"]] == ["matmul"]

    def quantized() -> Any:
        return torch.export.load(io.BytesIO(whole.quantized_files[whole.quantized["programs"]["forward"]]))

    one = await compiled(workers, tmp_path / "client", quantized, STATIC, done=("QUANTIZE", "TORCH_EXPORT"))
    assert [row["op"] for row in one.result["stayed_fp32"]["forward"]] == ["matmul"]


async def test_a_module_that_the_client_quantized_is_lowered_and_not_quantized_again(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.quantized, STATIC, done=("QUANTIZE", "TORCH_EXPORT"))
    assert one.stages == ["TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]
    assert any("dequantize" in o["op"] for o in one.result["delegation"]["forward"]["operators"])


async def test_a_program_that_is_not_quantized_is_not_lowered_as_if_it_were(workers: Workers, tmp_path: Path) -> None:
    with pytest.raises(EtfarmError, match="plain fp32") as caught:
        await compiled(workers, tmp_path, models.conv, STATIC, done=("QUANTIZE", "TORCH_EXPORT"))
    assert caught.value.reason == "QUANTIZED_NOTHING"


async def test_int8_by_tensor_is_int8(workers: Workers, tmp_path: Path) -> None:
    recipe = "xnnpack_pt2e_int8_static_per_tensor"
    one = await compiled(workers, tmp_path, models.conv, recipe, calibration={"forward": images(tmp_path)})
    assert one.codes == []
    assert not any("per_channel" in o["op"] for o in one.result["delegation"]["forward"]["operators"])


@pytest.mark.parametrize("recipe", [FOUR_BIT, "xnnpack_torchao_int8da_int4w_per_tensor"])
async def test_a_4_bit_program_of_the_client_is_lowered(workers: Workers, tmp_path: Path, recipe: str) -> None:
    one = await compiled(workers, tmp_path, models.four_bit, recipe, done=("SOURCE_TRANSFORM", "TORCH_EXPORT"))
    assert one.result["delegation"]["forward"]["subgraphs"] >= 1
    assert one.stages == ["TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]


async def test_int8_and_fp32_recipes_combine(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.conv, f"{STATIC}+xnnpack_fp32", calibration={"forward": images(tmp_path)})
    assert one.stages[0] == "QUANTIZE"
    assert one.result["facts"] is not None
    assert one.result["facts"]["methods"]["forward"]["backends"] == ["XnnpackBackend"]
    torch.manual_seed(0)
    program = models.conv().module()
    inputs = torch.randn(1, 3, 8, 8)
    assert sqnr_db(program(inputs), run(one.pte, [inputs])[0]) > 20


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f'name = "mine"\nrecipe = "{DYNAMIC}"', DYNAMIC),
        (f'combine = ["xnnpack_fp32", "{DYNAMIC}"]', DYNAMIC),
        ('name = "mine"\npartitioners = ["xnnpack"]\n[[quantizers]]\nname = "xnnpack"\ndynamic = true', "xnnpack"),
    ],
)
async def test_a_shared_quantization_names_no_recipe_that_is_another_s(
    workers: Workers, tmp_path: Path, text: str, name: str
) -> None:
    whole = await compiled(workers, tmp_path, models.elementwise, recipes.from_toml(text))
    assert whole.quantized is not None
    (warning,) = whole.quantized["warnings"]
    assert warning["code"] == "QUANTIZED_NOTHING"
    assert warning["message"].startswith(f"Recipe {name} found nothing to quantize in forward: it is plain fp32. The program is")


@pytest.mark.remedy("QUANTIZED_NOTHING")
async def test_a_model_without_quantizable_operators_is_lowered_as_without_quantization(workers: Workers, tmp_path: Path) -> None:
    whole = await compiled(workers, tmp_path / "int8", models.elementwise, DYNAMIC)
    assert whole.codes == ["QUANTIZED_NOTHING"], "one warning, not one of each stage"
    plain = await compiled(workers, tmp_path / "fp32", models.elementwise, "xnnpack_fp32")
    assert whole.pte == plain.pte and "QUANTIZED_NOTHING" not in plain.codes


async def test_a_quantizer_for_a_method_that_the_model_lacks_is_refused(workers: Workers, tmp_path: Path) -> None:
    recipe = recipes.from_toml(
        'recipe = "xnnpack_fp32"\n[methods.other]\nquantizers = [{name = "xnnpack", per_channel = true}]\n'
    )
    with pytest.raises(EtfarmError, match="found nothing to quantize"):
        await compiled(workers, tmp_path, models.conv, recipe)


async def test_int8_that_no_delegate_takes_runs_on_executorchs_quantized_kernels(workers: Workers, tmp_path: Path) -> None:
    recipe = recipes.from_toml(f'recipe = "{STATIC}"\npartitioners = []\n')
    one = await compiled(workers, tmp_path, models.conv, recipe, calibration={"forward": images(tmp_path)})
    assert one.result["facts"] is not None
    facts = one.result["facts"]["methods"]["forward"]
    assert facts["backends"] == []
    assert any(operator.startswith("quantized_decomposed::") for operator in facts["operators"])
    assert [check["ran"] for check in one.result["checks"]] == [True]


class Keywords(torch.nn.Module):  # type: ignore[misc]
    """Two products; inputs are nested, one is a keyword, and a number is baked in."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], times: int, *, extra: torch.Tensor) -> torch.Tensor:
        return self.one(pair[0]) * times + self.other(pair[1] + extra)


def keywords() -> Any:
    batch = torch.export.Dim("batch", min=1, max=16)
    tensors = [torch.randn(4, 8) for _ in range(3)]
    shapes = {"pair": ({0: batch}, {0: batch}), "times": None, "extra": {0: batch}}
    return torch.export.export(
        Keywords().eval(), ((tensors[0], tensors[1]), 3), {"extra": tensors[2]}, dynamic_shapes=shapes
    )  # fmt: skip


@pytest.mark.parametrize("strict", ["true", "false"])
async def test_int8_keeps_keywords_nested_inputs_numbers_and_dynamic_dims(workers: Workers, tmp_path: Path, strict: str) -> None:
    samples = [sample(tmp_path / f"{n}.ett", torch.randn(n, 8), torch.randn(n, 8), 3, torch.randn(n, 8)) for n in (1, 7, 16)]
    recipe = recipes.from_toml(f'recipe = "{STATIC}"\nstrict = {strict}\n')
    one = await compiled(workers, tmp_path / "c", keywords, recipe, calibration={"forward": samples})
    torch.manual_seed(0)
    program = keywords().module()
    a, b, c = (torch.randn(11, 8) for _ in range(3))
    assert sqnr_db(program((a, b), 3, extra=c), run(one.pte, [a, b, 3, c])[0]) > 20


class Doubled(torch.nn.Module):  # type: ignore[misc]
    """A dim that is twice another: each row of a product, two times, plus a row of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x).repeat_interleave(2, 0) + y


def doubled() -> Any:
    rows = torch.export.Dim("rows", min=1, max=16)
    shapes = {"x": {0: rows}, "y": {0: 2 * rows}}
    return torch.export.export(Doubled().eval(), (torch.randn(3, 8), torch.randn(6, 8)), dynamic_shapes=shapes)


@pytest.mark.parametrize(("recipe", "db"), [("xnnpack_fp32", 100), ("portable", 100), (STATIC, 20)])
async def test_a_dim_that_is_twice_another_stays_dynamic(workers: Workers, tmp_path: Path, recipe: str, db: float) -> None:
    samples = [sample(tmp_path / f"{n}.ett", torch.randn(n, 8), torch.randn(2 * n, 8)) for n in (1, 7, 16)]
    calibration = {"forward": samples} if recipe == STATIC else None
    one = await compiled(workers, tmp_path / "c", doubled, recipe, calibration=calibration)
    torch.manual_seed(0)
    program = doubled().module()
    x, y = torch.randn(11, 8), torch.randn(22, 8)
    assert sqnr_db(program(x, y), run(one.pte, [x, y])[0]) > db


async def test_a_sample_that_the_model_itself_fails_on_is_named(workers: Workers, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(tensors.encode([tensors.from_array("index", np.array([1, 2]))]))
    bad.write_bytes(tensors.encode([tensors.from_array("index", np.array([1, 99]))]))
    with pytest.raises(EtfarmError, match=r"forward fails on calibration sample 1: .* indices within their tables") as caught:
        await compiled(workers, tmp_path, models.table, STATIC, calibration={"forward": [good, bad]})
    assert caught.value.reason == "CALIBRATION_FAILED"


class Halved(torch.nn.Module):  # type: ignore[misc]
    """Every second row, of a dim that is one more than another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x[:, ::2]))


def one_more() -> Any:
    shapes = {"x": {1: torch.export.Dim("rows", max=16) + 1}}
    return torch.export.export(Halved().eval(), (torch.randn(3, 6, 8),), dynamic_shapes=shapes)


@pytest.mark.parametrize(("recipe", "db"), [("xnnpack_fp32", 100), (STATIC, 20)])
async def test_a_dim_that_is_one_more_than_another_is_no_value(workers: Workers, tmp_path: Path, recipe: str, db: float) -> None:
    one = await compiled(workers, tmp_path / "c", one_more, recipe)
    torch.manual_seed(0)
    program = one_more().module()
    x = torch.randn(3, 10, 8)  # torch guards that the rows are even
    assert sqnr_db(program(x), run(one.pte, [x])[0]) > db


class Twice(torch.nn.Module):  # type: ignore[misc]
    """A layer with two uses whose inputs have other ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x) * 20)


def twice() -> Any:
    torch.manual_seed(0)
    return torch.export.export(Twice().eval(), (torch.randn(1, 3, 16),))


async def test_a_program_that_is_wrong_when_fused_is_found_without_a_device(workers: Workers, tmp_path: Path) -> None:
    samples = [sample(tmp_path / f"{factor}.ett", torch.randn(1, 3, 16) * factor) for factor in (0.5, 1.5)]
    options = recipes.from_toml(f'recipe = "{STATIC}"\ncopy_shared_layers = true\nfuse_activations = true')
    plain, copied = [
        await compiled(workers, tmp_path / name, twice, recipe, calibration={"forward": samples})
        for name, recipe in (("plain", STATIC), ("copied", options))
    ]
    (warning,) = [each["message"] for each in plain.result["warnings"] if each["code"] == "FAR_FROM_QUANTIZED_GRAPH"]
    assert warning.startswith(
        "forward on the server: Outputs are far from the program's own quantized graph, run by PyTorch: 0 ("
    )
    assert "write copy_shared_layers = true" in warning and "test_compile_quantize.py:" in warning
    assert "FAR_FROM_QUANTIZED_GRAPH" not in copied.codes
    # A recipe's options are not for a program that the user quantized.
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the operators

    (tmp_path / "quantized.pt2").write_bytes(plain.quantized_files["forward.pt2"])
    by_user = await compiled(workers, tmp_path / "by_user", lambda: torch.export.load(tmp_path / "quantized.pt2"), "xnnpack_fp32")
    (warning,) = [each["message"] for each in by_user.result["warnings"] if each["code"] == "FAR_FROM_QUANTIZED_GRAPH"]
    assert "torchao's quantize_ takes filter_fn" in warning and "recipe file" not in warning
    # A model without activations has nothing for the other option.
    assert copied.quantized is not None
    (unused,) = [each["message"] for each in copied.quantized["warnings"] if each["code"] == "OPTION_WITHOUT_EFFECT"]
    assert unused.startswith("fuse_activations changes nothing") and "OPTION_WITHOUT_EFFECT" not in plain.codes


class Smoothed(torch.nn.Module):  # type: ignore[misc]
    """Multiplies by a number in the body of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        from torch._higher_order_ops.scan import scan

        carry, steps = scan(lambda c, v: (c * 0.5 + v, (c + v).clone()), torch.zeros(16), self.first(x))
        return self.last(steps), carry


@pytest.mark.parametrize("recipe", [STATIC, DYNAMIC])
async def test_a_loop_with_a_number_in_its_body_is_quantized_around_it(workers: Workers, tmp_path: Path, recipe: str) -> None:
    answer = await compiled(workers, tmp_path, lambda: torch.export.export(Smoothed().eval(), (torch.randn(4, 16),)), recipe)
    assert not answer.result["stayed_fp32"]
    (check,) = answer.result["checks"]
    assert check["ran"] and all(output["sqnr_db"] > 25 for output in check["outputs"])


class Steps(torch.nn.Module):
    """Computes a layer in the body of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.step = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        from torch._higher_order_ops.scan import scan

        return scan(lambda c, v: (c * 0.5 + self.step(v), (c + v).relu()), torch.zeros(16), self.first(x))


@pytest.mark.parametrize("recipe", [STATIC, DYNAMIC])
async def test_the_body_of_a_loop_stays_in_fp32(workers: Workers, tmp_path: Path, recipe: str) -> None:
    answer = await compiled(workers, tmp_path, lambda: torch.export.export(Steps().eval(), (torch.randn(4, 16),)), recipe)
    assert [(row["op"], row["count"]) for row in answer.quantized["stayed_fp32"]["forward"]] == [("linear", 1)]
    (check,) = answer.result["checks"]
    assert check["ran"] and all(output["sqnr_db"] > 25 for output in check["outputs"])
    operators = {row["op"]: row["delegated"] for row in answer.result["delegation"]["forward"]["operators"]}
    assert operators["aten_linear_default"] == 1
