"""How a program was compiled: its stages, files, delegation, sizes and checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etfarm.client.reports.enums import Actor, CheckInputs
from etfarm.client.reports.json_object import JsonObject
from etfarm.client.reports.source import SourceLine


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProgramFile(JsonObject):
    """A file in the farm's store."""

    digest: str
    """SHA-256 of the content, in hexadecimal."""
    size_bytes: int = 0
    """Size in bytes."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Stage(JsonObject):
    """One stage of ExecuTorch's export pipeline."""

    stage: str = ""
    """Name of the stage, such as `TO_EXECUTORCH`."""
    duration_ms: float | None = None
    """Duration in milliseconds."""
    where: Actor | None = None
    cached: bool = False
    """Whether it comes from an earlier compilation, which its times are of."""
    methods: Mapping[str, float] = field(default_factory=dict)
    """Duration in milliseconds by method; empty for a stage that processes all methods at once."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Place(JsonObject):
    """Where nodes of a graph come from in the user's model."""

    source: SourceLine | None = None
    """None if no frame is the user's own."""
    module: str | None = None
    """Path of the module in the user's model."""
    count: int = 0
    """Number of nodes."""
    undelegated_reason: str | None = None
    """Why the nodes were not delegated, in the partitioner's own words, or that it gave no reason; None where nothing was
    partitioned, and for other nodes."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OperatorDelegation(JsonObject):
    """The nodes of one operator inside and outside of delegates."""

    op: str = ""
    delegated: int = 0
    """Number of nodes inside of delegates."""
    non_delegated: int = 0
    """Number of nodes outside of delegates."""
    places: tuple[Place, ...] = ()
    """Where the nodes outside of delegates come from, the most frequent place first."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Delegation(JsonObject):
    """The part of a method's graph that delegates run."""

    subgraphs: int = 0
    """Number of delegated subgraphs."""
    delegated_nodes: int = 0
    """Number of nodes inside of delegates."""
    non_delegated_nodes: int = 0
    """Number of nodes outside of delegates."""
    operators: tuple[OperatorDelegation, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Toolchain(JsonObject):
    """The versions of the packages that compiled the program."""

    torch: str | None = None
    executorch: str | None = None
    torchao: str | None = None
    etfarm: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompileWarning(JsonObject):
    """A warning of the compilation or of the analysis."""

    code: str = ""
    """UPPER_SNAKE word that programs may rely on."""
    message: str
    """One sentence."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MethodSizes(JsonObject):
    """The sizes of one method, in bytes."""

    delegate_bytes: int = 0
    planned_bytes: tuple[int, ...] = ()
    """The sizes of the memory plan's buffers."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProgramSizes(JsonObject):
    """The sizes of a program's parts, in bytes."""

    program_bytes: int = 0
    """Operators, values and plans of all methods."""
    constant_bytes: int = 0
    """Constants in the .pte, including those that delegates keep as named data."""
    delegate_bytes: int = 0
    """What delegates made of their parts of the graphs."""
    methods: Mapping[str, MethodSizes] = field(default_factory=dict)
    data_bytes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the named data files beside the .pte, by name."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OutputCheck(JsonObject):
    """One output of a check."""

    output: str = ""
    equal: bool | None = None
    max_abs_error: float | None = None
    """The largest absolute difference."""
    sqnr_db: float | None = None
    """The signal-to-noise ratio in dB, 300 for an exact match; None for NaN or inf of one side, a zero reference, integers."""
    equal_share: float | None = None
    """Part of the elements that are equal, 0 to 1; for integers and bools only."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HostCheck(JsonObject):
    """One run of a method on the server, compared with eager PyTorch before quantization."""

    method: str = ""
    inputs: CheckInputs | None = None
    shapes: tuple[str, ...] = ()
    """Shapes of the tensor inputs in flattened order, such as `2x3x224x224`."""
    ran: bool = False
    why: str = ""
    """Why it did not run or was not compared; empty otherwise."""
    outputs: tuple[OutputCheck, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fp32Operator(JsonObject):
    """An operator that a quantizing recipe left in fp32."""

    op: str = ""
    count: int = 0
    """Number of nodes."""
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fp32Operators(JsonObject):
    """The operators of one method that a quantizing recipe left in fp32."""

    operators: tuple[Fp32Operator, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SelectedOperator(JsonObject):
    """The operators of one kind that a name in a recipe file selected."""

    op: str = ""
    count: int = 0
    """Number of nodes."""
    quantized: int = 0
    """Number of nodes that are quantized."""
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SelectedName(JsonObject):
    """What a name in a recipe file's quantizer selected."""

    argument: str = ""
    """The argument that has the name: `only_modules`, `skip_modules`, `only_operators` or `skip_operators`."""
    name: str = ""
    count: int = 0
    """Number of operators that the name selected."""
    quantized: int = 0
    """How many of them are quantized."""
    operators: tuple[SelectedOperator, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SelectedNames(JsonObject):
    """What the names in a recipe file's quantizers selected in one method."""

    names: tuple[SelectedName, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModuleFootprint(JsonObject):
    """What a module of the user's model takes of the program and of its planned memory, without the modules inside of it."""

    method: str = ""
    module: str = ""
    """Path of the module; empty for what belongs to none."""
    constant_bytes: int = 0
    """Size of its parameters and buffers as the program stores them, in bytes."""
    planned_bytes: int = 0
    """The most that its tensors hold of the planned memory at one time, in bytes."""
    planned_tensors: int = 0
    """Number of its tensors in the memory plan."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Compile(JsonObject):
    """The compilation of a program."""

    cached: bool = False
    """Whether the program was compiled earlier."""
    stages: tuple[Stage, ...] = ()
    """The stages in order; empty for a ready program."""
    program: ProgramFile | None = None
    """The .pte."""
    etrecord: ProgramFile | None = None
    """ExecuTorch's record of the export."""
    delegation: Mapping[str, Delegation] = field(default_factory=dict)
    """Delegation by method."""
    toolchain: Toolchain | None = None
    warnings: tuple[CompileWarning, ...] = ()
    sizes: ProgramSizes | None = None
    checks: tuple[HostCheck, ...] = ()
    stayed_fp32: Mapping[str, Fp32Operators] = field(default_factory=dict)
    """Operators that a quantizing recipe left in fp32, by method."""
    selected: Mapping[str, SelectedNames] = field(default_factory=dict)
    """What the names of modules and operators in a recipe file selected, by method."""
    data: Mapping[str, ProgramFile] = field(default_factory=dict)
    """The named data files (.ptd) beside the program, by name."""
    exported_programs: Mapping[str, ProgramFile] = field(default_factory=dict)
    """The exported program of each method as it was lowered."""
    stopped_after: str | None = None
    """The stage that the job asked for instead of a program."""
    stage_files: Mapping[str, ProgramFile] = field(default_factory=dict)
    """The files of that stage, by name."""
    modules: tuple[ModuleFootprint, ...] | None = None
