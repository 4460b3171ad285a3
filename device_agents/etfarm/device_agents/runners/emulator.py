"""The processor emulator of `etfarm agent --emulate`: qemu's user mode runs another architecture's runner on this machine.

Outputs, kernels and events of an emulated device match the emulated processor; its times depend on this machine and are not
meaningful.
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
from etfarm.wire.errors import UserError, error_for

DEFAULT_CPUS: Final = {"aarch64": "cortex-a76"}
"""Default processor by architecture; these are all architectures that can be emulated. Not qemu's own default `max`: see
SME_WARNING."""
SME_WARNING: Final = (
    "this cpu model has SME, with which qemu computes XNNPACK's int8 kernels wrongly (their outputs, not only their times): "
    "cortex-a76 and max,sme=off are right"
)
PROGRAMS: Final = {"aarch64": ("qemu-aarch64-static", "qemu-aarch64")}
"""Names of the emulator's program by architecture, in order of preference."""
_ANSWER_S: Final = 30.0
_CODE_BYTES: Final = 96 << 20
"""Address space for everything but data: the runner and its libraries (17 MB), a program's file, and what malloc reserves."""
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
"""Code that writes the processor's id, and the initial stack as the kernel sets it up, which contains the auxiliary vector."""
_AT_PAGESZ, _AT_HWCAP, _AT_HWCAP2 = 6, 16, 26
_FEATURE_BITS: Final = {
    (_AT_HWCAP, 10): "asimdhp", (_AT_HWCAP, 20): "asimddp", (_AT_HWCAP, 22): "sve", (_AT_HWCAP2, 1): "sve2",
    (_AT_HWCAP2, 13): "i8mm", (_AT_HWCAP2, 14): "bf16", (_AT_HWCAP2, 23): "sme",
}  # fmt: skip
"""The kernel's names in /proc/cpuinfo. Source: Linux' arch/arm64/include/uapi/asm/hwcap.h."""


class EmulatorMissing(UserError):
    """An emulator that is not installed."""

    reason = "EMULATOR_MISSING"

    def __init__(self, arch: str) -> None:
        program = PROGRAMS[arch][0]
        super().__init__(
            f"Emulating {arch} needs {program}, which is not on PATH.",
            "Install it, for example with `apt-get install qemu-user-static`.",
            arch=arch,
            program=program,
        )


@dataclass(frozen=True)
class Emulator:
    """An emulated processor."""

    path: str
    """Path of the emulator; absolute, since a runner's environment has no PATH."""
    arch: str
    cpu: str
    """A model as `-cpu help` lists it, with optional properties."""

    @classmethod
    def find(cls, arch: str, cpu: str | None = None) -> Emulator:
        """Find the emulator on PATH.

        Raises:
            EmulatorMissing: the emulator is not installed.
        """
        for name in PROGRAMS[arch]:
            if (path := shutil.which(name)) is not None:
                return cls(str(Path(path).absolute()), arch, cpu or DEFAULT_CPUS[arch])
        raise EmulatorMissing(arch)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Return the words to put before a command line that the emulator runs."""
        return (self.path, "-cpu", self.cpu)

    def within(self, data_bytes: int) -> tuple[str, ...]:
        """Return `prefix` for a program that may use at most `data_bytes` of memory.

        qemu reports RLIMIT_DATA to a program as set, but does not apply it. If the limit were set on qemu's own process, memory
        that the program takes would be missing for qemu itself, which then hangs. So the program's address space is limited, and
        a request beyond it is refused properly.
        """
        page = 1 << 16  # the largest page size of Arm
        return (*self.prefix, "-R", str((data_bytes + _CODE_BYTES) // page * page))

    def version(self) -> str:
        """Return the version, such as `7.2.22`; empty if it is unknown."""
        match = re.search(r"version (\S+)", self._run_emulator("--version").stdout.decode(errors="replace"))
        return match[1] if match else ""

    def models(self) -> list[str]:
        """Return the processors that the emulator supports; empty if they are unknown."""
        lines = self._run_emulator("-cpu", "help").stdout.decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.startswith(" ") and len(line.split()) == 1]

    def device(self, cores: frozenset[int] | None = None) -> device_pb2.Device:
        """Return the processor as programs see it, and this machine through it; without id, agent_id, name and labels. Blocks.

        Raises:
            CPU_UNKNOWN: the emulator does not support the processor.
            EMULATOR_FAILED: the emulator does not work.
        """
        local_facts = inventory.collect()
        # What it shows of this machine's processor, frequencies included, does not belong to the emulated one.
        facts = {path: text for path, text in local_facts.items() if path in ("uname -r", "/proc/meminfo", "/proc/self/status")}
        facts |= {path: text for path, text in local_facts.items() if "/topology/" in path}
        device = inventory.parse(facts | self._facts(), cores)
        device.soc, device.emulated = f"qemu {self.cpu}", True
        if version := self.version():
            device.os = ", ".join(part for part in (device.os, f"qemu-user {version}") if part)
        return device

    def _facts(self) -> dict[str, str]:
        """Return facts for `inventory.parse`, from what the processor reports to a program."""
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
        """Return the processor's id (MIDR) and the auxiliary vector of a program that it runs, by key.

        Before version 8.2, qemu shows this machine's /proc/cpuinfo, so a small program reads the registers itself.
        """
        with tempfile.TemporaryDirectory(prefix="etfarm-probe-") as folder:
            program = Path(folder) / "probe"
            program.write_bytes(_probe_program())
            program.chmod(0o755)
            # The stack beyond the vector must extend as far as the program writes.
            process = self._run_emulator("-cpu", self.cpu, str(program), environment={"PADDING": "x" * _PROBE_BYTES})
        if process.returncode != 0:
            lines = process.stderr.decode(errors="replace").strip().splitlines()
            why = lines[-1].removeprefix(f"{Path(self.path).name}: ").rstrip(".") if lines else _ending(process.returncode)
            known = self.models()
            if lines and process.returncode == 1:
                raise error_for(
                    "CPU_UNKNOWN",
                    f"The emulator cannot emulate {self.cpu!r}: {why}.",
                    f"Choose one of {', '.join(known)}; properties may follow, as in max,sme=off.",
                    cpu=self.cpu,
                    known=",".join(known),
                )
            raise error_for("EMULATOR_FAILED", f"{self.path} does not run a program: {why}.", path=self.path, why=why)
        try:
            words = struct.unpack(f"<{_PROBE_BYTES // 8}Q", process.stdout)
            at = 2 + 1 + words[2] + 1  # skip the id, the number of arguments, the arguments and a null
            at = words.index(0, at) + 1  # skip the environment
            auxiliary: dict[int, int] = {}
            while words[at]:
                auxiliary[words[at]] = words[at + 1]
                at += 2
            return words[0], auxiliary
        except (struct.error, ValueError, IndexError) as error:
            raise error_for(
                "EMULATOR_FAILED", f"{self.path} gives a program an unknown stack: {error}.", path=self.path
            ) from None

    def _run_emulator(self, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                [self.path, *arguments], capture_output=True, check=False, timeout=_ANSWER_S, env=environment or {}
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise error_for("EMULATOR_FAILED", f"{self.path} does not work: {error}.", path=self.path) from None


def _probe_program() -> bytes:
    """Return an ELF file that contains `_PROBE_CODE` only. Source: elf(5)."""
    base, headers = 0x400000, 64 + 56
    code = struct.pack(f"<{len(_PROBE_CODE)}I", *_PROBE_CODE)
    size = headers + len(code)
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack("<16sHHIQQQIHHHHHH", identity, 2, 183, 1, base + headers, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x10000)
    return header + segment + code


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
