"""A typed interface to ExecuTorch's ExportSession: the stages from exported programs to a .pte, with progress events."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from executorch.devtools.backend_debug import get_delegation_info
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig, ExecutorchProgramManager
from executorch.export import ExportSession, StageType

from etfarm.server.compile.errors import StageFailed
from etfarm.server.compile.inspect import footprint
from etfarm.server.compile.lower import (
    arithmetic,
    branches,
    build,
    convolutions,
    memory_formats,
    regions,
    rejections,
    remainders,
    shared_constants,
    shared_state,
)
from etfarm.server.compile.program.descriptions import describe_control_flow
from etfarm.server.compile.program.explain import stage_failed
from etfarm.server.workers.errors import is_disk_full, is_out_of_memory
from etfarm.v1 import common_pb2
from etfarm.v1.compile_pb2 import Compilation, Delegation, OperatorDelegation, Place
from etfarm.wire.errors import EtfarmError, error_for


class Stages:
    """The reporter of stages, which also records their durations.

    Args:
        emit: called with the JSON of each event: `stage`, a name from etfarm.wire.stages.STAGES; `phase`, START or END, which a
            failed stage has not; `duration_ms`, null at START.
        programs: the compiled programs by method, for error messages.
        compilation: gets the stages that ended.
    """

    def __init__(self, emit: Callable[[bytes], None], programs: Mapping[str, Any], compilation: Compilation) -> None:
        self._emit = emit
        self.programs = programs
        self._compilation = compilation

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, float]]:
        """Run one stage; yield a dict for the milliseconds by method. Convert torch's exceptions to a user's error.

        Raises:
            StageFailed: an exception was raised inside; it is the error's cause, and goes to the log.
        """
        self._emit(json.dumps({"stage": name, "phase": "START", "duration_ms": None}).encode())
        began = time.monotonic()
        methods: dict[str, float] = {}
        try:
            yield methods
        except (EtfarmError, MemoryError):
            raise
        except Exception as error:
            if is_out_of_memory(error) or is_disk_full(error):
                raise
            raise stage_failed(name, error, self.programs) from error
        duration_ms = milliseconds(began)
        self._compilation.stages.add(stage=name, duration_ms=duration_ms, where=common_pb2.ACTOR_SERVER, methods=methods)
        self._emit(json.dumps({"stage": name, "phase": "END", "duration_ms": duration_ms}).encode())


@contextmanager
def timed(methods: dict[str, float], method: str) -> Iterator[None]:
    """Record a method's milliseconds in its stage's dict."""
    began = time.monotonic()
    yield
    methods[method] = milliseconds(began)


def milliseconds(began: float) -> float:
    """Return the milliseconds since a time of the monotonic clock."""
    return round((time.monotonic() - began) * 1000, 3)


@dataclass(frozen=True)
class Pipeline:
    """The stages to run on exported programs, with their configuration."""

    stages: Sequence[str]
    """Stages from TO_EDGE_TRANSFORM_AND_LOWER or TO_EDGE on, in an order that ExecuTorch allows; at least one."""
    replaced: Mapping[str, Any] = field(default_factory=dict)
    """Plug-ins' stages by the stage that each replaces."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Values of constant methods: a tensor, a plain Python value, or a tuple of them."""
    etrecord: bool = False
    shared: shared_state.SharedBuffers = field(default_factory=dict)
    """Buffers that methods share."""

    @property
    def partitions(self) -> bool:
        """Whether one of the stages partitions programs into delegates."""
        return not {"TO_EDGE_TRANSFORM_AND_LOWER", "TO_BACKEND"}.isdisjoint(self.stages)


@dataclass
class Lowered:
    """The results of the stages."""

    manager: Any = None
    """An ExecutorchProgramManager if TO_EXECUTORCH ran, else the EdgeProgramManager of the last stage."""
    delegation: dict[str, Delegation] = field(default_factory=dict)
    """Delegation by method; empty if nothing was partitioned."""
    initialized: dict[str, list[str]] = field(default_factory=dict)
    """Names of the buffers whose initial values are stored in the program, by method."""
    transformed: dict[str, Any] = field(default_factory=dict)
    """The edge programs after EDGE_PROGRAM_MANAGER_TRANSFORM by method, if an ETRecord is requested."""
    copied: dict[str, str] = field(default_factory=dict)
    """The branches and loops whose outputs are copied, with their lines, by method."""
    graphs: footprint.Graphs = field(default_factory=dict)
    """The graphs that XNNPACK wrote into its delegates."""


Undelegated = Callable[[Any, Callable[[str, Any], str]], Mapping[str, Mapping[str, list[Place]]]]
"""Function that returns the places of the operators outside of an EdgeProgramManager's delegates, by method and operator; takes
the manager, and a function that returns why a method's node was not delegated."""


def apply_aten_passes(recipe: Any, programs: Mapping[str, Any]) -> dict[str, Any]:
    """Apply the recipe's passes between export and edge, which a session that starts from programs silently drops."""
    passed = dict(programs)
    for transform in recipe.aten_transform_passes or []:
        passed = {method: transform(method, program) for method, program in passed.items()}
    return passed


def lower(
    programs: Mapping[str, Any], recipe: Any, pipeline: Pipeline, name: str, stages: Stages, undelegated: Undelegated
) -> Lowered:
    """Run ExecuTorch's session from exported programs on.

    Args:
        programs: exported programs by method.
        recipe: a new ExportRecipe, which is modified.
        name: the model's name.

    Raises:
        StageFailed: as `Stages.stage`; or a plug-in's stage has a result of another type than the stage that it replaces.
        EXTERNAL_CONSTANTS_CLASH: constants of two methods have the same name in a data file.
    """
    import executorch.kernels.quantized  # noqa: F401 - registers out variants, which undelegated int8 operators need

    recipe.pipeline_stages = [StageType[stage] for stage in pipeline.stages]
    recipe.executorch_backend_config = recipe.executorch_backend_config or ExecutorchBackendConfig()
    session = ExportSession(
        dict(programs), export_recipe=recipe, name=name, generate_etrecord=pipeline.etrecord,
        constant_methods=dict(pipeline.constants) or None,
    )  # fmt: skip
    for stage, plugin in pipeline.replaced.items():
        session.register_stage(StageType[stage], plugin)
    with rejections.collected(partial(build.partitioners, recipe)) as rejected:
        hooks = _StageHooks(
            pipeline, recipe.executorch_backend_config, stages, lambda manager: undelegated(manager, rejected.reason_of)
        )
        for kind, stage in session.get_all_registered_stages().items():
            stage.run = hooks.watched(kind.name, stage)
        lowered = hooks.lowered
        with (
            footprint.kept_graphs() as lowered.graphs, regions.interpreted(), branches.kept_handles(), memory_formats.separate(),
            shared_constants.separate(), arithmetic.exact(), convolutions.of_any_batch(),
        ):  # fmt: skip
            session.export()
        lowered.manager = session.get_stage_artifacts()[StageType[pipeline.stages[-1]]].data
        if pipeline.stages[-1] != "TO_EXECUTORCH":
            hooks.describe(lowered.manager)
    return lowered


class _StageHooks:
    """The hooks around the stages of one session, which report stages and collect their results."""

    def __init__(
        self,
        pipeline: Pipeline,
        config: Any,
        stages: Stages,
        undelegated: Callable[[Any], Mapping[str, Mapping[str, list[Place]]]],
    ) -> None:
        self._pipeline = pipeline
        self._config = config
        self._stages = stages
        self._undelegated = undelegated
        self.lowered = Lowered()

    def watched(self, name: str, stage: Any) -> Callable[[Any], None]:
        run = stage.run

        def watched(artifact: Any) -> None:
            if name == "TO_EXECUTORCH":
                self.describe(artifact.data)  # before the stage replaces the edge programs' graphs
                self._stages.programs = {m: artifact.data.exported_program(m) for m in artifact.data.methods}
            with self._stages.stage(name):
                if name == "TO_EXECUTORCH":
                    self._before_executorch(artifact.data)
                with torch.no_grad():  # a pass writes to weights, which torch forbids for weights that require gradients
                    run(artifact)
                if name in self._pipeline.replaced:
                    _check_replacement(name, stage)
            if name == "EDGE_PROGRAM_MANAGER_TRANSFORM" and self._pipeline.etrecord:
                after = stage.get_artifacts().data
                if after is not artifact.data:
                    self.lowered.transformed = {m: _copy_graph(after.exported_program(m)) for m in sorted(after.methods)}

        return watched

    def describe(self, manager: Any) -> None:
        """Record the delegation of each method."""
        if not self._pipeline.partitions:
            return
        places = self._undelegated(manager)
        for method in sorted(manager.methods):
            info = get_delegation_info(manager.exported_program(method).graph_module)
            self.lowered.delegation[method] = _delegation(info, places.get(method, {}))

    def _before_executorch(self, manager: Any) -> None:
        shared_state.require_shared(self._pipeline.shared, manager)
        for method in sorted(manager.methods):
            remainders.compute_as_python(manager.exported_program(method))
            branches.copy_arguments(manager.exported_program(method))
            if nodes := branches.copy_outputs(manager.exported_program(method)):
                self.lowered.copied[method] = describe_control_flow(nodes)
        # Not earlier: before the edge dialect, in-place operators change buffers without an entry in the signature.
        for method in sorted(manager.methods):
            if buffers := _initialized_buffers(manager.exported_program(method)):
                self.lowered.initialized[method] = sorted(map(shared_state.shown_name, buffers))
                for placeholder in buffers.values():
                    # ExecuTorch's pass sets this by name in all methods.
                    placeholder.meta["et_init_buffer"] = True
        if self._config.external_constants:
            _check_external(manager)


def _initialized_buffers(edge: Any) -> dict[str, Any]:
    """Return the changed buffers whose initial values are not 0: their placeholders by their names in the module."""
    signature = edge.graph_signature
    mutated = set(signature.buffers_to_mutate.values())
    placeholders = {node.name: node for node in edge.graph.nodes if node.op == "placeholder"}
    names = {}
    for spec in signature.input_specs:
        initial = edge.state_dict.get(spec.target, edge.constants.get(spec.target))
        if spec.target in mutated and initial is not None and bool(initial.count_nonzero()):
            names[spec.target] = placeholders[spec.arg.name]
    return names


def _check_external(manager: Any) -> None:
    """Refuse different constants of the same name in two methods, which a data file would silently merge."""
    seen: dict[str, tuple[str, Any]] = {}
    for method in sorted(manager.methods):
        edge = manager.exported_program(method)
        used = {node.name for node in edge.graph.nodes if node.op == "placeholder" and node.users}
        mutated = set(edge.graph_signature.buffers_to_mutate.values())
        for spec in edge.graph_signature.input_specs:
            value = edge.state_dict.get(spec.target, edge.constants.get(spec.target)) if spec.target else None
            if not isinstance(value, torch.Tensor) or spec.arg.name not in used or spec.target in mutated:
                continue
            other, first = seen.setdefault(spec.target, (method, value))
            if first is not value and not (first.dtype == value.dtype and torch.equal(first, value)):
                raise error_for(
                    "EXTERNAL_CONSTANTS_CLASH",
                    f"The constant {spec.target} differs between {other} and {method}, but a data file identifies constants by "
                    "name only: both methods would read the same one.",
                    "Name the methods' modules differently (wrap each in a module with its own attribute), or leave out "
                    "external_constants.",
                    stage="TO_EXECUTORCH",
                    constant=spec.target,
                    methods=f"{other},{method}",
                )


def _check_replacement(name: str, stage: Any) -> None:
    result = getattr(stage.get_artifacts(), "data", None)
    wanted = ExecutorchProgramManager if name == "TO_EXECUTORCH" else EdgeProgramManager
    if not isinstance(result, wanted):
        raise StageFailed(
            name, "TypeError", f"the plug-in's stage {type(stage).__name__} returned {type(result).__name__}, not "
            f"{wanted.__name__}",
            "Its run() must store a PipelineArtifact of the same type as the replaced stage's.",
        )  # fmt: skip


def _copy_graph(program: Any) -> Any:
    """Return a copy of a program with its own graph, since TO_EXECUTORCH changes graphs in place; weights are shared."""
    duplicate = copy.copy(program)
    duplicate._graph_module = copy.deepcopy(program.graph_module)
    return duplicate


def _delegation(info: Any, places: Mapping[str, list[Place]]) -> Delegation:
    rows = sorted(info.delegation_by_operator.items())
    return Delegation(
        subgraphs=info.num_delegated_subgraphs,
        delegated_nodes=info.num_delegated_nodes,
        non_delegated_nodes=info.num_non_delegated_nodes,
        operators=[
            OperatorDelegation(op=op, delegated=b.delegated, non_delegated=b.non_delegated, places=places.get(op, ()))
            for op, b in rows
        ],
    )
