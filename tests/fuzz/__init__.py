"""Fuzzing of every reader of bytes that others send: users, devices, phones, programs, servers.

One module a reader. Each has

- `fuzz(data: bytes)`, which raises for a genuine finding alone: an exception that the reader does not document, an answer that
  breaks its promise. What the reader refuses as documented is an answer.
- `seeds() -> list[bytes]`, small and good inputs to start from; what found something lies in `corpus/NAME/` beside.
- optionally `attacks() -> list[bytes]`, larger inputs that are replayed and not mutated;
- optionally `TOKENS` (bytes that mean something to the reader), `MOST_BYTES`, `RUNS`, `MEMORY_FACTOR`.

`test_readers.py` replays seeds, corpus and a fixed number of mutated inputs. `python -m tests.fuzz NAME --seconds N` goes on
longer, guided by coverage where `atheris` is installed (`pip install atheris`; it is no dependency).
"""
