"""Facts of a .pte file that `executorch.runtime` does not expose: kinds, dim orders, names of required resources.

Read from the flatbuffer (executorch/schema/program.fbs), without ExecuTorch and without torch.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final, TypeVar

from etfarm.wire.flatbuffer import BadBuffer, Buffer, Table
from etfarm.wire.pte import read_extended_header
from etfarm.wire.tensors import ITEM_BYTES, SCALAR_TYPES

T = TypeVar("T")

_EXTERNAL: Final = 1
_INLINE: Final = 0
_XNNPACK_MAGIC: Final = b"XH00"


@dataclass(frozen=True)
class FileValue:
    """A value in a method's plan."""

    kind: str
    """`tensor`, `int`, `double`, `bool`, `none` or `unsupported`."""
    scalar: int | float | bool | None = None
    """The value with which the program was exported, for kinds other than tensors."""
    name: str = ""
    dtype: str = "unsupported"
    shape: tuple[int, ...] = ()
    """The shape; for a dynamic tensor, the largest one."""
    dim_order: tuple[int, ...] = ()
    planned: bool = False
    dynamic: bool = False
    external_key: str | None = None
    """Key under which a data file must hold the tensor's bytes."""

    @property
    def size_bytes(self) -> int:
        """Size of the largest shape in bytes; 0 if the dtype is unsupported."""
        return prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)


@dataclass(frozen=True)
class FileMethod:
    """A method as the file describes it."""

    name: str
    inputs: tuple[FileValue, ...]
    outputs: tuple[FileValue, ...]
    planned_bytes: tuple[int, ...]
    backends: tuple[str, ...]
    operators: tuple[str, ...]
    """Kernels such as `aten::add.out`, in the order of the file."""
    data_keys: frozenset[str]
    """Keys of weights outside the method's own part of the file."""
    tensor_bytes: int
    """Bytes of all tensors in the method's plan, at their largest shapes."""


@dataclass(frozen=True)
class ProgramFile:
    """A .pte file."""

    methods: tuple[FileMethod, ...]
    own_keys: frozenset[str] = field(default_factory=frozenset)
    """Keys of weights that the .pte itself holds."""

    @property
    def shares_state(self) -> bool:
        """Whether methods share mutable buffers (share_mutable_buffers of ExecuTorch's memory planner).

        The file does not say so, but only that planner gives methods two buffers each, of which the second has one size in all.
        """
        planned = [method.planned_bytes for method in self.methods if len(method.planned_bytes) > 1]
        return len(planned) > 1 and all(len(sizes) == 2 and sizes[1] == planned[0][1] > 0 for sizes in planned)

    @classmethod
    def read(cls, path: Path) -> ProgramFile:
        """Read the file's description.

        Raises:
            BadBuffer: the file is not a .pte, or is damaged.
            OSError: it cannot be read.
        """
        buffer = _mapped(path)
        program = Table.root(buffer)
        methods = tuple(_method(plan, program, buffer) for plan in program.tables(1))
        return cls(methods, frozenset(data.text(0) for data in program.tables(7)))


def check_identifier(path: Path) -> None:
    """Refuse a file whose identifier is not text, because ExecuTorch's Python binding would end the process.

    Raises:
        BadBuffer: the identifier is not text.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        identifier = file.read(8)[4:]
    if not identifier.isascii():
        raise BadBuffer("it has no file identifier of an ExecuTorch program")


def data_keys(path: Path) -> frozenset[str]:
    """Return the keys of the weights in a .ptd file.

    Raises:
        BadBuffer: the file is not a .ptd, or is damaged.
        OSError: it cannot be read.
    """
    buffer = _mapped(path)
    if bytes(buffer[4:8]) != b"FT01":
        raise BadBuffer("it has no file identifier of a .ptd file")
    return frozenset(data.text(0) for data in Table.root(buffer).tables(2))


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        try:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:
            raise BadBuffer("it is empty") from None


def _method(plan: Table, program: Table, buffer: Buffer) -> FileMethod:
    values = [_value(value) for value in plan.tables(2)]
    delegates = list(plan.tables(7))
    backends = [delegate.text(0) for delegate in delegates]
    keys = {value.external_key for value in values if value.external_key is not None}
    for delegate, backend in zip(delegates, backends, strict=True):
        if backend == "XnnpackBackend":
            keys |= _xnnpack_keys(_processed(delegate, program, buffer))
    return FileMethod(
        plan.text(0),
        tuple(_at(values, index) for index in plan.numbers(3, "<i")),
        tuple(_at(values, index) for index in plan.numbers(4, "<i")),
        plan.numbers(8, "<q")[1:],  # the first entry is reserved
        tuple(dict.fromkeys(backends)),
        tuple(dict.fromkeys(_operators(plan.tables(6)))),
        frozenset(keys),
        sum(value.size_bytes for value in values),
    )


def _operators(operators: Iterable[Table]) -> Iterable[str]:
    for operator in operators:
        overload = operator.text(1)
        yield operator.text(0) + (f".{overload}" if overload else "")


def _value(value: Table) -> FileValue:
    content = value.table(1)
    match value.number(0, "<B"):
        case 1:
            return FileValue("none")
        case 2 if content:
            return FileValue("int", content.number(0, "<q"))
        case 3 if content:
            return FileValue("bool", bool(content.number(0, "<?")))
        case 4 if content:
            return FileValue("double", content.real(0))
        case 5 if content:
            return _tensor(content)
    return FileValue("unsupported")


def _tensor(tensor: Table) -> FileValue:
    extra = tensor.table(9)
    return FileValue(
        "tensor",
        name=extra.text(1) if extra else "",
        dtype=SCALAR_TYPES.get(tensor.number(0, "<b"), "unsupported"),
        shape=tensor.numbers(2, "<i"),
        dim_order=tensor.numbers(3, "<B"),
        planned=tensor.table(6) is not None or tensor.number(5, "<I") != 0,
        dynamic=tensor.number(8, "<b") != 0,
        external_key=extra.text(1) if extra and extra.number(2, "<b") == _EXTERNAL else None,
    )


def _processed(delegate: Table, program: Table, buffer: Buffer) -> Buffer:
    """Return the blob that the delegate's own compiler produced."""
    reference = delegate.table(1)
    index = reference.number(1, "<I") if reference else 0
    if reference and reference.number(0, "<b") != _INLINE:
        segment = _at(list(program.tables(4)), index)
        header = read_extended_header(buffer)
        if header is None:
            raise BadBuffer("it has segments and no extended header")
        return header.segment(buffer, segment.number(0, "<Q"), segment.number(1, "<Q"))
    return _at(list(program.tables(3)), index).content(0)


def _xnnpack_keys(blob: Buffer) -> set[str]:
    """Return the names by which XNNPACK's delegate looks up its weights."""
    if bytes(blob[4:8]) != _XNNPACK_MAGIC or len(blob) < 18:
        return set()  # a format older than named data
    (start,) = struct.unpack_from("<I", blob, 10)
    graph = Table.root(blob[start:])
    return {key for constant in graph.tables(8) if (key := constant.text(2))}


def _at(items: list[T], index: int) -> T:
    if not 0 <= index < len(items):
        raise BadBuffer(f"index {index} of {len(items)}")
    return items[index]
