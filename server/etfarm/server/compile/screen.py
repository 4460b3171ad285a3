"""Looks at a user's bytes before anything loads them. Stdlib only: runs in the daemon, and again in the child.

The daemon asks `screen_upload`, which parses nothing large: a hostile graph may cost fifty times its bytes in memory. The
child, whose memory is limited, asks `screen_pt2` and `screen_records` for everything before torch loads anything.

`torch.export.load` executes what a .pt2 says in more ways than one; each is closed here:

- pickles: sample inputs fall back to a full unpickle, as do weights and constants marked `use_pickle` and the older
  layout's .pt files. Only pickles whose every opcode and global a plain tensor needs pass.
- `opaque_obj_*` and `custom_obj_*` constants are unpickled, AOTInductor's members are shared objects that get loaded.
- `expr_str` goes to sympy's sympify, `guards_code` to exec: see `expressions`.
- node targets are looked up by getattr from `torch` and `operator`; only torch's verifier stands behind that.
- names of nodes, arguments and parameters are pasted into the Python source that torch.fx generates and executes.

The jail stays the boundary; this keeps everything known from getting that far.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from etfarm.server.compile import expressions, pickles
from etfarm.server.compile.refusals import NotAPt2, NotAPte, TruncatedProgram, UnsafeModel

MAX_MEMBERS: Final = 100_000
MAX_DIRECTORY_BYTES: Final = 32 << 20
MAX_JSON_BYTES: Final = 512 << 20
"""Largest archived JSON; a large language model's graph has some ten megabytes."""
MAX_BYTES: Final = 64 << 30
"""Largest sum of the members' unpacked sizes."""
UPLOAD_PARSED_BYTES: Final = 8 << 20
"""Largest sum of the JSON and sample inputs that the daemon itself looks into; 53 convolutions with norms have 0.5 MB."""

_ONLY_STORED: Final = zipfile.ZIP_STORED


@dataclass(frozen=True)
class Records:
    """An archive's members without its root folder, however they are read."""

    names: tuple[str, ...]
    read: Callable[[str], bytes]
    sizes: Mapping[str, int] = field(default_factory=dict)
    """What `read` gives at most; empty where the reader does not say."""


Opened = Callable[[str, bytes], Records]
"""Gives the members of a torch.save file by its name and bytes."""
_Screen = Callable[[str, Records, Opened], None]


def screen_upload(path: Path) -> None:
    """`screen_pt2` for the daemon: what would cost much to parse is left to the child, which screens all of it again.

    Raises:
        NotAPt2, UnsafeModel, UnknownOperator: as `screen_pt2`.
    """
    screen_pt2(path, at_most_bytes=UPLOAD_PARSED_BYTES)


def screen_pt2(path: Path, at_most_bytes: int | None = None) -> None:
    """Refuses a file that is no .pt2, or whose loading could execute code.

    Reads only the JSON and the pickles, not the weights.

    Args:
        at_most_bytes: of JSON and pickles; where there are more, none is read and only the directory is checked.

    Raises:
        NotAPt2: no zip, or not with a .pt2's members.
        UnsafeModel: something in it is, or may be, code; the sentence says what and where.
        UnknownOperator: it uses an operator that the server does not load.
        EdgeDialectProgram: it was lowered already.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        _check_ends(file.read(4), _tail(file, size, _END_BYTES))
        try:
            _check_directory(file, size)
            with zipfile.ZipFile(file) as archive:
                screen_records(_records(archive, size), at_most_bytes=at_most_bytes)
        except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError) as error:
            raise NotAPt2(f"its zip directory cannot be read ({error})") from None


def screen_records(records: Records, opened: Opened | None = None, *, at_most_bytes: int | None = None) -> None:
    """The same over an archive's members; the child calls it with torch's own reader, which may see other ones.

    Args:
        opened: gives the members of a torch.save file by its name and bytes; zipfile's when None.
        at_most_bytes: as in `screen_pt2`; needs the records' sizes.

    Raises:
        NotAPt2, UnsafeModel, UnknownOperator: as in `screen_pt2`.
    """
    names = set(records.names)
    for needed in ("archive_format", "archive_version", "models/model.json"):
        if needed not in names:
            raise NotAPt2(f"it has no {needed}")
    if records.sizes.get("archive_format", 3) != 3 or records.read("archive_format") != b"pt2":
        raise NotAPt2("its archive_format is another")
    parsed = [(name, screen) for name in records.names if (screen := _screen_of(name)) is not None]
    if at_most_bytes is not None and sum(records.sizes[name] for name, _ in parsed) > at_most_bytes:
        return
    for name, screen in parsed:
        screen(name, records, opened or tensor_records)


def screen_pte(path: Path) -> None:
    """Refuses a file that is no .pte, or not a whole one.

    Raises:
        NotAPte: the flatbuffer identifier is not ExecuTorch's.
        TruncatedProgram: the file is shorter than its extended header says.
    Source: executorch/exir/_serialize/_program.py, _ExtendedHeader.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(40)
    if len(head) < 8 or head[4:6] != b"ET":
        raise NotAPte("its identifier is not ExecuTorch's")
    if head[4:8] != b"ET12":
        raise NotAPte(f"its format is {head[4:8].decode(errors='replace')}, and this version reads ET12")
    if head[8:12] != b"eh00":
        # Without the extended header the whole file is the flatbuffer, whose own verifier looks for its end.
        return
    if len(head) < 40:
        raise TruncatedProgram(40, size)
    length, program, segments, segment_bytes = struct.unpack("<I3Q", head[12:40])
    if length < 24:
        raise NotAPte(f"its extended header of {length} bytes is too short")
    segment_bytes = segment_bytes if length >= 32 else 0
    needed = max(program, segments + segment_bytes)
    if needed > size:
        raise TruncatedProgram(needed, size)


def _screen_of(name: str) -> _Screen | None:
    """What looks into a member; None for raw data, into which nothing has to look.

    Raises:
        UnsafeModel: no such member has a place in a .pt2.
    """
    folder, _, file = name.rpartition("/")
    if folder == "models":
        if not file.endswith(".json"):
            raise UnsafeModel("UNKNOWN_MEMBER", name, "is no exported program's JSON")
        return _screen_program
    if folder == "data/sample_inputs":
        return _screen_samples
    if folder in ("data/weights", "data/constants"):
        if file.startswith(("opaque_obj_", "custom_obj_")):
            raise UnsafeModel("CODE_CONSTANT", name, "is an object whose loading runs code")
        if file.endswith("_config.json"):
            return _screen_payloads
        if file.endswith(".pt"):
            raise UnsafeModel("PICKLED_WEIGHTS", name, "is a pickle of the older layout")
    elif folder == "" or name.startswith((".data/", "extra/")):
        if folder == "" and file not in _TOP:
            raise UnsafeModel("UNKNOWN_MEMBER", name, "is not known in a .pt2")
    else:  # data/aotinductor/ above all
        raise UnsafeModel("UNKNOWN_MEMBER", name, "is not known in a .pt2, or is native code")
    return None


_TOP: Final = frozenset({"archive_format", "archive_version", "byteorder", "version"})


def _screen_samples(name: str, records: Records, opened: Opened) -> None:
    data = records.read(name)
    if data:  # none: a program without example inputs
        screen_tensor_records(name, opened(name, data))


def _screen_payloads(name: str, records: Records, opened: Opened) -> None:
    """Weights or constants by name: raw tensors only, in this archive's own members."""
    config = _json(name, records)
    if not isinstance(config, dict) or not isinstance(config.get("config"), dict):
        raise NotAPt2(f"{name} is no payload config")
    for payload in config["config"].values():
        if not isinstance(payload, dict):
            raise NotAPt2(f"{name} is no payload config")
        if payload.get("use_pickle"):
            raise UnsafeModel("PICKLED_WEIGHTS", name, "has tensors of a subclass, which are unpickled")
        file = payload.get("path_name")
        if not isinstance(file, str) or not file.startswith(("weight_", "tensor_")) or "/" in file:
            raise UnsafeModel("CODE_CONSTANT", name, f"names {str(file)[:80]!r}, which is no plain tensor")
    for key, text in _strings(config):
        if key == "expr_str":
            expressions.check_symbol(text, name)


def _screen_program(name: str, records: Records, opened: Opened) -> None:
    program = _json(name, records)
    if not isinstance(program, dict) or not isinstance(program.get("graph_module"), dict):
        raise NotAPt2(f"{name} is no exported program")
    for key, text in _strings(program):
        _CHECKS.get(key, expressions.check_name)(text, name)
    if _has_objects(program):
        raise UnsafeModel("CODE_CONSTANT", name, "uses script objects, whose loading runs code")


def _accept(text: str, where: str) -> None:
    """For texts that torch keeps, compares, or pastes as their repr()."""


_CHECKS: Final[dict[str, Callable[[str, str], None]]] = {
    "expr_str": expressions.check_symbol,
    "guards_code": expressions.check_guard,
    "target": expressions.check_target,
    "as_operator": expressions.check_target,
    "in_spec": expressions.check_tree,
    "out_spec": expressions.check_tree,
    "fqn": expressions.check_path,
    "range_constraints": expressions.check_range,
    "torch_version": _accept,
    "metadata": _accept,  # stack traces and module paths
    "as_string": _accept,
    "as_strings": _accept,
}
"""What is checked of the string, or of each in the list, right under a key. Every other string must be a name."""


def _strings(value: object) -> Iterator[tuple[str, str]]:
    """Every string of a JSON value, with the key right above it; a key is a string under "" itself.

    The two dicts whose keys or values are free: `range_constraints` has expressions for keys, and `metadata` texts for
    values, as long as all are texts. A tensor may be called "metadata" as well: its dict is looked at like any other.
    """
    stack: list[tuple[str, object]] = [("", value)]
    while stack:
        above, found = stack.pop()
        if isinstance(found, str):
            yield above, found
        elif isinstance(found, list):
            stack.extend((above if isinstance(inner, str) else "", inner) for inner in found)
        elif isinstance(found, dict):
            texts = above == "metadata" and all(
                isinstance(inner, str) and key not in _CHECKS and not key.startswith("as_") for key, inner in found.items()
            )
            for key, inner in found.items():
                yield (above if texts or above == "range_constraints" else ""), key
                stack.append(("metadata" if texts else key, inner))


def _has_objects(program: object) -> bool:
    stack = [program]
    while stack:
        found = stack.pop()
        if isinstance(found, list):
            stack.extend(found)
        elif isinstance(found, dict):
            if found.get("custom_obj_values") or found.get("as_custom_obj") or found.get("custom_obj"):
                return True
            stack.extend(found.values())
    return False


def tensor_records(name: str, data: bytes) -> Records:
    """The members of a torch.save file, a zip with one pickle of plain tensors.

    Raises:
        UnsafeModel: it is none, so that torch.load would fall back to unpickling it.
    """
    _check_ends(data[:4], data[-_END_BYTES:], name)
    try:
        _check_directory(io.BytesIO(data), len(data))
        # The archive stays open with what reads from it.
        return _records(zipfile.ZipFile(io.BytesIO(data)), len(data))
    except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, NotAPt2):
        raise UnsafeModel("NOT_WEIGHTS_ONLY", name, "is no torch.save file, so it would be unpickled") from None


def screen_tensor_records(name: str, records: Records) -> None:
    """The members of a torch.save file.

    Raises:
        UnsafeModel: its pickle is more than plain tensors, or it is a TorchScript archive.
    """
    for member in records.names:
        if member == "data.pkl":
            pickles.check(records.read(member), f"{name}:{member}")
        elif not member.startswith(("data/", ".data/")) and member not in _TENSOR_FILE:
            raise UnsafeModel("NOT_WEIGHTS_ONLY", f"{name}:{member}", "is not known in a torch.save file")
    if "data.pkl" not in records.names:
        raise UnsafeModel("NOT_WEIGHTS_ONLY", name, "has no data.pkl")


_TENSOR_FILE: Final = frozenset({"version", "byteorder", ".format_version", ".storage_alignment"})


def _json(name: str, records: Records) -> object:
    data = records.read(name)
    if len(data) > MAX_JSON_BYTES:
        raise UnsafeModel("TOO_LARGE", name, f"has {len(data)} bytes")
    try:
        parsed: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotAPt2(f"{name} is no JSON ({error})") from None
    return parsed


def _records(archive: zipfile.ZipFile, size: int) -> Records:
    """The members of a zip as every reader sees them: one root, no two of a name, nothing packed, nothing in front."""
    members = archive.infolist()
    if not members:
        raise NotAPt2("it is an empty zip")
    if min(member.header_offset for member in members) != 0:
        raise UnsafeModel("AMBIGUOUS_ZIP", "its first byte", "is not its first member's")
    if any(member.filename == "serialized_exported_program.json" for member in members):
        raise NotAPt2(
            "it is of a torch before 2.8, or the edge-dialect program of executorch.exir.serde, and ATen dialect is wanted"
        )
    root = members[0].filename.partition("/")[0] + "/"
    seen: set[str] = set()
    sizes: dict[str, int] = {}
    total = 0
    for member in members:
        name = member.filename
        inner = name.removeprefix(root)
        if not name.startswith(root) or not inner or ".." in inner.split("/") or "\\" in name or "\0" in name:
            raise UnsafeModel("AMBIGUOUS_ZIP", name[:100], f"does not lie in {root[:60]}")
        if inner.lower() in seen:
            raise UnsafeModel("AMBIGUOUS_ZIP", name[:100], "is there twice")
        if member.compress_type != _ONLY_STORED or member.file_size != member.compress_size:
            raise UnsafeModel("AMBIGUOUS_ZIP", name[:100], "is packed, which torch never does")
        if member.flag_bits & 0x1:
            raise UnsafeModel("AMBIGUOUS_ZIP", name[:100], "is encrypted")
        total += member.file_size
        if member.header_offset + member.file_size > size or total > min(MAX_BYTES, size):
            raise UnsafeModel("TOO_LARGE", name[:100], "says that it is larger than the file")
        seen.add(inner.lower())
        sizes[inner] = member.file_size

    def read(inner: str) -> bytes:
        with archive.open(root + inner) as member:
            return member.read(sizes[inner])

    return Records(tuple(sizes), read, sizes)


def _tail(file: BinaryIO, size: int, count: int) -> bytes:
    """The last `count` bytes, fewer where there are not as many; the file is back at its start then."""
    file.seek(max(0, size - count))
    tail = file.read(count)
    file.seek(0)
    return tail


_END_BYTES: Final = 22
_LOCATOR_BYTES: Final = 20
_END64_BYTES: Final = 56


def _check_directory(file: BinaryIO, size: int) -> None:
    """Bounds what zipfile makes objects of: it takes the directory's size, and not its count, from the archive's end.

    Source: APPNOTE.TXT, 4.3.14 to 4.3.16.

    Raises:
        NotAPt2: the directory does not lie right before the end records.
        UnsafeModel: it is too large.
    """
    ends = _tail(file, size, _END64_BYTES + _LOCATOR_BYTES + _END_BYTES)
    length, start = struct.unpack("<2I", ends[-10:-2])
    end = size - _END_BYTES
    if ends[:-_END_BYTES][-_LOCATOR_BYTES:][:4] == b"PK\x06\x07":
        if ends[:4] != b"PK\x06\x06":
            raise NotAPt2("its zip directory cannot be found")
        length, start = struct.unpack("<2Q", ends[40:56])
        end = size - len(ends)
    if start + length != end:
        raise NotAPt2("its zip directory cannot be found")
    if length > MAX_DIRECTORY_BYTES:
        raise UnsafeModel("TOO_LARGE", "its directory", f"has {length} bytes")
    file.seek(start)
    count = file.read(length).count(b"PK\x01\x02")
    file.seek(0)
    if count > MAX_MEMBERS:
        raise UnsafeModel("TOO_LARGE", "its directory", f"has {count} members")


def _check_ends(head: bytes, tail: bytes, where: str = "") -> None:
    """A zip that begins with its first member and ends with its end record: no two readers find other directories."""
    if head == b"PK\x03\x04" and tail[:4] == b"PK\x05\x06" and tail[-2:] == b"\0\0":
        return
    if where:
        raise UnsafeModel("NOT_WEIGHTS_ONLY", where, "is no torch.save file, so it would be unpickled")
    raise NotAPt2("it is no zip, or not a whole one")
