"""The tasks of compiling children: quantize exported programs, and lower them to a .pte that is tested on this host."""

from __future__ import annotations

import logging
import shutil
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from etfarm.server.compile.errors import QuantizedNothing, QuantizerFailed, StageFailed, recipe_needs_eager_module
from etfarm.server.compile.inspect import facts, footprint, signature, sizes
from etfarm.server.compile.lower import (
    batch_norms,
    build,
    etrecord,
    in_place,
    integers,
    lowering,
    plugins,
    quantize,
    quantized_tables,
    shared_state,
    stage_files,
    written_state,
)
from etfarm.server.compile.lower.far_values import Kept, Reason
from etfarm.server.compile.lower.selection import Selection, require_found
from etfarm.server.compile.program import (
    assertions,
    double_precision,
    fp32_layers,
    gelu,
    large_integers,
    loading,
    number_inputs,
    places,
    refused_operators,
    resizes,
    special_values,
    suspects,
    zero_points,
)
from etfarm.server.compile.program import values as wire_values
from etfarm.server.compile.program.descriptions import describe_place, describe_places, first_line
from etfarm.server.compile.program.explain import stage_failed
from etfarm.server.compile.program.input_copies import copy_written_inputs, describe_copies
from etfarm.server.compile.program.toolchain import toolchain
from etfarm.server.compile.request import LowerRequest, QuantizeRequest
from etfarm.server.compile.screening.operators import Operators
from etfarm.server.compile.verify import checks
from etfarm.server.compile.verify.smoke import SmokeRunner
from etfarm.server.graphs.quantized_outputs import is_quantized
from etfarm.server.graphs.views import name_of
from etfarm.server.workers.errors import is_disk_full, is_out_of_memory
from etfarm.v1.child_pb2 import CompileResult
from etfarm.v1.compile_pb2 import Compilation, Fp32Operator
from etfarm.wire import recipes, tensors
from etfarm.wire.errors import EtfarmError
from etfarm.wire.fixed_numbers import INPUT_FIXED
from etfarm.wire.recipes import MethodOptions, Quantization, Recipe
from etfarm.wire.shared_state import keep_constants, written_buffers
from etfarm.wire.stages import check_order, check_stop_after

_EXPORTING: Final = ("SOURCE_TRANSFORM", "QUANTIZE", "TORCH_EXPORT")
"""Stages before the edge dialect."""

_UNUSED: Final = {
    "copy_shared_layers": "no two layers have the same weights",
    "fuse_activations": "no layer has an activation behind it that XNNPACK would quantize apart and fuse with it",
}
"""Why an option of the recipe has no effect."""

_log = logging.getLogger(__name__)


def quantize_model(request: QuantizeRequest, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: run QUANTIZE and the TORCH_EXPORT after it for all methods. Emit events of stages, return a CompileResult.

    A method without quantizers stays unchanged. So does one without anything that they quantize, with a warning, and a method
    that the quantizers fail on if others are quantized, unless the recipe names quantizers for it.

    Raises:
        UserError: the model, its calibration inputs or the recipe are at fault; see `compile.errors`.
        QuantizedNothing: the recipe has no quantizers for any of the methods.
        RECIPE_UNAVAILABLE: this host cannot compile the recipe.
    """
    torch.set_num_threads(request.threads)
    recipe = build.resolved(recipes.from_json(request.recipe_json))
    programs, copies = _load(request.models, folder, request.operators)
    result = CompileResult()
    compilation = result.compilation
    stages = lowering.Stages(emit, programs, compilation)
    quantizing = {method: built for method in programs if (built := build.quantization(recipe, method)) is not None}
    name = _quantizer_names(recipe)
    for method in quantizing:
        quantize.check(programs[method], name, method)
        programs[method] = in_place.without_writes(programs[method])
    _check_names(recipe, quantizing, programs)
    is_marked = shared_state.mark_equal_names(programs, recipe)

    modules = {}
    failures: list[EtfarmError] = []
    unused = set(recipe.options.before_quantization())
    with stages.stage("QUANTIZE") as times:
        for method, quantization in quantizing.items():
            calibration = request.calibration.get(method, ())
            kept = Kept()
            with lowering.timed(times, method):
                try:
                    modules[method] = quantize.quantize(
                        programs[method], quantization, name, method, calibration, recipe.options, unused, kept
                    )
                except QuantizedNothing as error:
                    failures.append(error)
                    _add_selected(quantization, method, compilation)
                    _warn_of_kept(method, kept, compilation)
                    continue
                except Exception as error:  # noqa: BLE001 - raised again if the host or the model is at fault
                    failures.append(_quantizer_failure(error, recipe, method, programs))
                    continue
            _add_selected(quantization, method, compilation)
            _warn_of_integers(programs[method], quantization, method, compilation)
            _warn_of_kept(method, kept, compilation)
            _warn_of_copies(method, copies[method], compilation)
            if kept.is_blank and quantize.is_static(modules[method]):
                _warn(
                    compilation, "FEW_CALIBRATION_INPUTS",
                    f"Each calibration input of {method} has one value only, such as 0 everywhere, which shows no range: the "
                    "int8 program is as fast as any, and wrong for other inputs. Give calibration inputs as they are in use.",
                )  # fmt: skip
            elif not calibration and quantize.is_static(modules[method]):
                _warn(
                    compilation, "FEW_CALIBRATION_INPUTS",
                    f"{method} was calibrated with one input; int8 needs eight or more to be accurate. "
                    "Give more calibration inputs.",
                )  # fmt: skip
            elif quantize.is_static(modules[method]):
                _warn_of_same(method, kept, compilation)
            if kept.grown and not kept.is_blank:
                _warn(
                    compilation, "STATE_GROWS",
                    f"In calls after those of calibration, the buffers {', '.join(kept.grown)} of {method} give operators values "
                    "that int8 clips. Give as many calibration inputs as a session has calls, in their order, or keep the layers "
                    "that these buffers reach in fp32 (skip_modules, or skip_operators for those of the model itself).",
                )  # fmt: skip
        if not quantizing:
            raise QuantizedNothing(name, " or ".join(programs))
        failed = [failure for failure in failures if not isinstance(failure, QuantizedNothing)]
        if failed and not modules:
            raise failed[0]
        for failure in failures:
            stays = (
                "The method stays as it is." if modules else "The program is the one without quantization, as from xnnpack_fp32."
            )
            _warn(compilation, failure.reason, f"{failure.message} {stays}")
        for option in sorted(unused) if modules else ():
            _warn(compilation, "OPTION_WITHOUT_EFFECT", f"{option} changes nothing: {_UNUSED[option]}. Leave it out.")
    with stages.stage("TORCH_EXPORT") as times:
        for method in sorted(programs):
            file = folder / f"{method}.pt2"
            result.exported_programs[method] = file.name
            if method not in modules:
                if is_marked:
                    torch.export.save(programs[method], str(file))
                else:
                    shutil.copyfile(request.models[method], file)
                continue
            with lowering.timed(times, method):
                original = programs.pop(method)
                exported = quantize.export_again(modules.pop(method), original, recipe.strict)
                if recipe.options.executorch.get("share_mutable_buffers") is not False:
                    shared_state.require_kept(method, original, exported)
                del original
                if not is_quantized(exported):
                    raise QuantizedNothing(name, method, "TORCH_EXPORT")
                quantize.settle_origins(exported)
                # The archive's prefix is the file's stem, so equal programs of the same method have equal bytes.
                torch.export.save(exported, str(file))
            fp32_operators = places.fp32(exported, xnnpack=fp32_layers.by_xnnpack(quantizing[method].quantizers))
            _add_fp32(name, method, fp32_operators, compilation)
    return result.SerializeToString()


def _add_selected(quantization: Any, method: str, compilation: Compilation) -> None:
    if names := [row for each in _selections(quantization) for row in each.listed()]:
        compilation.selected[method].names.extend(names)


def _selections(quantization: Any) -> list[Selection]:
    """Return the selections of a QuantizationRecipe's quantizers."""
    selections = (getattr(quantizer, "selection", None) for quantizer in quantization.quantizers)
    return [selection for selection in selections if selection is not None]


def _check_names(recipe: Recipe, quantizing: Mapping[str, Any], programs: Mapping[str, Any]) -> None:
    """Check that each name in the quantizers selects something in the methods that they are for.

    Raises:
        RECIPE_NAME_NOT_FOUND: a name selects nothing.
    """
    alone = [method for method in quantizing if recipe.options.methods.get(method, MethodOptions()).quantizers is not None]
    for methods in ([method for method in quantizing if method not in alone], *([method] for method in alone)):
        selections = _selections(quantizing[methods[0]]) if methods else []
        graphs = {method: programs[method].module(check_guards=False).graph for method in methods if selections}
        for selection in selections:
            require_found(selection, graphs)


def _quantizer_failure(error: Exception, recipe: Recipe, method: str, programs: Mapping[str, Any]) -> EtfarmError:
    """Return the error of a method that the quantizers fail on, which then stays as it is.

    Raises:
        EtfarmError: the error, if the model or its calibration is at fault, or the recipe names quantizers for this method.
        Exception: the host is at fault.
    """
    if is_out_of_memory(error) or is_disk_full(error):
        raise error
    if isinstance(error, EtfarmError) and not isinstance(error, QuantizerFailed):
        raise error
    traceback.print_exception(error)
    failure = error if isinstance(error, EtfarmError) else stage_failed("QUANTIZE", error, {method: programs[method]})
    own = recipe.options.methods.get(method)
    if own is not None and own.quantizers:
        raise failure
    return failure


def _warn_of_integers(program: Any, quantization: Any, method: str, compilation: Compilation) -> None:
    """Warn of arithmetic that was kept away from the quantizers."""
    nodes = integers.find_scalar_arithmetic(program) if quantize.keeps_integers(quantization) else []
    if nodes:
        where = describe_place(places.places(nodes))
        _warn(
            compilation, "INTEGERS_KEPT",
            f"{len(nodes)} sums and products of integers in {method} stay integers{f', such as {where}' if where else ''}: "
            "XNNPACK's quantizer would compute them in float.",
        )  # fmt: skip


def _warn_of_kept(method: str, kept: Kept, compilation: Compilation) -> None:
    """Warn of operators that stay in fp32 for their values."""
    for reason, (code, why) in _WHY_KEPT.items():
        nodes_by_operator: dict[str, list[Any]] = defaultdict(list)
        for node in (node for node_reason, node in kept.nodes if node_reason is reason):
            nodes_by_operator[name_of(node)].append(node)
        if nodes_by_operator:
            named = (f"{len(group)} x {name}{describe_places(places.places(group))}" for name, group in nodes_by_operator.items())
            what = f"Operators of {method} stay in fp32: {', '.join(named)}."
            remedies = _remedies(kept) if reason is Reason.UNSEEN else []
            _warn(compilation, code, " ".join((what, why, *remedies)))


def _warn_of_same(method: str, kept: Kept, compilation: Compilation) -> None:
    """Warn of inputs that were the same in all calibration inputs, and for whose other values int8 has no range."""
    names = [*kept.clipped, *kept.untried]
    if not names:
        return
    untried = ""
    if kept.untried:
        untried = (
            f" Of other values of {', '.join(kept.untried)} nothing is known: the model refuses them or makes NaN of them, or "
            "there are too many such inputs."
        )
    _warn(
        compilation, "SAME_IN_CALIBRATION",
        f"These inputs of {method} were the same in all calibration inputs: {', '.join(names)}. int8 has ranges for these values "
        f"only, so that outputs for others may be wrong.{untried} Give calibration inputs in which they vary as in use, or keep "
        "the layers that they reach in fp32 (skip_modules).",
    )  # fmt: skip


def _remedies(kept: Kept) -> list[str]:
    """Return sentences on what could be done for operators that stay in fp32 for what calibration did not show."""
    sentences = []
    if kept.inputs or not kept.buffers:
        sentences.append(
            "Give calibration inputs in which that is different, such as texts with padding or a state that is not zero."
        )
    if kept.inputs:
        sentences.append(f"Inputs with one value only: {', '.join(kept.inputs)}.")
    if kept.buffers:
        sentences.append(f"Buffers that other methods write: {', '.join(kept.buffers)}.")
        sentences.append("No calibration shows what these become, so that there is nothing to do for them.")
    return sentences


_WHY_KEPT: Final = {
    Reason.FAR: (
        "FAR_VALUES_KEPT",
        "Some of their values are infinite, as a mask's may be, or so far from the others that int8 has fewer than eight steps "
        "for these.",
    ),
    Reason.UNSEEN: (
        "UNSEEN_VALUES_KEPT",
        "They may get values that calibration did not show and that int8 would clip: a state was zero, or a mask never applied.",
    ),
}
"""The codes and sentences of warnings, by reason."""


def _warn_of_copies(method: str, copies: Mapping[str, int], compilation: Compilation) -> None:
    if copies:
        _warn(compilation, "INPUT_COPIED", describe_copies(method, copies))


def lower_model(request: LowerRequest, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: run the stages from exported programs to a .pte. Emit events of stages, return a CompileResult.

    Raises:
        UserError: the model or the recipe is at fault; see `compile.errors`.
        RECIPE_UNAVAILABLE: this host cannot compile the recipe.
    """
    smoke = SmokeRunner(folder / "smoke.log")  # forks, so it must come first; see SmokeRunner
    try:
        return _lower(request, folder, emit, smoke).SerializeToString()
    finally:
        smoke.close()


def _lower(request: LowerRequest, folder: Path, emit: Callable[[bytes], None], smoke: SmokeRunner) -> CompileResult:
    torch.set_num_threads(request.threads)
    recipe = build.resolved(recipes.from_json(request.recipe_json))
    built = build.export_recipe(recipe, sorted(request.models))
    remaining = _remaining_stages(recipe, built, request)
    programs, copies = _load(request.models, folder, request.operators)
    unquantized = {method: path for method, path in request.originals.items() if request.models[method] != path}
    stateful = sorted(method for method, program in programs.items() if written_buffers(program))
    result = CompileResult(
        compilation=Compilation(toolchain=toolchain(), stateful_methods=stateful),
        example_inputs=checks.example_files(programs, folder),
    )
    compilation = result.compilation
    for method in programs:
        _warn_of_copies(method, copies[method], compilation)
        if fixed := number_inputs.describe_fixed(programs[method], method):
            _warn(compilation, INPUT_FIXED, fixed)
        if unchecked := assertions.describe(programs[method], method):
            _warn(compilation, "ASSERTIONS_DROPPED", unchecked)
        if remainders := suspects.find_remainders(programs[method]):
            sentence = f"{method} may differ from PyTorch for negative numbers: {remainders}"
            _warn(compilation, "REMAINDERS_TRUNCATED", sentence)
        if inexact := large_integers.describe(programs[method]):
            _warn(compilation, "LARGE_INTEGERS_INEXACT", f"{method} may differ from PyTorch for large integers: {inexact}")
        if narrowed := double_precision.describe(programs[method]):
            _warn(compilation, "FLOAT64_INEXACT", f"In {method}, {narrowed}")
    quantized = _check_quantized(recipe, built, request, programs)
    for method in sorted(quantized) if not request.quantized_here else ():
        fp32_operators = places.fp32(programs[method], xnnpack=fp32_layers.by_xnnpack(build.partitioners(built, method)))
        name = "" if recipe.quantization is Quantization.NONE else recipe.name
        _add_fp32(name, method, fp32_operators, compilation)
    if not remaining:
        result.stage_files.update(stage_files.of_exported(request.models, programs, folder))
        return result

    shared_state.rename_ambiguous(programs.values())
    for method, program in programs.items():
        written_state.copy_values(program)
        if (partitioners := build.partitioners(built, method)) and fp32_layers.by_xnnpack(partitioners):
            zero_points.check(program, method)
            batch_norms.compute_apart(program)
            written_state.return_values(program)
    quantized_tables.fuse(recipe, built, programs.values())
    shared = shared_state.plan_shared_state(programs, recipe, built.executorch_backend_config)
    compilation.shared_buffers.extend(sorted(frozenset().union(*shared.values())))
    if shared:
        _warn(compilation, "STATE_SHARED", shared_state.describe(shared))
    stages = lowering.Stages(emit, programs, compilation)
    exported = lowering.apply_aten_passes(built, programs)
    pipeline = lowering.Pipeline(
        remaining,
        {stage: plugins.stage(name, stage) for stage, name in recipe.options.replace.items() if stage in remaining},
        _load_constants(request),
        request.want_etrecord and remaining[-1] == "TO_EXECUTORCH",
        shared,
    )
    exact = {method: signature.of_exported(program) for method, program in programs.items() if method not in unquantized}
    lowered = lowering.lower(exported, built, pipeline, request.model_name, stages, places.undelegated)
    for method, table in lowered.delegation.items():
        compilation.delegation[method].CopyFrom(table)
        by_xnnpack = fp32_layers.by_xnnpack(build.partitioners(built, method))
        if exact_gelus := gelu.describe_exact(programs[method], table.operators) if by_xnnpack else "":
            _warn(compilation, "GELU_NOT_APPROXIMATED", f"In {method}, {exact_gelus}")
        if special := special_values.describe(programs[method], table.operators) if by_xnnpack else "":
            _warn(compilation, "SPECIAL_VALUES_DIFFER", f"In {method}, {special}")
        if resized := resizes.describe_undelegated(programs[method]) if by_xnnpack and build.partitioners(built, method) else "":
            _warn(compilation, "RESIZE_NOT_DELEGATED", f"In {method}, {resized}")
    if remaining[-1] != "TO_EXECUTORCH":
        result.stage_files.update(stage_files.of_edge(lowered.manager, lowered.delegation, folder))
        return result

    for method, buffers in lowered.initialized.items():
        _warn(
            compilation, "INITIALIZED_MUTABLE_BUFFERS",
            f"The initial values of {', '.join(buffers)}, which {method} changes, were put into the .pte; "
            "ExecuTorch alone would start them at 0.",
        )  # fmt: skip
    for method, copied in lowered.copied.items():
        _warn(
            compilation, "BRANCH_OUTPUTS_COPIED",
            f"{method} copies the outputs of {copied}: in ExecuTorch's memory plan, a later branch overwrites them, or a view of "
            "them reads other memory. ExecuTorch alone computes wrong outputs here, or fails; torch.where needs no copy.",
        )  # fmt: skip
    data = _write_program(lowered.manager, folder, result)
    described = sizes.read(folder / "model.pte")
    compilation.facts.CopyFrom(facts.of_program(described.program))
    _add_footprint(lowered, compilation)
    for method, operators in refused_operators.of_program(lowered.manager).items():
        compilation.located_operators[method].CopyFrom(operators)
    unsaved = [lowered] if request.want_etrecord else []
    del lowered

    def save_etrecord() -> None:
        if unsaved:
            _save_etrecord(unsaved.pop(), exported, folder, result)

    if unquantized:
        save_etrecord()
    # Lowering fixes sizes that a map takes in the programs themselves, which then could not be tried with others.
    specialized = {
        method: request.models[method] for method, before in exact.items() if signature.of_exported(programs[method]) != before
    }  # fmt: skip
    # Loaded late, so that their weights are not in memory while programs are lowered.
    originals = programs | _load(unquantized | specialized, folder, request.operators)[0]
    shared_state.rename_ambiguous(originals.values())
    shrunk = set()
    for method, original in originals.items():
        facts_before = exact.get(method) or signature.of_exported(original)
        if lost := signature.add_exported(compilation.facts.methods[method], facts_before):
            _warn(compilation, "DYNAMIC_DIM_LOST", signature.describe_lost(method, original, lost))
            shrunk.add(method)
    compilation.sizes.CopyFrom(sizes.of_program(described, data))
    backends = {method: compilation.facts.methods[method].backends for method in originals}
    checked = checks.check_program(
        smoke, originals=originals, pte=folder / "model.pte", data=data, folder=folder, quantized=bool(quantized),
        backends=backends, delegation=compilation.delegation, located=compilation.located_operators,
        lowered={method: programs[method] for method in quantized}, shrunk=shrunk, meanwhile=save_etrecord,
    )  # fmt: skip
    calls = list(request.calls) or [(method, None) for method in sorted(originals) if shared]
    if not calls:  # a second call shows whether a program keeps its state
        calls = [(method, None) for method in sorted(originals) if written_buffers(originals[method]) for _ in range(2)]
    # In the host's runtime, methods overwrite each other's state unless the program shares it.
    methods = dict.fromkeys(method for method, _ in calls)
    for sequence in [calls] if shared else [[call for call in calls if call[0] == method] for method in methods]:
        if [file for _, file in sequence] != [None]:  # a single call with the example inputs was compared before
            checks.check_calls(
                smoke, checked, calls=sequence, originals=originals, shared=compilation.shared_buffers,
                pte=folder / "model.pte", data=data, folder=folder, quantized=bool(quantized), backends=backends,
                must_run=bool(request.calls),
            )  # fmt: skip
    compilation.checks.extend(checked.checks)
    compilation.warnings.extend(checked.warnings)
    return result


def _remaining_stages(recipe: Recipe, built: Any, request: LowerRequest) -> list[str]:
    """Return the stages to run here; empty if `stop_after` is a stage that has already run.

    Raises:
        BAD_STAGES: the stages' order is not valid, or `stop_after` is not among them.
    """
    pipeline = build.stages(recipe, built)
    if request.stop_after is not None and request.stop_after not in pipeline:
        check_stop_after(recipe, request.stop_after)
    wanted = pipeline if request.stop_after is None else pipeline[: pipeline.index(request.stop_after) + 1]
    remaining = [stage for stage in wanted if stage not in _EXPORTING]
    if remaining:
        check_order(remaining)
    return remaining


def _quantizer_names(recipe: Recipe) -> str:
    """Return the name of the quantizing parts for messages.

    Messages of QUANTIZE must not contain the recipe's own name, because other recipes share the result.
    """
    parts = [part.name for part in recipe.parts if part.specification.quantization is not Quantization.NONE]
    lists = [recipe.options.quantizers, *(method.quantizers for method in recipe.options.methods.values())]
    return "+".join(parts or sorted({part.name for quantizers in lists for part in quantizers or ()})) or recipe.name


def _load(models: Mapping[str, Path], folder: Path, operators: Operators) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """Return the loaded and checked programs by method, and the sizes of the inputs that each copies.

    Sorted, so that equal models give equal bytes.
    """
    programs, copies = {}, {}
    for method, path in sorted(models.items()):
        if not method.isidentifier():
            raise ValueError(f"{method!r} is not a valid method name")
        subfolder = folder / f"load-{len(list(folder.glob('load-*')))}"
        subfolder.mkdir()
        programs[method] = loading.load(path, subfolder, operators)
        loading.check(programs[method], method)
        keep_constants(programs[method])
        written_state.cast_copies(programs[method])
        copies[method] = copy_written_inputs(programs[method])
    return programs, copies


def _check_quantized(recipe: Recipe, built: Any, request: LowerRequest, programs: Mapping[str, Any]) -> set[str]:
    """Return the methods that have quantized operators.

    Raises:
        RECIPE_NEEDS_EAGER_MODULE: the recipe replaces modules, but no method has quantized operators.
        QuantizedNothing: the recipe quantizes and the client has done that, but no method has quantized operators.
    """
    quantized = {method for method, program in programs.items() if is_quantized(program)}
    if request.quantized_here:
        return quantized  # the child that found nothing to quantize has said so
    if quantized or (request.stop_after == "SOURCE_TRANSFORM" and "QUANTIZE" in recipe.stages):
        return quantized
    if recipe.quantization is Quantization.TORCHAO_SOURCE:
        raise recipe_needs_eager_module(recipe.name, "the model")
    has_recipe_quantizers = recipe.options.quantizers is None and built.quantization_recipe is not None
    if recipe.quantization is not Quantization.NONE or (has_recipe_quantizers and built.quantization_recipe.quantizers):
        raise QuantizedNothing(recipe.name, " or ".join(programs))
    return quantized


def _load_constants(request: LowerRequest) -> dict[str, Any]:
    """Return the values of constant methods: a single leaf as it is, several leaves as a tuple.

    Raises:
        StageFailed: a constant method has the name of a method.
    """
    constants = {}
    for name, path in sorted(request.constant_methods.items()):
        if name in request.models:
            why = f"{name} is both a method and a constant method"
            raise StageFailed("TO_EXECUTORCH", "DuplicateMethod", why, "Rename one of them.")
        leaves = [wire_values.to_leaf(value) for value in tensors.decode(path.read_bytes())]
        constants[name] = leaves[0] if len(leaves) == 1 else tuple(leaves)
    return constants


def _write_program(manager: Any, folder: Path, result: CompileResult) -> dict[str, Path]:
    """Write model.pte and its data files; return the data files by the names that the program refers to."""
    with (folder / "model.pte").open("wb") as file:
        manager.write_to_file(file)
    manager.write_tensor_data_to_file(str(folder))
    data = {name: folder / f"{name}.ptd" for name in sorted(manager._tensor_data or {})}
    result.pte = "model.pte"
    result.data.update({name: path.name for name, path in data.items()})
    return data


def _add_footprint(lowered: lowering.Lowered, compilation: Compilation) -> None:
    try:
        compilation.modules.extend(footprint.of_program(lowered.manager, lowered.graphs))
    except Exception as error:  # noqa: BLE001 - the program is complete; results of plug-ins may not be readable here
        traceback.print_exc()
        _warn(compilation, "FOOTPRINT_FAILED", f"The sizes of the modules are unknown: {first_line(error)}.")


def _save_etrecord(lowered: lowering.Lowered, exported: Mapping[str, Any], folder: Path, result: CompileResult) -> None:
    path = folder / "model.etrecord"
    try:
        etrecord.save(lowered.manager.get_etrecord(), exported, lowered.transformed, path)
        result.etrecord = path.name
    except Exception as error:  # noqa: BLE001 - the program is complete; without the record only names in the profile are missing
        if is_out_of_memory(error):
            _log.warning("not enough memory for the ETRecord")
        traceback.print_exc()
        path.unlink(missing_ok=True)  # after a full disk, the runs that try the program need the space
        _warn(result.compilation, "ETRECORD_FAILED", f"No ETRecord was written: {first_line(error)}.")


def _add_fp32(recipe: str, method: str, rows: list[Fp32Operator], compilation: Compilation) -> None:
    """Add the heavy operators of a quantized method that are in fp32, and warn of them.

    Args:
        recipe: the name of the recipe that quantized; empty if the model came quantized.
    """
    if rows:
        compilation.stayed_fp32[method].operators.extend(rows)
        operators = ", ".join(f"{row.count} x {row.op}{describe_places(row.places)}" for row in rows)
        left = f"Recipe {recipe} left" if recipe else "The model's own quantization leaves"
        _warn(compilation, "STAYED_FP32", f"{left} operators of {method} in fp32: {operators}.")


def _warn(compilation: Compilation, code: str, message: str) -> None:
    compilation.warnings.add(code=code, message=message)
