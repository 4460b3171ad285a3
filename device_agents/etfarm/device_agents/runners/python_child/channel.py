"""The child's pipes and the command lines read from them."""

from __future__ import annotations

import json
import os
import re
import select
from typing import IO, Any, Final

from etfarm.device_agents.runners.python_child.refusals import Refusal

_MAX_LINE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 16
_ESCAPE: Final = re.compile(rb"%(.{0,2})", re.DOTALL)


class Channel:
    """The two pipes, on private descriptors, so that what a library prints lands on stderr and cannot corrupt the protocol."""

    def __init__(self) -> None:
        self._input = os.dup(0)
        self._buffer = b""
        """What was read and not taken yet."""
        self._output: IO[bytes] = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def read_line(self) -> bytes | None:
        """Return the next line without its newline; None at the end of the stream."""
        parts: list[bytes] = []
        size = 0
        while True:
            part, newline, rest = self._buffer.partition(b"\n")
            size += len(part)
            if size <= _MAX_LINE_BYTES:
                parts.append(part)
            self._buffer = rest
            if newline:
                break
            if not self._fill():
                return None
        if size > _MAX_LINE_BYTES:
            raise Refusal("BAD_COMMAND", f"the line is longer than {_MAX_LINE_BYTES} bytes")
        return b"".join(parts)

    def read(self, size: int) -> bytes:
        """Return a payload of `size` bytes.

        Raises:
            EOFError: the payload is truncated.
        """
        parts: list[bytes] = []
        while size > 0:
            if not self._buffer and not self._fill():
                raise EOFError
            part, self._buffer = self._buffer[:size], self._buffer[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Discard a payload."""
        while size > 0:
            size -= len(self.read(min(size, 1 << 20)))

    def has_input(self) -> bool:
        """Return whether a further command has begun to arrive, or the stream has ended, without waiting."""
        return bool(self._buffer or select.select([self._input], [], [], 0)[0])

    def _fill(self) -> bool:
        """Wait for more input; return False at the end of the stream."""
        self._buffer = os.read(self._input, _READ_BYTES)
        return bool(self._buffer)

    def send(self, event: dict[str, Any], payload: bytes = b"") -> None:
        """Send one event; end the process if the other end is closed."""
        if payload:
            event["payload_bytes"] = len(payload)
        try:
            self._output.write(json.dumps(event).encode() + b"\n" + payload)
            self._output.flush()
        except OSError:
            os._exit(3)


class Command:
    """A line `command key=value ...`, whose keys must all be taken before `finish`."""

    def __init__(self, line: bytes) -> None:
        words = [word for word in line.split(b" ") if word]
        self.name = words[0].decode("utf-8", "replace") if words else ""
        self.payload = b""
        self._arguments: list[tuple[str, str]] = []
        self.bad: Refusal | None = None
        for word in words[1:]:
            key, equals, value = word.partition(b"=")
            if not key or not equals:
                self.bad = Refusal("BAD_COMMAND", f"'{word[:40].decode('utf-8', 'replace')}' is not key=value")
                return
            try:
                self._arguments.append((key.decode("utf-8", "replace"), _decoded(value)))
            except Refusal as error:
                self.bad = error
                return

    def take_all(self, key: str) -> list[str]:
        """Return all values of a key."""
        values = [value for name, value in self._arguments if name == key]
        self._arguments = [argument for argument in self._arguments if argument[0] != key]
        return values

    def take(self, key: str) -> str | None:
        """Return the value of a key that may be absent."""
        values = self.take_all(key)
        if len(values) > 1:
            raise Refusal("BAD_COMMAND", f"{key} is given twice")
        return values[0] if values else None

    def require(self, key: str) -> str:
        """Return the value of a required key."""
        value = self.take(key)
        if value is None:
            raise Refusal("BAD_COMMAND", f"{self.name} needs {key}=")
        return value

    def integer(self, key: str, low: int, high: int, otherwise: int | None = None) -> int:
        """Return an integer within the bounds."""
        text = self.require(key) if otherwise is None else self.take(key)
        return otherwise if text is None and otherwise is not None else parse_integer(text or "", key, low, high)

    def integers(self, key: str, low: int, high: int) -> list[int]:
        """Return the comma-separated integers; an empty text has none."""
        text = self.require(key)
        return [parse_integer(part, key, low, high) for part in text.split(",")] if text else []

    def finish(self) -> None:
        """Refuse keys that were not taken: a misspelt option must not be ignored."""
        if self._arguments:
            raise Refusal("BAD_COMMAND", f"{self.name} has no option '{self._arguments[0][0][:40]}'")


def _decoded(value: bytes) -> str:
    if any(len(escape) < 2 or not re.fullmatch(rb"[0-9a-fA-F]{2}", escape) for escape in _ESCAPE.findall(value)):
        raise Refusal("BAD_COMMAND", "a % is not followed by two hex digits")
    data = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), value)
    if b"\0" in data:
        raise Refusal("BAD_COMMAND", "a value holds a NUL byte")
    return os.fsdecode(data)


def parse_integer(text: str, what: str, low: int, high: int) -> int:
    """Return the integer; refuse anything else, or one out of bounds, with BAD_COMMAND."""
    if re.fullmatch(r"-?[0-9]{1,20}", text) and low <= int(text) <= high:
        return int(text)
    raise Refusal("BAD_COMMAND", f"{what} must be an integer from {low} to {high}, not '{text[:40]}'")
