"""The agent's settings, made once by `main` from the command line and the environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etfarm.device_agents.conditions.gates import GateLimits
from etfarm.device_agents.jail.options import JailOptions
from etfarm.device_agents.runners.emulator import Emulator
from etfarm.wire.channel import Access
from etfarm.wire.names import data_folder
from etfarm.wire.retry_backoff import retry_backoff

DEFAULT_CACHE_LIMIT_BYTES = 8 << 30


def default_data_folder() -> Path:
    """Where an agent that is told nothing keeps its id, its cache and results that the server has not acknowledged."""
    return data_folder() / "agent"


def phones_data_folder() -> Path:
    """The same for an agent that serves phones, beside the one of this machine."""
    return data_folder() / "agent-adb"


def emulated_data_folder(emulator: Emulator) -> Path:
    """The same for an emulated device that is told nothing: an agent of its own, beside the one of this machine."""
    return data_folder() / f"agent-{emulator.arch}-{emulator.cpu.replace('/', '_')}"


@dataclass(frozen=True)
class PhoneOptions:
    """How phones are served."""

    limit_bytes: int = 2 << 30
    """Of bundles and programs that are kept on each phone. Above it the longest unused go."""
    runner: str | None = None
    """Command line of a runner that was put on the phones beforehand, in place of the bundle's."""
    probe_s: float = 5.0
    """Between two questions whether a phone lives ..."""
    answer_s: float = 5.0
    """... and how long it may take to answer. adb itself takes a dead link for alive for a minute and more."""
    settle_s: float = 2.0
    """How long a phone that just came may be in a state of adb's in which nothing can be run, before that is told."""
    retry_s: float = 5.0
    """Before another try to serve a phone that could not be served ..."""
    retry_last_s: float = 120.0
    """... which doubles up to this: a try starts a dozen processes on the phone. One that is plugged in again, or whose state
    changes, is tried at once."""
    farm_s: float = 10.0
    """How long the farm may take to say which runners it has."""


@dataclass(frozen=True)
class AgentConfig:
    """How one agent process works."""

    access: Access
    """The server, and how it is reached."""
    name: str
    """The device's label for people; of phones, what stands before the name of each."""
    data: Path
    """The data folder. One agent at a time uses it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    """Logical cpus that programs may use; all that the process may use when None."""
    cache_limit_bytes: int = DEFAULT_CACHE_LIMIT_BYTES
    """Above it the longest unused artifacts go. One that a run needs stays, whatever its size."""
    memory_share: float = 0.8
    """Part of the memory that is available when a run starts which its program may use. The rest keeps the agent, and the
    board, alive when a program asks for everything."""
    self_test_s: float = 10.0
    """Deadline of the check of a runner, when it is used first and after a program that crashed, hung or ran out of memory. It
    takes 20 ms on a PC; an emulated board needs seconds."""
    emulator: Emulator | None = None
    """What the device is instead of this machine."""
    phones: PhoneOptions | None = None
    """The agent serves the phones that are attached to this machine, and not the machine."""
    gates: GateLimits = field(default_factory=GateLimits)
    """What a measurement waits for before it starts."""
    governor: str | None = "performance"
    """The cpus' clock governor while something is measured, where the agent may write it; None leaves it. Others let the clock
    follow the load, so that short programs are timed on a clock that is still on its way up."""
    jail: JailOptions = field(default_factory=JailOptions)
    """Settings of the confinement of runners on this machine."""
    progress_interval_s: float = 0.25
    """The shortest time between two RunProgress of one phase."""
    retry_first_s: float = 0.2
    """The first pause before another try to reach the server ..."""
    retry_last_s: float = 5.0
    """... which doubles up to this, and is jittered so that a farm's agents do not come back all at once."""

    def pauses(self) -> Iterator[float]:
        """Return the seconds to wait before each further try to reach the server, without end."""
        return retry_backoff(self.retry_first_s, self.retry_last_s)
