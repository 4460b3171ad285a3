"""Common failures of an export, each provoked for real: one sentence that says what to change, and where."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from executorch.backends.xnnpack.recipes import XNNPackRecipeType  # noqa: E402
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig  # noqa: E402
from executorch.export import ExportRecipe, ExportSession, LoweringRecipe, StageType  # noqa: E402
from torch import nn  # noqa: E402
from torch._higher_order_ops.map import map as map_over  # noqa: E402
from torch.export import Dim  # noqa: E402
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_  # noqa: E402
from torchao.utils import unwrap_tensor_subclass  # noqa: E402

from etfarm.server.compile.errors import StageFailed  # noqa: E402
from etfarm.server.compile.lower.lowering import Stages  # noqa: E402
from etfarm.server.compile.program.descriptions import first_line  # noqa: E402
from etfarm.server.compile.program.explain import stage_failed  # noqa: E402
from etfarm.server.compile.program.suspects import find_many_dims, find_suspects  # noqa: E402
from etfarm.v1.compile_pb2 import Compilation  # noqa: E402
from etfarm.wire.errors import EtfarmError, Fault  # noqa: E402
from tests.support import models  # noqa: E402

pytestmark = pytest.mark.slow(reason="each test exports, and most compile")


class Function(nn.Module):
    """A model that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def exported(function: Callable[..., Any], x: torch.Tensor, **more: Any) -> Any:
    return torch.export.export(Function(function), (x,), **more)


def branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def size_of_a_value(x: torch.Tensor) -> torch.Tensor:
    n = x.max().item()
    return torch.zeros(3) if n > 3 else torch.ones(4)


def grouped(x: torch.Tensor) -> torch.Tensor:
    scales, zeros = torch.ones(4, 2), torch.zeros(4, 2)
    q = torch.ops.quantized_decomposed.quantize_per_channel_group(x, scales, zeros, -8, 7, torch.int8, 4)
    return torch.ops.quantized_decomposed.dequantize_per_channel_group(q, scales, zeros, -8, 7, torch.int8, 4, torch.float32)


def complex_product(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(x))


def portable(*, checked: bool) -> Any:
    return ExportRecipe(
        lowering_recipe=LoweringRecipe(edge_compile_config=EdgeCompileConfig(_check_ir_validity=checked)),
        executorch_backend_config=ExecutorchBackendConfig(),
    )


def failure(make: Callable[[], Any]) -> BaseException:
    """Return what torch raises while exporting."""
    with pytest.raises(Exception) as caught:
        make()
    return caught.value


def lowered(program: Any, recipe: Any) -> EtfarmError:
    """Return the sentence for what ExecuTorch raises while lowering."""
    session = ExportSession({"forward": program}, export_recipe=recipe)
    error = failure(session.export)
    return stage_failed("TO_EXECUTORCH", error, {"forward": program})


def lowers(program: Any, *, checked: bool) -> bool:
    """Whether ExecuTorch lowers a program."""
    session = ExportSession({"forward": program}, export_recipe=portable(checked=checked))
    session.export()
    return bool(session.get_pte_buffer())


def promised(error: EtfarmError, reason: str, *words: str) -> bool:
    """Check every sentence; fail with the rule that one breaks."""
    assert error.reason == reason
    assert error.fault is Fault.USER
    assert error.remedy
    assert error.stage
    assert "\n" not in error.message
    assert len(error.message) < 600
    for word in words:
        assert word in str(error)
    return True


@pytest.mark.parametrize("strict", [False, True])
def test_a_branch_on_a_value_is_named_with_its_line(strict: bool) -> None:
    error = stage_failed("TORCH_EXPORT", failure(lambda: exported(branch, torch.ones(3), strict=strict)))
    assert promised(error, "DATA_DEPENDENT_BRANCH", "test_compile_explain.py:", "if x.sum() > 0", "torch.where")
    assert "if x.sum() > 0" in error.metadata["source"]


def test_a_branch_on_an_item_is_named_with_its_condition() -> None:
    error = stage_failed("TORCH_EXPORT", failure(lambda: exported(size_of_a_value, torch.tensor([1, 2]))))
    assert promised(error, "DATA_DEPENDENT_BRANCH", "u0 > 3", "test_compile_explain.py:")


def test_a_dim_that_the_model_fixes_is_named() -> None:
    shapes = {"x": {0: Dim("batch", max=8)}}
    error = stage_failed(
        "TORCH_EXPORT",
        failure(lambda: exported(lambda x: x.reshape(4, -1) + torch.ones(4, 3), torch.ones(4, 3), dynamic_shapes=shapes)),
    )
    assert promised(error, "DIM_SPECIALIZED", "batch", "constant (4)")


def test_a_dim_whose_minimum_is_too_small_is_named() -> None:
    def unfolded(low: int) -> Any:
        return exported(lambda x: x.unfold(1, 4, 2), torch.ones(2, 8), dynamic_shapes={"x": {1: Dim("n", min=low, max=32)}})

    error = stage_failed("TORCH_EXPORT", failure(lambda: unfolded(4)))
    assert promised(error, "DIM_SPECIALIZED", "n", "Give the dim a larger min (6), or export it as static")
    assert unfolded(6) is not None


def test_a_dim_whose_maximum_fills_a_buffer_gets_a_maximum_that_can_be_exported() -> None:
    cache = torch.zeros(4, 8)

    def write(x: Any) -> Any:
        rows = cache.clone()
        rows[0 : x.shape[0], 0 : x.shape[1]] = x
        return rows

    def written(most: int) -> Any:
        shapes = {"x": {0: Dim("b", min=2, max=4), 1: Dim("s", min=2, max=most)}}
        return exported(write, torch.ones(3, 5), dynamic_shapes=shapes)

    error = stage_failed("TORCH_EXPORT", failure(lambda: written(8)))
    assert promised(error, "DIM_SPECIALIZED", "Dim s", "Give the dim a smaller max (7), or export it as static")
    assert written(7) is not None


@pytest.mark.remedy("MISSING_OUT_VARIANTS")
def test_operators_without_a_kernel_are_named_with_their_line() -> None:
    with torch.library._scoped_library("etfarm_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        program = exported(lambda x: torch.ops.etfarm_test.twice(x), torch.ones(4))
        error = lowered(program, portable(checked=False))
    assert promised(error, "MISSING_OUT_VARIANTS", "etfarm_test::twice at ", "test_compile_explain.py:", "backend")
    assert lowers(exported(lambda x: x * 2, torch.ones(4)), checked=False)


def test_undelegated_quantized_operators_are_named() -> None:
    import executorch.kernels.quantized  # noqa: F401 - as the pipeline has it

    program = exported(grouped, torch.ones(4, 8))
    error = lowered(program, ExportRecipe.get_recipe(XNNPackRecipeType.FP32))
    assert promised(error, "UNSUPPORTED_QUANTIZED_OP", "quantize_per_channel_group at ", "fp32")


@pytest.mark.remedy("OPERATOR_NOT_CORE_ATEN")
def test_an_operator_outside_of_core_aten_is_named_with_its_line() -> None:
    error = lowered(models.unbounded(), portable(checked=True))
    assert promised(
        error, "OPERATOR_NOT_CORE_ATEN", "aten::bincount at ", "models.py:", "torch.bincount(x)", "core_aten_exceptions"
    )
    counted = exported(lambda x: (x[:, None] == torch.arange(4)).sum(0), torch.tensor([1, 2, 2]))
    assert lowers(counted, checked=True)


@pytest.mark.parametrize("checked", [True, False])
def test_batch_norm_in_training_mode_is_explained_with_a_remedy(checked: bool) -> None:
    error = lowered(models.train_mode(), portable(checked=checked))
    assert promised(error, "TRAINING_MODE", "forward", "batch_norm", ".eval()")


@pytest.mark.remedy("UNBOUNDED_SIZE")
def test_an_unbounded_size_is_explained_with_its_operator() -> None:
    error = lowered(models.unbounded(), portable(checked=False))
    assert promised(error, "UNBOUNDED_SIZE", "aten::bincount at ", "torch.bincount(x)", "torch._check")

    def sized(most: int | None) -> Any:
        def ones(x: torch.Tensor) -> torch.Tensor:
            n = x.max().item()
            torch._check(n >= 2)
            if most is not None:
                torch._check(n <= most)
            return torch.ones(n)

        return exported(ones, torch.tensor([1, 3]))

    assert promised(lowered(sized(None), portable(checked=False)), "UNBOUNDED_SIZE")
    assert lowers(sized(1024), checked=False)


@pytest.mark.remedy("UNSUPPORTED_DTYPES")
def test_complex_numbers_are_explained() -> None:
    error = lowered(exported(complex_product, torch.ones(3, 2)), portable(checked=True))
    assert promised(error, "UNSUPPORTED_DTYPES", "complex64", "aten::mul", "test_compile_explain.py:", "real and imaginary")

    def apart(x: torch.Tensor) -> torch.Tensor:
        real, imaginary = x[:, 0], x[:, 1]
        return torch.stack([real * real - imaginary * imaginary, 2 * real * imaginary], 1)

    x = torch.rand(3, 2)
    assert torch.allclose(apart(x), complex_product(x)) and lowers(exported(apart, x), checked=True)


@pytest.mark.remedy("OPERATOR_WITH_EFFECTS")
def test_value_assertions_are_explained_as_side_effects() -> None:
    error = lowered(exported(torch.linalg.inv, torch.eye(4)), portable(checked=False))
    assert promised(error, "OPERATOR_WITH_EFFECTS", "linalg_inv", "compute it outside of the model")
    inverse = torch.linalg.inv(torch.eye(4))
    assert lowers(exported(lambda x: x @ inverse, torch.eye(4)), checked=False)


class Overlapping(nn.Module):
    """Two buffers that share a part of their memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(6)
        self.register_buffer("low", memory[:3])
        self.register_buffer("high", memory[2:5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.low.add_(x)
        self.high.mul_(2)
        return x + self.high


def test_buffers_that_share_memory_are_explained() -> None:
    error = lowered(torch.export.export(Overlapping().eval(), (torch.ones(3),)), portable(checked=False))
    assert promised(error, "STAGE_FAILED", "shares memory", "take parts of it in forward")


class Counting(nn.Module):
    """Its buffer's new value is an output too."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        return x + self.calls, self.calls.clone()


class Patches(nn.Module):
    """A linear over a transposed input of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(2).transpose(1, 2))


def test_a_value_that_leaves_a_delegate_twice_is_reported() -> None:
    program = torch.export.export(Counting(), (torch.ones(2),))
    error = lowered(program, ExportRecipe.get_recipe(XNNPackRecipeType.FP32))
    assert promised(error, "STAGE_FAILED", "aten_add_tensor", "a buffer's new value", "self.count * 1")


def test_a_decomposed_linear_is_explained_with_the_stage_that_keeps_it() -> None:
    program = torch.export.export(Patches(), (torch.ones(1, 4, 3, 3),))
    recipe = ExportRecipe.get_recipe(XNNPackRecipeType.FP32)
    recipe.pipeline_stages = [StageType.TO_EDGE, StageType.TO_BACKEND, StageType.TO_EXECUTORCH]
    assert promised(lowered(program, recipe), "STAGE_FAILED", "more than two dims", "TO_EDGE_TRANSFORM_AND_LOWER")


def test_a_method_without_outputs_is_explained() -> None:
    program = exported(lambda x: None, torch.ones(2))
    assert promised(lowered(program, portable(checked=False)), "STAGE_FAILED", "forward returns nothing", "Return a tensor")


def test_operators_within_branches_and_loops_are_found_under_the_names_that_users_call() -> None:
    program = exported(
        lambda x: torch.cond(
            x.sum() > 0, lambda v: map_over(lambda r: r[(None,) * 6] * 2, v).sum((1, 2, 3, 4, 5, 6)), torch.relu, [x]
        ),
        torch.ones(3, 2),
    )
    suspects = find_suspects(program)
    assert suspects.startswith("torch.cond at ") and "; map at " in suspects
    assert find_many_dims(program).startswith("aten::") and "test_compile_explain.py:" in find_many_dims(program)


def test_remainders_of_integers_are_found_and_those_of_floats_are_not() -> None:
    suspects = find_suspects(exported(lambda x: x % 3, torch.ones(3, dtype=torch.int32)))
    assert suspects.startswith("aten::remainder") and "test_compile_explain.py:" in suspects
    assert "sign of the dividend" in suspects
    assert find_suspects(exported(lambda x: x % 3, torch.ones(3))) == ""


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("while_loop", "torch.while_loop"),
        ("<built-in function sym_ite>", "sym_ite"),
        ("<function sym_max at 0x7f0000000000>", "sym_max"),
    ],
)
def test_what_executorch_cannot_emit_has_the_name_of_its_function(target: str, name: str) -> None:
    error = stage_failed("TO_EXECUTORCH", RuntimeError(f"Failed with error: invalid target for call_function {target}"), {})
    assert promised(error, "STAGE_FAILED", f"ExecuTorch cannot emit {name}.")


def test_unsupported_weight_groups_are_explained() -> None:
    module = nn.Sequential(nn.Linear(48, 8)).eval()
    quantize_(module, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(16)))
    unwrap_tensor_subclass(module)
    program = torch.export.export(module, (torch.ones(1, 48),))
    error = lowered(program, ExportRecipe.get_recipe(XNNPackRecipeType.FP32))
    assert promised(error, "STAGE_FAILED", "groups of 16", "in_features a multiple of 32")


class Head(nn.Module):
    """Has a layer in 4 bits, and one in others."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 8)
        for layer, kind in ((self.body, torch.int4), (self.head, dtype)):
            quantize_(layer, Int8DynamicActivationIntxWeightConfig(weight_dtype=kind, weight_granularity=PerGroup(32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.int2, 2), (torch.int8, 8)])
def test_weight_groups_of_other_bits_are_named_with_their_line(dtype: torch.dtype, bits: int) -> None:
    program = torch.export.export(unwrap_tensor_subclass(Head(dtype).eval()), (torch.ones(1, 64),))
    error = lowered(program, ExportRecipe.get_recipe(XNNPackRecipeType.FP32))
    words = f"they have {bits} bits in aten::linear at ", "self.head(self.body(x))", "module head.", "Quantize to int4"
    assert promised(error, "STAGE_FAILED", *words) and "module body" not in error.message


def test_an_excessive_maximum_is_explained() -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),), dynamic_shapes=({0: Dim("n", max=1 << 40)},))
    error = lowered(program, ExportRecipe.get_recipe(XNNPackRecipeType.FP32))
    assert promised(error, "STAGE_FAILED", "32 bits", "maxima")


def test_unserializable_stack_traces_are_explained() -> None:
    recipe = portable(checked=False)
    recipe.executorch_backend_config.emit_stacktrace = True
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(1, 2, 4),), dynamic_shapes=({1: Dim("n", min=2, max=8)},))
    assert promised(lowered(program, recipe), "STAGE_FAILED", "stack traces", "emit_stacktrace", "ETRecord")


def test_contradicting_recipes_are_explained() -> None:
    one, other = (ExportRecipe.get_recipe(XNNPackRecipeType.FP32) for _ in range(2))
    other.strict = not one.strict
    error = stage_failed("SOURCE_TRANSFORM", failure(lambda: ExportRecipe.combine([one, other])))
    assert promised(error, "BAD_RECIPE_COMBINATION", "strict", "combined")


def test_a_missing_sdk_is_the_servers_lack() -> None:
    def needs() -> None:
        import etfarm_has_no_such_sdk  # type: ignore[import-not-found]  # noqa: F401

    error = stage_failed("TO_EDGE_TRANSFORM_AND_LOWER", failure(needs))
    assert error.reason == "RECIPE_UNAVAILABLE"
    assert error.fault is Fault.FARM
    assert "etfarm_has_no_such_sdk" in str(error)


def test_unknown_errors_keep_their_own_message() -> None:
    error = stage_failed("TO_EXECUTORCH", ValueError("a new one\nwith more"))
    assert promised(error, "STAGE_FAILED", "a new one", "log")


def test_the_original_is_the_cause_for_the_log() -> None:
    original = failure(lambda: exported(branch, torch.ones(3)))
    try:
        raise stage_failed("TORCH_EXPORT", original) from original
    except EtfarmError as error:
        reported = "".join(traceback.format_exception(error))
    assert "GuardOnDataDependentSymNode" in reported


def test_a_wrapped_error_is_explained_by_its_cause_without_paths() -> None:
    cause = ValueError("\n\nCannot lower /srv/etfarm/jobs/job-1/model.pt2 today\nsecond line")
    wrapper = RuntimeError("An error occurred when running the 'X' pass after the following passes: []")
    wrapper.__cause__ = cause
    assert first_line(wrapper) == "Cannot lower model.pt2 today"
    error = stage_failed("TO_EXECUTORCH", wrapper)
    assert (error.reason, error.stage) == ("STAGE_FAILED", "TO_EXECUTORCH")


def test_an_error_without_a_message_is_explained_by_its_type() -> None:
    assert first_line(KeyError()) == "KeyError"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_no_failure_of_the_model(number: int) -> None:
    with pytest.raises(OSError) as raised, Stages(lambda event: None, {}, Compilation()).stage("TO_EXECUTORCH"):
        raise OSError(number, os.strerror(number))
    assert raised.value.errno == number
    with pytest.raises(StageFailed), Stages(lambda event: None, {}, Compilation()).stage("TO_EXECUTORCH"):
        raise FileNotFoundError(errno.ENOENT, "no such file")
