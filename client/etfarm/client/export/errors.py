"""Errors of a MODEL argument, a factory or an eager module. Stdlib only.

The user can act on every one of them, and every value of a message is in its metadata as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from etfarm.wire.errors import EtfarmError, UserError, error_for

if TYPE_CHECKING:
    from etfarm.client.export.traces import Place

STAGE = "TORCH_EXPORT"
"""Stage in errors of exporting."""

TRANSFORM_STAGE = "SOURCE_TRANSFORM"
"""Stage in errors of source transforms."""

FORMS = "x.pt2, x.pte, file.py:factory, package.module:factory, hf:FOLDER or demo:NAME"
"""The six forms of a MODEL argument, in words."""


def with_article(noun: str) -> str:
    """Return the noun with its article, for a class of Python's or of the user's: `an int`, `a Tensor`."""
    return f"{'an' if noun[:1].lower() in tuple('aeio') else 'a'} {noun}"


class BadModel(UserError):
    """A model argument has an unsupported form or type."""

    reason = "BAD_MODEL_ARGUMENT"


class BadModelArgument(BadModel):
    """A MODEL argument has none of the six forms."""

    def __init__(self, model: str, hint: str = "") -> None:
        super().__init__(f"{model!r} does not name a model.", hint or f"Give {FORMS}.", model=model)


def unknown_demo(demo: str, nearest: Sequence[str], known: Sequence[str]) -> EtfarmError:
    """Return the error of `demo:NAME` with a name that no demo has."""
    meant = f"Did you mean demo:{nearest[0]}? " if nearest else ""
    return error_for(
        "UNKNOWN_DEMO",
        f"There is no demo {demo!r}.",
        f"{meant}The demos are {', '.join(known)}.",
        demo=demo,
        known=",".join(known),
    )


def truncated_program(path: str, size_bytes: int, expected_bytes: int) -> EtfarmError:
    """Return the error of a .pte file ends before the end that its header gives."""
    return error_for(
        "TRUNCATED_PROGRAM",
        f"{path} is cut off: it has {size_bytes} bytes, but its header says {expected_bytes}.",
        "Copy or download it again.",
        path=path,
        size_bytes=size_bytes,
        expected_bytes=expected_bytes,
    )


def factory_not_found(where: str, factory: str, functions: Sequence[str]) -> EtfarmError:
    """Return the error that the file or module has no such function."""
    remedy = f"It has {', '.join(functions)}." if functions else "It has no functions of its own."
    return error_for(
        "FACTORY_NOT_FOUND",
        f"{where} has no function {factory!r}.",
        remedy,
        where=where,
        factory=factory,
        functions=",".join(functions),
    )


class FactoryFailed(UserError):
    """The user's own code raised, on import or when it was called.

    The exception is the `__cause__`.
    """

    reason = "FACTORY_FAILED"

    def __init__(self, where: str, error: BaseException, place: str, remedy: str = "") -> None:
        text = str(error).strip()
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
        super().__init__(
            f"{where} raised {what}{f', at {place}' if place else ''}.",
            remedy,
            where=where,
            exception=type(error).__name__,
            exception_message=text,
            place=place,
        )


def factory_returned_something_else(where: str, returned: str) -> EtfarmError:
    """Return the error that a factory returned neither (module, example_inputs) nor a ModelSource."""
    return error_for(
        "FACTORY_RETURNED_SOMETHING_ELSE",
        f"{where} returned {returned}.",
        "Return (module, example_inputs), where example_inputs is the tuple of forward's arguments, or an "
        "etfarm.client.export.ModelSource.",
        where=where,
        returned=returned,
    )


def example_inputs_not_a_tuple(method: str, got: str) -> EtfarmError:
    """Return the error that example or calibration inputs are not a tuple of positional arguments."""
    return error_for(
        "EXAMPLE_INPUTS_NOT_A_TUPLE",
        f"{method}: the example inputs are {with_article(got)}, not a tuple of arguments.",
        "Write (x,) for a method of one argument.",
        method=method,
        got=got,
    )


def dim_without_maximum(method: str, argument: str, dim: str) -> EtfarmError:
    """Return the error that a dynamic dimension has no finite maximum; ExecuTorch plans memory for the largest input."""
    name = dim if dim.isidentifier() else "n"
    return error_for(
        "DIM_WITHOUT_MAXIMUM",
        f"{method}: dim {dim} of {argument!r} has no maximum, and ExecuTorch plans memory for the largest input.",
        f'Give one, for example Dim("{name}", max=64).',
        stage=STAGE,
        method=method,
        argument=argument,
        dim=dim,
    )


def training_mode(method: str, module: str) -> EtfarmError:
    """Return the error that the module, or a part of it, is in train mode, which no program supports."""
    part = f"its submodule {module!r}" if module else "the module"
    return error_for(
        "TRAINING_MODE",
        f"{method}: {part} is in train mode.",
        "Call .eval() on the module before returning it.",
        stage=STAGE,
        method=method,
        module=module,
    )


class UnsupportedInput(UserError):
    """An input has a dtype or type that no device supports."""

    reason = "UNSUPPORTED_INPUT"

    def __init__(self, method: str, argument: str, what: str, remedy: str) -> None:
        super().__init__(
            f"{method}: input {argument!r} is {what}.", remedy, stage=STAGE, method=method, argument=argument, got=what
        )


def unsupported_output(method: str, kind: str, place: str, output: str = "") -> EtfarmError:
    """Return the error that forward returns an object that torch.export cannot take apart.

    Args:
        kind: the name of the object's class.
        place: the user's line; empty if unknown.
        output: the output's name, of one that is a value of Python.
    """
    if output and not place:
        remedy = "Leave it out: outputs are tensors, numbers, bools and None, and tuples, lists and dicts of these."
    elif kind.endswith("Cache"):
        remedy = "Call the model with use_cache=False, or with a static cache (StaticCache of transformers)."
    else:
        remedy = "Return tensors, tuples, lists or dicts, or register the class with torch.export.register_dataclass."
    at = f" at {place}" if place else f" as its output {output!r}" if output else ""
    return error_for(
        "UNSUPPORTED_OUTPUT",
        f"{method} returns {with_article(kind)}{at}, which a program cannot return.",
        remedy,
        stage=STAGE,
        method=method,
        output=output,
        output_type=kind,
        place=place,
    )


def calibration_mismatch(method: str, sample: int | str, what: str, *, stage: str = STAGE) -> EtfarmError:
    """Return the error that a calibration sample has another structure, dtype or rank than the example inputs.

    Args:
        stage: empty if the samples were passed beside the model, which is then not at fault.
    """
    return error_for(
        "CALIBRATION_MISMATCH",
        f"{method}: calibration sample {sample} differs from the example inputs: {what}.",
        "Give every sample the same arguments as the example inputs.",
        stage=stage,
        method=method,
        sample=sample,
    )


_ASSERTS: Final = re.compile(r"^\s*assert\b|torch\._(assert|check)\w*\(")
"""In a line that checks a value, and so has no second branch."""


def data_dependent_branch(method: str, place: Place | None, library: Place | None = None) -> EtfarmError:
    """Return the error that a Python branch depends on a tensor's value, which a program cannot express.

    Args:
        place: the user's line.
        library: the line of an installed library that has the branch, and that the user's line calls; None if that has it.
    """
    has_branch = library or place
    code = has_branch.code if has_branch else ""
    at = f" at {has_branch}" if has_branch else ""
    called = f", which {place} calls," if library else ""
    is_assertion = _ASSERTS.search(code) is not None
    if library is not None and "causal" in code:
        remedy = (
            "Pass is_causal=False to the layer, or True for a causal mask, so that it does not look into the mask; to a decoder "
            "tgt_is_causal and memory_is_causal."
        )
    elif library is not None:
        remedy = "Call it such that it needs no value there, or replace that part by your own, with torch.cond or torch.where."
    elif is_assertion:
        remedy = "Put it under `if not torch.compiler.is_exporting():`, and check the values where the program is called."
    else:
        remedy = "Write it with torch.cond(predicate, true_fn, false_fn, operands), or with torch.where."
    return error_for(
        "DATA_DEPENDENT_BRANCH",
        f"{method}: {'an assertion' if is_assertion else 'a branch'}{at}{called} depends on a tensor's value"
        f"{f': `{code}`' if code else ''}.",
        remedy,
        stage=STAGE,
        method=method,
        place=str(place or ""),
        code=code,
    )


class DimSpecialized(UserError):
    """A dynamic dim can only have one size, or other sizes than requested.

    Args:
        dim: its name in a sentence: `Dim n`, `dim 0 of 'x'`.
        why: the rest of the sentence that starts with the dim.
    """

    reason = "DIM_SPECIALIZED"

    def __init__(self, method: str, dim: str, why: str, remedy: str, place: str) -> None:
        super().__init__(
            f"{method}: {dim} cannot be dynamic as requested{f' at {place}' if place else ''}: {why}.",
            remedy,
            stage=STAGE,
            method=method,
            dims=dim,
            why=why,
            source=place,
        )


def export_failed(
    method: str, exception: str, line: str, place: str, what: str = "torch.export", remedy: str = ""
) -> EtfarmError:
    """Return the error that torch.export refused the module.

    torch's exception is the `__cause__`.

    Args:
        what: what failed, with the reason for it if it was not the usual export.
        remedy: what to do instead of the usual.
    """
    return error_for(
        "EXPORT_FAILED",
        f"{method}: {what} failed{f' at {place}' if place else ''} with {exception}: {line}",
        remedy or "Try torch.export.export on the module by itself; etfarm exports with strict=False.",
        stage=STAGE,
        method=method,
        exception=exception,
        exception_message=line,
        place=place,
    )


def recipe_needs_eager_module(recipe: str, model: str) -> EtfarmError:
    """Return the error that the recipe replaces modules before the export, and an exported program has no modules.

    Without this error, the program would silently stay fp32.
    """
    return error_for(
        "RECIPE_NEEDS_EAGER_MODULE",
        f"Recipe {recipe} quantizes an eager module before the export, but {model} is already exported: nothing of it "
        "would be quantized.",
        "Give the module itself, or file.py:factory; or use a pt2e recipe, such as xnnpack_pt2e_int8_static_per_channel.",
        recipe=recipe,
        model=model,
    )


def source_transform_failed(method: str, message: str, remedy: str = "", **metadata: object) -> EtfarmError:
    """Return the error that a source transform raised, or did not return a module.

    Its exception is the `__cause__`.
    """
    return error_for("SOURCE_TRANSFORM_FAILED", f"{method}: {message}", remedy, stage=TRANSFORM_STAGE, method=method, **metadata)
