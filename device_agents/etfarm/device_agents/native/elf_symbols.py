"""The dynamic symbols of ELF libraries: what a library needs to be loaded, and what it provides."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_RELOCATION: Final = struct.Struct("<QQq")
_DYNAMIC: Final = struct.Struct("<qQ")
_SHT_RELA: Final = 4
_SHT_DYNAMIC: Final = 6
_SHT_DYNSYM: Final = 11
_DT_NEEDED: Final = 1
_STB_GLOBAL: Final = 1
_JUMP_SLOTS: Final = {62: 7, 183: 1026}
"""By machine (x86-64, AArch64): the type of relocations that are resolved when a function is first called."""


@dataclass(frozen=True)
class LibrarySymbols:
    """The names that a 64-bit little-endian library imports and exports."""

    needed: tuple[str, ...]
    """The libraries that the loader loads first, in order."""
    required: frozenset[str]
    """Symbols of other libraries without which the loader does not load this one: data, and functions whose address is taken."""
    defined: frozenset[str]
    """Symbols that it provides."""

    @classmethod
    def read(cls, path: Path) -> LibrarySymbols:
        """Read the symbols of a library.

        Raises:
            ValueError: the file is not a complete library of this kind.
        """
        data = path.read_bytes()
        try:
            return cls._parse(data)
        except (struct.error, ValueError, IndexError, OverflowError) as error:
            raise ValueError(f"{path} is not a complete ELF library: {error}") from None

    @classmethod
    def _parse(cls, data: bytes) -> LibrarySymbols:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no 64-bit little-endian file")
        header = _HEADER.unpack_from(data)
        machine, offset, size, count = header[1], header[5], header[10], header[11]
        sections = [_Section(*_SECTION.unpack_from(data, offset + index * size)) for index in range(count)]
        names: list[str] = []
        undefined: set[int] = set()
        defined, required, needed = set(), set(), []
        for index, section in enumerate(sections):
            if section.kind != _SHT_DYNSYM:
                continue
            strings = sections[section.link].content(data)
            for number, (name, info, _, home, _, _) in enumerate(_SYMBOL.iter_unpack(section.content(data))):
                names.append(_text(strings, name))
                if home:
                    defined.add(names[number])
                elif info >> 4 == _STB_GLOBAL:
                    undefined.add(number)
            for relocations in sections:
                if relocations.kind != _SHT_RELA or relocations.link != index:
                    continue
                for _, info, _ in _RELOCATION.iter_unpack(relocations.content(data)):
                    if info >> 32 in undefined and info & 0xFFFFFFFF != _JUMP_SLOTS.get(machine):
                        required.add(names[info >> 32])
        for section in sections:
            if section.kind == _SHT_DYNAMIC:
                needed += [_text(sections[section.link].content(data), value) for value in _values(section.content(data))]
        return cls(tuple(needed), frozenset(required), frozenset(defined))


@dataclass(frozen=True)
class _Section:
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int

    def content(self, data: bytes) -> bytes:
        return data[self.offset : self.offset + self.size]


def _values(dynamic: bytes) -> Iterator[int]:
    for tag, value in _DYNAMIC.iter_unpack(dynamic):
        if tag == _DT_NEEDED:
            yield value


def _text(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(b"\0", offset)].decode("utf-8", "replace")
