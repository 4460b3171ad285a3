"""The agent's settings, created once by `main` from the command line and the environment."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from etfarm.device_agents import logs
from etfarm.device_agents.conditions.gates import MEASUREMENTS, GateLimits
from etfarm.device_agents.jail.options import JailOptions
from etfarm.device_agents.runners.emulator import DEFAULT_CPUS, Emulator
from etfarm.wire.channel import Access
from etfarm.wire.cores import MAX_CONCURRENT_RUNS, parse_cpu_list
from etfarm.wire.names import data_folder
from etfarm.wire.options import Option, option, options, part
from etfarm.wire.retry_backoff import retry_backoff

_SIZE: Final = re.compile(r"(\d+)\s*([KMGT]i?)?B?\Z", re.IGNORECASE)
_GOVERNOR: Final = "performance"
"""Other governors let the clock follow the load, so that short programs are timed while the clock is still rising."""
_EMULATION: Final = (
    "emulation",
    "Serve an emulated device instead of this machine: programs run on another processor in software (qemu), with its "
    "kernels. Outputs are valid, times mean nothing: the verdict is NOT_BENCHMARKABLE.",
)
_PHONES: Final = (
    "phones",
    "Serve the Android phones that are attached to this machine instead of it: each that the adb server lists is a device, "
    "comes and goes with its cable, and needs nothing installed. The server is that of ADB_SERVER_SOCKET, else adb's own, "
    "which is started where it does not run.",
)


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


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ArgumentTypeError(f"{text!r} is not K=V")
    return key, value


def _cores(text: str) -> frozenset[int]:
    try:
        return parse_cpu_list(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of cpus such as 4-7 or 0,2") from None


def _concurrent_runs(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_CONCURRENT_RUNS):
        raise ArgumentTypeError(f"{text!r} is not between 1 and {MAX_CONCURRENT_RUNS}")
    return int(text)


def _size(text: str) -> int:
    match = _SIZE.match(text.strip())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a size such as 1000000 or 500MiB")
    number, unit = int(match.group(1)), (match.group(2) or "").upper()
    if not unit:
        return number
    base = 1024 if unit.endswith("I") else 1000
    return number * int(base ** " KMGT".index(unit[0]))


def _access(server: str, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None) -> Access:
    # A device serves every project that it is not restricted from, so ETFARM_PROJECT does not apply.
    return replace(Access.of(server, tls_ca), tls_cert=tls_cert, tls_key=tls_key, project="")


def _emulator(arch: str | None, cpu: str | None) -> Emulator | None:
    return Emulator.find(arch, cpu) if arch else None


def _phones(is_served: bool, limit_bytes: int | None, runner: str | None) -> PhoneOptions | None:
    limit_bytes = PhoneOptions.limit_bytes if limit_bytes is None else limit_bytes
    return PhoneOptions(limit_bytes=limit_bytes, runner=runner) if is_served else None


def _governor(name: str) -> str | None:
    return None if name == "keep" else name


@dataclass(frozen=True)
class AgentConfig:
    """The settings of one agent process: the options of `etfarm agent`, whose help describes them, and further numbers."""

    # fmt: off
    access: Access = options(
        Option(
            flag="--server", metavar="ADDR",
            help="HOST:PORT, [IPV6]:PORT, several of one farm with commas, or unix:PATH; default: $ETFARM_SERVER"),
        Option(
            flag="--tls-ca", metavar="FILE", read=Path,
            help="certificates (PEM) that the server's is signed by; default: $ETFARM_TLS_CA"),
        Option(flag="--tls-cert", metavar="FILE", read=Path, help="client certificate (PEM), where the server demands one"),
        Option(flag="--tls-key", metavar="FILE", read=Path, help="the client certificate's key (PEM)"),
        build=_access,
    )
    name: str = option(
        "--name", "the device's name; default: the host's name. For phones: the prefix of each name", metavar="N", absent=str)
    # One agent at a time uses it.
    data: Path = option(
        "--data", lambda: "the agent's id, cache and unsent results; default: "
        f"{default_data_folder()}, beside it for --adb and --emulate".replace("%", "%%"),
        metavar="DIR", read=Path, absent=default_data_folder)
    labels: Mapping[str, str] = option(
        "--label", "for selectors (label.K=V); repeatable", default=[], metavar="K=V", read=_label, build=dict, absent=dict)
    cores: frozenset[int] | None = option(
        "--cores", "cpus that programs may use, as 4-7 or 0,2; default: all. Not for phones", metavar="LIST", read=_cores)
    concurrent_runs: int = option(
        "--concurrent-runs", "run up to N programs at the same time that are not measured, each with 1/N of the memory; a "
        "measurement or a session is always alone; default: %(default)s. Not for phones",
        default=1, metavar="N", read=_concurrent_runs)
    # Above it the least recently used artifacts are deleted; those that a run needs stay, whatever their size.
    cache_limit_bytes: int = option(
        "--cache-limit", "as 500MiB; default: %(default)s", default="8GiB", metavar="BYTES", read=_size)
    log_format: str = option("--log-format", "of stderr; default: %(default)s", default="text", choices=logs.FORMATS)
    allow_upgrade: bool = option(
        "--allow-upgrade", "install the wheels of etfarm that the farm's admins offer (`etfarm agents upgrade`), and run the new "
        "version: they can then run any code as this agent's user",
        default=False)
    exit_with_stdin: bool = option(
        "--exit-with-stdin", "end when stdin ends, for programs that start an agent of their own", default=False, in_unit=False)
    emulator: Emulator | None = options(
        Option(
            flag="--emulate", metavar="ARCH", choices=sorted(DEFAULT_CPUS), group=_EMULATION,
            help=f"the architecture: {', '.join(sorted(DEFAULT_CPUS))}"),
        Option(
            flag="--cpu", metavar="MODEL", group=_EMULATION,
            help="the processor, as `qemu-aarch64-static -cpu help` lists them; default: "
            f"{DEFAULT_CPUS['aarch64']}. Not max, but max,sme=off: with SME qemu computes XNNPACK's int8 kernels wrongly"),
        build=_emulator, default=None,
    )
    phones: PhoneOptions | None = options(
        Option(flag="--adb", default=False, group=_PHONES, help="serve every phone"),
        Option(
            flag="--phone-limit", metavar="BYTES", read=_size, group=_PHONES,
            help=f"of runners and programs that are kept on each phone; default: {PhoneOptions.limit_bytes >> 30}GiB"),
        Option(
            flag="--phone-runner", metavar="COMMAND", group=_PHONES,
            help="a runner that was put on the phones beforehand, one built with the NDK for example, and speaks the protocol of "
            "the bundle's; its path on the phone"),
        build=_phones, default=None,
    )
    gates: GateLimits = part(GateLimits)
    governor: str | None = option(
        "--governor", "the cpus' clock governor during measurements, where this agent may write it (as root); it is put back "
        f"afterwards, also after a crash; keep: leave it as it is; default: {_GOVERNOR}",
        metavar="NAME", group=MEASUREMENTS, build=_governor, absent=lambda: _GOVERNOR)
    jail: JailOptions = part(JailOptions)
    # fmt: on
    memory_share: float = 0.8
    """Part of the memory available at the start of a run that its program may use. The rest keeps the agent and the board
    alive if a program requests too much."""
    self_test_s: float = 10.0
    """Deadline in seconds of a runner's self-test, at its first use and after a program crashed, hung or ran out of memory. It
    takes 20 ms on a PC; an emulated board needs seconds."""
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
