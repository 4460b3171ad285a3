"""The words of a report: each enum has the text of the JSON as its value."""

from __future__ import annotations

from etfarm.client.reports.json_object import OpenEnum


class JobState(OpenEnum):
    """A job's state, derived from the states of its cells."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        """Whether the state is final."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class CellState(OpenEnum):
    """The state of a cell."""

    QUEUED = "QUEUED"
    COMPILING = "COMPILING"
    WAITING_FOR_DEVICE = "WAITING_FOR_DEVICE"
    RUNNING = "RUNNING"
    ANALYZING = "ANALYZING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        """Whether the state is final."""
        return self in (CellState.SUCCEEDED, CellState.FAILED, CellState.CANCELLED)


class VerdictStatus(OpenEnum):
    """Whether a latency can be trusted."""

    VALID = "VALID"
    INVALID = "INVALID"
    """Something disturbed the measurement; the verdict's reasons say what."""
    NOT_BENCHMARKABLE = "NOT_BENCHMARKABLE"
    """The device's times mean nothing, such as those of an emulated device."""


class PositionInput(OpenEnum):
    """How a language model receives the positions of its tokens."""

    START = "START"
    """The position of the first token of an execution."""
    VECTOR = "VECTOR"
    """The position of each token of an execution."""
    NONE = "NONE"
    """Not at all: without a KV cache, every execution takes the whole text."""


class OperatorKind(OpenEnum):
    """The kind of an operator's row."""

    OPERATOR = "OPERATOR"
    """A kernel of the runtime."""
    DELEGATE = "DELEGATE"
    """A call of a delegate; its kernels are its children."""
    KERNEL = "KERNEL"
    """A kernel inside a delegate."""
    REST = "REST"
    """The parent's time that its children do not explain; the method's where it has no parent."""


class Actor(OpenEnum):
    """The machine that works on a step of a job."""

    CLIENT = "CLIENT"
    SERVER = "SERVER"
    DEVICE = "DEVICE"


class StopReason(OpenEnum):
    """Why a timed pass ended."""

    ENOUGH = "ENOUGH"
    """It had its minimum of iterations and of time."""
    MAX_TIME = "MAX_TIME"
    MAX_SAMPLES = "MAX_SAMPLES"
    SETTLED = "SETTLED"
    """Times drifted when it had enough; a longer pass ended the drift."""
    DRIFTING = "DRIFTING"
    """Times drifted when it had enough, and still drifted after a longer pass."""


class RunSpreadSource(OpenEnum):
    """Where the spread between runs comes from."""

    REPEATS = "REPEATS"
    """The valid runs of this report, at least three."""
    HISTORY = "HISTORY"
    """Earlier valid reports of the project with the same program, device, method, threads, cores, inputs and runner, and
    equally many valid runs."""
    PRIOR = "PRIOR"
    """Other programs of the project on such devices with a similar duration, or a constant: an assumption, which decides no
    comparison."""


class RepeatabilityOutcome(OpenEnum):
    """Whether several executions on the same inputs gave the same outputs."""

    EQUAL = "EQUAL"
    KEEPS_STATE = "KEEPS_STATE"
    """They differ, and the same number of executions after loading the program again gives the same outputs."""
    NONDETERMINISTIC = "NONDETERMINISTIC"
    """They differ, also after the same number of executions."""
    DIFFERENT = "DIFFERENT"
    """They differ for an unknown reason."""
    ROUNDING = "ROUNDING"
    """They differ by no more than rounding explains, as when threads add in another order."""


class Execution(OpenEnum):
    """An execution whose outputs are compared with those of another."""

    FIRST = "FIRST"
    """The first one after loading the program again."""
    TIMED_LAST = "TIMED_LAST"
    TRACED_LAST = "TRACED_LAST"
    REPEATED = "REPEATED"
    """The same number of executions, after loading the program once more."""


class NumericReference(OpenEnum):
    """What an operator's output is compared with."""

    EAGER = "EAGER"
    """The program before quantization."""
    QUANTIZED = "QUANTIZED"
    """The quantized graph, run by PyTorch."""
    HOST = "HOST"
    """The same program, run by ExecuTorch on the server; never of operators."""


class Gate(OpenEnum):
    """What a run waited for before it began."""

    COOL_DOWN = "COOL_DOWN"
    """The pause between two measurements."""
    COOL = "COOL"
    """A temperature below a limit."""
    IDLE = "IDLE"
    """A number of runnable tasks per CPU below a limit."""


class CheckInputs(OpenEnum):
    """The inputs of a check on the server."""

    EXAMPLE = "EXAMPLE"
    MIN = "MIN"
    """The smallest sizes of the dynamic dims."""
    MAX = "MAX"
    """The largest sizes of the dynamic dims."""
