"""Step 1, client: a data set's samples, one at a time: a folder of .npz, a batch in one .npz, or what a program gives.

Nothing here holds more than one sample: a batch is read row by row from the archive, whatever its size.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from etfarm.client.errors import EtfarmError, UserError
from etfarm.client.submit import npz
from etfarm.wire.tensors import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_AGAIN = "Write it with numpy.savez(path, name=array, ...)."
_DAMAGE = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)


class NoSamples(UserError):
    """A data set is empty."""

    reason = "NO_SAMPLES"


@dataclass(frozen=True)
class Sample:
    """One set of inputs, and what came with them."""

    index: int
    name: str
    """What errors call it: its file, its place in a batch, or `sample 7`."""
    values: Mapping[str, Any] | Sequence[Any] = field(default=(), repr=False)
    """Arrays, numbers or values of the wire by key, or in flattened order."""
    error: EtfarmError | None = None
    """Why it could not be read."""


@dataclass(frozen=True)
class Source:
    """A data set that is there, and has not been read."""

    samples: Iterable[Sample]
    """To be iterated once."""
    count: int


def given(inputs: Iterable[Any]) -> Iterator[Sample]:
    """The samples of an iterable, each a mapping of arrays by name, a sequence of arrays in order, or one array alone."""
    for index, values in enumerate(inputs):
        whole = isinstance(values, Mapping | list | tuple)
        yield Sample(index, f"sample {index}", values if whole else (values,))


def of_folder(folder: Path) -> Source:
    """Each .npz of a folder, by file name. One that cannot be read is a sample with an error.

    Raises:
        InputFileUnreadable: there is none.
    """
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise npz.InputFileUnreadable(f"The folder {folder} has no .npz file.", "Each sample is one file.", path=folder)
    return Source((_of_file(index, file) for index, file in enumerate(files)), len(files))


def _of_file(index: int, file: Path) -> Sample:
    try:
        arrays = npz.load(file)
        return Sample(index, file.name, dict(_values(file, arrays)))
    except EtfarmError as error:
        return Sample(index, file.name, error=error)


def of_batch(path: Path) -> Source:
    """Each index of axis 0 of all arrays of an .npz. A Python number (`KEY.dtype` is scalar) is every sample's.

    Raises:
        InputFileUnreadable: it is missing, cut off, no .npz, or holds Python objects or arrays in Fortran order.
        UnsupportedInputArray: an array without an axis 0, or several lengths.
        NoSamples: axis 0 is empty.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            columns = _columns(path, archive)
    except FileNotFoundError:
        raise npz.InputFileUnreadable(f"There is no file {path}.", _AGAIN, path=path) from None
    except _DAMAGE as error:
        raise _unreadable(path, error) from None
    lengths = {column.key: column.shape[0] for column in columns if not column.shared}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise npz.UnsupportedInputArray(
            f"{path}: axis 0 has several lengths: {shown}.", "Give all keys as many samples.", path=path
        )
    count = next(iter(lengths.values()), 0)
    if not count:
        raise NoSamples(f"{path} has no samples: no array has anything along axis 0.", "Stack them along axis 0.", path=path)
    return Source(_rows(path, columns, count), count)


@dataclass(frozen=True)
class _Column:
    """One array of a batch."""

    key: str
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shared: bool
    """Every sample has all of it."""


def _columns(path: Path, archive: zipfile.ZipFile) -> list[_Column]:
    members = [name for name in archive.namelist() if name.endswith(".npy")]
    keys = {name.removesuffix(".npy") for name in members}
    columns = []
    for member in members:
        key = member.removesuffix(".npy")
        with archive.open(member) as stream:
            shape, fortran, dtype = _header(stream)
        if dtype.hasobject:
            raise npz.InputFileUnreadable(f"{path}: {key!r} holds Python objects, which are never loaded.", _AGAIN, path=path)
        if fortran and len(shape) > 1:
            raise npz.InputFileUnreadable(
                f"{path}: {key!r} is in Fortran order, in which no sample lies in one piece.",
                "Write it as numpy.ascontiguousarray(array).",
                path=path, key=key,
            )  # fmt: skip
        sibling = npz.told_of(key, keys) is not None
        shared = sibling or (not shape and f"{key}{npz.DTYPE}" in keys)
        if not shape and not shared:
            raise npz.UnsupportedInputArray(
                f"{path}: {key!r} has no axis 0 to take samples from.", "Give it one value a sample.", path=path, key=key
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
    """The next index of axis 0."""
    import numpy as np

    shape = column.shape[1:]
    size = int(np.prod(shape, dtype=np.int64)) * column.dtype.itemsize
    data = stream.read(size)
    if len(data) != size:
        raise EOFError(f"{column.key!r} is cut off")
    return np.frombuffer(data, column.dtype).reshape(shape)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and dtype of the .npy that begins here; the stream is at its first element afterwards."""
    import numpy as np

    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"an array of the format {version[0]}.{version[1]}, which only named fields need")


def _values(path: Path, arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, Any]]:
    """Keys with values of the wire; what no program takes, such as text, stays an array: it may be a label."""
    for key, array in arrays.items():
        if npz.told_of(key, arrays) is not None:
            continue
        said = arrays.get(key + npz.DTYPE)
        if said is None and array.dtype.name not in ITEM_BYTES:
            yield key, array
            continue
        # How it lies in memory is the program's to say, whatever `.dim_order` tells.
        yield key, npz.value_of_entry(path, key, key, array, said)


def _unreadable(path: Path, error: Exception) -> npz.InputFileUnreadable:
    what = str(error).strip().rstrip(".") or type(error).__name__
    return npz.InputFileUnreadable(f"{path} cannot be read: {what}.", _AGAIN, path=path)
