"""The description of a .pte and the sizes of its parts. Constants and delegates' data are not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etfarm.server.compile.inspect.program import Program, parse
from etfarm.v1.compile_pb2 import MethodSizes, ProgramSizes
from etfarm.wire import pte
from etfarm.wire.errors import error_for
from etfarm.wire.flatbuffer import BadBuffer
from etfarm.wire.program_tables import Delegate


@dataclass(frozen=True)
class Described:
    """The flatbuffer of a .pte."""

    program: Program
    program_bytes: int
    """Size of the flatbuffer; the size of the file if it has no segments."""


def read(path: Path) -> Described:
    """Return the description of a .pte.

    Raises:
        UNSUPPORTED_PROGRAM: the flatbuffer cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        program_bytes = _flatbuffer_bytes(file.read(pte.HEAD_BYTES), size)
        file.seek(0)
        head = file.read(min(program_bytes, size))
    try:
        return Described(parse(head), program_bytes)
    except BadBuffer as error:
        raise error_for(
            "UNSUPPORTED_PROGRAM", f"The program's description cannot be read: {error}.", "Export it again with ExecuTorch 1.x."
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
    used = {_place(delegate) for plan in program.execution_plan for delegate in plan.delegates}
    in_segments = {index for in_segment, index in used if in_segment}
    constants = program.constant_bytes + sum(size for index, size in enumerate(program.segment_bytes) if index not in in_segments)
    return ProgramSizes(
        program_bytes=described.program_bytes,
        constant_bytes=_possible(constants),
        delegate_bytes=_possible(sum(_bytes(program, *place) for place in used)),
        methods={
            plan.name: MethodSizes(
                delegate_bytes=_possible(sum(_bytes(program, *place) for place in {_place(d) for d in plan.delegates})),
                planned_bytes=plan.planned_bytes,
            )
            for plan in program.execution_plan
        },
        data_bytes={name: path.stat().st_size for name, path in sorted((data or {}).items())},
    )


def _possible(size: int) -> int:
    """Return a size; 0 for one that no file has, which a damaged program may claim for a segment."""
    return size if size < 1 << 63 else 0


def _place(delegate: Delegate) -> tuple[bool, int]:
    return delegate.in_segment, delegate.index


def _bytes(program: Program, in_segment: bool, index: int) -> int:
    return (program.segment_bytes if in_segment else program.inline_data_bytes)[index]
