"""Screening of a user's bytes before anything loads them. Stdlib only: runs in children, never in the daemon.

The child at the upload calls `screen_upload`, which parses nothing large, so that a submission does not wait. The one that
compiles screens everything with `screen_pt2` and `screen_records` before torch loads anything. Their memory is limited: a hostile
graph may take fifty times its bytes.

`torch.export.load` can execute contents of a .pt2 in several ways; each is prevented here:

- pickles: sample inputs fall back to a full unpickle, as do weights and constants marked `use_pickle` and the older
  layout's .pt files. A pickle passes only if a plain tensor needs all of its opcodes and globals.
- `opaque_obj_*` and `custom_obj_*` constants are unpickled; AOTInductor's members are shared objects that are loaded.
- `expr_str` is passed to sympy's sympify, `guards_code` to exec: see `expressions`.
- node targets, and operators as arguments, are looked up with getattr from `torch` and `operator`: only those on the list
  pass, at every depth of the graph (see `operators`). `source_fn_stack` is looked up likewise: only plain paths pass.
- treespecs import modules for enums and default factories: see `expressions.check_tree`.
- names of nodes, arguments and parameters are pasted into the Python source that torch.fx generates and executes.

The jail remains the security boundary; screening stops all known attacks before they reach it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from etfarm.server.compile.screening import expressions, operators, payloads, pickles
from etfarm.server.compile.screening.archives import Opened, Records, pt2_records, tensor_records
from etfarm.server.compile.screening.errors import NotAPt2, OperatorNotAllowed, TruncatedProgram, UnsafeModel, not_a_pte
from etfarm.server.graphs.sources import source_of
from etfarm.wire import pte

MAX_JSON_BYTES: Final = 512 << 20
"""Maximum size of an archived JSON; a large language model's graph has about ten megabytes."""
UPLOAD_PARSED_BYTES: Final = 2 << 20
"""Maximum total size of the JSON and sample inputs that are screened at the upload. Four in five of 190 common networks have
less; parsing more would delay the submission for too long."""
UPLOAD_EXPRESSION_BYTES: Final = 256 << 10
"""Maximum total size of the distinct expressions that are parsed at the upload, which takes half a second."""

_MAX_TRACE: Final = 10_000
"""Maximum number of characters of a stack trace that is read for a message."""

_Check = Callable[[str, str], None]
"""Function that checks one text of a member and raises if it is not allowed."""


@dataclass(frozen=True)
class _Rules:
    """The rules that members are screened by."""

    allowed: frozenset[str]
    """Targets that nodes may use."""
    expression_bytes: int | None
    """Maximum size of parsed expressions and guards, None for no maximum; larger ones are left to the child."""


_Screen = Callable[[str, Records, Opened, _Rules], None]
"""Function that screens one member."""


def screen_upload(path: Path, allowed: frozenset[str] | None = None) -> None:
    """Screen an uploaded .pt2. Contents that are expensive to parse are left to the child that compiles, which screens it again.

    Raises:
        NotAPt2, UnsafeModel, UNKNOWN_OPERATOR: as `screen_pt2`.
    """
    screen_pt2(path, allowed, at_most_bytes=UPLOAD_PARSED_BYTES)


def screen_pt2(path: Path, allowed: frozenset[str] | None = None, *, at_most_bytes: int | None = None) -> None:
    """Refuse a file that is not a .pt2, or whose loading could execute code.

    Reads only the JSON and the pickles, not the weights.

    Args:
        allowed: targets that nodes may use; those of the committed list when None.
        at_most_bytes: maximum size of JSON and pickles; if they are larger, only the directory is checked.

    Raises:
        NotAPt2: the file is not a zip, or lacks the members of a .pt2.
        UnsafeModel: the file contains code or what could be code, or uses an operator that is not on the list; the message
            says what and where.
        UNKNOWN_OPERATOR: the program uses an operator of a library that the server does not load.
        EDGE_DIALECT_PROGRAM: the program is already lowered.
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
    """Screen an archive's members as `screen_pt2` does. The child passes those of torch's reader, which may see other members.

    Args:
        opened: returns the members of a torch.save file for its name and bytes; uses zipfile when None.
        allowed: as in `screen_pt2`.
        at_most_bytes: as in `screen_pt2`; needs the records' sizes.

    Raises:
        NotAPt2, UnsafeModel, UNKNOWN_OPERATOR: as in `screen_pt2`.
    """
    names = set(records.names)
    for needed in ("archive_format", "archive_version", "models/model.json"):
        if needed not in names:
            raise NotAPt2(f"it has no {needed}")
    if records.sizes.get("archive_format", 3) != 3 or records.read("archive_format") != b"pt2":
        raise NotAPt2("its archive_format is not pt2")
    parsed = [(name, screen) for name in records.names if (screen := _select_screen(name)) is not None]
    if at_most_bytes is not None and sum(records.sizes[name] for name, _ in parsed) > at_most_bytes:
        return
    rules = _Rules(
        operators.builtin() if allowed is None else allowed, None if at_most_bytes is None else UPLOAD_EXPRESSION_BYTES
    )
    for name, screen in parsed:
        screen(name, records, opened or tensor_records, rules)


def screen_pte(path: Path) -> None:
    """Refuse a file that is not a .pte, or is truncated.

    Raises:
        NOT_A_PTE: the flatbuffer identifier is not ExecuTorch's.
        TruncatedProgram: the file is shorter than its extended header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(pte.HEAD_BYTES)
    identifier = pte.identifier_of(head)
    if len(identifier) < 4 or not identifier.startswith(pte.FAMILY):
        raise not_a_pte("its identifier is not ExecuTorch's")
    if identifier != pte.IDENTIFIER:
        version = identifier.decode(errors="replace")
        raise not_a_pte(f"its format is {version}, and this version reads {pte.IDENTIFIER.decode()}")
    try:
        header = pte.read_extended_header(head)
    except pte.HeaderCutOff:
        raise TruncatedProgram(pte.HEAD_BYTES, size) from None
    if header is None:
        # The whole file is the flatbuffer, whose verifier checks its end.
        return
    if header.length < pte.MIN_HEADER_BYTES:
        raise not_a_pte(f"its extended header of {header.length} bytes is too short")
    if header.file_bytes > size:
        raise TruncatedProgram(header.file_bytes, size)


def _select_screen(name: str) -> _Screen | None:
    """Return the function that screens a member; None for raw data, which needs no screening.

    Raises:
        UnsafeModel: a .pt2 has no such member.
    """
    folder, _, file = name.rpartition("/")
    if folder == "models":
        if not file.endswith(".json"):
            raise UnsafeModel("UNKNOWN_MEMBER", name, "is not the JSON of an exported program")
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
    if data:  # empty for a program without example inputs
        screen_tensor_records(name, opened(name, data))


def _screen_payloads(name: str, records: Records, opened: Opened, rules: _Rules) -> None:
    """Screen a config of weights or constants: it may only refer to raw tensors in members of this archive."""
    config = _parse_json(name, records)
    for key, text in _iterate_strings(config):
        if key == "expr_str":
            expressions.check_symbol(text, name)
        elif key == "":
            expressions.check_path(text, name)
    payloads.check(name, config, records.sizes)


def _screen_program(name: str, records: Records, opened: Opened, rules: _Rules) -> None:
    program = _parse_json(name, records)
    if not isinstance(program, dict) or not isinstance(program.get("graph_module"), dict):
        raise NotAPt2(f"{name} is not an exported program")

    def target(text: str, where: str) -> None:
        try:
            expressions.check_target(text, where, rules.allowed)
        except OperatorNotAllowed:
            if line := _find_line(program, text):
                expressions.check_target(text, line, rules.allowed)
            raise

    checks: dict[str, _Check] = {**_CHECKS, "target": target, "as_operator": target}
    parsed = set()
    for key, text in _iterate_strings(program):
        if key in _PARSED:
            parsed.add((key, text))  # a program repeats its sizes in every node
        else:
            checks.get(key, expressions.check_name)(text, name)
    if rules.expression_bytes is None or sum(len(text) for _, text in parsed) <= rules.expression_bytes:
        for key, text in sorted(parsed):
            _PARSED[key](text, name)
    if _has_objects(program):
        raise UnsafeModel("CODE_CONSTANT", name, "uses script objects, whose loading runs code")
    if _has_numbers_as_dtypes(program):
        raise UnsafeModel("OUT_OF_BOUNDS", name, "promotes a number that is not a dtype")
    expressions.check_verifiers(program.get("verifiers", []), name)


def _accept(text: str, where: str) -> None:
    """Accept a text, because torch stores or compares it, or pastes its repr()."""


_PARSED: Final[dict[str, _Check]] = {"expr_str": expressions.check_symbol, "guards_code": expressions.check_guard}
"""Checks by key that need Python's parser, which takes microseconds per character."""
_CHECKS: Final[dict[str, _Check]] = {
    "in_spec": expressions.check_tree,
    "out_spec": expressions.check_output_tree,
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
"""Checks by key of the string, or of each string in the list, directly under the key, in addition to operators. Every other
string must be a name."""


_FIELDS: Final = frozenset({*_CHECKS, *_PARSED, "target"})


def _find_line(program: Any, target: str) -> str:
    """Return the user's line of the first node of an operator, like `models/net.py:31 (self.table(x))`; empty if unknown."""
    try:
        nodes = program["graph_module"]["graph"]["nodes"]
        traces = (node["metadata"]["stack_trace"] for node in nodes if node["target"] == target)
        source = source_of(next(traces, "")[-_MAX_TRACE:])
    except (KeyError, TypeError):
        return ""
    return f"{source.file}:{source.line} ({source.code[:80]})" if source is not None else ""


def _iterate_strings(value: object) -> Iterator[tuple[str, str]]:
    """Yield every string of a JSON value as (key, string), with the key directly above it; keys are strings under "".

    Two dicts have arbitrary keys or values: `range_constraints` has expressions as keys. `metadata` has texts as values, if
    all of its values are texts. A tensor may also be named "metadata"; its dict is treated like any other.
    """
    stack: list[tuple[str, object]] = [("", value)]
    while stack:
        parent, current = stack.pop()
        if isinstance(current, str):
            yield parent, current
        elif isinstance(current, list):
            stack.extend((parent if isinstance(inner, str) else "", inner) for inner in current)
        elif isinstance(current, dict):
            texts = parent == "metadata" and all(
                isinstance(inner, str) and (key == "source_fn_stack" or key not in _FIELDS) and not key.startswith("as_")
                for key, inner in current.items()
            )
            for key, inner in current.items():
                yield (parent if texts or parent == "range_constraints" else ""), key
                stack.append(("metadata" if texts and key != "source_fn_stack" else key, inner))


def _dicts_in(program: object) -> Iterator[dict[str, Any]]:
    """Yield the dicts within parsed JSON, at any depth."""
    stack = [program]
    while stack:
        current = stack.pop()
        if isinstance(current, list):
            stack.extend(current)
        elif isinstance(current, dict):
            yield current
            stack.extend(current.values())


def _has_objects(program: object) -> bool:
    return any(
        current.get("custom_obj_values") or current.get("as_custom_obj") or current.get("custom_obj")
        for current in _dicts_in(program)
    )


def _has_numbers_as_dtypes(program: object) -> bool:
    """Return whether promote_types, which looks up its arguments in a table without a check, has any that is not a dtype.

    torch.tensor of sizes makes this operator. torch itself looks up what is archived as a dtype among those that there are.
    """
    return any(current.get("target") == _PROMOTE and not _are_dtypes(current.get("inputs")) for current in _dicts_in(program))


_PROMOTE: Final = "torch.ops.aten.promote_types.default"


def _are_dtypes(inputs: object) -> bool:
    arguments = [each.get("arg") if isinstance(each, dict) else None for each in inputs] if isinstance(inputs, list) else [None]
    return all(isinstance(argument, dict) and list(argument) == ["as_scalar_type"] for argument in arguments)


def screen_tensor_records(name: str, records: Records) -> None:
    """Screen the members of a torch.save file.

    Raises:
        UnsafeModel: the pickle contains more than plain tensors, or the file is a TorchScript archive.
    """
    for member in records.names:
        if member == "data.pkl":
            pickles.check(records.read(member), f"{name}:{member}")
        elif not member.startswith(("data/", ".data/")) and member not in _TENSOR_FILE:
            raise UnsafeModel("NOT_WEIGHTS_ONLY", f"{name}:{member}", "is not known in a torch.save file")
    if "data.pkl" not in records.names:
        raise UnsafeModel("NOT_WEIGHTS_ONLY", name, "has no data.pkl")


_TENSOR_FILE: Final = frozenset({"version", "byteorder", ".format_version", ".storage_alignment"})


def _parse_json(name: str, records: Records) -> object:
    data = records.read(name)
    if len(data) > MAX_JSON_BYTES:
        raise UnsafeModel("TOO_LARGE", name, f"has {len(data)} bytes")
    try:
        # Decoded first, as torch does; json would guess the encoding of bytes.
        parsed: object = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise NotAPt2(f"{name} is not JSON ({error})") from None
    return parsed
