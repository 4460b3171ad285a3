"""Checks of a job before its models are exported and uploaded, which takes seconds.

The server checks what it knows: the caller's role, the project, recipes, selectors and cores. Methods and inputs are checked here
as soon as a model is loaded.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etfarm.client.export.spec import ModelSpec, PteFile, resolve
from etfarm.client.submit import input_names
from etfarm.client.submit.input_types import require_fitting
from etfarm.client.submit.prepared import PreparedModel
from etfarm.v1 import job_pb2
from etfarm.wire.errors import error_for
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.pt2 import InputType
from etfarm.wire.tensors import Value

if TYPE_CHECKING:
    from etfarm.client.export.source import ModelSource
    from etfarm.client.transport.stubs import Stubs
    from etfarm.wire.recipes import Recipe


async def require_accepted(stubs: Stubs, spec: job_pb2.JobSpec, models: Sequence[Any], recipes: Sequence[Recipe]) -> None:
    """Check that the server would accept a job of these models, as far as it can tell without them.

    Args:
        spec: the job without candidates and inputs.

    Raises:
        EtfarmError: the server would refuse the job; see JobService.Submit. Or a model's file is wrong.
    """
    request = job_pb2.SubmitJobRequest(
        request_id=str(uuid.uuid4()), spec=spec, validate_only=True, protocol_version=PROTOCOL_VERSION
    )
    for model in models:
        is_ready = is_program(model)
        for recipe in recipes[:1] if is_ready else recipes:
            candidate = request.spec.candidates.add(name=_name_of(model))
            if not is_ready:
                candidate.recipe, candidate.recipe_label = recipe.json, recipe.label
    await stubs.jobs.Submit(request)


def check_source(name: str, source: ModelSource, methods: Sequence[str], inputs: Mapping[str, input_names.Named] | None) -> None:
    """Check the methods and inputs of a job against an eager model that is not exported yet.

    Args:
        methods: methods that the job names; its default when empty.
        inputs: the job's inputs by method and key; None for the model's own.

    Raises:
        METHOD_MISSING: the model lacks a method.
        UnknownInput, InputMissing, DuplicateInput: a key belongs to no method, or names no argument of `forward`.
        InputMismatch: a tensor has another dtype or number of dims than the argument's example, or another shape, and no dynamic
            shapes are set.
    """
    require_methods(name, [*source.methods, *source.constant_methods], methods)
    if inputs is None or not any(inputs.values()):
        return
    for method, values in input_names.by_method(inputs, source.methods).items():
        forward = source.methods[method].forward
        _require_arguments(method, forward, values)
        _require_types(method, source, forward, values)


def require_methods(name: str, known: Collection[str], methods: Sequence[str]) -> None:
    """Check that a model has the methods that a job names.

    Raises:
        METHOD_MISSING: it lacks one.
    """
    for method in methods:
        if method not in known:
            raise error_for(
                "METHOD_MISSING",
                f"{name} has no method {method!r}.", f"It has: {', '.join(sorted(known))}. Choose with --method (methods=).",
                method=method,
            )  # fmt: skip


def _require_arguments(method: str, forward: Any, values: Mapping[str, object]) -> None:
    """Refuse keys that can be no input's name: those of an argument are its name, or begin with it and `_`.

    Raises:
        UnknownInput: a key is neither such a name nor a position.
    """
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for key in values:
        if not (input_names.is_position(key) or any(key == name or key.startswith(f"{name}_") for name in names)):
            raise input_names.UnknownInput(
                f"{method}: there is no input {key!r}.", f"The arguments are {', '.join(names)}.", method=method, key=key,
                inputs=",".join(names),
            )  # fmt: skip


def _require_types(method: str, source: ModelSource, forward: Any, values: Mapping[str, Value]) -> None:
    """Refuse tensors that are not like the example of the argument with their name; other keys are checked after the export."""
    args, kwargs = source.example_inputs[method], source.example_kwargs.get(method, {})
    try:
        examples = inspect.signature(forward).bind(*args, **kwargs).arguments
    except TypeError:
        return  # the export says how the examples do not fit
    is_dynamic = bool(source.dynamic_shapes.get(method))
    types = {name: _type_of(example, is_dynamic=is_dynamic) for name, example in examples.items()}
    in_order = [_type_of(example, is_dynamic=is_dynamic) for example in (*args, *kwargs.values())]
    if None not in in_order:  # else positions are those of flattened inputs, which are not known yet
        types |= {f"{prefix}{place}": wanted for place, wanted in enumerate(in_order) for prefix in ("", "arr_")}
    structures = [f"{name}_" for name, wanted in types.items() if wanted is None]
    for key, value in values.items():
        if not key.startswith(tuple(structures)):  # `x_1` may be the argument of this name, and a part of `x`
            require_fitting(method, [replace(value, name=key)], [types.get(key)])
    if None not in in_order and len(values) < len(in_order):
        _require_all(method, [*list(examples)[: len(args)], *kwargs], values)


def _require_all(method: str, names: Sequence[str], values: Mapping[str, Value]) -> None:
    """Refuse inputs that lack one.

    Raises:
        InputMissing: no key is the name or the position of an input.
    """
    for place, name in enumerate(names):
        if not {name, str(place), f"arr_{place}"} & values.keys():
            raise input_names.InputMissing(
                f"{method}: the input {name!r} is missing.", f"The inputs are {', '.join(names)}.", method=method, missing=name
            )


def _type_of(example: Any, *, is_dynamic: bool) -> InputType | None:
    """Return the type of inputs like an example, of any size if `is_dynamic`; None if it is not a tensor."""
    import torch

    if not isinstance(example, torch.Tensor):
        return None
    sizes = tuple(None if is_dynamic else size for size in example.shape)
    return InputType(str(example.dtype).removeprefix("torch."), sizes)


def is_program(model: Any) -> bool:
    """Return whether a model, as callers pass it, is a ready program."""
    if isinstance(model, PreparedModel):
        return model.program is not None
    return isinstance(resolve(str(model)) if isinstance(model, str | Path) else model, PteFile)


def _name_of(model: Any) -> str:
    """Return the name of a model for messages."""
    if isinstance(model, PreparedModel):
        return model.name
    known = resolve(str(model)) if isinstance(model, str | Path) else model
    return known.label if isinstance(known, ModelSpec) else type(model).__name__
