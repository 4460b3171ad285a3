"""The agent's checks of `etfarm doctor`: compilers, runners and their jail, measurement conditions, emulation and phones."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from etfarm.device_agents.adb.phones import State
from etfarm.device_agents.adb.server import AdbServer
from etfarm.device_agents.daemon.local_bundle import find_prebuilt_runner
from etfarm.device_agents.jail.confine import Jail
from etfarm.device_agents.jail.options import JailOptions
from etfarm.device_agents.native.build import source_digest
from etfarm.device_agents.native.toolchain import LOADERS, Compiler
from etfarm.device_agents.runners.emulator import PROGRAMS
from etfarm.wire.cores import format_cpu_list
from etfarm.wire.doctor import Check, Finding, Status
from etfarm.wire.errors import EtfarmError
from etfarm.wire.names import TLS_CA_VARIABLE, prebuilt_runner
from etfarm.wire.private import FolderNotPrivate, find_openness

_PRESSURE: Final = Path("/proc/pressure/cpu")
_RUNNER_S: Final = 10.0
"""Seconds that a runner's self-test may take; usual is a tenth of a second."""
_FREE_BYTES: Final = 1 << 30
_GOVERNORS: Final = "devices/system/cpu/cpufreq/policy*/scaling_governor"


def check_compilers() -> Iterable[Finding]:
    """Yield the compiler of each architecture that bundles are built for; only this machine's own is missed."""
    for arch in sorted(LOADERS):
        name = f"compiler {arch}"
        try:
            compiler = Compiler.find(arch)
            yield Finding(name, Status.OK, f"{compiler.path} {compiler.version()}")
        except EtfarmError as error:
            # The distribution etfarm-runner has what this machine's compiler would build.
            is_missed = arch == platform.machine() and not _has_runner()
            cost = (
                "ExecuTorch's Python binding runs programs instead of a runner, about 2 µs slower a call."
                if is_missed
                else f"no bundles for {arch} devices are built here."
            )
            yield Finding(name, Status.WARNING if is_missed else Status.OPTIONAL, error.message, cost, error.remedy)


def _has_runner() -> bool:
    """Return whether the distribution etfarm-runner has the runner that a build would yield."""
    try:
        return find_prebuilt_runner(version("executorch"), source_digest()) is not None
    except PackageNotFoundError:
        return prebuilt_runner() is not None  # an agent, which builds nothing


def check_jail() -> Iterable[Finding]:
    """Yield whether runners are confined on this machine, as a process that confines itself reports."""
    measures = asyncio.run(Jail(JailOptions()).measures())
    if measures.is_complete:
        yield Finding("runner jail", Status.OK, str(measures))
    else:
        remedy = "Start the agent as root, or use a kernel with Landlock and seccomp."
        yield Finding("runner jail", Status.WARNING, str(measures), "a hostile program is less confined.", remedy)


def check_prebuilt_runner(archive: Path | None = None) -> Iterable[Finding]:
    """Yield whether the runner of the distribution etfarm-runner starts on this machine and computes known results.

    Args:
        archive: the runner's bundle; that of the installed distribution by default. Yields nothing without one.
    """
    archive = archive or prebuilt_runner()
    if archive is None:
        return
    name = "runner self-test"
    try:
        with tempfile.TemporaryDirectory(prefix="etfarm-doctor-") as folder:
            tested = asyncio.run(_test_runner(archive, Path(folder)))
    except (EtfarmError, OSError, TimeoutError) as error:
        detail = str(error) or f"The runner did not answer within {_RUNNER_S:g} s."
        cost = "runs fail on this machine, unless it can build a runner."
        remedy = "Reinstall etfarm-runner, or uninstall it and install g++. Programs must be allowed to start from TMPDIR."
        yield Finding(name, Status.WARNING, detail, cost, remedy)
    else:
        yield Finding(name, Status.OK, f"the prebuilt runner computed {len(tested)} known results: {', '.join(tested)}")


async def _test_runner(archive: Path, folder: Path) -> tuple[str, ...]:
    """Unpack a bundle, start its runner, and return the kernels and backends that computed known results."""
    # The other checks do without gRPC, which these need.
    from etfarm.device_agents.runners.bundle import unpack
    from etfarm.device_agents.runners.native import NativeRunner

    bundle = await asyncio.to_thread(unpack, archive, folder / "bundle")
    scratch = folder / "scratch"
    scratch.mkdir()
    async with asyncio.timeout(_RUNNER_S), NativeRunner.start(bundle.command(), scratch) as runner:
        await runner.hello()
        return await runner.self_test()


def check_affinity(bind: Callable[[int, Collection[int]], None] = os.sched_setaffinity) -> Iterable[Finding]:
    """Yield whether threads may be bound to cpus, as runners are for `--cores` and the agent's own sampler is.

    Args:
        bind: binds a thread to cpus; 0 is the calling thread.
    """
    name, allowed = "cpu affinity", os.sched_getaffinity(0)
    try:
        try:
            for cpu in sorted(allowed):
                bind(0, {cpu})
        finally:
            bind(0, allowed)
    except OSError as error:
        cost = "`--cores` is refused, and the agent's own work may disturb a measurement."
        remedy = "Allow the system call sched_setaffinity, for example in the container's seccomp profile."
        yield Finding(name, Status.WARNING, f"A thread cannot be bound to a cpu: {error.strerror}.", cost, remedy)
        return
    count = os.cpu_count() or len(allowed)
    text = f"threads may be bound to cpus {format_cpu_list(allowed)}"
    if len(allowed) < count:
        cost = "the device has fewer cpus than the machine."
        remedy = "Start the agent without taskset and outside a cpuset, if it should use all of them."
        yield Finding(name, Status.OPTIONAL, f"{text}, {len(allowed)} of {count}", cost, remedy)
    else:
        yield Finding(name, Status.OK, text)


def check_clocks(sys: Path = Path("/sys")) -> Iterable[Finding]:
    """Yield whether the agent may set the cpus' governor."""
    governors = sorted(sys.glob(_GOVERNORS))
    if not governors:
        yield Finding("clock governor", Status.OK, "This machine has none, as is usual for a virtual one.")
    elif all(os.access(path, os.W_OK) for path in governors):
        yield Finding("clock governor", Status.OK, "may be set for a measurement")
    else:
        cost = "the clock may move during a measurement, which makes it INVALID."
        remedy = "Start the agent as root, or set the governor `performance` yourself."
        yield Finding("clock governor", Status.WARNING, "may not be set by this user", cost, remedy)


def check_pressure(path: Path = _PRESSURE) -> Iterable[Finding]:
    """Yield whether the kernel reports how long tasks wait for a cpu."""
    try:
        path.read_text()
    except OSError as error:
        cost = "other programs that disturb a measurement are noticed later."
        remedy = "Boot with psi=1 on a kernel with CONFIG_PSI."
        yield Finding("cpu pressure", Status.WARNING, f"{path} cannot be read: {error.strerror}", cost, remedy)
    else:
        yield Finding("cpu pressure", Status.OK, str(path))


def check_emulators() -> Iterable[Finding]:
    """Yield the emulator of each other architecture."""
    for arch, programs in PROGRAMS.items():
        if arch == platform.machine():
            continue
        path = next(filter(None, map(shutil.which, programs)), None)
        if path is not None:
            yield Finding(f"emulator {arch}", Status.OK, path)
        else:
            cost, remedy = "`etfarm agent --emulate` does not work.", "For example `apt-get install qemu-user-static`."
            yield Finding(f"emulator {arch}", Status.OPTIONAL, f"{programs[-1]} is not installed", cost, remedy)


def check_phones() -> Iterable[Finding]:
    """Yield each phone that the adb server knows. The adb server is not started."""
    try:
        phones = asyncio.run(AdbServer(answer_s=5.0).phones())
    except EtfarmError as error:
        yield Finding("adb", Status.OPTIONAL, error.message, "phones cannot be devices of this machine.", error.remedy)
        return
    yield Finding("adb", Status.OK, f"{len(phones)} phone{'' if len(phones) == 1 else 's'} attached")
    for phone in phones:
        status = Status.OK if phone.state is State.DEVICE else Status.WARNING
        cost = "" if status is Status.OK else "the phone runs no programs."
        yield Finding("phone", status, f"{phone.serial} {phone.model}: {phone.state}", cost, phone.remedy)


def check_enrolment(folder: Path | None = None) -> Iterable[Finding]:
    """Yield whether the server that this machine's agent enrolled with answers, and what it says of itself.

    Args:
        folder: the agent's data folder; the default one when None.
    """
    # The other checks do without gRPC, which these need.
    from etfarm.device_agents.config import default_data_folder
    from etfarm.device_agents.daemon.enrolment import kept_access
    from etfarm.wire.server_findings import ask, describe

    folder = folder or default_data_folder()
    access = kept_access(folder)
    if access is None:
        return
    ca = os.environ.get(TLS_CA_VARIABLE)
    access = dataclasses.replace(access, tls_ca=Path(ca) if ca else None)
    try:
        asked = asyncio.run(ask(access))
    except EtfarmError as error:
        remedy = error.remedy if ca else f"{error.remedy} Set {TLS_CA_VARIABLE} if the server has a certificate.".strip()
        yield Finding("agent's server", Status.WARNING, error.message, "the agent of this machine cannot serve.", remedy)
        return
    yield from describe("agent's server", access.server, asked)


def check_agent_folder(folder: Path | None = None) -> Iterable[Finding]:
    """Yield whether the data folder of this machine's agent has room for programs and results.

    Args:
        folder: the agent's data folder; the default one when None.
    """
    from etfarm.device_agents.config import default_data_folder

    folder = folder or default_data_folder()
    if not folder.is_dir():
        return
    try:
        if (openness := find_openness(folder)) is not None:
            yield Finding(
                "agent's folder", Status.WARNING, openness, "they may read its token.", "The agent closes it at its start."
            )
    except FolderNotPrivate as error:
        yield Finding("agent's folder", Status.WARNING, error.message, "the agent does not start.", error.remedy)
        return
    free, name = shutil.disk_usage(folder).free, "agent's disk"
    text = f"{folder}, {free / 1e9:.1f} GB free"
    if free < _FREE_BYTES:
        remedy = "Free disk space, or lower `etfarm agent --cache-limit`."
        yield Finding(name, Status.WARNING, text, "runs of large programs fail.", remedy)
    else:
        yield Finding(name, Status.OK, text)


CHECKS: Final[Mapping[str, Check]] = {
    "compilers": check_compilers, "runner self-test": check_prebuilt_runner, "runner jail": check_jail,
    "cpu affinity": check_affinity, "clock governor": check_clocks, "cpu pressure": check_pressure,
    "emulators": check_emulators, "phones": check_phones, "agent's server": check_enrolment, "agent's disk": check_agent_folder,
}  # fmt: skip
