"""Compiling in real children: programs that run, refusals in one sentence, nothing silent."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from etfarm.server.compile import values  # noqa: E402 - needs torch
from etfarm.server.compile.inputs import check_inputs  # noqa: E402
from etfarm.server.compile.prewarm import PRELOAD  # noqa: E402
from etfarm.server.compile.refusals import InputMismatch  # noqa: E402
from etfarm.server.compile.request import CompileRequest, ReferenceRequest  # noqa: E402
from etfarm.server.compile.result import CompileResult  # noqa: E402
from etfarm.server.workers.limits import Limits  # noqa: E402
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes, tensors  # noqa: E402
from etfarm.wire.errors import EtfarmError, Fault  # noqa: E402
from tests.support import models  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")

STATIC = "xnnpack_pt2e_int8_static_per_channel"
DYNAMIC = "xnnpack_pt2e_int8_dynamic_per_channel"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    """One warm forkserver for all tests here."""
    folder = tmp_path_factory.mktemp("workers") / "jobs"
    pool = Workers(preload=PRELOAD, limits=Limits(memory_bytes=4 << 30, threads=2), folder=folder, concurrency=2)
    pool.start()
    yield pool
    await pool.stop()


@dataclass
class Compiled:
    """A result, and the files that were beside it."""

    result: CompileResult
    files: dict[str, bytes]
    events: list[dict[str, Any]]
    log: list[str]

    @property
    def codes(self) -> list[str]:
        return [warning["code"] for warning in self.result["warnings"]]


async def compile_(
    workers: Workers, tmp_path: Path, make: Callable[[], Any], recipe: str = "xnnpack_fp32", **more: Any
) -> Compiled:
    model = models.save(make, tmp_path / "3a7bd3e2360a3d29eea436fcfb7e44c735d117c4")
    request = CompileRequest(model, None, "tiny", recipes.parse(recipe).json, threads=2, **more)
    events: list[dict[str, Any]] = []
    log: list[str] = []
    async with await workers.run(
        "etfarm.server.compile.pipeline:compile_model", request, deadline_s=120,
        on_event=lambda event: events.append(json.loads(event)), on_log=log.append,
    ) as finished:  # fmt: skip
        files = {p.name: p.read_bytes() for p in finished.folder.iterdir() if p.is_file() and not p.is_symlink()}
        return Compiled(json.loads(finished.result), files, events, log)


async def refused(workers: Workers, tmp_path: Path, make: Callable[[], Any], recipe: str, **more: Any) -> EtfarmError:
    with pytest.raises(EtfarmError) as caught:
        await compile_(workers, tmp_path, make, recipe, **more)
    error = caught.value
    assert error.fault is Fault.USER
    assert "/" not in error.message.replace(" / ", ""), "a path of the server"
    assert len(error.message) < 600
    assert "\n" not in error.message
    return error


def run(pte: bytes, leaves: Sequence[Any], method: str = "forward", times: int = 1) -> list[Any]:
    """What the program gives on this host, after `times` calls."""
    from executorch.runtime import Runtime

    loaded = Runtime.get().load_program(pte).load_method(method)
    assert loaded is not None
    for _ in range(times - 1):
        loaded.execute(leaves)
    return [o.clone() if isinstance(o, torch.Tensor) else o for o in loaded.execute(leaves)]


async def test_a_program_runs_like_the_model_and_says_what_it_is(workers: Workers, tmp_path: Path) -> None:
    compiled = await compile_(workers, tmp_path, models.conv)
    result = compiled.result
    assert [s["stage"] for s in result["stages"]] == ["TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]
    assert [(e["stage"], e["phase"]) for e in compiled.events] == [
        ("TO_EDGE_TRANSFORM_AND_LOWER", "START"), ("TO_EDGE_TRANSFORM_AND_LOWER", "END"),
        ("TO_EXECUTORCH", "START"), ("TO_EXECUTORCH", "END"),
    ]  # fmt: skip
    assert result["program"] == {"pte": "model.pte"}
    assert compiled.files[str(result["etrecord"])]
    delegation = result["delegation"]["forward"]
    assert delegation["subgraphs"] >= 1
    assert delegation["delegated_nodes"] >= 3
    assert sum(row["delegated"] for row in delegation["operators"]) == delegation["delegated_nodes"]
    facts = result["facts"]
    assert facts is not None
    method = facts["methods"]["forward"]
    assert method["inputs"] == [
        {"name": "image", "kind": "tensor", "dtype": "float32", "dims": [1, 3, 8, 8], "dim_order": [0, 1, 2, 3]}
    ]
    assert method["outputs"][0]["dims"] == [1, 4]
    assert method["backends"] == ["XnnpackBackend"]
    assert facts["size_bytes"] == len(compiled.files["model.pte"])
    assert facts["delegate_bytes"] > 0
    assert result["toolchain"]["executorch"] == "1.5.1"
    assert not result["warnings"]

    example = values.to_leaf(tensors.decode(compiled.files[result["inputs"]["forward"]])[0])
    torch.manual_seed(0)
    expected = models.conv().module()(example)
    assert torch.allclose(run(compiled.files["model.pte"], [example])[0], expected, atol=1e-5)


async def test_equal_requests_give_equal_bytes(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one = await compile_(workers, tmp_path, models.conv, STATIC)
    other = await compile_(workers, tmp_path / "a", models.conv, STATIC)
    assert one.files["model.pte"] == other.files["model.pte"]


async def test_portable_delegates_nothing_and_names_its_kernels(workers: Workers, tmp_path: Path) -> None:
    compiled = await compile_(workers, tmp_path, models.conv, "portable")
    assert compiled.result["facts"] is not None
    method = compiled.result["facts"]["methods"]["forward"]
    assert method["backends"] == []
    assert "aten::convolution.out" in method["operators"]
    assert method["planned_bytes"]
    assert compiled.result["delegation"]["forward"]["delegated_nodes"] == 0


async def test_int8_of_a_pt2_is_int8_and_close(workers: Workers, tmp_path: Path) -> None:
    samples = []
    for seed in range(8):
        torch.manual_seed(seed)
        path = tmp_path / f"{seed}.ett"
        path.write_bytes(tensors.encode([values.to_value("", torch.randn(1, 3, 8, 8))]))
        samples.append(path)
    compiled = await compile_(workers, tmp_path, models.conv, STATIC, calibration={"forward": samples})
    assert [s["stage"] for s in compiled.result["stages"]][:2] == ["QUANTIZE", "TORCH_EXPORT"]
    assert any("dequantize" in o["op"] for o in compiled.result["delegation"]["forward"]["operators"])
    assert not compiled.codes
    assert compiled.result["facts"] is not None
    assert compiled.result["facts"]["methods"]["forward"]["outputs"][0]["name"] == "linear"
    torch.manual_seed(0)
    program = models.conv().module()
    torch.manual_seed(99)
    inputs = torch.randn(1, 3, 8, 8)
    actual, expected = run(compiled.files["model.pte"], [inputs])[0], program(inputs)
    assert not torch.equal(actual, expected)
    assert 10 * torch.log10(expected.square().sum() / (expected - actual).square().sum()) > 20


@pytest.mark.parametrize("recipe", ["xnnpack_fp32", STATIC, DYNAMIC])
async def test_a_dynamic_batch_stays_dynamic(workers: Workers, tmp_path: Path, recipe: str) -> None:
    compiled = await compile_(workers, tmp_path, models.dynamic, recipe)
    assert compiled.result["facts"] is not None
    assert compiled.result["facts"]["methods"]["forward"]["inputs"][0]["dims"] == [{"min": 1, "max": 8}, 16]
    for batch in (1, 4, 8):
        assert run(compiled.files["model.pte"], [torch.ones(batch, 16)])[0].shape == (batch, 16)


async def test_nested_inputs_numbers_and_keywords(workers: Workers, tmp_path: Path) -> None:
    compiled = await compile_(workers, tmp_path, models.dict_inputs)
    assert compiled.result["facts"] is not None
    facts = compiled.result["facts"]["methods"]["forward"]
    assert [i["name"] for i in facts["inputs"]] == ["batch_left", "batch_right", "scale", "bias"]
    assert facts["inputs"][2] == {
        "name": "scale", "kind": "int", "dtype": None, "dims": None, "dim_order": None, "value": 3
    }  # fmt: skip
    given = tensors.decode(compiled.files["forward.ett"])
    check_inputs("forward", facts, given)
    with pytest.raises(InputMismatch, match=r"'scale'.*takes 3"):
        check_inputs("forward", facts, [*given[:2], tensors.Scalar("scale", 4), given[3]])
    outputs = run(compiled.files["model.pte"], [values.to_leaf(value) for value in given])
    assert torch.equal(outputs[0], torch.full((2, 3), 4.5))
    assert outputs[1] == 3


async def test_a_buffers_initial_value_is_kept(workers: Workers, tmp_path: Path) -> None:
    compiled = await compile_(workers, tmp_path, models.counter, "portable")
    assert "INITIALIZED_MUTABLE_BUFFERS" in compiled.codes
    assert run(compiled.files["model.pte"], [torch.zeros(2)], times=2)[0].tolist() == [43.0, 43.0]


@pytest.mark.parametrize(
    ("make", "recipe", "reason", "word"),
    [
        (models.fft, "xnnpack_fp32", "PROGRAM_CANNOT_RUN", "fft"),
        (models.unknown, "xnnpack_fp32", "PROGRAM_CANNOT_RUN", "_linalg_svd"),
        (lambda: models.dynamic(None), "xnnpack_fp32", "DIM_WITHOUT_MAXIMUM", "dim 0 of 'x'"),
        (models.train_mode, "xnnpack_fp32", "TRAINING_MODE", "eval()"),
        (models.elementwise, DYNAMIC, "QUANTIZED_NOTHING", "plain fp32"),
        (models.conv, "xnnpack_torchao_int8da_int4w_per_channel", "RECIPE_NEEDS_EAGER_MODULE", "eager module"),
        (models.quantized, STATIC, "ALREADY_QUANTIZED", "again"),
        (models.unbounded, "xnnpack_fp32", "STAGE_FAILED", "finite upper bound"),
    ],
)
async def test_what_would_be_silent_or_late_is_refused(
    workers: Workers, tmp_path: Path, make: Callable[[], Any], recipe: str, reason: str, word: str
) -> None:
    error = await refused(workers, tmp_path, make, recipe)
    assert error.reason == reason
    assert word in str(error)


async def test_a_4_bit_program_of_the_client_is_lowered(workers: Workers, tmp_path: Path) -> None:
    compiled = await compile_(workers, tmp_path, models.four_bit, "xnnpack_torchao_int8da_int4w_per_channel")
    assert compiled.result["delegation"]["forward"]["subgraphs"] >= 1


async def test_what_stays_fp32_is_told(workers: Workers, tmp_path: Path) -> None:
    compiled = await compile_(workers, tmp_path, models.conv, DYNAMIC)
    assert compiled.codes == ["STAYED_FP32"]
    assert "1 x conv2d" in compiled.result["warnings"][0]["message"]


@pytest.mark.parametrize("shape", [(1, 3, 9, 9), (1, 3, 8)])
async def test_a_calibration_sample_that_does_not_fit_is_refused(
    workers: Workers, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    path = tmp_path / "sample.ett"
    path.write_bytes(tensors.encode([values.to_value("image", torch.zeros(shape))]))
    error = await refused(workers, tmp_path, models.conv, STATIC, calibration={"forward": [path]})
    assert error.reason == "BAD_CALIBRATION_INPUT"
    assert str(list(shape)) in error.message


async def test_an_unsafe_model_is_refused_in_the_child_too(workers: Workers, tmp_path: Path) -> None:
    model = models.save(models.conv, tmp_path / "m")
    model.write_bytes(model.read_bytes().replace(b"torch.ops.aten.relu.default", b"torch.ops.load_library.__x_"))
    request = CompileRequest(model, None, "tiny", recipes.parse("xnnpack_fp32").json)
    with pytest.raises(EtfarmError) as caught:
        await workers.run("etfarm.server.compile.pipeline:compile_model", request, deadline_s=60)
    assert caught.value.reason in ("UNSAFE_MODEL", "NOT_A_PT2")


async def test_stopping_after_a_stage_gives_what_there_is(workers: Workers, tmp_path: Path) -> None:
    compiled = await compile_(workers, tmp_path, models.dynamic, STATIC, stop_after="TORCH_EXPORT")
    assert compiled.result["program"] is None
    assert [s["stage"] for s in compiled.result["stages"]] == ["QUANTIZE", "TORCH_EXPORT"]
    assert compiled.files[str(compiled.result["exported_program"])][:2] == b"PK"


async def test_a_ready_program_is_described(workers: Workers, tmp_path: Path) -> None:
    compiled = await compile_(workers, tmp_path, models.dynamic)
    (tmp_path / "p").write_bytes(compiled.files["model.pte"])
    request = CompileRequest(None, tmp_path / "p", "tiny")
    async with await workers.run("etfarm.server.compile.facts:inspect_pte", request, deadline_s=60) as finished:
        result: CompileResult = json.loads(finished.result)
    assert result["stages"] == []
    assert result["facts"] is not None
    method = result["facts"]["methods"]["forward"]
    assert method["inputs"][0]["dims"] == [{"min": 0, "max": 8}, {"min": 0, "max": 16}]
    assert method["backends"] == ["XnnpackBackend"]


async def test_a_damaged_program_is_a_users_error(workers: Workers, tmp_path: Path) -> None:
    compiled = await compile_(workers, tmp_path, models.dynamic)
    data = bytearray(compiled.files["model.pte"])
    data[48:400] = os.urandom(352)
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(EtfarmError) as caught:
        await workers.run("etfarm.server.compile.facts:inspect_pte", CompileRequest(None, tmp_path / "p", "tiny"), deadline_s=60)
    assert caught.value.reason == "UNSUPPORTED_PROGRAM"


async def test_the_reference_is_the_model_before_quantization(workers: Workers, tmp_path: Path) -> None:
    model = models.save(models.dict_inputs, tmp_path / "m")
    inputs = tmp_path / "in.ett"
    torch.manual_seed(0)
    inputs.write_bytes(tensors.encode(values.example_values(models.dict_inputs()) or []))
    request = ReferenceRequest(model, [inputs, inputs], "tiny")
    async with await workers.run("etfarm.server.compile.reference:reference_outputs", request, deadline_s=60) as finished:
        names = json.loads(finished.result)["outputs"]
        outputs = [tensors.decode((finished.folder / name).read_bytes()) for name in names]
    assert len(outputs) == 2
    assert isinstance(outputs[0][0], tensors.Tensor)
    assert values.to_leaf(outputs[0][0]).tolist() == [[4.5] * 3] * 2
    assert outputs[0][1] == tensors.Scalar("", 3)


async def test_the_recipes_that_this_host_has_are_listed(workers: Workers) -> None:
    async with await workers.run("etfarm.server.compile.available:list_recipes", None, deadline_s=60) as finished:
        rows = {row["name"]: row for row in json.loads(finished.result)["recipes"]}
    assert list(rows) == list(recipes.RECIPES)
    for name, row in rows.items():
        assert row["available"] == (not row["missing"]), row
        assert row["available"] or not name.startswith(("xnnpack", "portable")), row
    assert "Qualcomm" in rows["qnn_fp16"]["missing"]
