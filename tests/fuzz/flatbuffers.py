"""FlatBuffers whose vectors lead to the same table over and over: small files that say as much as large ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping


class Builder:
    """Bytes that grow to the end; what an offset leads to comes behind it."""

    def __init__(self, identifier: bytes, prefix: int = 0) -> None:
        """Begin with a root that `root` sets, `prefix` bytes in."""
        self.data = bytearray(prefix) + bytes(4) + identifier
        self._root = prefix

    def table(self, *numbers: int, **inline: int) -> dict[int, int]:
        """Add a table of four-byte fields with these numbers, and return where each lies; key -1 is the table itself.

        Args:
            inline: `f3=7` sets field 3 to 7.
        """
        values: Mapping[int, int] = {int(name[1:]): value for name, value in inline.items()}
        slots = sorted({*numbers, *values})
        count = max(slots, default=-1) + 1
        layout = len(self.data)
        self.data += struct.pack("<HH", 4 + 2 * count, 4 + 4 * len(slots))
        self.data += b"".join(struct.pack("<H", 4 + 4 * slots.index(slot) if slot in slots else 0) for slot in range(count))
        self.data += bytes(-len(self.data) % 4)
        at = len(self.data)
        self.data += struct.pack("<i", at - layout) + bytes(4 * len(slots))
        places = {slot: at + 4 + 4 * place for place, slot in enumerate(slots)} | {-1: at}
        for slot, value in values.items():
            struct.pack_into("<I", self.data, places[slot], value)
        return places

    def root(self, table: Mapping[int, int]) -> None:
        """Make a table the root."""
        self.lead(self._root, table[-1])

    def lead(self, place: int, to: int) -> None:
        """Make the offset at `place` lead to `to`."""
        struct.pack_into("<I", self.data, place, to - place)

    def text(self, place: int, text: bytes) -> int:
        """Add a text that `place` leads to, and return where it is."""
        at = len(self.data)
        self.lead(place, at)
        self.data += struct.pack("<I", len(text)) + text + bytes(1 + -(len(text) + 1) % 4)
        return at

    def alike(self, place: int, count: int) -> range:
        """Add a vector of offsets that `place` leads to; the places of its elements, for `lead`."""
        at = len(self.data)
        self.lead(place, at)
        self.data += struct.pack("<I", count) + bytes(4 * count)
        return range(at + 4, at + 4 + 4 * count, 4)


def program(count: int) -> bytes:
    """Return a .pte whose chains are all one chain, and its instructions all one instruction of one long name."""
    created = Builder(b"ET12")
    root = created.table(1)
    created.root(root)
    plans = created.alike(root[1], 1)
    plan = created.table(0, 4 + 1, 6)
    created.lead(plans[0], plan[-1])
    created.text(plan[0], b"forward")
    chains = created.alike(plan[5], count)
    chain = created.table(2)
    instructions = created.alike(chain[2], count)
    instruction = created.table(1, f0=1)
    call = created.table(f0=0)
    operators = created.alike(plan[6], count)
    operator = created.table(0)
    created.text(operator[0], b"aten::add" * 1000)
    for places, to in ((chains, chain), (instructions, instruction), (operators, operator)):
        for place in places:
            created.lead(place, to[-1])
    created.lead(instruction[1], call[-1])
    return bytes(created.data)


def etdump(count: int) -> bytes:
    """Return an .etdp whose runs are all one run, and its events all one event."""
    created = Builder(b"ED00", prefix=4)
    root = created.table(1)
    created.root(root)
    runs = created.alike(root[1], count)
    run = created.table(3)
    events = created.alike(run[3], count)
    event = created.table(0, 2)
    profile = created.table(0, f3=1)
    created.text(profile[0], b"Method::execute")
    debug = created.table(f1=1)
    for places, to in ((runs, run), (events, event)):
        for place in places:
            created.lead(place, to[-1])
    created.lead(event[0], profile[-1])
    created.lead(event[2], debug[-1])
    struct.pack_into("<I", created.data, 0, len(created.data) - 4)
    return bytes(created.data)


def xnnpack(count: int) -> bytes:
    """Return a delegate's bytes whose values are all one value with many dims."""
    created = Builder(b"XN01")
    root = created.table(1, 2)
    created.root(root)
    values = created.alike(root[2], count)
    value = created.table(1, f0=1)
    tensor = created.table(2)
    dims = created.alike(tensor[2], count)
    for place in values:
        created.lead(place, value[-1])
    created.lead(value[1], tensor[-1])
    for place in dims:
        struct.pack_into("<I", created.data, place, (1 << 32) - 1)
    flat = bytes(created.data)
    return bytes(4) + b"XH00" + struct.pack("<H", 30) + struct.pack("<II", 32, len(flat)) + bytes(32 - 18) + flat
