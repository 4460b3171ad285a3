"""The check of pickles: only those pass that torch's weights_only unpickler accepts for plain tensors. Stdlib only.

Source: torch/_weights_only_unpickler.py; only what tensors, Parameters and pytrees of them need is allowed.
"""

from __future__ import annotations

import pickletools
import re
from typing import Final

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


def check(data: bytes, where: str) -> None:
    """Refuse a pickle that could do more than create tensors, containers and scalars.

    Raises:
        UnsafeModel: it has another opcode or global, or cannot be read to its end.
    """
    count = 0
    end = 0
    try:
        for opcode, argument, position in pickletools.genops(data):
            count += 1
            end = position or 0
            if opcode.name not in _OPCODES or count > MAX_OPCODES:
                raise UnsafeModel("NOT_WEIGHTS_ONLY", where, f"has the pickle opcode {opcode.name}")
            if opcode.name == "GLOBAL" and not _GLOBALS.fullmatch(str(argument)):
                raise UnsafeModel("NOT_WEIGHTS_ONLY", where, f"would call {str(argument)[:100]!r}")
    except (ValueError, UnicodeDecodeError, IndexError) as error:
        raise UnsafeModel("NOT_WEIGHTS_ONLY", where, f"is not a complete pickle ({str(error)[:80]})") from None
    if end + 1 != len(data):
        raise UnsafeModel("NOT_WEIGHTS_ONLY", where, "continues after the end of its pickle")
