"""What compiling children answer: JSON, utf-8. Documented here for both ends; stdlib only.

Files that are named lie directly in the child's folder.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class StageEvent(TypedDict):
    """Emitted when a stage starts and when it has ended; a stage that fails has no END."""

    stage: str
    """One of etfarm.wire.names.STAGES."""
    phase: Literal["START", "END"]
    duration_ms: float | None
    """None at START."""


class StageTime(TypedDict):
    """A stage that was run."""

    stage: str
    duration_ms: float
    where: Literal["SERVER"]


class DimRange(TypedDict):
    """A dynamic dim's least and greatest size, both included."""

    min: int
    max: int


class ValueFacts(TypedDict):
    """One flattened input or output of a method."""

    name: str | None
    """None where only the .pte is known, which has no names."""
    kind: Literal["tensor", "int", "float", "bool", "none", "str"]
    dtype: str | None
    """torch's name, like `float32`; None for non-tensors."""
    dims: list[int | DimRange] | None
    """None for non-tensors. A .pte says of a dynamic tensor only each dim's greatest size, so min is 0 there."""
    dim_order: list[int] | None
    """Outermost first; None for non-tensors."""
    value: NotRequired[int | float | bool | str | None]
    """What a non-tensor input must be: the program has it baked in."""


class MethodFacts(TypedDict):
    """What a method takes, gives and needs of a device."""

    inputs: list[ValueFacts]
    outputs: list[ValueFacts]
    operators: list[str]
    """Kernels by the runtime registry's names with overloads, like `aten::add.out`; sorted."""
    backends: list[str]
    """Delegates' backend ids, like `XnnpackBackend`; sorted."""
    planned_bytes: list[int]
    """Sizes of the memory-planned buffers."""


class ProgramFacts(TypedDict):
    """What a .pte says of itself."""

    methods: dict[str, MethodFacts]
    size_bytes: int
    constant_bytes: int
    """Constants outside of delegates, named data included."""
    delegate_bytes: int
    """Delegates' own data, without constants that they keep as named data."""


class OperatorDelegation(TypedDict):
    """How many nodes of one operator are in delegates and outside."""

    op: str
    delegated: int
    non_delegated: int


class Delegation(TypedDict):
    """What was delegated of one method."""

    subgraphs: int
    delegated_nodes: int
    non_delegated_nodes: int
    operators: list[OperatorDelegation]


class ProgramFiles(TypedDict):
    """The program's files."""

    pte: str


class Toolchain(TypedDict):
    """Versions that the program was made with."""

    torch: str
    executorch: str
    torchao: str


class Warning(TypedDict):
    """Something that does not fail the job. Codes are UPPER_SNAKE."""

    code: str
    message: str


class CompileResult(TypedDict):
    """The answer of `compile_model`, and of `inspect_pte` with neither stages, program, ETRecord nor delegation."""

    stages: list[StageTime]
    program: ProgramFiles | None
    """None where `stop_after` ended it before TO_EXECUTORCH, and for a ready .pte."""
    etrecord: str | None
    exported_program: str | None
    """A .pt2 of the last exported program, where `stop_after` ended it at one."""
    inputs: dict[str, str]
    """Tensor files of the model's own example inputs by method; a method without any is missing."""
    delegation: dict[str, Delegation]
    toolchain: Toolchain
    warnings: list[Warning]
    facts: ProgramFacts | None
    """None where there is no .pte."""


class RecipeRow(TypedDict):
    """One recipe as this server has it; `compile.proto`'s RecipeInfo."""

    name: str
    summary: str
    backend: str
    quantization: Literal["none", "pt2e-static", "pt2e-dynamic", "torchao"]
    available: bool
    missing: str
    arguments: list[str]


class RecipesResult(TypedDict):
    """The answer of `list_recipes`."""

    recipes: list[RecipeRow]


class ReferenceResult(TypedDict):
    """The answer of `reference_outputs`: one tensor file of flattened outputs for each sample, in order."""

    outputs: list[str]
