"""A data set's samples, one at a time: a folder of .npz files, a batch in one .npz, or an iterable.

Only one sample is in memory: a batch is read row by row from the archive, whatever its size.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from etfarm.client.submit import npz
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.tensors import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_AGAIN = "Write it with numpy.savez(path, name=array, ...)."
_DAMAGE = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)


@dataclass(frozen=True)
class Sample:
    """One set of inputs with its labels."""

    index: int
    name: str
    """The sample's name in errors: its file, its index in a batch, or `sample 7`."""
    values: Mapping[str, Any] | Sequence[Any] = field(default=(), repr=False)
    """Arrays, numbers or wire values by key, or in flattened order."""
    error: EtfarmError | None = None
    """Why the sample could not be read; None if it could."""


@dataclass(frozen=True)
class Source:
    """A data set that exists and has not been read."""

    samples: Iterable[Sample]
    """The samples, to be iterated once."""
    count: int


def number_samples(inputs: Iterable[Any]) -> Iterator[Sample]:
    """Yield the samples of an iterable, each a mapping of arrays by name, a sequence of arrays in order, or one array."""
    for index, values in enumerate(inputs):
        whole = isinstance(values, Mapping | list | tuple)
        yield Sample(index, f"sample {index}", values if whole else (values,))


def of_folder(folder: Path) -> Source:
    """Return each .npz of a folder as a sample, sorted by file name.

    An unreadable file is a sample with an error.

    Raises:
        INPUT_FILE_UNREADABLE: the folder has no .npz file.
    """
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise error_for(
            "INPUT_FILE_UNREADABLE", f"The folder {folder} has no .npz file.", "Each sample is one file.", path=folder
        )
    return Source((_of_file(index, file) for index, file in enumerate(files)), len(files))


def _of_file(index: int, file: Path) -> Sample:
    try:
        arrays = npz.load(file)
        return Sample(index, file.name, dict(_values(file, arrays)))
    except EtfarmError as error:
        return Sample(index, file.name, error=error)


def of_batch(path: Path) -> Source:
    """Return each index of axis 0 of all arrays of an .npz as a sample.

    A Python number (`KEY.dtype` is scalar) is repeated for every sample.

    Raises:
        INPUT_FILE_UNREADABLE: it is missing, truncated, not an .npz, or contains Python objects or arrays in Fortran
            order.
        UNSUPPORTED_INPUT: an array has no axis 0, or the lengths differ.
        NO_SAMPLES: axis 0 is empty.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            columns = _columns(path, archive)
    except FileNotFoundError:
        raise error_for("INPUT_FILE_UNREADABLE", f"There is no file {path}.", _AGAIN, path=path) from None
    except _DAMAGE as error:
        raise _unreadable(path, error) from None
    lengths = {column.key: column.shape[0] for column in columns if not column.shared}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise error_for(
            "UNSUPPORTED_INPUT",
            f"{path}: axis 0 has several lengths: {shown}.",
            "Give all keys the same number of samples.",
            path=path,
        )
    count = next(iter(lengths.values()), 0)
    if not count:
        raise error_for(
            "NO_SAMPLES", f"{path} has no samples: no array has anything along axis 0.", "Stack them along axis 0.", path=path
        )
    return Source(_rows(path, columns, count), count)


@dataclass(frozen=True)
class _Column:
    """One array of a batch."""

    key: str
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shared: bool
    """Whether every sample uses the whole array."""


def _columns(path: Path, archive: zipfile.ZipFile) -> list[_Column]:
    members = [name for name in archive.namelist() if name.endswith(".npy")]
    keys = {name.removesuffix(".npy") for name in members}
    columns = []
    for member in members:
        key = member.removesuffix(".npy")
        with archive.open(member) as stream:
            shape, fortran, dtype = _header(stream)
        if dtype.hasobject:
            raise error_for(
                "INPUT_FILE_UNREADABLE", f"{path}: {key!r} holds Python objects, which are never loaded.", _AGAIN, path=path
            )
        if fortran and len(shape) > 1:
            raise error_for(
                "INPUT_FILE_UNREADABLE",
                f"{path}: {key!r} is in Fortran order, in which samples are not contiguous.",
                "Write it as numpy.ascontiguousarray(array).",
                path=path, key=key,
            )  # fmt: skip
        sibling = npz.told_of(key, keys) is not None
        shared = sibling or (not shape and f"{key}{npz.DTYPE}" in keys)
        if not shape and not shared:
            raise error_for(
                "UNSUPPORTED_INPUT",
                f"{path}: {key!r} has no axis 0 to take samples from.",
                "Give it one value per sample.",
                path=path,
                key=key,
            )
        columns.append(_Column(key, member, shape, dtype, shared))
    return columns


def _rows(path: Path, columns: Sequence[_Column], count: int) -> Iterator[Sample]:
    import numpy as np

    try:
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(path))
            shared: dict[str, NDArray[Any]] = {}
            streams: list[tuple[_Column, IO[bytes]]] = []
            for column in columns:
                stream = stack.enter_context(archive.open(column.member))
                if column.shared:
                    shared[column.key] = np.lib.format.read_array(stream, allow_pickle=False)
                else:
                    _header(stream)
                    streams.append((column, stream))
            for index in range(count):
                arrays = {column.key: _row(stream, column) for column, stream in streams}
                name = f"{path.name}[{index}]"
                yield Sample(index, name, dict(_values(Path(name), {**arrays, **shared})))
    except _DAMAGE as error:
        raise _unreadable(path, error) from None


def _row(stream: IO[bytes], column: _Column) -> NDArray[Any]:
    """Read the next index of axis 0."""
    import numpy as np

    shape = column.shape[1:]
    size = int(np.prod(shape, dtype=np.int64)) * column.dtype.itemsize
    data = stream.read(size)
    if len(data) != size:
        raise EOFError(f"{column.key!r} is cut off")
    return np.frombuffer(data, column.dtype).reshape(shape)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the shape, Fortran order and dtype of the .npy at the stream's position.

    The stream is then at the first element.
    """
    import numpy as np

    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"an array of the format {version[0]}.{version[1]}, which only named fields need")


def _values(path: Path, arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, Any]]:
    """Yield keys with wire values.

    Values that no program takes, such as text, stay arrays: they may be labels.
    """
    for key, array in arrays.items():
        if npz.told_of(key, arrays) is not None:
            continue
        dtype = arrays.get(key + npz.DTYPE)
        name = npz.name_of(key)
        if dtype is None and array.dtype.name not in ITEM_BYTES:
            yield name, array
            continue
        # The program determines the memory layout, whatever `.dim_order` says.
        yield name, npz.value_of_entry(path, key, name, array, dtype)


def _unreadable(path: Path, error: Exception) -> EtfarmError:
    what = str(error).strip().rstrip(".") or type(error).__name__
    return error_for("INPUT_FILE_UNREADABLE", f"{path} cannot be read: {what}.", _AGAIN, path=path)
