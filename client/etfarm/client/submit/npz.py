"""Wire tensors in numpy's .npz files, for `--inputs` and `-o`.

A key is an argument's or output's name, or its position `0`, `1`, ... in flattened order (`arr_0`, as np.savez calls them,
works too); `METHOD/` before it selects the method. In a name, `/`, `%` and control characters are percent-escaped as in a URL,
and so is the dot of an ending that has a meaning in a file: the key `box%2Fscore` is the name `box/score`. A value whose type
npz lacks has a sibling key `KEY.dtype`, a string:

    bfloat16, float8_e4m3fn, float8_e5m2   KEY holds the elements' bits as uint16 or uint8
    scalar                                 KEY holds a Python bool, int or float in no dims, or nothing: None

Arrays are read and written contiguous: npz supports C and Fortran order, but not channels_last. An input with another dim
order has a sibling key `KEY.dim_order`, the dims from the outermost in memory to the innermost: channels_last is 0, 2, 3, 1.
The array itself keeps its logical shape.
"""

from __future__ import annotations

import io
import lzma
import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.errors import OutputUnwritable
from etfarm.client.submit.input_names import UNSAID, Named, by_method, order
from etfarm.wire.errors import error_for
from etfarm.wire.output_names import distinct_names
from etfarm.wire.tensors import ITEM_BYTES, Scalar, Tensor, Value, dtype_of, from_array, to_array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FOREIGN = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_SCALAR = "scalar"
DTYPE = ".dtype"
"""Suffix of the sibling key with the type of an array that npz has no type for."""

_DIM_ORDER = ".dim_order"

_ESCAPED: Final = re.compile(r"[/%\x00-\x1f\x7f-\x9f]|\.(?=(?:dtype|dim_order|npy)\Z)")
_ESCAPES: Final = re.compile(r"(?:%[0-9A-Fa-f]{2})+")


def read_named(path: Path) -> dict[str, Named]:
    """Return the values of an .npz by method and key.

    The method of a key without one, and of an empty file, is `UNSAID`. `order` checks whether the keys fit a
    program: the names are unknown until the server has compiled it.



    Raises:
        INPUT_FILE_UNREADABLE: it is missing, truncated, not an .npz, or contains Python objects.
        UNSUPPORTED_INPUT: an unsupported dtype, or a `.dtype` that does not match.
    """
    arrays = load(path)
    named: dict[str, Named] = {}
    for key, array in arrays.items():
        if key.endswith((DTYPE, _DIM_ORDER)):
            if told_of(key, arrays) is None:
                raise error_for(
                    "UNSUPPORTED_INPUT", f"{path}: {key!r} has no matching array {key.rpartition('.')[0]!r}.", path=path, key=key
                )
            continue
        method, slash, name = key.partition("/")
        method, name = (method, name) if slash else (UNSAID, key)
        dtype = arrays.get(key + DTYPE)
        name = name_of(name)
        value = value_of_entry(path, key, name, array, dtype)
        if (dim_order := arrays.get(key + _DIM_ORDER)) is not None:
            value = _laid_out(path, key, value, dim_order)
        named.setdefault(method, {})[name] = value
    return named or {UNSAID: {}}


def read_samples(path: Path, *, batched: bool = False) -> Iterator[dict[str, Named]]:
    """Yield several samples one by one.

    They are each .npz of a folder, by file name, or with `batched` each index of axis 0 of a file.

    A batched tensor loses axis 0; a scalar is repeated for every sample. A file that is not batched is one sample.

    Raises:
        INPUT_FILE_UNREADABLE: the folder has no .npz files, or as `read_named`.
        UNSUPPORTED_INPUT: batched arrays differ in length, or as `read_named`.
    """
    return (sample for _, sample in labelled_samples(path, batched=batched))


def labelled_samples(path: Path, *, batched: bool = False) -> Iterator[tuple[str, dict[str, Named]]]:
    """Yield each sample of `read_samples` with its name for errors: the file's name, and its index in a batch."""
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise error_for(
                "INPUT_FILE_UNREADABLE", f"The folder {path} has no .npz file.", "Each sample is one file.", path=path
            )
    else:
        files = [path]
    for file in files:
        named = read_named(file)
        if not batched:
            yield file.name, named
        else:
            yield from ((f"{file.name}[{place}]", sample) for place, sample in enumerate(split(str(file), named)))


def read_inputs(path: Path, methods: Mapping[str, Sequence[str]]) -> dict[str, list[Value]]:
    """Return the inputs of each method that the file has keys for, in the order of the names in `methods`.

    Raises:
        UnknownInput, InputMissing, DuplicateInput: the keys do not fit.
        INPUT_FILE_UNREADABLE, UNSUPPORTED_INPUT: see `read_named`.
    """
    named = read_named(path)
    return {method: order(values, methods[method], method) for method, values in by_method(named, methods).items()}


def write_outputs(
    path: Path,
    outputs: Mapping[str, Sequence[Value]],
    names: Mapping[str, Sequence[str]] | None = None,
    *,
    with_dim_orders: bool = False,
) -> None:
    """Write values to exactly `path`, in the form that `read_named` reads.

    Keys start with `METHOD/` if there are several methods. `names` are the output names by method, in order; an output has its
    position where they are not unique.

    Args:
        with_dim_orders: write `KEY.dim_order` for values that are not contiguous; inputs need it, outputs do not.

    Raises:
        OutputUnwritable: the file cannot be written; an earlier file is replaced only on success.
    """
    import numpy as np

    buffer = io.BytesIO()
    # Write the archive here: np.savez takes arrays as keyword arguments, so no array can be named "file".
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for key, array in entries(outputs, names or {}, with_dim_orders=with_dim_orders):
            # Use the default date of ZipInfo, so that equal values give equal bytes.
            with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
    try:
        path.write_bytes(buffer.getbuffer())
    except OSError as error:
        raise OutputUnwritable(f"{path} cannot be written: {error.strerror or error}.", "Give another -o.", path=path) from None


def key_of(name: str) -> str:
    """Return the key of a name, in which characters with a meaning in files are percent-escaped."""
    return _ESCAPED.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), name)


def name_of(key: str) -> str:
    """Return the name of a key without `METHOD/`; escapes that are not UTF-8 stay as they are."""

    def decoded(match: re.Match[str]) -> str:
        try:
            return bytes.fromhex(match[0].replace("%", "")).decode()
        except UnicodeDecodeError:
            return match[0]

    return _ESCAPES.sub(decoded, key)


def told_of(key: str, keys: Collection[str]) -> str | None:
    """Return the key of `keys` that the sibling key `key` describes; None if `key` is not a sibling."""
    base = key.removesuffix(DTYPE).removesuffix(_DIM_ORDER)
    return base if base != key and base in keys else None


_DEFLATE_RATIO: Final = 1032
"""Maximum number of bytes that one byte of deflate expands to. Source: zlib's technical details."""

_UNREADABLE: Final = (
    OSError, ValueError, TypeError, EOFError, KeyError, MemoryError, OverflowError, SyntaxError, RecursionError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError,
    # Raised by zipfile for a compression or an encryption that it does not support.
    NotImplementedError, RuntimeError,
)  # fmt: skip


def load(path: Path) -> dict[str, NDArray[Any]]:
    """Return all arrays of an .npz by key.

    Raises:
        INPUT_FILE_UNREADABLE: it is missing, truncated, not an .npz, or contains Python objects.
    """
    import numpy as np

    again = "Write it with numpy.savez(path, name=array, ...)."
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise error_for("INPUT_FILE_UNREADABLE", f"{path} is one .npy array, not an .npz.", again, path=path)
        with loaded:
            size = path.stat().st_size
            for info in loaded.zip.infolist():
                _check_entry(loaded.zip, info, size)
            return {key: loaded[key] for key in loaded.files}
    except FileNotFoundError:
        raise error_for("INPUT_FILE_UNREADABLE", f"There is no file {path}.", again, path=path) from None
    except _UNREADABLE as error:
        if "allow_pickle" in str(error):
            what = "it is not an .npz, or holds Python objects, which are never loaded"
        else:
            what = str(error).strip().rstrip(".") or type(error).__name__
        raise error_for("INPUT_FILE_UNREADABLE", f"{path} cannot be read: {what}.", again, path=path) from None


def _check_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, archive_bytes: int) -> None:
    """Refuse an array whose header announces more bytes than the entry holds: numpy would allocate them before it reads.

    Args:
        archive_bytes: size of the whole file.

    Raises:
        ValueError: the entry is too short, or its header is not that of a plain array.
    """
    import numpy as np

    ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _DEFLATE_RATIO}.get(info.compress_type)
    if ratio is None:
        raise ValueError(f"{info.filename} uses a compression that numpy does not write")
    if info.header_offset + info.compress_size > archive_bytes:
        raise ValueError(f"{info.filename} ends behind the file")
    most = min(info.file_size, ratio * info.compress_size)
    with archive.open(info) as file:
        if file.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            return  # not an array: numpy returns its bytes
        file.seek(0)
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"{info.filename} is of numpy's format {version[0]}.{version[1]}, which plain arrays do not use")
        shape, _, dtype = read(file)
        needed = math.prod(shape) * dtype.itemsize
        if needed > most or min(shape, default=0) < 0:
            raise ValueError(f"{info.filename} says {needed} bytes of {dtype.name} {list(shape)[:8]}, and has at most {most}")


def _laid_out(path: Path, key: str, value: Value, dim_order: NDArray[Any]) -> Tensor:
    """Return the same elements with their bytes in the order of the sibling key."""
    order = tuple(int(dim) for dim in dim_order.reshape(-1)) if dim_order.dtype.kind in "iu" else ()
    if not isinstance(value, Tensor) or sorted(order) != list(range(len(value.shape))):
        raise error_for(
            "UNSUPPORTED_INPUT",
            f"{path}: {key + _DIM_ORDER!r} is not an order of the dims of {key!r}.",
            "Give each dim once, outermost in memory first: channels_last is 0, 2, 3, 1.",
            path=path,
            key=key,
        )
    return from_array(value.name, to_array(value), order)


def value_of_entry(path: Path, key: str, name: str, array: NDArray[Any], dtype_entry: NDArray[Any] | None) -> Value:
    """Return the array of a key as the value `name`; `dtype_entry` is its sibling `KEY.dtype`.

    Raises:
        UNSUPPORTED_INPUT: an unsupported dtype, or a `.dtype` that does not match.
    """
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise error_for(
            "INPUT_FILE_UNREADABLE", f"{path}: {key!r} is not an array.", "Write it with numpy.savez.", path=path, key=key
        )
    if dtype_entry is not None:
        dtype = str(dtype_entry.reshape(-1)[0]) if isinstance(dtype_entry, np.ndarray) and dtype_entry.size == 1 else ""
        if dtype == _SCALAR and (array.size == 0 or (array.ndim == 0 and array.dtype.kind in "biuf")):
            return Scalar(name, array.item() if array.size else None)
        if dtype in _FOREIGN and array.dtype.itemsize == ITEM_BYTES[dtype] and array.dtype.kind in "uiV":
            bits = np.ascontiguousarray(array).reshape(array.shape)
            return from_array(name, bits.view(dtype_of(dtype)))
        if dtype not in ITEM_BYTES or dtype != array.dtype.name:
            raise error_for(
                "UNSUPPORTED_INPUT",
                f"{path}: {key + DTYPE!r} says {dtype or 'nothing'!r}, but {key!r} holds {array.dtype.name}.",
                f"It marks {', '.join(_FOREIGN)}, stored as uint16 or uint8, and {_SCALAR!r}.",
                path=path, key=key, dtype=dtype, held=array.dtype.name,
            )  # fmt: skip
    if array.dtype.name not in ITEM_BYTES:
        is_raw = array.dtype.kind == "V" and array.dtype.itemsize in (1, 2)
        raise error_for(
            "UNSUPPORTED_INPUT",
            f"{path}: {key!r} has the dtype {array.dtype.name}, which no program accepts.",
            f"If these are {' or '.join(_FOREIGN)}, name the dtype in a key {key + DTYPE!r}."
            if is_raw
            else f"The dtypes are {', '.join(ITEM_BYTES)}.",
            path=path,
            key=key,
            dtype=array.dtype.name,
        )
    return from_array(name, array.astype(array.dtype.newbyteorder("<"), copy=False))


def split(path: str, named: Mapping[str, Named]) -> Iterator[dict[str, Named]]:
    """Yield the samples of a batch: each index of axis 0 of every tensor.

    A scalar is repeated for every sample.

    Args:
        path: the batch's name for errors.

    Raises:
        UNSUPPORTED_INPUT: a tensor has no axis 0, or the lengths within a method differ.
    """
    counts: dict[str, int] = {}
    for method, values in named.items():
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            if not value.shape:
                key = f"{method}/{name}" if method else name
                raise error_for(
                    "UNSUPPORTED_INPUT",
                    f"{path}: {key!r} has no axis 0 to take samples from.",
                    "Leave out --batched.",
                    path=path,
                    key=key,
                )
        if len({value.shape[0] for value in tensors.values()}) > 1:
            shown = ", ".join(f"{name} {value.shape[0]}" for name, value in tensors.items())
            raise error_for(
                "UNSUPPORTED_INPUT",
                f"{path}: axis 0 has several lengths: {shown}.",
                "Give all keys of a method the same number of samples.",
                path=path,
            )
        counts[method] = next((value.shape[0] for value in tensors.values()), 1)
    for index in range(max(counts.values(), default=0)):
        yield {
            method: {name: _at(value, index) for name, value in values.items()}
            for method, values in named.items()
            if index < counts[method]
        }


def _at(value: Value, index: int) -> Value:
    if isinstance(value, Scalar):
        return value
    order = tuple(dim - 1 for dim in value.dim_order if dim)
    return from_array(value.name, to_array(value)[index], order)


def entries(
    outputs: Mapping[str, Sequence[Value]], names: Mapping[str, Sequence[str]], *, with_dim_orders: bool = False
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield the keys that `write_outputs` writes, including sibling keys, with their arrays."""
    import numpy as np

    for method, values in outputs.items():
        prefix = f"{method}/" if len(outputs) > 1 else ""
        output_names = distinct_names([*names.get(method, ()), *[""] * len(values)][: len(values)])
        for name, value in zip(output_names, values, strict=True):
            key = prefix + key_of(name)
            if isinstance(value, Scalar):
                yield key, np.asarray(value.value) if value.value is not None else np.empty(0)
                yield key + DTYPE, np.asarray(_SCALAR)
                continue
            if value.dtype in _FOREIGN:
                bits = np.uint16 if ITEM_BYTES[value.dtype] == 2 else np.uint8
                yield key, np.ascontiguousarray(to_array(value)).reshape(value.shape).view(bits)
                yield key + DTYPE, np.asarray(value.dtype)
            else:
                yield key, np.ascontiguousarray(to_array(value)).reshape(value.shape)
            if with_dim_orders and not value.is_contiguous:
                yield key + _DIM_ORDER, np.asarray(value.dim_order)
