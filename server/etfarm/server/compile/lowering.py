"""ExecuTorch's recipe and session behind typed doors: a fresh recipe a job, stages that tell when they start and end."""

from __future__ import annotations

import importlib
import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, Final

from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from executorch.export import ExportRecipe, ExportSession, LoweringRecipe
from executorch.export.recipe_registry import recipe_registry

from etfarm.server.compile.explain import first_line, stage_failed
from etfarm.server.compile.refusals import ToolchainIncomplete
from etfarm.server.compile.result import Delegation, StageEvent, StageTime
from etfarm.server.workers.faults import is_out_of_memory
from etfarm.wire.errors import EtfarmError
from etfarm.wire.recipes import Plain, Recipe

_log = logging.getLogger(__name__)

_RECIPE_MODULES: Final = (
    "executorch.backends.xnnpack.recipes",
    "executorch.backends.apple.coreml.recipes",
    "executorch.backends.apple.coreai.recipes",
    "executorch.backends.arm.recipes",
    "executorch.backends.qualcomm.recipes",
)
"""Modules that register recipe providers when they are imported, where their tools are installed."""


class Stopped(Exception):
    """Not an error: the last stage that was asked for has ended."""


class Stages:
    """Tells of each stage and keeps its time.

    Args:
        emit: gets StageEvents.
        stop_after: the last stage to run.
    """

    def __init__(self, emit: Callable[[StageEvent], None], stop_after: str | None) -> None:
        self._emit = emit
        self._stop_after = stop_after
        self.times: list[StageTime] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """One stage. What torch raises inside becomes the user's StageFailed.

        Raises:
            StageFailed: with one sentence; the whole message is its cause and goes to the log.
            Stopped: it was the last one asked for.
        """
        self._emit({"stage": name, "phase": "START", "duration_ms": None})
        began = time.monotonic()
        try:
            yield
        except (EtfarmError, MemoryError):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise stage_failed(name, error) from error
        duration_ms = round((time.monotonic() - began) * 1000, 3)
        self.times.append({"stage": name, "duration_ms": duration_ms, "where": "SERVER"})
        self._emit({"stage": name, "phase": "END", "duration_ms": duration_ms})
        if name == self._stop_after:
            raise Stopped


def executorch_recipe(recipe: Recipe) -> Any:
    """A fresh ExportRecipe: lowering changes its configuration, so none is used twice.

    Raises:
        ToolchainIncomplete: the recipe's provider or its tools are not installed here.
        StageFailed: the provider refuses the arguments.
    """
    if recipe.name == "portable":
        return ExportRecipe(
            name=recipe.name,
            lowering_recipe=LoweringRecipe(edge_compile_config=EdgeCompileConfig(_check_ir_validity=False)),
            executorch_backend_config=ExecutorchBackendConfig(),
        )
    try:
        with _quiet():
            return ExportRecipe.get_recipe(_type_of(recipe), **_arguments(recipe))
    except (ImportError, OSError) as error:
        raise ToolchainIncomplete(recipe.name, first_line(error)) from error
    except ValueError as error:
        raise stage_failed("SOURCE_TRANSFORM", error) from error


def provider_problems() -> dict[str, str]:
    """What hinders each module of recipe providers from being imported here; modules without a problem are missing."""
    problems = {}
    for module in _RECIPE_MODULES:
        try:
            with _quiet():
                importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - an SDK's import fails in its own ways, and each is an answer
            problems[module] = first_line(error)
    return problems


def _type_of(recipe: Recipe) -> Any:
    for module in _RECIPE_MODULES:
        if f".{recipe.specification.backend}." in module or (recipe.specification.backend == "qnn" and "qualcomm" in module):
            importlib.import_module(module)
    for backend in recipe_registry.list_backends():
        for found in recipe_registry.get_supported_recipes(backend):
            if found.value == recipe.name:
                return found
    raise ToolchainIncomplete(recipe.name, f"no provider of {recipe.specification.backend} recipes has it")


def _arguments(recipe: Recipe) -> dict[str, object]:
    if recipe.specification.backend != "coreml":
        return dict(recipe.arguments)
    ct = importlib.import_module("coremltools")

    def converted(key: str, value: Plain) -> object:
        if key == "minimum_deployment_target":
            return getattr(ct.target, str(value))
        if key == "compute_unit":
            return getattr(ct.ComputeUnit, str(value))
        return list(value) if isinstance(value, tuple) else value

    return {key: converted(key, value) for key, value in recipe.arguments.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Providers print what they miss; it is told in one sentence instead."""
    with redirect_stderr(io.StringIO()):
        yield


def apply_aten_passes(recipe: Any, method: str, program: Any) -> Any:
    """The recipe's passes between export and edge. The session drops them silently when it starts from a program."""
    for transform in recipe.aten_transform_passes or []:
        program = transform(method, program)
    return program


def lower(program: Any, recipe: Any, method: str, name: str, stages: Stages, *, etrecord: bool) -> tuple[Any, list[str]]:
    """Runs ExecuTorch's session from an exported program to its end.

    Gives the session, and the buffers whose initial values had to be put into the program: ExecuTorch alone starts a
    buffer that the program changes at 0.

    Raises:
        StageFailed, Stopped: as `Stages.stage`.
    """
    import executorch.kernels.quantized  # noqa: F401 - its out variants, or undelegated int8 fails

    config = recipe.executorch_backend_config or ExecutorchBackendConfig()
    recipe.executorch_backend_config = config
    session = ExportSession({method: program}, export_recipe=recipe, name=name, generate_etrecord=etrecord)
    initialized: list[str] = []

    def before_executorch(artifact: Any) -> None:
        # Only now: before the edge dialect a change of a buffer is an operator with an underscore, and in no signature.
        edge = artifact.data.exported_program(method)
        buffers = _initialized_buffers(edge)
        if buffers:
            initialized.extend(sorted(buffers))
            config.passes = [*config.passes, InitializedMutableBufferPass(list(buffers.values()))]

    for kind, stage in session.get_all_registered_stages().items():
        before = before_executorch if kind.name == "TO_EXECUTORCH" else None
        stage.run = _told(stage.run, kind.name, stages, before)
    session.export()
    return session, initialized


def _initialized_buffers(edge: Any) -> dict[str, str]:
    """Buffers that a program changes and that do not begin at 0: their names in the module and in the graph."""
    signature = edge.graph_signature
    mutated = set(signature.buffers_to_mutate.values())
    found = {}
    for spec in signature.input_specs:
        initial = edge.state_dict.get(spec.target, edge.constants.get(spec.target))
        if spec.target in mutated and initial is not None and bool(initial.count_nonzero()):
            found[spec.target] = spec.arg.name
    return found


def _told(run: Callable[[Any], None], name: str, stages: Stages, before: Callable[[Any], None] | None) -> Callable[[Any], None]:
    def told(artifact: Any) -> None:
        with stages.stage(name):
            if before is not None:
                before(artifact)
            run(artifact)

    return told


def delegation(session: Any) -> dict[str, Delegation]:
    """What was delegated of each method."""
    for artifact in session.get_stage_artifacts().values():
        by_method = artifact.get_context("delegation_info_by_method")
        if by_method:
            return {method: _delegation(info) for method, info in sorted(by_method.items())}
    return {}


def _delegation(info: Any) -> Delegation:
    rows = sorted(info.delegation_by_operator.items())
    return {
        "subgraphs": info.num_delegated_subgraphs,
        "delegated_nodes": info.num_delegated_nodes,
        "non_delegated_nodes": info.num_non_delegated_nodes,
        "operators": [{"op": op, "delegated": b.delegated, "non_delegated": b.non_delegated} for op, b in rows],
    }
