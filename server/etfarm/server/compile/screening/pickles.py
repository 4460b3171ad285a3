"""The check of pickles: only those pass that torch's weights_only unpickler accepts for plain tensors. Stdlib only.

Source: torch/_weights_only_unpickler.py; only what tensors, Parameters and pytrees of them need is allowed.
"""

from __future__ import annotations

import pickletools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from etfarm.server.compile.screening.errors import UnsafeModel

MAX_OPCODES: Final = 5_000_000


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OPCODES: Final = _words(
    "PROTO GLOBAL BINPUT LONG_BINPUT BINGET LONG_BINGET MARK TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_TUPLE EMPTY_LIST "
    "EMPTY_DICT LIST DICT APPEND APPENDS SETITEM SETITEMS BINUNICODE SHORT_BINUNICODE BINSTRING "
    "SHORT_BINSTRING BININT BININT1 BININT2 LONG1 BINFLOAT NEWTRUE NEWFALSE NONE BINPERSID REDUCE STOP"
)

_STORAGES: Final = r"torch (Float|Double|Half|BFloat16|Long|Int|Short|Char|Byte|Bool|ComplexFloat|ComplexDouble)Storage"
_GLOBALS: Final = re.compile(
    rf"{_STORAGES}|torch\.storage UntypedStorage|collections OrderedDict|torch Size|torch device"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter)"
    r"|torch (u?int(8|16|32|64)|b?float(16|32|64)|float8_e4m3fn|float8_e5m2|bool|complex(64|128))"
    r"|torch\.serialization _get_layout"
)

_MARKED: Final = "torch._tensor _rebuild_from_type_v2"
"""Creates a tensor with attributes, as `torch.export` leaves them on the sample inputs of `Dim.DYNAMIC`."""
_TENSOR: Final = "torch Tensor"
_PLAIN: Final = frozenset({"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"})
_DIMENSIONS: Final = "_specialize_on"
"""The only attribute: a dictionary of dimensions, each with the conditions to specialize on, of which there are none."""


def check(data: bytes, where: str) -> None:
    """Refuse a pickle that could do more than create tensors, containers and scalars.

    Raises:
        UnsafeModel: it has another opcode or global, or cannot be read to its end.
    """
    count = 0
    end = 0
    is_marked = False
    try:
        for opcode, argument, position in pickletools.genops(data):
            count += 1
            end = position or 0
            if opcode.name not in _OPCODES or count > MAX_OPCODES:
                raise UnsafeModel("NOT_WEIGHTS_ONLY", where, f"has the pickle opcode {opcode.name}")
            if opcode.name == "GLOBAL" and argument in (_MARKED, _TENSOR):
                is_marked = True
            elif opcode.name == "GLOBAL" and not _GLOBALS.fullmatch(str(argument)):
                raise UnsafeModel("NOT_WEIGHTS_ONLY", where, f"would call {str(argument)[:100]!r}")
    except (ValueError, UnicodeDecodeError, IndexError) as error:
        raise UnsafeModel("NOT_WEIGHTS_ONLY", where, f"is not a complete pickle ({str(error)[:80]})") from None
    if end + 1 != len(data):
        raise UnsafeModel("NOT_WEIGHTS_ONLY", where, "continues after the end of its pickle")
    if is_marked and not _has_only_marked_dimensions(data):
        raise UnsafeModel("NOT_WEIGHTS_ONLY", where, f"would call {_MARKED!r} with other attributes than {_DIMENSIONS!r}")


@dataclass(frozen=True)
class _Global:
    name: str


def _has_only_marked_dimensions(data: bytes) -> bool:
    """Return whether tensors with attributes have those of `Dim.DYNAMIC` only, at their creation and at the pickle's end.

    It follows the pickle's stack without calling anything. The pickle's opcodes must be those that `check` allows.
    """
    pushed: Counter[str] = Counter()
    states: list[object] = []
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        position = marks.pop()
        items = stack[position:]
        del stack[position:]
        return items

    def pop(count: int) -> list[Any]:
        items = stack[-count:]
        if len(items) < count or (marks and len(stack) - count < marks[-1]):
            raise IndexError
        del stack[-count:]
        return items

    def fill(items: list[Any]) -> None:
        target = stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, dict):
            target.update(zip(items[::2], items[1::2], strict=True))

    try:
        for opcode, argument, _ in pickletools.genops(data):
            match opcode.name:
                case "PROTO" | "STOP":
                    continue
                case "BINPUT" | "LONG_BINPUT":
                    memo[int(str(argument))] = stack[-1]
                    continue
                case "MARK":
                    marks.append(len(stack))
                    continue
                case "APPEND":
                    fill(pop(1))
                    continue
                case "SETITEM":
                    fill(pop(2))
                    continue
                case "APPENDS" | "SETITEMS":
                    fill(since_mark())
                    continue
                case "GLOBAL":
                    value: Any = _Global(str(argument))
                case "BINGET" | "LONG_BINGET":
                    value = memo[int(str(argument))]
                case "TUPLE":
                    value = tuple(since_mark())
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    value = tuple(pop(int(opcode.name[-1])))
                case "EMPTY_TUPLE":
                    value = ()
                case "EMPTY_LIST":
                    value = []
                case "LIST":
                    value = since_mark()
                case "EMPTY_DICT":
                    value = {}
                case "DICT":
                    items = since_mark()
                    value = dict(zip(items[::2], items[1::2], strict=True))
                case "BINPERSID":
                    pop(1)
                    value = object()
                case "REDUCE":
                    function, arguments = pop(2)
                    if function == _Global(_MARKED):
                        create, kind, _, state = arguments
                        if not (isinstance(create, _Global) and create.name in _PLAIN and kind == _Global(_TENSOR)):
                            return False
                        if not _marks_dimensions(state):
                            return False
                        states.append(state)
                    value = object()
                case _:
                    value = argument
            if isinstance(value, _Global):
                pushed[value.name] += 1
            stack.append(value)
    except (IndexError, KeyError, TypeError, ValueError, RecursionError):
        return False
    # Neither of the two names is used for anything else, and no state was changed once its tensor had it.
    return pushed[_MARKED] == pushed[_TENSOR] == len(states) and all(map(_marks_dimensions, states))


def _marks_dimensions(state: object) -> bool:
    if not isinstance(state, dict) or list(state) != [_DIMENSIONS]:
        return False
    dimensions = state[_DIMENSIONS]
    return isinstance(dimensions, dict) and all(type(key) is int and value == [] for key, value in dimensions.items())
