"""What a runner answers, whichever kind it is. Times are the runner's own monotonic clock, in nanoseconds."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from etfarm.wire.tensors import Value

DEFAULT_INPUTS_SEED: Final = 0
"""The seed of `Runner.default_inputs` for a program that came without inputs."""


@dataclass(frozen=True)
class Hello:
    """Who answers."""

    protocol: int
    executorch: str
    arch: str
    backends: tuple[str, ...]
    """Delegates that are usable on this machine."""
    operators: tuple[str, ...]
    """Names of the kernels, such as `aten::add.out`."""
    confined: tuple[str, ...] = ()
    """Active measures by which the runner confines itself: `no-new-privileges`, `landlock`, `seccomp`."""


@dataclass(frozen=True)
class Loaded:
    """A program was loaded."""

    load_ns: int
    methods: tuple[str, ...]
    threads: int
    """Size of the thread pool; fixed from here on."""


@dataclass(frozen=True)
class TensorInfo:
    """One input or output of a method."""

    index: int
    kind: str
    """`tensor`, `int`, `double`, `bool`, `none` or `unsupported`; only a tensor has what follows."""
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Of a dynamic tensor: the largest."""
    dim_order: tuple[int, ...] = ()
    size_bytes: int = 0
    planned: bool = False
    """Whether its memory belongs to the method's plan."""
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
    """Delegates that it needs."""


@dataclass(frozen=True)
class MethodLoaded:
    """A method is ready for inputs; its mutable buffers hold their initial values."""

    load_method_ns: int


@dataclass(frozen=True)
class Ran:
    """One execution."""

    run_ns: int


@dataclass(frozen=True)
class MeasurePlan:
    """How long to measure: at least `iterations` and `min_time_ns`, at most `max_time_ns` and `max_samples`.

    `warmup=0, min_time_ns=0` is a block of `iterations`, which is cheap to repeat: nothing is loaded again.
    """

    warmup: int = 10
    """Iterations before the timed ones, at least."""
    iterations: int = 100
    min_time_ns: int = 1_000_000_000
    max_time_ns: int = 60_000_000_000
    """Of the timed iterations; the one under way is finished."""
    max_samples: int = 1_000_000
    steady: bool = False
    """Whether the warm-up goes on until the medians of its last three windows (of at least 5 iterations and 50 ms each)
    lie within 2 %."""
    max_warmup_ns: int | None = None
    """After which the warm-up ends, steady or not; `max_time_ns` by default."""


@dataclass(frozen=True)
class Measured:
    """A timed pass. What the kernel does not tell is None, never 0."""

    warmup: int
    """Iterations done; fewer than planned where they took longer than `max_warmup_ns`."""
    first_run_ns: int
    """Of the first execution since the method was loaded."""
    iterations: int
    duration_ns: int
    """From the start of the first timed iteration to the end of the last, with the setting of inputs between."""
    stop_reason: str
    """`ENOUGH`, `MAX_TIME` or `MAX_SAMPLES`."""
    wall_ns: int
    """Between the two readings of the counters below."""
    cpu_ns: int | None
    """CPU time of all threads of the process."""
    voluntary_switches: int | None
    involuntary_switches: int | None
    minor_faults: int | None
    major_faults: int | None
    cpu_pressure_us: int | None
    """PSI `some` of the whole machine: time in which a task waited for a CPU."""
    peak_rss_bytes: int | None
    """VmHWM right after the pass, without what samples took. None where the runner's own share hides the program's."""
    samples_ns: array[int]
    """One a timed iteration, in order; type code `q`."""
    warmup_ns: int | None = None
    """What the warm-up took."""
    steady: bool | None = None
    """Whether the median had become steady before the warm-up's time was up; None where the plan did not ask for it."""

    def joined(self, other: Measured) -> Measured:
        """This pass and a later one over the same program as one: sums, samples in their order, the larger peak; None where
        either is. The rest is this one's."""

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
    """Memory of the runner's process, in bytes; None where the kernel does not tell."""

    rss_bytes: int | None
    peak_rss_bytes: int | None
    data_bytes: int | None


@dataclass(frozen=True)
class Progress:
    """How far a pass is. At most about four a second, and none has to come."""

    stage: str
    """`WARMUP`, `TIMED`, `TRACED` or `DEBUG`."""
    done: int
    """Iterations."""
    elapsed_ns: int


OnProgress = Callable[[Progress], None]


class Runner(Protocol):
    """One process that serves one program. Commands are given one at a time, in the order of the methods here.

    Every method raises what became of the process or the program (`etfarm.device_agents.runners.errors`): a runner
    that crashed, hung or was cancelled is over, and every later call raises the same. A refused command leaves it usable.
    """

    async def hello(self) -> Hello:
        """Who answers, with what it can run."""

    async def self_test(self) -> tuple[str, ...]:
        """Names of kernels and backends that gave known results, without any program; RunnerBroken where one does not."""

    async def threads(self, count: int) -> int:
        """Sets the size of the thread pool; only before `load`."""

    async def affinity(self, cores: Sequence[int]) -> None:
        """Binds the process to these CPUs; before `threads`, so that the pool's threads are made there."""

    async def load(self, program: Path, data: Sequence[Path] = ()) -> Loaded:
        """Loads a .pte with its .ptd files; once in a process."""

    async def method(self, name: str) -> MethodInfo:
        """What a method takes and gives."""

    async def load_method(self, name: str, *, trace: bool = False, debug: bool = False, keep: bool = False) -> MethodLoaded:
        """Makes `name` the loaded method, in its initial state; inputs that were set for it before are kept.

        `trace` for `trace`, `trace` and `debug` for `debug`; neither for `measure`. With `keep` the methods that were loaded
        before stay so, each with its own memory.
        """

    async def select(self, name: str) -> None:
        """Makes a method that is loaded already the one that commands are for, as it was left."""

    async def set_inputs(self, values: Sequence[Value]) -> None:
        """All inputs of the loaded method, in order. They are checked here, before anything runs."""

    async def default_inputs(self, seed: int) -> list[Value]:
        """Sets and gives inputs made from `seed`: floats uniform in [0, 1), integers 0, bools false."""

    async def run(self) -> Ran:
        """One execution."""

    async def outputs(self) -> list[Value]:
        """What the latest execution gave, in order."""

    async def measure(self, plan: MeasurePlan, on_progress: OnProgress | None = None) -> Measured:
        """The timed pass, without a tracer."""

    async def trace(self, iterations: int, etdump: Path, *, warmup: int = 1, on_progress: OnProgress | None = None) -> Traced:
        """`iterations` traced ones into `etdump`; the `warmup` before leaves no trace."""

    async def debug(self, etdump: Path, dump: Path, *, max_bytes: int | None = None) -> Debugged:
        """One iteration with intermediate outputs: events into `etdump`, tensors into `dump`, which get no more than
        `max_bytes` together."""

    async def memory(self) -> Memory:
        """Memory of the process now."""

    async def close(self) -> None:
        """Ends the process, by force where needed. Never raises."""
