"""`etfarm agent --emulate`: a processor in software that runs its architecture's runner on this machine, qemu's user mode.

Outputs, kernels and events of an emulated device are those of the processor; its times are this machine's and mean nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.device_agents.device import inventory
from etfarm.v1 import device_pb2
from etfarm.wire.errors import DeviceError, UserError

DEFAULT_CPUS: Final = {"aarch64": "cortex-a76"}
"""By architecture, which are those that can be emulated. Not qemu's own default `max`: see SME_WARNING."""
SME_WARNING: Final = (
    "this cpu model has SME, with which qemu computes XNNPACK's int8 kernels wrongly (their outputs, not only their times): "
    "cortex-a76 and max,sme=off are right"
)
_PROGRAMS: Final = {"aarch64": ("qemu-aarch64-static", "qemu-aarch64")}
_ANSWER_S: Final = 30.0
_CODE_BYTES: Final = 96 << 20
"""Of address space for what is no data: the runner and its libraries, 17 MB, a program's file, and what malloc reserves."""
_PROBE_BYTES: Final = 2048
_PROBE_CODE: Final = (
    0xD5380009,  # mrs x9, midr_el1
    0xA9BF7FE9,  # stp x9, xzr, [sp, #-16]!
    0xD2800020,  # mov x0, #1
    0x910003E1,  # mov x1, sp
    0xD2810002,  # mov x2, #2048
    0xD2800808,  # mov x8, #64 (write)
    0xD4000001,  # svc #0
    0xD2800000,  # mov x0, #0
    0xD2800BA8,  # mov x8, #93 (exit)
    0xD4000001,  # svc #0
)
"""Writes the processor's id and the stack as the kernel made it, which has the auxiliary vector."""
_AT_PAGESZ, _AT_HWCAP, _AT_HWCAP2 = 6, 16, 26
_FEATURE_BITS: Final = {
    (_AT_HWCAP, 10): "asimdhp", (_AT_HWCAP, 20): "asimddp", (_AT_HWCAP, 22): "sve", (_AT_HWCAP2, 1): "sve2",
    (_AT_HWCAP2, 13): "i8mm", (_AT_HWCAP2, 14): "bf16", (_AT_HWCAP2, 23): "sme",
}  # fmt: skip
"""The kernel's words in /proc/cpuinfo. Source: Linux' arch/arm64/include/uapi/asm/hwcap.h."""


class EmulatorMissing(UserError):
    """The emulator is not installed."""

    reason = "EMULATOR_MISSING"

    def __init__(self, arch: str) -> None:
        program = _PROGRAMS[arch][0]
        super().__init__(
            f"Emulating {arch} needs {program}, which is not on PATH.",
            "Install it, for example with `apt-get install qemu-user-static`.",
            arch=arch,
            program=program,
        )


class CpuUnknown(UserError):
    """The emulator has no such processor."""

    reason = "CPU_UNKNOWN"

    def __init__(self, cpu: str, known: list[str], why: str) -> None:
        super().__init__(
            f"The emulator cannot be a {cpu!r}: {why}.",
            f"Choose one of {', '.join(known)}; properties may follow, as in max,sme=off.",
            cpu=cpu,
            known=",".join(known),
        )


class EmulatorFailed(DeviceError):
    """The emulator is there and does not run a program of ten instructions."""

    reason = "EMULATOR_FAILED"


@dataclass(frozen=True)
class Emulator:
    """An emulated processor."""

    path: str
    """Absolute, since a runner's environment has no PATH."""
    arch: str
    cpu: str
    """A model as `-cpu help` lists them, and properties of it."""

    @classmethod
    def find(cls, arch: str, cpu: str | None = None) -> Emulator:
        """The emulator on PATH.

        Raises:
            EmulatorMissing: there is none.
        """
        for name in _PROGRAMS[arch]:
            if (path := shutil.which(name)) is not None:
                return cls(str(Path(path).absolute()), arch, cpu or DEFAULT_CPUS[arch])
        raise EmulatorMissing(arch)

    @property
    def prefix(self) -> tuple[str, ...]:
        """What stands before a command line that it runs."""
        return (self.path, "-cpu", self.cpu)

    def within(self, data_bytes: int) -> tuple[str, ...]:
        """`prefix` for a program that may use so much memory.

        qemu tells a program that RLIMIT_DATA was set, and does not set it. Of its own process, what a program takes would be
        missing to qemu, which then hangs. So the program's address space is limited: a request beyond it is refused in order.
        """
        page = 1 << 16  # the largest that Arm has
        return (*self.prefix, "-R", str((data_bytes + _CODE_BYTES) // page * page))

    def version(self) -> str:
        """Such as `7.2.22`; empty where it does not say."""
        match = re.search(r"version (\S+)", self._ask("--version").stdout.decode(errors="replace"))
        return match[1] if match else ""

    def models(self) -> list[str]:
        """The processors that it knows; empty where it does not say."""
        lines = self._ask("-cpu", "help").stdout.decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.startswith(" ") and len(line.split()) == 1]

    def device(self, cores: frozenset[int] | None = None) -> device_pb2.Device:
        """What programs see of the processor, and of this machine through it; without id, agent_id, name and labels. Blocks.

        Raises:
            CpuUnknown: it has no such processor.
            EmulatorFailed: it does not work.
        """
        here = inventory.collect()
        # What it shows of this machine's processor, frequencies included, is not of the emulated one.
        facts = {path: text for path, text in here.items() if path in ("uname -r", "/proc/meminfo", "/proc/self/status")}
        facts |= {path: text for path, text in here.items() if "/topology/" in path}
        device = inventory.parse(facts | self._facts(), cores)
        device.soc, device.emulated = f"qemu {self.cpu}", True
        if version := self.version():
            device.os = ", ".join(part for part in (device.os, f"qemu-user {version}") if part)
        return device

    def _facts(self) -> dict[str, str]:
        """Facts for `inventory.parse`, of what the processor tells a program."""
        midr, auxiliary = self._probe()
        words = [word for (key, bit), word in _FEATURE_BITS.items() if auxiliary.get(key, 0) >> bit & 1]
        stanza = f"CPU implementer: {midr >> 24 & 0xFF:#x}\nCPU part: {midr >> 4 & 0xFFF:#x}\nFeatures: {' '.join(words)}\n"
        facts = {
            "uname -m": self.arch,
            "/proc/cpuinfo": "\n".join(f"processor: {number}\n{stanza}" for number in sorted(os.sched_getaffinity(0))),
        }
        if _AT_PAGESZ in auxiliary:
            facts["getconf PAGESIZE"] = str(auxiliary[_AT_PAGESZ])
        return facts

    def _probe(self) -> tuple[int, dict[int, int]]:
        """The processor's id (MIDR), and the auxiliary vector, by key, of a program that it runs.

        qemu's /proc/cpuinfo is this machine's before version 8.2, so a program of our own asks.
        """
        with tempfile.TemporaryDirectory(prefix="etfarm-probe-") as folder:
            program = Path(folder) / "probe"
            program.write_bytes(_probe_program())
            program.chmod(0o755)
            # The stack behind the vector must reach as far as is written.
            done = self._ask("-cpu", self.cpu, str(program), environment={"PADDING": "x" * _PROBE_BYTES})
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            why = lines[-1].removeprefix(f"{Path(self.path).name}: ").rstrip(".") if lines else _ending(done.returncode)
            known = self.models()
            if lines and done.returncode == 1:
                raise CpuUnknown(self.cpu, known, why)
            raise EmulatorFailed(f"{self.path} does not run a program: {why}.", path=self.path, why=why)
        try:
            words = struct.unpack(f"<{_PROBE_BYTES // 8}Q", done.stdout)
            at = 2 + 1 + words[2] + 1  # behind the id: the number of arguments, they, and a null
            at = words.index(0, at) + 1  # behind the environment
            auxiliary: dict[int, int] = {}
            while words[at]:
                auxiliary[words[at]] = words[at + 1]
                at += 2
            return words[0], auxiliary
        except (struct.error, ValueError, IndexError) as error:
            raise EmulatorFailed(f"{self.path} gives a program an unknown stack: {error}.", path=self.path) from None

    def _ask(self, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                [self.path, *arguments], capture_output=True, check=False, timeout=_ANSWER_S, env=environment or {}
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EmulatorFailed(f"{self.path} does not work: {error}.", path=self.path) from None


def _probe_program() -> bytes:
    """An ELF file of `_PROBE_CODE` alone. Source: elf(5)."""
    base, headers = 0x400000, 64 + 56
    code = struct.pack(f"<{len(_PROBE_CODE)}I", *_PROBE_CODE)
    size = headers + len(code)
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack("<16sHHIQQQIHHHHHH", identity, 2, 183, 1, base + headers, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x10000)
    return header + segment + code


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
