"""One planned memory for the buffers that several methods share, where a method writes to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from executorch.exir.passes import MemoryPlanningPass

from etfarm.server.compile.program.descriptions import describe_place
from etfarm.server.compile.program.places import places
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.recipes import Recipe
from etfarm.wire.shared_state import PREFIX, buffer_names, rename_buffers, written_buffers

_OWN: Final = "etfarm_own."
"""Beginning of the name of a buffer that would have an input's."""

SharedBuffers = Mapping[str, frozenset[str]]
"""Names of the shared buffers that each method uses, by method."""


def state_not_shared(buffer: str, methods: str, why: str, remedy: str) -> EtfarmError:
    """Return the error that a buffer of several methods cannot be in one memory, so that each method would keep its own state.

    Args:
        why: the reason in the message.
    """
    return error_for(
        "STATE_NOT_SHARED",
        f"The buffer {buffer}, shared by {methods}, cannot be one buffer of the program: {why}.",
        f"{remedy}, or set share_mutable_buffers = false in [executorch] of a recipe file for separate states.",
        buffer=buffer, methods=methods, stage="TO_EXECUTORCH",
    )  # fmt: skip


def plan_shared_state(programs: Mapping[str, Any], recipe: Recipe, config: Any) -> SharedBuffers:
    """Plan one memory for each buffer that the client has marked as shared; return the names in the programs, without a mark.

    Without `share_mutable_buffers` in the recipe, buffers that a method writes to are shared if they are one object in the model;
    with true, also those of equal names in programs that were exported separately.

    Args:
        programs: exported programs by method, in which buffers are renamed.
        config: the ExecutorchBackendConfig, which is changed.

    Raises:
        STATE_NOT_SHARED: the recipe, the memory planner or an initial value makes it impossible.
    """
    wanted = recipe.options.executorch.get("share_mutable_buffers")
    buffers = {method: frozenset(buffer_names(program).values()) for method, program in programs.items()}
    written = {method: written_buffers(program) for method, program in programs.items()}
    shared = _select(buffers, written, marked_only=_has_marks(buffers) or not wanted)
    if wanted is False or not shared:
        for program in programs.values():
            names = set(buffer_names(program).values())
            plain = {name: name.removeprefix(PREFIX) for name in names}
            rename_buffers(program, {name: new for name, new in plain.items() if new not in names})
        rename_ambiguous(programs.values())
        return {}
    for name, methods in shared.items():
        _require_possible(name, methods, programs, recipe, config)
    for method, program in programs.items():
        # ExecuTorch's planner shares all buffers of equal names.
        own = {name: f"{method}.{name}" for name in written[method] - shared.keys()}
        if any(not own.keys().isdisjoint(buffers[other]) for other in programs if other != method):
            rename_buffers(program, own)
    config.memory_planning_pass.share_mutable_buffers = True
    return {method: frozenset(_used(program) & shared.keys()) for method, program in programs.items()}


def mark_equal_names(programs: Mapping[str, Any], recipe: Recipe) -> bool:
    """Mark buffers of equal names as shared where the recipe says that they are; return whether there are any.

    The client marks those that are one object. With a mark, quantization leaves them variable in methods that only read them.
    """
    buffers = {method: frozenset(buffer_names(program).values()) for method, program in programs.items()}
    if not recipe.options.executorch.get("share_mutable_buffers") or _has_marks(buffers):
        return False
    shared = _select(buffers, {method: written_buffers(program) for method, program in programs.items()}, marked_only=False)
    for program in programs.values():
        rename_buffers(program, {name: f"{PREFIX}{name}" for name in shared})
    return bool(shared)


def rename_ambiguous(programs: Iterable[Any]) -> None:
    """Give each buffer that has the name of an input another name, in all programs alike.

    ExecuTorch looks up both in one table when a method writes to a buffer, and would copy the new value to the input.
    Source: executorch/exir/passes/insert_write_back_for_buffers_pass.py 1.5.1.
    """
    programs = list(programs)
    inputs = {name for program in programs for name in program.graph_signature.user_inputs}
    for program in programs:
        rename_buffers(program, {name: f"{_OWN}{name}" for name in buffer_names(program).values() if name in inputs})


def describe(shared: SharedBuffers) -> str:
    """Return the sentence about shared buffers for the report."""
    names = sorted(frozenset().union(*shared.values()))
    parts = [
        f"{shown_name(name)} is shared by {', '.join(method for method, own in shared.items() if name in own)}"
        for name in names[:5]
    ]
    more = f", and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{'; '.join(parts)}{more}. share_mutable_buffers = false in [executorch] gives each method its own."


def shown_name(name: str) -> str:
    """Return a buffer's name in the model."""
    return name.removeprefix(PREFIX).removeprefix(_OWN)


def require_shared(shared: SharedBuffers, manager: Any) -> None:
    """Check that no partitioner has taken a shared buffer into a delegate, as a constant or as the backend's own state.

    Args:
        manager: the EdgeProgramManager before TO_EXECUTORCH.

    Raises:
        STATE_NOT_SHARED: one has.
    """
    for method, names in shared.items():
        for name in sorted(names - _used(manager.exported_program(method))):
            methods = ", ".join(each for each, own in shared.items() if name in own)
            raise state_not_shared(
                shown_name(name), methods, f"the backend takes it into a delegate of {method}",
                f"Leave {method} to the portable kernels (partitioners = [] in [methods.{method}])",
            )  # fmt: skip


def require_kept(method: str, before: Any, after: Any) -> None:
    """Check that a quantized method has the shared buffers of its original program.

    Raises:
        STATE_NOT_SHARED: the quantizer made a constant of one.
    """
    for name in sorted(_used(before) - _used(after)):
        if name.startswith(PREFIX):
            names = buffer_names(before)
            line = describe_place(
                places([user for node in before.graph.nodes if names.get(node.name) == name for user in node.users])
            )
            raise state_not_shared(
                shown_name(name), f"{method} and other methods",
                f"quantization makes a constant of it in {method}{f', at {line}' if line else ''}",
                f"Leave {method} unquantized (quantizers = [] in [methods.{method}])",
            )  # fmt: skip


def _used(program: Any) -> set[str]:
    """Return the buffers that a program reads or writes."""
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    read = {buffer for placeholder, buffer in buffer_names(program).items() if placeholder in used}
    return read | set(program.graph_signature.buffers_to_mutate.values())


def _has_marks(buffers: Mapping[str, frozenset[str]]) -> bool:
    return any(name.startswith(PREFIX) for names in buffers.values() for name in names)


def _select(buffers: Mapping[str, frozenset[str]], written: Mapping[str, set[str]], *, marked_only: bool) -> dict[str, list[str]]:
    """Return the methods of each buffer that several have and one writes to."""
    shared = {}
    for name in sorted(frozenset().union(*written.values())):
        methods = [method for method, names in buffers.items() if name in names]
        if len(methods) > 1 and (name.startswith(PREFIX) or not marked_only):
            shared[name] = methods
    return shared


def _require_possible(name: str, methods: list[str], programs: Mapping[str, Any], recipe: Recipe, config: Any) -> None:
    listed, shown = ", ".join(methods), shown_name(name)
    if recipe.options.executorch.get("alloc_mutable_buffers") is False:
        raise state_not_shared(shown, listed, "the recipe plans no memory for it", "Leave alloc_mutable_buffers out")
    if not isinstance(config.memory_planning_pass, MemoryPlanningPass):
        raise state_not_shared(shown, listed, f"recipe {recipe.name} plans memory in another way", "Use another recipe")
    values = [program.state_dict.get(name, program.constants.get(name)) for program in map(programs.__getitem__, methods)]
    if any(value is not None and bool(value.count_nonzero()) for value in values):
        raise state_not_shared(
            shown, listed, "its initial value is not zero, which ExecuTorch sets when it loads each method",
            "Let it start at zero, and set it by a method",
        )  # fmt: skip
    if len({(value.dtype, tuple(value.shape)) for value in values if value is not None}) > 1:
        raise state_not_shared(shown, listed, "it has another dtype or shape in each", "Give it one shape")
