"""`Dataset`: many samples through one loaded program on one or several devices, with results in order.

Each device has one session. Samples are dispatched one by one as devices become free; two are in flight on a device, so
that the next one is there when the first is done. Samples in flight on a lost device run again on another device.

A program that keeps state sees, on each device, its samples in the order of their indices; on a single device these are
all samples. The state starts anew after a crash and, with `reset`, at each sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypedDict

from etfarm.client.datasets.dispatch import Deal, Tally, Work
from etfarm.client.datasets.samples import Sample
from etfarm.client.errors import EtfarmError, Fault
from etfarm.client.models import Device
from etfarm.client.sessions.calls import Outputs
from etfarm.client.sessions.open_calls import TextCallback
from etfarm.client.sessions.session import AsyncSession
from etfarm.client.submit import input_names
from etfarm.client.submit.inputs import in_order, value_of
from etfarm.wire.errors import AWAY_REASONS, error_of
from etfarm.wire.tensors import Scalar, Tensor, Value, to_array

if TYPE_CHECKING:
    from pathlib import Path

    from etfarm.client.submit.preparation import ExampleInputs
    from etfarm.client.transport import transfers
    from etfarm.wire.recipes import Recipe

LANES: Final = 2
"""Samples in flight on one device: one that runs, and one in transfer."""

WINDOW: Final = 8
"""Maximum number of samples that a device may be ahead of the next result."""

MOST_TRIES: Final = 3
"""Maximum number of lost devices that a sample is tried on."""

LAST_WORD_S: Final = 3.0
"""Seconds that a session may take to end after the call that ended it: the device tests itself to find the cause."""


class Options(TypedDict, total=False):
    """The options of `run_dataset` beside the program, the inputs and the devices."""

    method: str
    """The method; the program's only method, or forward, when left out."""
    methods: str
    """The same as `method`."""
    recipe: str | Recipe
    recipes: str | Recipe
    """The same as `recipe`."""
    example_inputs: ExampleInputs | None
    data: Sequence[str | Path]
    threads: int | None
    cores: str
    timeout_s: float | None
    """Limit for one sample on the device in seconds; 600 when None."""
    priority: int
    reservation: str | None
    """Id of a reservation, whose devices are used."""
    mixed: bool
    """Whether devices may differ in arch and soc."""
    keep_going: bool
    """Whether to continue after a failed sample."""
    reset: bool
    """Whether to reload the program for each sample, so that no state remains from the sample before; this takes time."""
    on_wait: TextCallback | None
    on_log: TextCallback | None
    on_upload: transfers.Moved | None
    on_status: TextCallback | None
    """Callback with one sentence about slow work before the samples run, such as an export."""


@dataclass(frozen=True)
class Result:
    """The result of one sample: outputs or an error."""

    index: int
    name: str
    device: Device | None
    """The device that ran it; None if it did not run."""
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Arrays and numbers by input name."""
    labels: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Values of the sample that are not inputs."""
    outputs: Outputs | None = field(default=None, repr=False)
    error: EtfarmError | None = None
    """The error of a failed sample, which names the sample."""

    @property
    def failed(self) -> bool:
        """Whether the sample has no outputs."""
        return self.error is not None


Open = Callable[[str, TextCallback], AsyncSession]
"""Callback that opens a session for a selector; its second argument receives what the session waits for."""


class Dataset:
    """Many samples through one program.

    An instance is used once, by one `async for` over `results` or `outputs`.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        choose: Callable[[], Awaitable[Sequence[tuple[str, str]]]],
        open_session: Open,
        close: Callable[[], Awaitable[None]],
        *,
        method: str = "",
        timeout_s: float | None = None,
        keep_going: bool = False,
        reset: bool = False,
        labels: bool = False,
        on_wait: TextCallback | None = None,
    ) -> None:
        """Prepare a data set; `devices.dataset` creates instances.

        Args:
            samples: samples with indices from 0; iterated in a thread, a few ahead.
            choose: returns a name and a selector for each session.
            close: called at the end.
            labels: keep values that are not inputs as labels instead of refusing them.
        """
        self._samples = samples
        self._choose = choose
        self._open_session = open_session
        self._close = close
        self._method = method
        self._timeout_s = timeout_s
        self._keep_going = keep_going
        self._reset = reset
        self._labels = labels
        self._on_wait = on_wait
        self._tries: dict[int, int] = {}
        self._calls = 0
        self.tally = Tally()
        self.is_running = False
        """Whether the iteration has begun and its sessions are not closed yet."""
        self._ended = asyncio.Event()

    async def wait_until_ended(self) -> None:
        """Wait until an iteration that has begun has closed its sessions."""
        if self.is_running:
            await self._ended.wait()

    async def results(self) -> AsyncGenerator[Result, None]:
        """Yield the result of each sample in order; a failed sample is the last one unless `keep_going` is set.

        Raises:
            EtfarmError: no session can be opened, the last device is lost, or the source cannot be read.
        """
        tasks: list[asyncio.Task[None]] = []
        deal: Deal[Result] | None = None
        self.is_running = True
        try:
            slots = await self._choose()
            deal = Deal(
                self._samples, ready=LANES * len(slots), window=WINDOW * len(slots), keep_going=self._keep_going
            )  # fmt: skip
            deal.begin()
            left = set(range(len(slots)))
            for place, (name, selector) in enumerate(slots):
                working = self._work(deal, place, name, selector, left)
                tasks.append(asyncio.create_task(working, name=f"data set on {name or 'a device'}"))
            async with aclosing(deal.results()) as results:
                async for result in results:
                    yield result
        finally:
            if deal is not None:
                deal.close()
            for task in tasks:
                task.cancel()
            # A further cancellation, or an error of the callback, must not keep those that wait for the end waiting.
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                try:
                    await self._close()
                finally:
                    self.is_running = False
                    self._ended.set()

    async def outputs(self, on_result: Callable[[Result], None] | None = None) -> AsyncGenerator[tuple[int, Outputs], None]:
        """Yield the index and outputs of each sample in order; `keep_going` skips failed samples.

        Args:
            on_result: called with each sample's result, including failures.

        Raises:
            EtfarmError: a sample failed, and the error names it; or as `results`.
        """
        async with aclosing(self.results()) as results:
            async for result in results:
                if on_result is not None:
                    on_result(result)
                if result.outputs is not None:
                    yield result.index, result.outputs
                elif not self._keep_going and result.error is not None:
                    raise result.error

    async def _work(self, deal: Deal[Result], place: int, name: str, selector: str, left: set[int]) -> None:
        """Run samples on one device; the error of the last remaining device ends the data set.

        Args:
            left: indices of the devices that still work.
        """
        try:
            while not deal.is_over:
                async with self._open_session(selector, self._report_wait) as session:
                    device = session.device
                    work = self.tally.devices.setdefault(device.id, Work(device))
                    ended = await self._serve(deal, session)
                if ended is not None and ended.fault is not Fault.USER and ended.reason not in AWAY_REASONS:
                    work.lost = ended
                    raise ended
        except EtfarmError as error:
            left.discard(place)
            # A fault of the program is the same on every device.
            if not left or error.fault is Fault.USER:
                await deal.abort(error)
            elif self._on_wait is not None:
                self._on_wait(f"{name} is lost, the others go on: {error.message}")
        except Exception as bug:  # noqa: BLE001 - raised again where results are asked for
            await deal.abort(bug)

    def _report_wait(self, why: str) -> None:
        if why and self._on_wait is not None:
            self._on_wait(f"Waiting: {why}.")

    async def _serve(self, deal: Deal[Result], session: AsyncSession) -> EtfarmError | None:
        """Run samples until none is left for this session, or until it has ended; return why it ended."""
        methods = session.methods
        method = self._method or (methods[0] if len(methods) == 1 else "forward")
        names = session.input_names(method)
        while True:
            broken: list[tuple[int, Sample, EtfarmError]] = []
            lanes = 1 if self._reset else LANES
            await asyncio.gather(*(self._lane(deal, session, method, names, broken) for _ in range(lanes)))
            if not broken:
                return None
            ended = await session.ended(LAST_WORD_S)
            # Calls are served in order: of several unanswered calls at a session's end, the first one was running.
            for rank, (_, sample, error) in enumerate(sorted(broken, key=lambda item: item[0])):
                own = error.fault is Fault.USER and not error.reason.startswith("SESSION_") and (ended is None or rank == 0)
                if own or (rank == 0 and self._is_given_up(sample, error)):
                    await deal.settle(_failed(sample, session.device, error))
                else:
                    await deal.give_back(sample)
            if ended is not None:
                return ended

    def _is_given_up(self, sample: Sample, error: EtfarmError) -> bool:
        """Count an attempt of a sample that failed for another reason, and return whether it has no attempts left."""
        if error.fault is Fault.USER:
            return False
        self._tries[sample.index] = self._tries.get(sample.index, 0) + 1
        return self._tries[sample.index] >= MOST_TRIES

    async def _lane(
        self,
        deal: Deal[Result],
        session: AsyncSession,
        method: str,
        names: Sequence[str],
        broken: list[tuple[int, Sample, EtfarmError]],
    ) -> None:
        """Run one sample after the other until none is left, or until a call has no answer of its own."""
        device = session.device
        while (sample := await deal.take(lambda: bool(broken))) is not None:
            try:
                inputs, labels = self._fitted(sample, method, names)
            except EtfarmError as error:
                await deal.settle(_failed(sample, None, error))
                continue
            self.tally.begin()
            self._calls += 1
            order = self._calls
            try:
                outputs = await session.run(method, *inputs.values(), timeout_s=self._timeout_s)
            except EtfarmError as error:
                if error.fault is not Fault.USER or error.reason.startswith(("PROGRAM_", "SESSION_")):
                    broken.append((order, sample, error))
                    await deal.wake()
                    return
                await deal.settle(_failed(sample, device, error))
                continue
            self.tally.ran(device, outputs.run_ns)
            arrays = {name: _plain(value) for name, value in inputs.items()}
            await deal.settle(Result(sample.index, sample.name, device, arrays, labels, outputs))
            if self._reset:
                return

    def _fitted(self, sample: Sample, method: str, names: Sequence[str]) -> tuple[dict[str, Value], dict[str, Any]]:
        """Return a sample's inputs in the method's order and with its names, and its labels."""
        if sample.error is not None:
            raise sample.error
        if not isinstance(sample.values, Mapping):
            values = {str(place): value_of(str(place), value) for place, value in enumerate(sample.values)}
            return _by_name(in_order(values, names[: len(values)], "The program", method), names), {}
        inputs: dict[str, Value] = {}
        labels: dict[str, Any] = {}
        for key, value in sample.values.items():
            prefix, slash, rest = key.partition("/")
            own = rest if slash and prefix == method else key
            if input_names.place_of(own, names) is None:
                if not self._labels:
                    there = f"The inputs are {', '.join(names)}" if names else "There are no inputs"
                    raise input_names.UnknownInput(
                        f"{method}: there is no input {key!r}.", f"{there}; for a metric it would be a label.", key=key
                    )
                labels[key] = _plain(value)
            elif own in inputs:
                message = f"{method}: the input {own!r} occurs twice, with its method and without."
                raise input_names.DuplicateInput(message, method=method, key=own)
            else:
                inputs[own] = value_of(own, value)
        try:
            return _by_name(input_names.order(inputs, names, method), names), labels
        except input_names.InputMissing as error:
            beside = f" Beside them there is {', '.join(labels)}." if labels else ""
            raise input_names.InputMissing(error.message, f"{error.remedy}{beside}", **error.metadata) from None


def _by_name(values: Sequence[Value], names: Sequence[str]) -> dict[str, Value]:
    return {names[place] if place < len(names) else str(place): value for place, value in enumerate(values)}


def _plain(value: Any) -> Any:
    """Convert a wire value to an array or a number; return anything else unchanged."""
    if isinstance(value, Tensor):
        return to_array(value)
    return value.value if isinstance(value, Scalar) else value


def _failed(sample: Sample, device: Device | None, error: EtfarmError) -> Result:
    return Result(sample.index, sample.name, device, error=named(error, sample.index, sample.name))


def named(error: EtfarmError, index: int, name: str) -> EtfarmError:
    """Return the same error with the sample's name in front."""
    own = error_of(
        error.fault, error.reason, f"{name}: {error.message}", error.remedy, kind=error.kind, stage=error.stage,
        metadata={**error.metadata, "sample": str(index), "name": name},
    )  # fmt: skip
    own.__cause__ = error.__cause__
    return own
