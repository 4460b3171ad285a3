"""The interface of every kind of runner. Times are from the runner's own monotonic clock, in nanoseconds."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, Protocol

from etfarm.device_agents.runners.generation import Generated, GenerateRequest
from etfarm.device_agents.runners.score import Scored, ScoreRequest
from etfarm.device_agents.runners.streaming import OnTokens, Streamed, StreamRequest
from etfarm.wire.tensors import Value

DEFAULT_INPUTS_SEED: Final = 0
"""The seed of `Runner.default_inputs` for a program without inputs of its own."""


@dataclass(frozen=True)
class Hello:
    """The runner's identity and what it can run."""

    protocol: int
    executorch: str
    arch: str
    backends: tuple[str, ...]
    """Delegates that are usable on this machine."""
    operators: tuple[str, ...]
    """Names of the kernels, such as `aten::add.out`."""
    confined: tuple[str, ...] = ()
    """Active measures by which the runner confines itself: `no-new-privileges`, `landlock`, `seccomp`."""
    commands: tuple[str, ...] = ()
    """The commands of the protocol that it knows; empty for a runner that does not list them."""


@dataclass(frozen=True)
class Loaded:
    """The result of loading a program."""

    load_ns: int
    methods: tuple[str, ...]
    threads: int
    """Size of the thread pool; fixed from now on."""


@dataclass(frozen=True)
class TensorInfo:
    """One input or output of a method."""

    index: int
    kind: str
    """`tensor`, `int`, `double`, `bool`, `none` or `unsupported`; only a tensor has the fields below."""
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """The shape; for a dynamic tensor, the largest one."""
    dim_order: tuple[int, ...] = ()
    size_bytes: int = 0
    planned: bool = False
    """Whether its memory is part of the method's memory plan."""
    dynamic: bool | None = None
    """Whether dims may be smaller than `shape`; None for outputs, and until the method is loaded."""


@dataclass(frozen=True)
class MethodInfo:
    """A method of the loaded program."""

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    planned_bytes: tuple[int, ...]
    """Sizes of the memory-planned buffers."""
    backends: tuple[str, ...]
    """Delegates that the method needs."""


@dataclass(frozen=True)
class MethodLoaded:
    """The result of loading a method, which is ready for inputs; its mutable buffers hold their initial values."""

    load_method_ns: int


@dataclass(frozen=True)
class Ran:
    """The times of one execution."""

    run_ns: int


@dataclass(frozen=True)
class MeasurePlan:
    """The length of a measurement: at least `iterations` and `min_time_ns`, at most `max_time_ns` and `max_samples`.

    `warmup=0, min_time_ns=0` is a block of `iterations`, which is cheap to repeat: nothing is loaded again.
    """

    warmup: int = 10
    """Minimum number of iterations before the timed ones."""
    iterations: int = 100
    min_time_ns: int = 1_000_000_000
    max_time_ns: int = 60_000_000_000
    """Limit for the timed iterations; the current iteration is completed."""
    max_samples: int = 1_000_000
    steady: bool = False
    """Whether the warm-up goes on until the medians of its last three windows (of at least 5 iterations and 50 ms each)
    lie within 2 %."""
    max_warmup_ns: int | None = None
    """Time after which the warm-up ends, steady or not; `max_time_ns` by default."""


@dataclass(frozen=True)
class Measured:
    """A timed pass. A counter that the kernel does not provide is None, never 0."""

    warmup: int
    """Number of warm-up iterations; fewer than planned if they took longer than `max_warmup_ns`."""
    first_run_ns: int
    """Duration of the first execution after the method was loaded."""
    iterations: int
    duration_ns: int
    """Time from the start of the first timed iteration to the end of the last, including setting the inputs in between."""
    stop_reason: str
    """`ENOUGH`, `MAX_TIME` or `MAX_SAMPLES`."""
    wall_ns: int
    """Time between the two readings of the counters below."""
    cpu_ns: int | None
    """CPU time of all threads of the process."""
    voluntary_switches: int | None
    involuntary_switches: int | None
    minor_faults: int | None
    major_faults: int | None
    cpu_pressure_us: int | None
    """PSI `some` of the whole machine: time in which a task waited for a CPU."""
    peak_rss_bytes: int | None
    """VmHWM right after the pass, without the memory of the samples. None if the runner's own share hides the program's."""
    samples_ns: array[int]
    """Duration of each timed iteration, in order; type code `q`."""
    warmup_ns: int | None = None
    """Duration of the warm-up."""
    steady: bool | None = None
    """Whether the median became steady within the warm-up's time limit; None if the plan did not ask for it."""

    def joined(self, other: Measured) -> Measured:
        """Return this pass and a later one over the same program as a single pass.

        Counters and samples are added (None if either is None), the peak is the larger one; the rest is from this pass.
        """

        def total(*values: int | None) -> int | None:
            known = [value for value in values if value is not None]
            return sum(known) if len(known) == len(values) else None

        is_peak_known = self.peak_rss_bytes is not None and other.peak_rss_bytes is not None
        return replace(
            self,
            iterations=self.iterations + other.iterations,
            duration_ns=self.duration_ns + other.duration_ns,
            wall_ns=self.wall_ns + other.wall_ns,
            cpu_ns=total(self.cpu_ns, other.cpu_ns),
            voluntary_switches=total(self.voluntary_switches, other.voluntary_switches),
            involuntary_switches=total(self.involuntary_switches, other.involuntary_switches),
            minor_faults=total(self.minor_faults, other.minor_faults),
            major_faults=total(self.major_faults, other.major_faults),
            cpu_pressure_us=total(self.cpu_pressure_us, other.cpu_pressure_us),
            peak_rss_bytes=max(self.peak_rss_bytes or 0, other.peak_rss_bytes or 0) if is_peak_known else None,
            samples_ns=self.samples_ns + other.samples_ns,
        )


@dataclass(frozen=True)
class Traced:
    """A traced pass; its times include the tracer's cost."""

    iterations: int
    samples_ns: array[int]
    etdump: Path
    etdump_bytes: int
    wall_ns: int | None = None
    """Time between the two readings of the counters below, as in `Measured`; None if the runner's bundle does not read them."""
    cpu_ns: int | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None
    minor_faults: int | None = None
    major_faults: int | None = None
    cpu_pressure_us: int | None = None


@dataclass(frozen=True)
class Debugged:
    """One iteration with its intermediate outputs."""

    run_ns: int
    etdump: Path
    etdump_bytes: int
    dump: Path
    dump_bytes: int


@dataclass(frozen=True)
class Memory:
    """Memory of the runner's process, in bytes; None if the kernel does not report it."""

    rss_bytes: int | None
    peak_rss_bytes: int | None
    data_bytes: int | None


@dataclass(frozen=True)
class Progress:
    """The progress of a pass, sent at most about four times a second, and possibly never."""

    stage: str
    """`WARMUP`, `TIMED`, `TRACED` or `DEBUG`."""
    done: int
    """Number of completed iterations."""
    elapsed_ns: int


OnProgress = Callable[[Progress], None]


class Runner(Protocol):
    """A process that serves one program; it takes one command at a time, in the order of the methods here.

    Every method may raise the errors of `etfarm.device_agents.runners.errors`: a runner that crashed, hung or was cancelled has
    ended, and every later call raises the same error. After a refused command it is still usable.
    """

    kind: ClassVar[str]
    """The kind of runner that reports state, such as `native`."""

    async def hello(self) -> Hello:
        """Return the runner's identity and what it can run."""

    async def self_test(self) -> tuple[str, ...]:
        """Return the kernels and backends that computed known results without a program; raise RUNNER_BROKEN if one did not."""

    async def threads(self, count: int) -> int:
        """Set the size of the thread pool; only before `load`."""

    async def affinity(self, cores: Sequence[int]) -> None:
        """Bind the process to these CPUs; before `threads`, so that the pool's threads inherit the binding."""

    async def load(self, program: Path, data: Sequence[Path] = ()) -> Loaded:
        """Load a .pte with its .ptd files; once per process."""

    async def method(self, name: str) -> MethodInfo:
        """Return the inputs, outputs and needs of a method."""

    async def load_method(self, name: str, *, trace: bool = False, debug: bool = False, keep: bool = False) -> MethodLoaded:
        """Load `name` in its initial state and make it the current method; its inputs that were set before are kept.

        Use `trace` for `trace`, `trace` and `debug` for `debug`, and neither for `measure`. With `keep`, methods that were loaded
        before stay loaded, each with its own memory.
        """

    async def select(self, name: str) -> None:
        """Make a loaded method the current one, with its state unchanged."""

    async def set_inputs(self, values: Sequence[Value]) -> None:
        """Set all inputs of the current method, in order. They are validated before anything runs."""

    async def default_inputs(self, seed: int) -> list[Value]:
        """Set inputs generated from `seed` and return them: floats uniform in [0, 1), integers 0, bools false."""

    async def run(self) -> Ran:
        """Execute once."""

    async def outputs(self) -> list[Value]:
        """Return the outputs of the latest execution, in order."""

    async def measure(self, plan: MeasurePlan, on_progress: OnProgress | None = None) -> Measured:
        """Run the timed pass, without a tracer."""

    async def trace(self, iterations: int, etdump: Path, *, warmup: int = 1, on_progress: OnProgress | None = None) -> Traced:
        """Trace `iterations` into `etdump`; the `warmup` iterations before them are not recorded."""

    async def generate(self, request: GenerateRequest, limit_s: float, on_progress: OnProgress | None = None) -> Generated:
        """Generate text repeatedly with methods that are loaded without a tracer, within `limit_s` seconds."""

    async def score(
        self, request: ScoreRequest, vocabulary: int, limit_s: float, on_progress: OnProgress | None = None
    ) -> Scored:
        """Execute given tokens one by one with methods that are loaded without a tracer, within `limit_s` seconds."""

    async def stream(self, request: StreamRequest, limit_s: float, on_tokens: OnTokens, stop: asyncio.Event) -> Streamed:
        """Generate one text with methods that are loaded without a tracer; `stop` ends it after the current token."""

    async def debug(self, etdump: Path, dump: Path, *, max_bytes: int | None = None) -> Debugged:
        """Run one iteration with intermediate outputs: events go to `etdump`, tensors to `dump`, at most `max_bytes` in all."""

    async def memory(self) -> Memory:
        """Return the current memory of the process."""

    async def close(self) -> None:
        """End the process, by force if necessary. Never raises."""
