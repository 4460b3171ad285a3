"""Reasons for `error` events of the child, and the conversion of ExecuTorch's failures to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

_CODE: Final = re.compile(r"0x:?([0-9a-fA-F]{1,2})\b")
_NAMES: Final = {
    0x01: "Internal", 0x02: "InvalidState", 0x03: "EndOfMethod", 0x10: "NotSupported", 0x11: "NotImplemented",
    0x12: "InvalidArgument", 0x13: "InvalidType", 0x14: "OPERATOR_MISSING", 0x20: "NotFound", 0x21: "MemoryAllocationFailed",
    0x22: "AccessFailed", 0x23: "InvalidProgram", 0x24: "InvalidExternalData", 0x25: "OutOfResources",
    0x30: "DelegateInvalidCompatibility", 0x31: "DelegateMemoryAllocationFailed", 0x32: "DelegateInvalidHandle",
}  # fmt: skip


class Refusal(Exception):
    """The reason why a command is answered with an `error` event; see PROTOCOL.md for the codes."""

    def __init__(self, code: str, message: str, runtime_code: str = "", names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code, self.runtime_code, self.names = code, runtime_code, list(names)


def called(doing: str, call: Callable[[], T]) -> T:
    """Return the binding's result, or raise its failure as a Refusal."""
    try:
        return call()
    except (RuntimeError, ValueError, IndexError) as error:
        raise failure(doing, error) from None


def described(doing: str, call: Callable[[], T]) -> T:
    """Return what a file's description says, or raise the reason why it cannot be read as a Refusal."""
    try:
        return call()
    except OSError as error:
        raise Refusal("RUNTIME", f"{doing}: {error.strerror}", "AccessFailed") from None
    except ValueError as error:
        raise Refusal("RUNTIME", f"{doing}: {error}", "InvalidProgram") from None


def failure(doing: str, error: Exception) -> Refusal:
    """Return the Refusal for an exception of the binding, which carries at most a hexadecimal code."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    match = _CODE.search(text)
    name = _NAMES.get(int(match[1], 16), "Internal") if match else "Internal"
    return Refusal("RUNTIME", f"{doing}: ExecuTorch says {name}: {text.partition(', error: 0x')[0]}", name)
