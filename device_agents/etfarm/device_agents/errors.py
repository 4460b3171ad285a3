"""What can go wrong on the agent's side of a run; what a program does wrong is in `runners.errors`."""

from __future__ import annotations

from pathlib import Path

from etfarm.wire.errors import DeviceError, EtfarmError, FarmError, Kind, UserError


class NoCores(UserError):
    """--cores leaves nothing to run on."""

    reason = "NO_CORES"


class FolderInUse(UserError):
    """Another agent works in the data folder."""

    reason = "DATA_FOLDER_IN_USE"
    kind = Kind.FAILED_PRECONDITION


class FolderUnusable(UserError):
    """The agent cannot write into its data folder."""

    reason = "DATA_FOLDER_UNUSABLE"

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(
            f"The agent cannot work in its data folder {folder}: {why}.",
            "Make it writable with some space left, or give another one with --data.",
            folder=folder,
            why=why,
        )


class DeviceBusy(DeviceError):
    """A run came while another one is under way."""

    reason = "DEVICE_BUSY"


class WrongDevice(DeviceError):
    """A run came for a device that is not here."""

    reason = "DEVICE_UNKNOWN"


class DeviceGone(DeviceError):
    """The device was detached from its agent, or cannot be reached any more."""

    reason = "DEVICE_GONE"
    kind = Kind.UNAVAILABLE

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name} is gone: {why.rstrip('.')}.",
            "Look at its cable, its power and its network; it is served again once it is back.",
            device=name,
            why=why,
        )


class Cancelled(UserError):
    """The server took the attempt back."""

    reason = "CANCELLED"
    kind = Kind.CANCELLED


class AgentFailed(FarmError):
    """A bug of the agent."""

    reason = "AGENT_FAILED"


class CoresUnknown(UserError):
    """Measurement.cores names no cpus of the device."""

    reason = "CORES_UNKNOWN"


class DiskFull(DeviceError):
    """The device has no room for what the run needs."""

    reason = "DEVICE_DISK_FULL"
    kind = Kind.RESOURCE_EXHAUSTED


class MalformedDigest(FarmError):
    """The server named an artifact by something that is no digest."""

    reason = "DIGEST_MALFORMED"


class SelfTestFailed(DeviceError):
    """A program ended badly, and then the runner does not answer without it either: the device is to blame."""

    reason = "DEVICE_SELF_TEST_FAILED"

    def __init__(self, why: str, program_error: EtfarmError) -> None:
        super().__init__(
            f"The runner does not answer on this device any more ({why}), after a program ended with {program_error.reason}.",
            "Look at the device: memory, disk, temperature, the kernel's log.",
            stage=program_error.stage,
        )
        self.metadata.update(
            program_error.metadata, self_test=why, program_error=program_error.reason, program_message=program_error.message
        )


class RunnerDoesNotWork(DeviceError):
    """The runner of a bundle fails its self-test at its first use on this device, before it sees any program."""

    reason = "DEVICE_RUNNER_UNUSABLE"

    def __init__(self, digest: str, arch: str, why: str) -> None:
        super().__init__(
            f"The runner bundle {digest[:12]} for {arch} does not work on this device: {why.rstrip('.')}.",
            f"Offer another one, of `etfarm bundle build --arch {arch}`, with `etfarm bundle add`.",
            digest=digest,
            arch=arch,
            why=why,
        )


class TransferTimedOut(DeviceError):
    """The attempt's time was over while artifacts were still under way."""

    reason = "TRANSFER_TIMED_OUT"
    kind = Kind.DEADLINE_EXCEEDED

    def __init__(self, stage: str, deadline_s: float, what: str = "artifacts") -> None:
        super().__init__(
            f"The attempt's {deadline_s:g} s were over while {what} were still under way.",
            "Look at the link, or give the job a longer timeout.",
            stage=stage,
            deadline_s=deadline_s,
        )


class NotReached(UserError):
    """The attempt's time was over before this candidate's turn."""

    reason = "ATTEMPT_TIMED_OUT"
    kind = Kind.DEADLINE_EXCEEDED

    def __init__(self, deadline_s: float) -> None:
        super().__init__(
            f"The attempt's {deadline_s:g} s were over before this candidate's turn.",
            "Give the job a longer timeout.",
            deadline_s=deadline_s,
        )


class NoRunner(FarmError):
    """The server sent no runner that this device can start."""

    reason = "NO_RUNNER"


class ProgramMismatch(FarmError):
    """A program's manifest is not what its digest says."""

    reason = "DIGEST_MISMATCH"
    kind = Kind.DATA_LOSS
