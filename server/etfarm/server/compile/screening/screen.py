"""Looks at a user's bytes before anything loads them. Stdlib only: runs in the daemon, and again in the child.

The daemon asks `screen_upload`, which parses nothing large: a hostile graph may cost fifty times its bytes in memory. The
child, whose memory is limited, asks `screen_pt2` and `screen_records` for everything before torch loads anything.

`torch.export.load` executes what a .pt2 says in more ways than one; each is closed here:

- pickles: sample inputs fall back to a full unpickle, as do weights and constants marked `use_pickle` and the older
  layout's .pt files. Only pickles whose every opcode and global a plain tensor needs pass.
- `opaque_obj_*` and `custom_obj_*` constants are unpickled, AOTInductor's members are shared objects that get loaded.
- `expr_str` goes to sympy's sympify, `guards_code` to exec: see `expressions`.
- node targets, and operators given as arguments, are looked up by getattr from `torch` and `operator`: only those on the list
  pass, at every depth of the graph (see `operators`). `source_fn_stack` is looked up in the same way: only plain paths pass.
- treespecs import modules for enums and default factories: see `expressions.check_tree`.
- names of nodes, arguments and parameters are pasted into the Python source that torch.fx generates and executes.

The jail stays the boundary; this keeps everything known from getting that far.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from etfarm.server.compile.screening import expressions, operators, payloads, pickles
from etfarm.server.compile.screening.archives import Opened, Records, pt2_records, tensor_records
from etfarm.server.compile.screening.errors import NotAPt2, NotAPte, TruncatedProgram, UnsafeModel

MAX_JSON_BYTES: Final = 512 << 20
"""Largest archived JSON; a large language model's graph has some ten megabytes."""
UPLOAD_PARSED_BYTES: Final = 2 << 20
"""Largest sum of the JSON and sample inputs that the daemon itself looks into. Of 190 common networks four in five have less;
parsing more would hold up the whole daemon for too long."""
UPLOAD_EXPRESSION_BYTES: Final = 256 << 10
"""Largest sum of the different expressions that the daemon itself parses: half a second."""

_Check = Callable[[str, str], None]
"""Looks at one text of a member; raises for what must not be there."""


@dataclass(frozen=True)
class _Rules:
    """How closely members are looked at."""

    allowed: frozenset[str]
    """Targets that nodes may have."""
    expression_bytes: int | None
    """Expressions and guards that are parsed at most, None for any: what goes beyond is left to the child."""


_Screen = Callable[[str, Records, Opened, _Rules], None]
"""Looks into one member."""


def screen_upload(path: Path, allowed: frozenset[str] | None = None) -> None:
    """`screen_pt2` for the daemon: what would cost much to parse is left to the child, which screens all of it again.

    Raises:
        NotAPt2, UnsafeModel, UnknownOperator: as `screen_pt2`.
    """
    screen_pt2(path, allowed, at_most_bytes=UPLOAD_PARSED_BYTES)


def screen_pt2(path: Path, allowed: frozenset[str] | None = None, *, at_most_bytes: int | None = None) -> None:
    """Refuses a file that is no .pt2, or whose loading could execute code.

    Reads only the JSON and the pickles, not the weights.

    Args:
        allowed: targets that nodes may have; those of the committed list when None.
        at_most_bytes: of JSON and pickles; where there are more, none is read and only the directory is checked.

    Raises:
        NotAPt2: no zip, or not with a .pt2's members.
        UnsafeModel: something in it is, or may be, code, or it uses an operator that is on no list; the sentence says what
            and where.
        UnknownOperator: it uses an operator of a library that the server does not load.
        EdgeDialectProgram: it was lowered already.
    """
    with pt2_records(path) as records:
        screen_records(records, allowed=allowed, at_most_bytes=at_most_bytes)


def screen_records(
    records: Records,
    opened: Opened | None = None,
    *,
    allowed: frozenset[str] | None = None,
    at_most_bytes: int | None = None,
) -> None:
    """The same over an archive's members; the child calls it with torch's own reader, which may see other ones.

    Args:
        opened: gives the members of a torch.save file by its name and bytes; zipfile's when None.
        allowed: as in `screen_pt2`.
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
    rules = _Rules(
        operators.builtin() if allowed is None else allowed, None if at_most_bytes is None else UPLOAD_EXPRESSION_BYTES
    )
    for name, screen in parsed:
        screen(name, records, opened or tensor_records, rules)


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


def _screen_samples(name: str, records: Records, opened: Opened, rules: _Rules) -> None:
    data = records.read(name)
    if data:  # none: a program without example inputs
        screen_tensor_records(name, opened(name, data))


def _screen_payloads(name: str, records: Records, opened: Opened, rules: _Rules) -> None:
    """Weights or constants by name: raw tensors only, in this archive's own members."""
    config = _json(name, records)
    for key, text in _strings(config):
        if key == "expr_str":
            expressions.check_symbol(text, name)
        elif key == "":
            expressions.check_path(text, name)
    payloads.check(name, config, records.sizes)


def _screen_program(name: str, records: Records, opened: Opened, rules: _Rules) -> None:
    program = _json(name, records)
    if not isinstance(program, dict) or not isinstance(program.get("graph_module"), dict):
        raise NotAPt2(f"{name} is no exported program")
    target = partial(expressions.check_target, allowed=rules.allowed)
    checks: dict[str, _Check] = {**_CHECKS, "target": target, "as_operator": target}
    parsed = set()
    for key, text in _strings(program):
        if key in _PARSED:
            parsed.add((key, text))  # a program repeats its sizes in every node
        else:
            checks.get(key, expressions.check_name)(text, name)
    if rules.expression_bytes is None or sum(len(text) for _, text in parsed) <= rules.expression_bytes:
        for key, text in sorted(parsed):
            _PARSED[key](text, name)
    if _has_objects(program):
        raise UnsafeModel("CODE_CONSTANT", name, "uses script objects, whose loading runs code")
    expressions.check_verifiers(program.get("verifiers", []), name)


def _accept(text: str, where: str) -> None:
    """For texts that torch keeps, compares, or pastes as their repr()."""


_PARSED: Final[dict[str, _Check]] = {"expr_str": expressions.check_symbol, "guards_code": expressions.check_guard}
"""What Python's parser is needed for, which takes microseconds a character."""
_CHECKS: Final[dict[str, _Check]] = {
    "in_spec": expressions.check_tree,
    "out_spec": expressions.check_tree,
    "fqn": expressions.check_path,
    "parameter_name": expressions.check_path,
    "buffer_name": expressions.check_path,
    "tensor_constant_name": expressions.check_path,
    "as_float": expressions.check_float,
    "as_floats": expressions.check_float,
    "range_constraints": expressions.check_range,
    "name": expressions.check_identifier,
    "as_name": expressions.check_identifier,
    "source_fn_stack": expressions.check_functions,
    "torch_version": _accept,
    "metadata": _accept,  # stack traces and module paths
    "as_string": _accept,
    "as_strings": _accept,
}
"""What is checked of the string, or of each in the list, right under a key, beside operators. Every other string must be a
name."""


_FIELDS: Final = frozenset({*_CHECKS, *_PARSED, "target"})


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
                isinstance(inner, str) and (key == "source_fn_stack" or key not in _FIELDS) and not key.startswith("as_")
                for key, inner in found.items()
            )
            for key, inner in found.items():
                yield (above if texts or above == "range_constraints" else ""), key
                stack.append(("metadata" if texts and key != "source_fn_stack" else key, inner))


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
        # Decoded first, as torch does: of bytes, json would guess the encoding.
        parsed: object = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise NotAPt2(f"{name} is no JSON ({error})") from None
    return parsed
