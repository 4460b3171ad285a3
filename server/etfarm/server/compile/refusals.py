"""What the compile room refuses of users, each with its reason, its sentence and its remedy. Stdlib only."""

from __future__ import annotations

from etfarm.wire.errors import FarmError, Kind, UserError


class NotAPt2(UserError):
    """The bytes are no exported program."""

    reason = "NOT_A_PT2"

    def __init__(self, why: str) -> None:
        super().__init__(f"The model is no .pt2: {why}.", 'Write one with torch.export.save(program, "model.pt2").', why=why)


class NotAPte(UserError):
    """The bytes are no ExecuTorch program that this version reads."""

    reason = "NOT_A_PTE"

    def __init__(self, why: str) -> None:
        super().__init__(f"The program is no .pte: {why}.", "Export it again with ExecuTorch 1.x.", why=why)


class TruncatedProgram(UserError):
    """A .pte lacks its end."""

    reason = "TRUNCATED_PROGRAM"

    def __init__(self, needed_bytes: int, size_bytes: int) -> None:
        super().__init__(
            f"The program has {size_bytes} bytes, and its header says {needed_bytes}.",
            "Copy or export it again.",
            needed_bytes=needed_bytes,
            size_bytes=size_bytes,
        )


class UnsafeModel(UserError):
    """Loading this model would, or could, execute code that it brings.

    Args:
        vector: an UPPER_SNAKE word for the kind of it.
        where: the archive's member.
        what: the rest of the sentence that begins with `where`.
    """

    reason = "UNSAFE_MODEL"
    kind = Kind.PERMISSION_DENIED

    def __init__(self, vector: str, where: str, what: str) -> None:
        super().__init__(
            f"The model was refused before it was loaded: {where} {what}.",
            "Export plain tensors and operators with torch.export.save of the server's torch.",
            vector=vector, where=where, what=what,
        )  # fmt: skip


class UnknownOperator(UserError):
    """The model uses an operator of a library that the server does not load."""

    reason = "UNKNOWN_OPERATOR"

    def __init__(self, operator: str) -> None:
        super().__init__(
            f"The model uses the operator {operator}, which this server does not know.",
            "Decompose it before the export (program.run_decompositions()), or use operators of PyTorch.",
            operator=operator,
        )


class RecipeNeedsEagerModule(UserError):
    """The recipe replaces modules, and an exported program has none: it would come out as fp32, silently.

    Args:
        model: the candidate's name.
    """

    reason = "RECIPE_NEEDS_EAGER_MODULE"

    def __init__(self, recipe: str, model: str) -> None:
        super().__init__(
            f"Recipe {recipe} works on an eager module, before the export, and {model} arrives as an exported program: nothing "
            "of it would be quantized.",
            "Use a pt2e recipe, such as xnnpack_pt2e_int8_static_per_channel.",
            recipe=recipe, model=model,
        )  # fmt: skip


class QuantizedNothing(UserError):
    """The recipe quantizes, and the program that came out has no quantized operator."""

    reason = "QUANTIZED_NOTHING"

    def __init__(self, recipe: str, method: str, stage: str = "QUANTIZE") -> None:
        super().__init__(
            f"Recipe {recipe} found nothing to quantize in {method}: it would be plain fp32.",
            "Use xnnpack_fp32, or a recipe that quantizes the operators of this model.",
            stage=stage, recipe=recipe, method=method,
        )  # fmt: skip


class AlreadyQuantized(UserError):
    """A program that has quantized operators cannot be quantized once more."""

    reason = "ALREADY_QUANTIZED"

    def __init__(self, recipe: str, method: str) -> None:
        super().__init__(
            f"{method} is quantized already, and recipe {recipe} would quantize it again.",
            "Lower it with xnnpack_fp32, which keeps its quantized operators, or export the fp32 model.",
            stage="QUANTIZE", recipe=recipe, method=method,
        )  # fmt: skip


class DimWithoutMaximum(UserError):
    """A dynamic dimension has no finite maximum; ExecuTorch plans memory for the largest input."""

    reason = "DIM_WITHOUT_MAXIMUM"

    def __init__(self, method: str, argument: str, dim: int, symbol: str) -> None:
        super().__init__(
            f"{method}: dim {dim} of {argument!r} has no maximum, and ExecuTorch plans memory for the largest input.",
            f'Give one, for example dynamic_shapes={{"{argument}": {{{dim}: Dim("{symbol}", max=64)}}}}.',
            stage="TORCH_EXPORT", method=method, argument=argument, dim=dim, symbol=symbol,
        )  # fmt: skip


class TrainingMode(UserError):
    """The program was exported from a module in training mode."""

    reason = "TRAINING_MODE"

    def __init__(self, method: str, operator: str) -> None:
        super().__init__(
            f"{method} was exported in training mode: its {operator} would update or drop at inference.",
            "Call .eval() on the module before the export.",
            stage="TORCH_EXPORT", method=method, operator=operator,
        )  # fmt: skip


class NoExampleInputs(UserError):
    """Nothing to calibrate or to smoke-run with."""

    reason = "NO_EXAMPLE_INPUTS"

    def __init__(self, method: str) -> None:
        super().__init__(
            f"The .pt2 carries no example inputs for {method}, and calibration needs some.",
            "Export it anew: torch.export.save keeps the example inputs.",
            stage="QUANTIZE", method=method,
        )  # fmt: skip


class BadCalibrationInput(UserError):
    """A calibration sample does not fit the model."""

    reason = "BAD_CALIBRATION_INPUT"

    def __init__(self, method: str, sample: int, why: str) -> None:
        super().__init__(
            f"Calibration sample {sample} does not fit {method}: {why}.",
            "Give each sample the model's inputs in their order, with their dtypes and shapes.",
            stage="QUANTIZE", method=method, sample=sample, why=why,
        )  # fmt: skip


class StageFailed(UserError):
    """A stage of ExecuTorch's pipeline refused the model.

    Args:
        why: the one line of the stage's message that says what is wrong.
    """

    reason = "STAGE_FAILED"

    def __init__(self, stage: str, kind: str, why: str, remedy: str = "") -> None:
        super().__init__(
            f"{stage} failed: {why}",
            remedy or "The job's log has the whole message.",
            stage=stage, exception=kind, why=why,
        )  # fmt: skip


class ProgramCannotRun(UserError):
    """The program compiled, and ExecuTorch's runtime on this host cannot execute it."""

    reason = "PROGRAM_CANNOT_RUN"

    def __init__(self, method: str, why: str) -> None:
        super().__init__(
            f"{method} compiled, but ExecuTorch's runtime cannot run it: {why}.",
            "Replace the operators that the runtime lacks (complex numbers are one case), or use another recipe.",
            stage="SMOKE_RUN", method=method, why=why,
        )  # fmt: skip


class UnsupportedProgram(UserError):
    """A ready .pte that its own description does not let us read."""

    reason = "UNSUPPORTED_PROGRAM"


class ToolchainIncomplete(FarmError):
    """This server lacks what the recipe needs."""

    reason = "RECIPE_NOT_AVAILABLE"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, recipe: str, missing: str) -> None:
        super().__init__(
            f"This server cannot compile recipe {recipe}: {missing}.",
            "Install it on the server, or choose a recipe that `etfarm recipes list` shows as available.",
            recipe=recipe, missing=missing,
        )  # fmt: skip


class InputMismatch(UserError):
    """An input is not what the method takes."""

    reason = "INPUT_MISMATCH"

    def __init__(self, method: str, argument: str, what: str, expected: str, got: str, remedy: str) -> None:
        super().__init__(
            f"Input {argument!r} of {method} has the {what} {got}, and the program takes {expected}.",
            remedy,
            method=method, input=argument, what=what, expected=expected, got=got,
        )  # fmt: skip
