"""The results of compiling children as they are collected, and their encoding as messages for the server.

Named files are directly in the child's folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NotRequired, TypedDict

from etfarm.v1 import child_pb2, compile_pb2
from etfarm.wire.messages import fill, to_scalar

if TYPE_CHECKING:
    from etfarm.server.graphs.differences import OutputCheck


class StageEvent(TypedDict):
    """An event that a child emits when a stage starts and when it ends; a failed stage has no END."""

    stage: str
    """A name from etfarm.wire.stages.STAGES."""
    phase: Literal["START", "END"]
    duration_ms: float | None
    """None at START."""


class StageTime(TypedDict):
    """A stage that ran, with its duration."""

    stage: str
    duration_ms: float
    where: Literal["SERVER"]
    methods: dict[str, float]
    """Milliseconds by method if the stage processes methods one after the other; empty if it processes all of them at once."""


class DimRange(TypedDict):
    """A dynamic dim's minimum and maximum size, both inclusive."""

    min: int
    max: int


class ValueFacts(TypedDict):
    """One flattened input or output of a method."""

    name: str | None
    """The value's name; None if only the .pte is known, which has no names."""
    kind: Literal["tensor", "int", "double", "bool", "none", "str"]
    dtype: str | None
    """The dtype's name in torch, like `float32`; None for non-tensors."""
    dims: list[int | DimRange] | None
    """The tensor's dims; None for non-tensors. A .pte has only the maximum size of dynamic dims, so `min` is 0 there."""
    dim_order: list[int] | None
    """The dim order, outermost first; None for non-tensors."""
    value: NotRequired[int | float | bool | str | None]
    """The required value of a non-tensor input, which is baked into the program."""


class MethodFacts(TypedDict):
    """A method's inputs and outputs, and its requirements on a device."""

    inputs: list[ValueFacts]
    outputs: list[ValueFacts]
    operators: list[str]
    """Kernels as named in the runtime's registry, with overloads, like `aten::add.out`; sorted."""
    backends: list[str]
    """Backend ids of the delegates, like `XnnpackBackend`; sorted."""
    planned_bytes: list[int]
    """Sizes of the memory-planned buffers in bytes."""
    relations: NotRequired[list[str]]
    """Relations between the sizes of the inputs; absent if only the .pte is known, which has none."""
    state_bytes: NotRequired[int | None]
    """Size of the planned tensors that keep state from one execution to the next; None if it is unknown."""


class ProgramFacts(TypedDict):
    """The facts that a .pte contains about its methods."""

    methods: dict[str, MethodFacts]


class MethodSizes(TypedDict):
    """The sizes of one method of a program."""

    delegate_bytes: int
    planned_bytes: list[int]


class ProgramSizes(TypedDict):
    """The sizes of a program's parts; ProgramSizes in `compile.proto`."""

    program_bytes: int
    """Size of the flatbuffer."""
    constant_bytes: int
    """Size of the constants outside of delegates, named data included."""
    delegate_bytes: int
    """Size of the delegates' data, without constants that they keep as named data."""
    methods: dict[str, MethodSizes]
    data_bytes: dict[str, int]


class SourceLine(TypedDict):
    """A line of the user's code."""

    file: str
    line: int
    code: str


class Place(TypedDict):
    """The place in the user's model that nodes of a graph come from."""

    source: SourceLine | None
    module: str | None
    count: int
    undelegated_reason: NotRequired[str]
    """Why the nodes were not delegated, in the partitioner's words; absent if unknown."""


class OperatorDelegation(TypedDict):
    """The numbers of an operator's nodes inside and outside of delegates."""

    op: str
    delegated: int
    non_delegated: int
    places: list[Place]
    """Places of the nodes outside of delegates, the most frequent first; at most 20."""


class Fp32Operator(TypedDict):
    """An operator that a quantizing recipe left in fp32."""

    op: str
    count: int
    places: list[Place]


class HostCheck(TypedDict):
    """A run of a method on this host; HostCheck in `compile.proto`."""

    method: str
    inputs: Literal["EXAMPLE", "MIN", "MAX"]
    shapes: list[str]
    ran: bool
    why: str
    outputs: list[OutputCheck]


class Delegation(TypedDict):
    """The delegation of one method."""

    subgraphs: int
    delegated_nodes: int
    non_delegated_nodes: int
    operators: list[OperatorDelegation]


class ModuleFootprint(TypedDict):
    """A module's share of a program; ModuleFootprint in `compile.proto`."""

    method: str
    module: str
    """The module's path; empty for the model itself."""
    constant_bytes: int
    planned_bytes: int
    planned_tensors: int


class ProgramFiles(TypedDict):
    """The names of the program's files."""

    pte: str
    data: dict[str, str]
    """Named data files (.ptd), by the names that the program refers to."""


class Toolchain(TypedDict):
    """The versions that the program was compiled with."""

    torch: str
    executorch: str
    torchao: str


class Warning(TypedDict):
    """A warning, which does not fail the job. Codes are UPPER_SNAKE."""

    code: str
    message: str


class SelectedOperator(TypedDict):
    """The operators of one kind that a name in a recipe file selected."""

    op: str
    count: int
    quantized: int
    places: list[Place]


class SelectedName(TypedDict):
    """What a name in a recipe file's quantizer selected."""

    argument: str
    name: str
    count: int
    quantized: int
    operators: list[SelectedOperator]


class QuantizeResult(TypedDict):
    """The answer of `quantize_model`."""

    stages: list[StageTime]
    programs: dict[str, str]
    """Names of .pt2 files by method, quantized and exported again."""
    warnings: list[Warning]
    stayed_fp32: dict[str, list[Fp32Operator]]
    selected: dict[str, list[SelectedName]]


class LowerResult(TypedDict):
    """The answer of `lower_model`. The answer of `inspect_pte` has no stages, program, ETRecord or delegation."""

    stages: list[StageTime]
    program: ProgramFiles | None
    """The program; None for an uploaded .pte, or if `stop_after` is a stage before TO_EXECUTORCH."""
    etrecord: str | None
    stage_files: dict[str, str]
    """The files requested by `stop_after`: METHOD.pt2, METHOD.txt and delegation.csv by their names; empty for a program."""
    inputs: dict[str, str]
    """Tensor files of the model's example inputs by method; methods without example inputs are left out."""
    delegation: dict[str, Delegation]
    toolchain: Toolchain
    warnings: list[Warning]
    facts: ProgramFacts | None
    """The program's facts; None without a .pte."""
    sizes: ProgramSizes | None
    modules: list[ModuleFootprint]
    """The modules' shares; empty for an uploaded .pte, which has no information about modules."""
    checks: list[HostCheck]
    stayed_fp32: dict[str, list[Fp32Operator]]
    """Operators of methods that the client quantized; the quantizing child reports those of other methods."""
    located: dict[str, compile_pb2.LocatedOperators]
    """Operators by method, as in the Compilation."""
    shared_buffers: list[str]
    """Names of the buffers that methods share, in the exported programs."""
    stateful_methods: list[str]
    """Names of the methods that write to buffers."""


class RecipeRow(TypedDict):
    """A recipe and its availability on this server; RecipeInfo in `compile.proto`."""

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


_SAME: Final = ("stages", "warnings", "delegation", "sizes", "modules", "checks", "toolchain")
"""Keys of results whose values have the form of the Compilation's fields."""


def encode(result: QuantizeResult | LowerResult) -> bytes:
    """Return the answer of a compiling child: the result as a CompileResult."""
    parts: dict[str, Any] = {**result}
    answer = child_pb2.CompileResult()
    fill(answer.compilation, {key: parts.get(key) for key in _SAME})
    answer.compilation.shared_buffers.extend(parts.get("shared_buffers") or ())
    answer.compilation.stateful_methods.extend(parts.get("stateful_methods") or ())
    for method, rows in result["stayed_fp32"].items():
        fill(answer.compilation.stayed_fp32[method], {"operators": rows})
    for method, names in (parts.get("selected") or {}).items():
        fill(answer.compilation.selected[method], {"names": names})
    for method, operators in (parts.get("located") or {}).items():
        answer.compilation.located_operators[method].CopyFrom(operators)
    for method, facts in (parts.get("facts") or {"methods": {}})["methods"].items():
        fill_facts(answer.compilation.facts.methods[method], facts)
    if parts.get("facts") is not None:
        answer.compilation.facts.SetInParent()
    program: ProgramFiles | None = parts.get("program")
    files = {
        "pte": program and program["pte"], "data": program and program["data"], "etrecord": parts.get("etrecord"),
        "example_inputs": parts.get("inputs"), "exported_programs": parts.get("programs"),
        "stage_files": parts.get("stage_files"),
    }  # fmt: skip
    return fill(answer, files).SerializeToString()


def encode_recipes(result: RecipesResult) -> bytes:
    """Return the answer of a child that lists recipes: the result as a ListRecipesResponse."""
    return fill(compile_pb2.ListRecipesResponse(), result).SerializeToString()


def fill_facts(message: compile_pb2.MethodFacts, facts: MethodFacts) -> None:
    """Set the fields of a method's facts."""
    fill(message, {key: facts.get(key) for key in ("operators", "backends", "planned_bytes", "state_bytes", "relations")})
    for specs, values in ((message.inputs, facts["inputs"]), (message.outputs, facts["outputs"])):
        for value in values:
            spec = fill(specs.add(), {key: value[key] for key in ("name", "kind", "dtype", "dim_order")})
            for dim in value["dims"] or ():
                low, high = (dim, dim) if isinstance(dim, int) else (dim["min"], dim["max"])
                spec.dims.add(min=low, max=high)
            if "value" in value:
                spec.value.CopyFrom(to_scalar(value["value"]))
