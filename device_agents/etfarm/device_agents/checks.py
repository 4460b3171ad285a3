"""The agent's checks of `etfarm doctor`: compilers, the runners' jail, measurement conditions, emulation and phones."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from etfarm.device_agents.adb.phones import State
from etfarm.device_agents.adb.server import AdbServer
from etfarm.device_agents.jail.confine import Jail
from etfarm.device_agents.jail.options import JailOptions
from etfarm.device_agents.native.toolchain import LOADERS, Compiler
from etfarm.device_agents.runners.emulator import PROGRAMS
from etfarm.wire.doctor import Check, Finding, Status
from etfarm.wire.errors import EtfarmError

_PRESSURE: Final = Path("/proc/pressure/cpu")
_GOVERNORS: Final = "devices/system/cpu/cpufreq/policy*/scaling_governor"


def check_compilers() -> Iterable[Finding]:
    """Yield the compiler of each architecture that bundles are built for; only this machine's own is missed."""
    for arch in sorted(LOADERS):
        name = f"compiler {arch}"
        try:
            compiler = Compiler.find(arch)
            yield Finding(name, Status.OK, f"{compiler.path} {compiler.version()}")
        except EtfarmError as error:
            is_own = arch == platform.machine()
            cost = (
                "without etfarm-runner, ExecuTorch's Python binding runs programs, about 2 µs slower a call."
                if is_own
                else f"no bundles for {arch} devices are built here."
            )
            yield Finding(name, Status.WARNING if is_own else Status.OPTIONAL, error.message, cost, error.remedy)


def check_jail() -> Iterable[Finding]:
    """Yield whether runners are confined on this machine, as a process that confines itself reports."""
    measures = asyncio.run(Jail(JailOptions()).measures())
    if measures.is_complete:
        yield Finding("runner jail", Status.OK, str(measures))
    else:
        remedy = "Start the agent as root, or use a kernel with Landlock and seccomp."
        yield Finding("runner jail", Status.WARNING, str(measures), "a hostile program is less confined.", remedy)


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


CHECKS: Final[Mapping[str, Check]] = {
    "compilers": check_compilers, "runner jail": check_jail, "clock governor": check_clocks, "cpu pressure": check_pressure,
    "emulators": check_emulators, "phones": check_phones,
}  # fmt: skip
