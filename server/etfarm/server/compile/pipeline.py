"""Compiles one screened .pt2 in a jailed child: load, check, quantize, lower, write, describe, and run once."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from etfarm.server.compile import facts, loading, lowering, quantize
from etfarm.server.compile.explain import first_line
from etfarm.server.compile.refusals import ProgramCannotRun, QuantizedNothing, RecipeNeedsEagerModule
from etfarm.server.compile.request import CompileRequest
from etfarm.server.compile.result import CompileResult, ProgramFacts, StageEvent
from etfarm.server.compile.smoke import HOST_BACKENDS, SmokeRunner
from etfarm.server.compile.toolchain import toolchain
from etfarm.server.compile.values import example_values
from etfarm.server.workers.faults import is_out_of_memory
from etfarm.wire import recipes, tensors
from etfarm.wire.recipes import Quantization, Recipe

_SMOKE_S: Final = 120.0
"""How long a smoke run may take; a slower one is a warning, since it says nothing against the program."""

_PT2E: Final = (Quantization.PT2E_STATIC, Quantization.PT2E_DYNAMIC)

_log = logging.getLogger(__name__)


def compile_model(request: CompileRequest, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: compiles `request.model` by its recipe. Emits StageEvents, answers a CompileResult, both as JSON.

    Raises:
        UserError: the model, or this recipe for it, as the reasons of `refusals` say.
        ToolchainIncomplete: this host cannot do the recipe.
    """
    assert request.model is not None
    smoke = SmokeRunner(folder / "smoke.log")  # first of all: see there
    try:
        return json.dumps(_compile(request, request.model, folder, emit, smoke)).encode()
    finally:
        smoke.close()


def _compile(
    request: CompileRequest, model: Path, folder: Path, emit: Callable[[bytes], None], smoke: SmokeRunner
) -> CompileResult:
    torch.set_num_threads(request.threads)
    recipe = recipes.from_json(request.recipe_json)
    method = request.method
    stages = lowering.Stages(lambda event: emit(_json(event)), request.stop_after)
    result: CompileResult = {
        "stages": stages.times, "program": None, "etrecord": None, "exported_program": None, "inputs": {},
        "delegation": {}, "toolchain": toolchain(), "warnings": [], "facts": None,
    }  # fmt: skip

    program = loading.load(model, folder)
    loading.check(program, method)
    if recipe.quantization is Quantization.TORCHAO_SOURCE and not quantize.is_quantized(program):
        raise RecipeNeedsEagerModule(recipe.name, request.model_name)
    given = example_values(program)
    if given is not None:
        result["inputs"][method] = f"{method}.ett"
        (folder / f"{method}.ett").write_bytes(tensors.encode(given))

    built = lowering.executorch_recipe(recipe)
    original = kept = program  # kept: what was last exported, for stop_after
    try:
        if recipe.quantization in _PT2E:
            program = kept = _quantized(request, program, built, recipe, stages, result)
        program = lowering.apply_aten_passes(built, method, program)
        session, initialized = lowering.lower(program, built, method, request.model_name, stages, etrecord=request.want_etrecord)
    except lowering.Stopped:
        if request.stop_after in ("QUANTIZE", "TORCH_EXPORT"):
            torch.export.save(kept, str(folder / "exported.pt2"))
            result["exported_program"] = "exported.pt2"
        return result

    if initialized:
        _warn(
            result, "INITIALIZED_MUTABLE_BUFFERS",
            f"The initial values of {', '.join(initialized)}, which the program changes, were put into the .pte; "
            "ExecuTorch alone would start them at 0.",
        )  # fmt: skip
    manager = session.get_executorch_program_manager()
    with (folder / "model.pte").open("wb") as file:
        manager.write_to_file(file)
    result["program"] = {"pte": "model.pte"}
    result["delegation"] = lowering.delegation(session)
    described = facts.of_program(manager.executorch_program, (folder / "model.pte").stat().st_size)
    facts.add_exported(described, method, original)
    result["facts"] = described
    if request.want_etrecord:
        _save_etrecord(session, folder, result)
    _smoke_run(smoke, request, described, folder, result)
    return result


def _quantized(
    request: CompileRequest, program: Any, built: Any, recipe: Recipe, stages: lowering.Stages, result: CompileResult
) -> Any:
    method = request.method
    with stages.stage("QUANTIZE"):
        calibration = request.calibration.get(method, ())
        module = quantize.quantize(program, built.quantization_recipe, recipe.name, method, calibration)
        if recipe.quantization is Quantization.PT2E_STATIC and not calibration:
            _warn(
                result, "FEW_CALIBRATION_INPUTS",
                f"{method} was calibrated with one input; eight or more give int8 its accuracy. "
                "Give the model calibration inputs.",
            )  # fmt: skip
    with stages.stage("TORCH_EXPORT"):
        again = quantize.export_again(module, program, request.strict)
    if not quantize.is_quantized(again):
        raise QuantizedNothing(recipe.name, method, "TORCH_EXPORT")
    left = quantize.stayed_fp32(again)
    if left:
        operators = ", ".join(f"{count} x {name}" for name, count in sorted(left.items()))
        _warn(result, "STAYED_FP32", f"Recipe {recipe.name} left operators of {method} in fp32: {operators}.")
    return again


def _save_etrecord(session: Any, folder: Path, result: CompileResult) -> None:
    try:
        session.get_etrecord().save(str(folder / "model.etrecord"))
        result["etrecord"] = "model.etrecord"
    except Exception as error:  # noqa: BLE001 - the program is there; without the record only the profile lacks names
        if is_out_of_memory(error):
            _log.warning("not enough memory for the ETRecord")
        traceback.print_exc()
        _warn(result, "ETRECORD_FAILED", f"No ETRecord was written: {first_line(error)}.")


def _smoke_run(smoke: SmokeRunner, request: CompileRequest, described: ProgramFacts, folder: Path, result: CompileResult) -> None:
    method = request.method
    foreign = sorted({b for m in described["methods"].values() for b in m["backends"]} - HOST_BACKENDS)
    if foreign or method not in result["inputs"]:
        why = f"this host cannot run {', '.join(foreign)}" if foreign else "it carries no example inputs"
        _warn(result, "NOT_RUN_ON_HOST", f"{method} was not tried on the server: {why}.")
        return
    outcome = smoke.run(folder / "model.pte", {method: folder / result["inputs"][method]}, _SMOKE_S)
    if outcome.log:
        _log.info("smoke run:\n%s", outcome.log.rstrip())
    if outcome.timed_out:
        _warn(result, "NOT_RUN_ON_HOST", f"{method} was tried on the server, and {outcome.why}.")
    elif not outcome.ran:
        raise ProgramCannotRun(outcome.method or method, outcome.why)


def _warn(result: CompileResult, code: str, message: str) -> None:
    result["warnings"].append({"code": code, "message": message})


def _json(event: StageEvent) -> bytes:
    return json.dumps(event).encode()
