"""Facts of a .pte file that `executorch.runtime` does not expose: kinds, dim orders, names of required resources.

Read from the flatbuffer (executorch/schema/program.fbs), without ExecuTorch and without torch.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final, TypeVar

from etfarm.wire.flatbuffer import BadBuffer, Buffer, Table
from etfarm.wire.program_tables import PlanTable, ProgramTables, TensorTable, ValueKind, read_scalar, xnnpack_graph
from etfarm.wire.tensors import ITEM_BYTES, SCALAR_TYPES

T = TypeVar("T")

_SCALARS: Final[Mapping[int, str]] = {ValueKind.INT: "int", ValueKind.BOOL: "bool", ValueKind.DOUBLE: "double"}


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
        program = ProgramTables(buffer)
        methods = tuple(_method(plan, program) for plan in program.plans())
        return cls(methods, frozenset(program.keys()))


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


def _method(plan: PlanTable, program: ProgramTables) -> FileMethod:
    values, delegates = [_value(*union) for union in plan.values()], plan.delegates()
    keys = {value.external_key for value in values if value.external_key is not None}
    for delegate in delegates:
        if delegate.backend == "XnnpackBackend":
            keys |= _xnnpack_keys(program.data_of(delegate))
    return FileMethod(
        plan.name,
        tuple(_at(values, index) for index in plan.inputs),
        tuple(_at(values, index) for index in plan.outputs),
        plan.planned_bytes,
        tuple(dict.fromkeys(delegate.backend for delegate in delegates)),
        tuple(dict.fromkeys(plan.operators())),
        frozenset(keys),
        sum(value.size_bytes for value in values),
    )


def _value(kind: int, content: Table | None) -> FileValue:
    if kind == ValueKind.NULL:
        return FileValue("none")
    if content is not None and kind == ValueKind.TENSOR:
        return _tensor(TensorTable(content))
    if content is not None and kind in _SCALARS:
        scalar = read_scalar(kind, content)
        return FileValue(_SCALARS[kind], None if isinstance(scalar, str) else scalar)
    return FileValue("unsupported")


def _tensor(tensor: TensorTable) -> FileValue:
    return FileValue(
        "tensor",
        name=tensor.name,
        dtype=SCALAR_TYPES.get(tensor.scalar_type, "unsupported"),
        shape=tensor.sizes,
        dim_order=tensor.dim_order,
        planned=tensor.place is not None or tensor.has_data,
        dynamic=not tensor.is_static,
        external_key=tensor.name if tensor.is_external else None,
    )


def _xnnpack_keys(data: Buffer) -> set[str]:
    """Return the names by which XNNPACK's delegate looks up its weights."""
    graph = xnnpack_graph(data)
    if graph is None:
        return set()  # a format older than named data
    return {key for constant in graph.tables(8) if (key := constant.text(2))}


def _at(items: list[T], index: int) -> T:
    if not 0 <= index < len(items):
        raise BadBuffer(f"index {index} of {len(items)}")
    return items[index]
