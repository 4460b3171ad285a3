"""Every reader of bytes of others refuses what it cannot read, as it documents, in time and in memory; see `tests.fuzz`."""

from __future__ import annotations

import itertools

import pytest

from tests.fuzz import engine

pytestmark = pytest.mark.slow(reason="reads thousands of mutated files")

SEED = 20261122


@pytest.mark.parametrize("name", engine.NAMES)
def test_a_reader_refuses_what_it_cannot_read(name: str) -> None:
    reader = engine.load(name)
    assert reader.seeds
    known = [*reader.seeds, *reader.corpus, *reader.attacks]
    assert engine.replay(reader, known) == len(known)
    assert engine.replay(reader, itertools.islice(engine.mutated(reader, SEED), reader.runs)) == reader.runs


def test_hangs_exceptions_and_excessive_memory_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fuzz(data: bytes) -> None:
        if data == b"hang":
            while True:
                data = data + b""
        if data == b"raise":
            raise KeyError("odd")
        if data == b"memory":
            assert len(bytearray(64 << 20)) > 0

    monkeypatch.setattr(engine, "CPU_S", 0.2)
    reader = engine.Reader("reader", fuzz, [b"fine"])
    assert engine.replay(reader, [b"fine"]) == 1
    for data, text in ((b"hang", "CPU time"), (b"raise", "KeyError"), (b"memory", "bytes of memory")):
        with pytest.raises(AssertionError, match=text):
            engine.replay(reader, [data])


def test_equal_seeds_give_equal_inputs() -> None:
    reader = engine.load("selectors")
    first, again, other = (list(itertools.islice(engine.mutated(reader, seed), 50)) for seed in (1, 1, 2))
    assert first == again != other
