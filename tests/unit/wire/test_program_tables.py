"""The tables of a program: their fields and kinds are those of ExecuTorch's schema."""

from __future__ import annotations

import importlib.resources
import re

from executorch import exir

from etfarm.wire import program_tables as tables
from etfarm.wire.program_tables import InstructionKind, ValueKind

SCHEMA = importlib.resources.files(exir).joinpath("_serialize", "program.fbs").read_text()


def members(kind: str, name: str) -> list[str]:
    """Return the members of an enum or a union of the schema."""
    (body,) = re.findall(rf"^{kind} {name}(?: *: *\w+)? \{{(.*?)\}}", SCHEMA, re.DOTALL | re.MULTILINE)
    return re.findall(r"^ *(\w+)", re.sub(r"//.*", "", body), re.MULTILINE)


def test_fields_are_those_of_the_schema() -> None:
    bodies = dict(re.findall(r"^table (\w+) \{\n(.*?)^\}", SCHEMA, re.DOTALL | re.MULTILINE))
    fields: dict[str, list[str]] = {}
    for table, body in bodies.items():
        fields[table] = []
        for name, kind in re.findall(r"^ *(\w+) *: *([\[\]\w]+)", body, re.MULTILINE):
            fields[table] += [f"{name}_type", name] if kind in ("InstructionArguments", "KernelTypes") else [name]
    wanted = {
        "Program": {
            tables._PLANS: "execution_plan", tables._CONSTANTS: "constant_buffer", tables._DELEGATE_DATA: "backend_delegate_data",
            tables._SEGMENTS: "segments", tables._NAMED_DATA: "named_data",
        },
        "ExecutionPlan": {
            tables._NAME: "name", tables._VALUES: "values", tables._INPUTS: "inputs", tables._OUTPUTS: "outputs",
            tables._CHAINS: "chains", tables._OPERATORS: "operators", tables._DELEGATES: "delegates",
            tables._BUFFER_SIZES: "non_const_buffer_sizes",
        },
        "Tensor": {
            tables._SCALAR_TYPE: "scalar_type", tables._SIZES: "sizes", tables._DIM_ORDER: "dim_order",
            tables._DATA: "data_buffer_idx", tables._ALLOCATION: "allocation_info", tables._DYNAMISM: "shape_dynamism",
            tables._EXTRA: "extra_tensor_info",
        },
        "AllocationDetails": {
            tables._MEMORY: "memory_id", tables._OFFSET_LOW: "memory_offset_low", tables._OFFSET_HIGH: "memory_offset_high",
        },
        "ExtraTensorInfo": {tables._FULL_NAME: "fully_qualified_name", tables._LOCATION: "location"},
        "EValue": {0: "val_type", 1: "val"},
        "Chain": {tables._INSTRUCTIONS: "instructions"},
        "Instruction": {0: "instr_args_type", 1: "instr_args"},
        "KernelCall": {0: "op_index", 1: "args"},
        "DelegateCall": {0: "delegate_index", 1: "args"},
        "MoveCall": {0: "move_from", 1: "move_to"},
        "Operator": {0: "name", 1: "overload"},
        "BackendDelegate": {0: "id", 1: "processed"},
        "BackendDelegateDataReference": {0: "location", 1: "index"},
        "BackendDelegateInlineData": {0: "data"},
        "DataSegment": {0: "offset", 1: "size"},
        "NamedData": {0: "key"},
    }  # fmt: skip
    for table, slots in wanted.items():
        assert {slot: fields[table][slot] for slot in slots} == slots, table


def test_kinds_are_those_of_the_schema() -> None:
    unions = ((InstructionKind, "InstructionArguments"), (ValueKind, "KernelTypes"))
    for kinds, name in unions:
        assert [kind.name.replace("_", "") for kind in kinds] == [member.upper() for member in members("union", name)]
        assert [*kinds] == [*range(1, len(kinds) + 1)]
    assert [members("enum", "DataLocation")[place] for place in (tables._INLINE, tables._SEGMENT)] == ["INLINE", "SEGMENT"]
    assert members("enum", "TensorShapeDynamism")[tables._STATIC] == "STATIC"
    assert members("enum", "TensorDataLocation")[tables._EXTERNAL] == "EXTERNAL"
