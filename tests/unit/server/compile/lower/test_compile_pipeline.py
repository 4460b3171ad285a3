"""Compiling in real children: programs that run, refusals in one sentence, nothing silent."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from etfarm.server.compile.inputs import InputMismatch, check_inputs  # noqa: E402
from etfarm.server.compile.program import values  # noqa: E402 - needs torch
from etfarm.server.compile.request import InspectRequest, LowerRequest  # noqa: E402
from etfarm.server.compile.verify import reference  # noqa: E402 - needs torch
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes, tensors  # noqa: E402
from etfarm.wire.errors import EtfarmError, Fault  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.compiling import DYNAMIC, FOUR_BIT, STATIC, compiled, listed, plain, run  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def refused(workers: Workers, tmp_path: Path, make: Callable[[], Any], recipe: str, **more: Any) -> EtfarmError:
    with pytest.raises(EtfarmError) as caught:
        await compiled(workers, tmp_path, make, recipe, **more)
    error = caught.value
    assert error.fault is Fault.USER
    assert "site-packages" not in error.message, "a path of the server"
    assert "/jobs/" not in error.message, "a path of the server"
    assert len(error.message) < 600
    assert "\n" not in error.message
    return error


async def test_a_program_runs_like_the_model_and_says_what_it_is(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.conv)
    result = one.result
    assert [s["stage"] for s in result["stages"]] == ["TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]
    assert [(e["stage"], e["phase"]) for e in one.events] == [
        ("TO_EDGE_TRANSFORM_AND_LOWER", "START"), ("TO_EDGE_TRANSFORM_AND_LOWER", "END"),
        ("TO_EXECUTORCH", "START"), ("TO_EXECUTORCH", "END"),
    ]  # fmt: skip
    assert result["program"] == {"pte": "model.pte", "data": {}}
    assert result["stage_files"] == {}
    assert one.files[str(result["etrecord"])]
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
    sizes = result["sizes"]
    assert sizes is not None
    assert 0 < sizes["delegate_bytes"] < len(one.pte)
    assert [(check["inputs"], check["ran"]) for check in result["checks"]] == [("EXAMPLE", True)]
    assert result["toolchain"]["executorch"] == "1.5.1"
    assert not result["warnings"]

    example = values.to_leaf(tensors.decode(one.files[result["inputs"]["forward"]])[0])
    torch.manual_seed(0)
    expected = models.conv().module()(example)
    assert torch.allclose(run(one.files["model.pte"], [example])[0], expected, atol=1e-5)


@pytest.mark.slow(reason="compiles models several times in children")
async def test_equal_requests_give_equal_bytes(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one = await compiled(workers, tmp_path, models.conv, STATIC)
    other = await compiled(workers, tmp_path / "a", models.conv, STATIC)
    assert one.files["model.pte"] == other.files["model.pte"]


async def test_portable_delegates_nothing_and_names_its_kernels(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.conv, "portable")
    assert one.result["facts"] is not None
    method = one.result["facts"]["methods"]["forward"]
    assert method["backends"] == []
    assert "aten::convolution.out" in method["operators"]
    assert method["planned_bytes"]
    assert one.result["delegation"]["forward"]["delegated_nodes"] == 0


@pytest.mark.slow(reason="compiles models several times in children")
@pytest.mark.parametrize("recipe", ["xnnpack_fp32", STATIC, DYNAMIC])
async def test_a_dynamic_batch_stays_dynamic(workers: Workers, tmp_path: Path, recipe: str) -> None:
    one = await compiled(workers, tmp_path, models.dynamic, recipe)
    assert one.result["facts"] is not None
    assert one.result["facts"]["methods"]["forward"]["inputs"][0]["dims"] == [{"min": 1, "max": 8}, 16]
    for batch in (1, 4, 8):
        assert run(one.files["model.pte"], [torch.ones(batch, 16)])[0].shape == (batch, 16)


async def test_nested_inputs_numbers_and_keywords(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.dict_inputs)
    assert one.result["facts"] is not None
    facts = one.result["facts"]["methods"]["forward"]
    assert [i["name"] for i in facts["inputs"]] == ["batch_left", "batch_right", "scale", "bias"]
    assert facts["inputs"][2] == {
        "name": "scale", "kind": "int", "dtype": None, "dims": None, "dim_order": None, "value": 3
    }  # fmt: skip
    arguments = tensors.decode(one.files[one.result["inputs"]["forward"]])
    check_inputs("forward", one.facts.methods["forward"], arguments)
    with pytest.raises(InputMismatch, match=r"'scale'.*takes 3"):
        check_inputs("forward", one.facts.methods["forward"], [*arguments[:2], tensors.Scalar("scale", 4), arguments[3]])
    outputs = run(one.files["model.pte"], [values.to_leaf(value) for value in arguments])
    assert torch.equal(outputs[0], torch.full((2, 3), 4.5))
    assert outputs[1] == 3


async def test_a_buffers_initial_value_is_kept(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.counter, "portable")
    assert "INITIALIZED_MUTABLE_BUFFERS" in one.codes
    assert run(one.files["model.pte"], [torch.zeros(2)], times=2)[0].tolist() == [43.0, 43.0]


@pytest.mark.slow(reason="compiles models several times in children")
@pytest.mark.parametrize(
    ("make", "recipe", "reason", "word"),
    [
        (models.fft, "xnnpack_fp32", "PROGRAM_CANNOT_RUN", "fft"),
        (models.unknown, "xnnpack_fp32", "PROGRAM_CANNOT_RUN", "_linalg_svd"),
        (lambda: models.dynamic(None), "xnnpack_fp32", "DIM_WITHOUT_MAXIMUM", "dim 0 of 'x'"),
        (models.train_mode, "xnnpack_fp32", "TRAINING_MODE", "eval()"),
        (models.conv, FOUR_BIT, "RECIPE_NEEDS_EAGER_MODULE", "eager module"),
        (models.quantized, STATIC, "ALREADY_QUANTIZED", "again"),
        (models.unbounded, "xnnpack_fp32", "UNBOUNDED_SIZE", "plans memory"),
    ],
)
async def test_what_would_be_silent_or_late_is_refused(
    workers: Workers, tmp_path: Path, make: Callable[[], Any], recipe: str, reason: str, word: str
) -> None:
    error = await refused(workers, tmp_path, make, recipe)
    assert error.reason == reason
    assert word in str(error)


@pytest.mark.remedy("ALREADY_QUANTIZED")
@pytest.mark.slow(reason="compiles models several times in children")
async def test_a_quantized_program_is_lowered_as_it_is(workers: Workers, tmp_path: Path) -> None:
    assert (await refused(workers, tmp_path, models.quantized, STATIC)).reason == "ALREADY_QUANTIZED"
    assert (await compiled(workers, tmp_path, models.quantized, "xnnpack_fp32")).pte


@pytest.mark.parametrize(
    ("make", "operator", "code"),
    [(models.histogram, "aten::histc", "torch.histc(x"), (models.unknown, "aten::_linalg_svd", "svd")],
)
async def test_an_operator_without_a_kernel_is_reported_with_its_line(
    workers: Workers, tmp_path: Path, make: Callable[[], Any], operator: str, code: str
) -> None:
    error = await refused(workers, tmp_path, make, "xnnpack_fp32")
    assert error.reason == "PROGRAM_CANNOT_RUN"
    assert re.search(rf"not found, of {operator} at [^\n]*models\.py:\d+ \(.*{re.escape(code)}", error.message), error.message


async def test_a_4_bit_program_of_the_client_is_lowered(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.four_bit, FOUR_BIT)
    assert one.result["delegation"]["forward"]["subgraphs"] >= 1


async def test_an_unsafe_model_is_refused_in_the_child_too(workers: Workers, tmp_path: Path) -> None:
    model = models.save(models.conv, tmp_path / "m")
    model.write_bytes(model.read_bytes().replace(b"torch.ops.aten.relu.default", b"torch.ops.load_library.__x_"))
    request = LowerRequest({"forward": model}, {"forward": model}, "tiny", recipes.parse("xnnpack_fp32").json)
    with pytest.raises(EtfarmError) as caught:
        await workers.run("etfarm.server.compile.lower.tasks:lower_model", request, deadline_s=60)
    assert caught.value.reason in ("UNSAFE_MODEL", "NOT_A_PT2")


async def test_a_ready_program_is_described(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.dynamic)
    (tmp_path / "p").write_bytes(one.files["model.pte"])
    request = InspectRequest(tmp_path / "p", "tiny")
    async with await workers.run("etfarm.server.compile.inspect.facts:inspect_pte", request, deadline_s=60) as finished:
        result = plain(finished.result)
    assert result["stages"] == []
    assert result["facts"] is not None
    method = result["facts"]["methods"]["forward"]
    assert method["inputs"][0]["dims"] == [{"min": 0, "max": 8}, {"min": 0, "max": 16}]
    assert method["backends"] == ["XnnpackBackend"]


async def test_a_damaged_program_is_a_users_error(workers: Workers, tmp_path: Path) -> None:
    one = await compiled(workers, tmp_path, models.dynamic)
    data = bytearray(one.files["model.pte"])
    data[48:400] = os.urandom(352)
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(EtfarmError) as caught:
        await workers.run(
            "etfarm.server.compile.inspect.facts:inspect_pte", InspectRequest(tmp_path / "p", "tiny"), deadline_s=60
        )
    assert caught.value.reason == "UNSUPPORTED_PROGRAM"


def test_the_reference_is_the_model_before_quantization() -> None:
    torch.manual_seed(0)
    program = models.dict_inputs()
    outputs = reference.run_program(program, values.example_values(program) or [])
    assert isinstance(outputs[0], tensors.Tensor)
    assert values.to_leaf(outputs[0]).tolist() == [[4.5] * 3] * 2
    assert outputs[1] == tensors.Scalar("scale", 3)


async def test_the_recipes_that_this_host_has_are_listed(workers: Workers) -> None:
    async with await workers.run("etfarm.server.compile.lower.available:list_recipes", None, deadline_s=60) as finished:
        rows = {row["name"]: row for row in listed(finished.result)}
    assert list(rows) == list(recipes.RECIPES)
    for name, row in rows.items():
        assert row["available"] == (not row["missing"]), row
        assert row["available"] or not name.startswith(("xnnpack", "portable")), row
    assert "Qualcomm" in rows["qnn_fp16"]["missing"]


@pytest.mark.slow(reason="imports torch's compiler, as ExecuTorch's custom operators do")
async def test_custom_operators_of_language_models_are_lowered_and_tried(workers: Workers, tmp_path: Path) -> None:
    from tests.support.language_models import custom

    answer = await compiled(workers, tmp_path, custom)
    facts = answer.result["facts"]
    assert facts is not None
    operators = facts["methods"]["forward"]["operators"]
    assert {"llama::custom_sdpa.out", "llama::update_cache.out"} <= set(operators)
    assert [check["ran"] for check in answer.result["checks"]] == 3 * [True]
    assert "CHECK_FAILED" not in answer.codes
