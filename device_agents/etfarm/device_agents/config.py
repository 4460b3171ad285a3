"""The agent's settings, created once by `main` from the command line and the environment."""

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
    """Return the default folder for an agent's id, its cache, and results that the server has not acknowledged."""
    return data_folder() / "agent"


def phones_data_folder() -> Path:
    """Return the default data folder of an agent that serves phones, beside the one of this machine."""
    return data_folder() / "agent-adb"


def emulated_data_folder(emulator: Emulator) -> Path:
    """Return the default data folder of an emulated device: a separate agent, beside the one of this machine."""
    return data_folder() / f"agent-{emulator.arch}-{emulator.cpu.replace('/', '_')}"


@dataclass(frozen=True)
class PhoneOptions:
    """Settings for serving phones."""

    limit_bytes: int = 2 << 30
    """Size limit of the bundles and programs kept on each phone, in bytes; above it the least recently used are deleted."""
    runner: str | None = None
    """Command line of a runner installed on the phones beforehand, used instead of the bundle's."""
    probe_s: float = 5.0
    """Seconds between two liveness probes of a phone."""
    answer_s: float = 5.0
    """Seconds within which a phone must answer a probe. adb itself considers a dead link alive for a minute and more."""
    settle_s: float = 2.0
    """Seconds for which a new phone may be in an adb state without runs before this is reported."""
    retry_s: float = 5.0
    """Seconds before another try to serve a phone after a failure; they double up to `retry_last_s`."""
    retry_last_s: float = 120.0
    """Longest pause in seconds; each try starts a dozen processes on the phone. A phone that is plugged in again, or whose
    state changes, is tried at once."""
    farm_s: float = 10.0
    """Seconds within which the farm must list its runners."""


@dataclass(frozen=True)
class AgentConfig:
    """The settings of one agent process."""

    access: Access
    """The server's address and credentials."""
    name: str
    """The device's label for people; for phones, a prefix of the name of each."""
    data: Path
    """The data folder, which one agent at a time uses."""
    labels: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    """Logical cpus that programs may use; None for all that the process may use."""
    concurrent_runs: int = 1
    """Maximum number of runs at the same time, if none of them is measured or a session."""
    cache_limit_bytes: int = DEFAULT_CACHE_LIMIT_BYTES
    """Size in bytes above which the least recently used artifacts are deleted; those that a run needs stay, whatever their size.
    """
    memory_share: float = 0.8
    """Part of the memory available at the start of a run that its program may use. The rest keeps the agent and the board
    alive if a program requests too much."""
    self_test_s: float = 10.0
    """Deadline in seconds of a runner's self-test, at its first use and after a program crashed, hung or ran out of memory. It
    takes 20 ms on a PC; an emulated board needs seconds."""
    emulator: Emulator | None = None
    """The emulated processor that is served as the device instead of this machine."""
    phones: PhoneOptions | None = None
    """Settings for serving the phones attached to this machine instead of the machine itself; None otherwise."""
    gates: GateLimits = field(default_factory=GateLimits)
    """The conditions that a measurement waits for before it starts."""
    governor: str | None = "performance"
    """The cpus' clock governor during a measurement, if the agent may set it; None keeps the current one. Other governors let
    the clock follow the load, so that short programs are timed while the clock is still rising."""
    jail: JailOptions = field(default_factory=JailOptions)
    """Settings of the confinement of runners on this machine."""
    allow_upgrade: bool = False
    """Whether the agent installs wheels of etfarm that the server offers: its admins can then run any code on this machine."""
    progress_interval_s: float = 0.25
    """Minimum number of seconds between two RunProgress messages of one phase."""
    retry_first_s: float = 0.2
    """The first pause in seconds before another try to reach the server; it doubles up to `retry_last_s`."""
    retry_last_s: float = 2.0
    """The longest pause in seconds; pauses are jittered so that a farm's agents do not all reconnect at once. A server that
    restarts has its fleet back this long after it listens again."""

    def pauses(self) -> Iterator[float]:
        """Return the seconds to wait before each further try to reach the server, without end."""
        return retry_backoff(self.retry_first_s, self.retry_last_s)
