"""What all fuzzing shares: the readers' list, mutations of bytes, and what bounds one input's time and memory."""

from __future__ import annotations

import gc
import importlib
import random
import signal
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

FOLDER: Final = Path(__file__).parent
NAMES: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.py") if "\ndef seeds() " in path.read_text()))
"""The readers, each a module of this folder."""
CORPUS: Final = FOLDER / "corpus"
CPU_S: Final = 10.0
"""CPU time of one input, far above what any of a few kilobytes takes on any machine: beyond it the reader hangs."""
_BASE_BYTES: Final = 12 << 20
"""Memory that any input may take, as what is loaded on first use does."""
_NUMBERS: Final = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    15,
    16,
    31,
    32,
    63,
    64,
    127,
    128,
    255,
    256,
    1 << 15,
    1 << 16,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 53) + 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


class Finding(AssertionError):
    """A reader that hangs, or takes memory out of proportion to its input."""


@dataclass(frozen=True)
class Reader:
    """One reader under test."""

    name: str
    fuzz: Callable[[bytes], None]
    seeds: list[bytes]
    tokens: tuple[bytes, ...] = ()
    most_bytes: int = 1 << 16
    """Longer inputs are cut."""
    runs: int = 300
    """Mutated inputs of a test."""
    memory_factor: int = 64
    """Bytes of memory for each byte of an input, beside what any may take."""
    corpus: list[bytes] = field(default_factory=list)
    """What found something once."""
    attacks: list[bytes] = field(default_factory=list)
    """What is too large for a corpus and is made by the module's `attacks`; not mutated."""


def load(name: str) -> Reader:
    """Return the reader of a module of this folder, with its corpus."""
    module = importlib.import_module(f"tests.fuzz.{name}")
    options = {
        key.lower(): getattr(module, key) for key in ("TOKENS", "MOST_BYTES", "RUNS", "MEMORY_FACTOR") if hasattr(module, key)
    }
    files = sorted(path for path in (CORPUS / name).glob("*") if path.is_file()) if (CORPUS / name).is_dir() else []
    seeds = module.seeds()
    module.fuzz(seeds[0])  # what is loaded on first use is no input's memory
    attacks = module.attacks() if hasattr(module, "attacks") else []
    return Reader(name, module.fuzz, seeds, corpus=[path.read_bytes() for path in files], attacks=attacks, **options)


def mutated(reader: Reader, seed: int) -> Iterator[bytes]:
    """Yield mutated inputs without end; the same for equal seeds."""
    chance = random.Random(f"{reader.name} {seed}")
    pool = [*reader.seeds, *reader.corpus]
    while True:
        data = bytearray(chance.choice(pool))
        for _ in range(1 + min(int(chance.expovariate(0.5)), 12)):
            data = _mutate(data, chance, pool, reader.tokens)
        yield bytes(data[: reader.most_bytes])


def _mutate(data: bytearray, chance: random.Random, pool: Sequence[bytes], tokens: Sequence[bytes]) -> bytearray:
    at = chance.randrange(len(data) + 1)
    match chance.randrange(10 if tokens else 9):
        case 0 if data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        case 1 if data:
            data[at % len(data)] = chance.choice(
                (0, 1, 9, 10, 32, 34, 44, 45, 48, 58, 91, 123, 127, 128, 255, chance.randrange(256))
            )
        case 2 | 3:
            form = chance.choice(["<B", "<H", "<I", "<Q", ">I", ">Q"])
            number = chance.choice(_NUMBERS) + chance.choice((0, 0, 1, -1))
            if chance.random() < 0.3:
                number = chance.randrange(len(data) + 8)
            packed = struct.pack(form, number % (1 << 8 * struct.calcsize(form)))
            data[at : at + len(packed)] = packed
        case 4:
            del data[at : at + 1 + int(chance.expovariate(0.1))]
        case 5:
            part = data[at : at + 1 + int(chance.expovariate(0.05))]
            to = chance.randrange(len(data) + 1)
            data[to:to] = part * chance.choice((1, 1, 2, 16))
        case 6:
            other = chance.choice(pool)
            start = chance.randrange(len(other) + 1)
            data[at:] = other[start:]
        case 7:
            del data[at:]
        case 8:
            text = chance.choice(
                (
                    b"-1",
                    b"0",
                    b"1e999",
                    b"NaN",
                    b"9" * 5000,
                    b"[" * 2000,
                    b"\xff\xfe",
                    b"\xed\xa0\x80",
                    b"\0",
                    b"\n" * 500,
                    b" " * 500,
                )
            )
            data[at : at + chance.choice((0, 1, 4))] = text
        case 9:
            data[at : at + chance.choice((0, 1, 4))] = chance.choice(tokens)
    return data


@contextmanager
def bounded(reader: Reader, size: int) -> Iterator[None]:
    """Raise a `Finding` where what runs within takes more CPU time than CPU_S, or memory out of proportion to `size` bytes.

    tracemalloc runs already. Only on the main thread.
    """

    def hang(_: int, frame: FrameType | None) -> None:
        raise Finding(f"{reader.name}: {size} bytes took more than {CPU_S:g} s of CPU time")

    former = signal.signal(signal.SIGPROF, hang)
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)
    _, peak = tracemalloc.get_traced_memory()
    most = _BASE_BYTES + reader.memory_factor * size
    if peak - before > most:
        raise Finding(f"{reader.name}: {size} bytes took {peak - before} bytes of memory, above {most}")


def replay(reader: Reader, inputs: Iterator[bytes] | Sequence[bytes]) -> int:
    """Give each input to the reader, within its bounds, and return how many there were.

    Raises:
        Finding: as `bounded`.
        AssertionError: the input, in hexadecimal digits, with what the reader raised as its cause.
    """
    count = 0
    traced = tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start(1)
    try:
        for data in inputs:
            gc.collect(0)
            try:
                with bounded(reader, len(data)):
                    reader.fuzz(data)
            except Exception as error:
                shown = data.hex() if len(data) <= 4096 else f"{data[:4096].hex()}... ({len(data)} bytes)"
                raise AssertionError(f"{reader.name}: {type(error).__name__}: {error}; input {count}: {shown}") from error
            count += 1
    finally:
        if not traced:
            tracemalloc.stop()
    return count
