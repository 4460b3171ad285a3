"""What compiling children answer: JSON, utf-8. Documented here for both ends; stdlib only.

Files that are named lie directly in the child's folder.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class StageEvent(TypedDict):
    """Emitted when a stage starts and when it has ended; a stage that fails has no END."""

    stage: str
    """One of etfarm.wire.stages.STAGES."""
    phase: Literal["START", "END"]
    duration_ms: float | None
    """None at START."""


class StageTime(TypedDict):
    """A stage that was run."""

    stage: str
    duration_ms: float
    where: Literal["SERVER"]
    methods: dict[str, float]
    """Milliseconds of each method, where the stage does one after the other; empty where it does all of them at once."""


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


class MethodSizes(TypedDict):
    """A method's part of a program."""

    delegate_bytes: int
    planned_bytes: list[int]


class ProgramSizes(TypedDict):
    """Where a program's bytes are; `compile.proto`'s ProgramSizes."""

    program_bytes: int
    """The flatbuffer."""
    constant_bytes: int
    """Constants outside of delegates, named data included."""
    delegate_bytes: int
    """Delegates' own data, without constants that they keep as named data."""
    methods: dict[str, MethodSizes]
    data_bytes: dict[str, int]


class SourceLine(TypedDict):
    """A line of the user's code."""

    file: str
    line: int
    code: str


class Place(TypedDict):
    """Where nodes of a graph come from in the user's model."""

    source: SourceLine | None
    module: str | None
    count: int


class OperatorDelegation(TypedDict):
    """How many nodes of one operator are in delegates and outside."""

    op: str
    delegated: int
    non_delegated: int
    places: list[Place]
    """Of those outside, the most frequent first; at most 20."""


class Fp32Operator(TypedDict):
    """What a quantizing recipe left in fp32."""

    op: str
    count: int
    places: list[Place]


class OutputCheck(TypedDict):
    """One output of the host's runtime against eager PyTorch."""

    output: str
    equal: bool
    max_abs_error: float | None
    sqnr_db: float | None
    """Capped at 300; None for NaN or an all-zero reference."""


class HostCheck(TypedDict):
    """A method run once on this host; `compile.proto`'s HostCheck."""

    method: str
    inputs: Literal["EXAMPLE", "MIN", "MAX"]
    shapes: list[str]
    ran: bool
    why: str
    outputs: list[OutputCheck]


class Delegation(TypedDict):
    """What was delegated of one method."""

    subgraphs: int
    delegated_nodes: int
    non_delegated_nodes: int
    operators: list[OperatorDelegation]


class ModuleFootprint(TypedDict):
    """What a module takes of a program; `compile.proto`'s ModuleFootprint."""

    method: str
    module: str
    """Empty for the model itself."""
    constant_bytes: int
    planned_bytes: int
    planned_tensors: int


class ProgramFiles(TypedDict):
    """The program's files."""

    pte: str
    data: dict[str, str]
    """Named data files (.ptd): the file by the name that the program knows it under."""


class Toolchain(TypedDict):
    """Versions that the program was made with."""

    torch: str
    executorch: str
    torchao: str


class Warning(TypedDict):
    """Something that does not fail the job. Codes are UPPER_SNAKE."""

    code: str
    message: str


class QuantizeResult(TypedDict):
    """The answer of `quantize_model`."""

    stages: list[StageTime]
    programs: dict[str, str]
    """A .pt2 by method, quantized and exported again."""
    warnings: list[Warning]
    stayed_fp32: dict[str, list[Fp32Operator]]


class LowerResult(TypedDict):
    """The answer of `lower_model`; that of `inspect_pte` has neither stages, program, ETRecord nor delegation."""

    stages: list[StageTime]
    program: ProgramFiles | None
    """None where `stop_after` ended it before TO_EXECUTORCH, and for a ready .pte."""
    etrecord: str | None
    stage_files: dict[str, str]
    """What `stop_after` asked for: METHOD.pt2, METHOD.txt, delegation.csv by the same name; empty for a whole program."""
    inputs: dict[str, str]
    """Tensor files of the model's own example inputs by method; a method without any is missing."""
    delegation: dict[str, Delegation]
    toolchain: Toolchain
    warnings: list[Warning]
    facts: ProgramFacts | None
    """None where there is no .pte."""
    sizes: ProgramSizes | None
    modules: list[ModuleFootprint]
    """Empty for a ready .pte, which does not tell of modules."""
    checks: list[HostCheck]
    stayed_fp32: dict[str, list[Fp32Operator]]
    """Of methods that came quantized by the client; the quantizing child tells of the others."""


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
