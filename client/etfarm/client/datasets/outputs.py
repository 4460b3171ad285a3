"""A data set's outputs on disk: a folder with an .npz per sample, or all stacked along axis 0 of one .npz."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from etfarm.client.errors import OutputUnwritable
from etfarm.client.submit import npz
from etfarm.client.submit.inputs import value_of
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from etfarm.client.sessions.calls import Outputs

INDEX: Final = "etfarm.index"
"""Key with the sample index of each row; present only if samples failed, so that rows and inputs differ."""

_COPY_BYTES: Final = 1 << 20


class Folder:
    """A folder with a file per sample, named like the sample's own; `000000.npz`, `000001.npz`, ... for a batch."""

    def __init__(self, folder: Path) -> None:
        """Use a folder.

        Args:
            folder: created if it does not exist.
        """
        self._folder = folder
        self._count = 0

    def add(self, index: int, name: str, outputs: Outputs) -> None:
        """Add one sample's outputs.

        Args:
            name: name of the sample's file, or its other name.

        Raises:
            OutputUnwritable: the disk is full, or the file may not be written.
        """
        file = self._folder / (name if name.endswith(".npz") else f"{index:06}.npz")
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise _unwritable(self._folder, error) from None
        values = [value_of(key, value) for key, value in zip(outputs.names, outputs, strict=True)]
        npz.write_outputs(file, {"": values}, {"": outputs.names})
        self._count += 1

    def close(self) -> int:
        """Return the number of samples."""
        return self._count


class Stack:
    """One .npz file.

    Rows are collected in unnamed files beside it, so that they are never all in memory.
    """

    def __init__(self, path: Path) -> None:
        """Prepare to write a file.

        Args:
            path: replaced as a whole at `close`; unchanged if nothing was added.
        """
        self._path = path
        self._files = ExitStack()
        self._rows: dict[str, _Rows] = {}
        self._single: dict[str, NDArray[Any]] = {}
        self._indices: list[int] = []

    def add(self, index: int, name: str, outputs: Outputs) -> None:
        """Add one sample's outputs, as `Folder.add`.

        Raises:
            OUTPUTS_DIFFER: their shape differs from the outputs before.
        """
        values = [value_of(key, value) for key, value in zip(outputs.names, outputs, strict=True)]
        arrays = dict(npz.entries({"": values}, {"": outputs.names}))
        # A Python number is an entry of the stack, not a scalar that all samples share.
        siblings = {key: base for key in arrays if (base := npz.told_of(key, arrays)) is not None}
        scalars = {base for key, base in siblings.items() if str(arrays[key]) == "scalar"}
        single = {key: arrays[key] for key, base in siblings.items() if base not in scalars}
        rows = {key: array for key, array in arrays.items() if key not in siblings}
        if not self._indices:
            self._begin(rows, single)
        self._must_stack(name, rows)
        try:
            for key, array in rows.items():
                self._rows[key].file.write(array.tobytes())
        except OSError as error:
            raise _unwritable(self._path, error) from None
        self._indices.append(index)

    def close(self) -> int:
        """Write the remaining outputs and return the number of samples."""
        import numpy as np

        count = len(self._indices)
        with self._files:
            if not count:
                return 0
            part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
            try:
                with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
                    for key, rows in self._rows.items():
                        rows.file.seek(0)
                        with _member(archive, key) as member:
                            np.lib.format.write_array_header_2_0(member, rows.header(count))
                            shutil.copyfileobj(rows.file, member, _COPY_BYTES)
                    single = dict(self._single)
                    if self._indices != list(range(count)):
                        single[INDEX] = np.asarray(self._indices, np.int64)
                    for key, array in single.items():
                        with _member(archive, key) as member:
                            np.lib.format.write_array(member, array, allow_pickle=False)
                part.replace(self._path)
            except OSError as error:
                raise _unwritable(self._path, error) from None
            finally:
                part.unlink(missing_ok=True)
        return count

    def _begin(self, rows: dict[str, NDArray[Any]], single: dict[str, NDArray[Any]]) -> None:
        self._single = single
        for key, array in rows.items():
            try:
                # The stack of files closes it at the end.
                file = self._files.enter_context(tempfile.TemporaryFile(dir=self._path.parent))  # noqa: SIM115
            except OSError as error:
                raise _unwritable(self._path, error) from None
            self._rows[key] = _Rows(array.shape, array.dtype, file)

    def _must_stack(self, name: str, rows: dict[str, NDArray[Any]]) -> None:
        for key, first in self._rows.items():
            array = rows.get(key)
            if array is None or array.shape != first.shape or array.dtype != first.dtype:
                this = "is missing" if array is None else f"is {array.dtype} {list(array.shape)}"
                raise error_for(
                    "OUTPUTS_DIFFER",
                    f"The output {npz.name_of(key)} of {name} {this}, but was {first.dtype} {list(first.shape)} before, so they "
                    "cannot be stacked.",
                    "Give -o a folder for one file per sample.",
                    output=key,
                )


class _Rows:
    """The rows of one output."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], file: IO[bytes]) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.file = file

    def header(self, count: int) -> dict[str, Any]:
        """Return the .npy header for `count` rows."""
        import numpy as np

        return {
            "descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (count, *self.shape)
        }  # fmt: skip


Sink = Folder | Stack
"""Destination of the outputs of samples, which are added in order."""


def open_sink(path: Path) -> Sink:
    """Return a stack for `X.npz`, and a folder for any other path."""
    return Stack(path) if path.suffix.lower() == ".npz" and not path.is_dir() else Folder(path)


def _member(archive: zipfile.ZipFile, key: str) -> IO[bytes]:
    return archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True)


def _unwritable(path: Path, error: OSError) -> OutputUnwritable:
    return OutputUnwritable(f"{path} cannot be written: {error.strerror or error}.", "Give another -o.", path=path)
