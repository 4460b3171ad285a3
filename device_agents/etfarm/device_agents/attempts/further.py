"""Executions for accuracy alone, after all timed and traced passes: on further samples, and of calls that keep their state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from etfarm.device_agents.runners.protocol import Runner
from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.samples import MAX_OUTPUTS_BYTES, round_down
from etfarm.wire.tensors import Tensor, Value

LIMIT_S: Final = 30.0
"""Time limit of all executions together; the current one is completed unless it takes twice as long."""


@dataclass
class Further:
    """What the program returned for further samples, or for calls."""

    samples: int = 0
    """Number of executed samples or calls, from the first one on."""
    outputs: list[Value] = field(default_factory=list)
    """Outputs of all of them, one sample after the other."""
    error: EtfarmError | None = None
    """Why the others were left out."""


async def execute(
    runner: Runner,
    method: str,
    files: Sequence[Path],
    first: Sequence[Value],
    *,
    keeps_state: bool,
    limit_s: float = LIMIT_S,
) -> Further:
    """Execute a method once on the inputs of each file. An error ends this, and nothing else.

    Args:
        runner: has the program loaded.
        method: its name.
        files: tensor files of flattened inputs.
        first: the outputs of the timed inputs.
        keeps_state: whether to load the method anew for each sample, so that each starts from the initial state.
        limit_s: time limit in seconds.
    """

    async def prepare(index: int) -> None:
        if keeps_state or not index:
            await runner.load_method(method)

    return await _execute(runner, files, prepare, limit_s, first)


async def execute_calls(runner: Runner, calls: Sequence[tuple[str, Path]], limit_s: float = LIMIT_S) -> Further:
    """Execute methods one after the other, each with the state that those before have left. An error ends this, and nothing else.

    Args:
        runner: has the program loaded.
        calls: methods with tensor files of their inputs.
        limit_s: time limit in seconds.
    """

    async def prepare(index: int) -> None:
        if not index:  # all before the first call, as loading gives a method's buffers their initial values
            for place, method in enumerate(dict.fromkeys(method for method, _ in calls)):
                await runner.load_method(method, keep=place > 0)
        await runner.select(calls[index][0])

    return await _execute(runner, [path for _, path in calls], prepare, limit_s)


async def _execute(
    runner: Runner,
    files: Sequence[Path],
    prepare: Callable[[int], Awaitable[None]],
    limit_s: float,
    first: Sequence[Value] = (),
) -> Further:
    """Execute the current method once on the inputs of each file.

    Args:
        prepare: makes the method of a file, by index, the current one.
        first: the outputs of the timed inputs, which the files' are compared with; empty if there are none.
    """
    further, size_bytes, ends_s = Further(), _size_of(first), time.monotonic() + limit_s
    noun = f"{len(files) + bool(first)} {'samples' if first else 'calls'}"
    try:
        async with asyncio.timeout(2 * limit_s):
            for index, path in enumerate(files):
                if time.monotonic() > ends_s:
                    raise TimeoutError
                if size_bytes > MAX_OUTPUTS_BYTES:
                    done = f"{index + bool(first)} of {noun}"
                    raise error_for("SAMPLES_LEFT_OUT", f"The outputs of the first {done} exceed {MAX_OUTPUTS_BYTES >> 20} MiB.")
                values = await asyncio.to_thread(_read, path)
                await prepare(index)
                await runner.set_inputs(values)
                await runner.run()
                outputs = await runner.outputs()
                further.outputs += outputs
                further.samples += 1
                size_bytes += _size_of(outputs)
    except TimeoutError:
        if first:
            # With the timed inputs, these are a power of two.
            further.samples = round_down(1 + further.samples) - 1
            del further.outputs[further.samples * len(first) :]
        further.error = error_for("SAMPLES_LEFT_OUT", f"The device needs more than {limit_s:g} s for {noun}.")
    except EtfarmError as error:
        further.error = error
    return further


def _read(path: Path) -> list[Value]:
    return tensors.decode(path.read_bytes())


def _size_of(values: Sequence[Value]) -> int:
    return sum(len(value.data) for value in values if isinstance(value, Tensor))
