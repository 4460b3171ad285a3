"""The description of a .pte and the sizes of its parts. Constants and delegates' data are not read."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from executorch.exir._serialize._program import _flatbuffer_to_program
from executorch.exir.schema import BackendDelegateDataReference, DataLocation, ExecutionPlan, Program

from etfarm.server.compile.errors import UnsupportedProgram
from etfarm.server.compile.program.explain import first_line
from etfarm.server.compile.result import ProgramSizes
from etfarm.server.workers.errors import is_out_of_memory
from etfarm.wire import pte


@dataclass(frozen=True)
class Described:
    """The flatbuffer of a .pte."""

    program: Program
    program_bytes: int
    """Size of the flatbuffer; the size of the file if it has no segments."""


def read(path: Path) -> Described:
    """Return the description of a .pte.

    Raises:
        UnsupportedProgram: the flatbuffer cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        program_bytes = _flatbuffer_bytes(file.read(pte.HEAD_BYTES), size)
        file.seek(0)
        head = file.read(min(program_bytes, size))
    try:
        return Described(_flatbuffer_to_program(head), program_bytes)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise UnsupportedProgram(
            f"The program's description cannot be read: {first_line(error)}.", "Export it again with ExecuTorch 1.x."
        ) from None


def _flatbuffer_bytes(head: bytes, size: int) -> int:
    """Return the size of the flatbuffer; the size of the file if it has no valid extended header, as ExecuTorch has it."""
    try:
        header = pte.read_extended_header(head)
    except pte.HeaderCutOff:
        return size
    return header.program_bytes if header is not None and header.length >= pte.MIN_HEADER_BYTES else size


def of_program(described: Described, data: Mapping[str, Path] | None = None) -> ProgramSizes:
    """Return the sizes of a program's parts. Delegate data that methods share count once in the total, and in each method.

    Args:
        data: the program's named data files (.ptd).
    """
    program = described.program
    used = {_place(d.processed) for plan in program.execution_plan for d in plan.delegates}
    in_segments = {index for location, index in used if location == DataLocation.SEGMENT}
    return {
        "program_bytes": described.program_bytes,
        "constant_bytes": sum(len(buffer.storage) for buffer in program.constant_buffer)
        + sum(segment.size for index, segment in enumerate(program.segments) if index not in in_segments),
        "delegate_bytes": sum(_bytes(program, *place) for place in used),
        "methods": {
            plan.name: {
                "delegate_bytes": sum(_bytes(program, *place) for place in {_place(d.processed) for d in plan.delegates}),
                "planned_bytes": planned_bytes(plan),
            }
            for plan in program.execution_plan
        },
        "data_bytes": {name: path.stat().st_size for name, path in sorted((data or {}).items())},
    }  # fmt: skip


def planned_bytes(plan: ExecutionPlan) -> list[int]:
    """Return the sizes of a method's memory-planned buffers in bytes."""
    # Buffer 0 stands for constants.
    return [int(size) for size in plan.non_const_buffer_sizes[1:]]


def _place(reference: BackendDelegateDataReference) -> tuple[DataLocation, int]:
    return reference.location, reference.index


def _bytes(program: Program, location: DataLocation, index: int) -> int:
    if location == DataLocation.SEGMENT:
        return int(program.segments[index].size)
    return len(program.backend_delegate_data[index].data)
