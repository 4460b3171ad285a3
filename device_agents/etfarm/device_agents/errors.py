"""Errors on the agent's side of a run; errors of programs are in `runners.errors`."""

from __future__ import annotations

from pathlib import Path

from etfarm.wire.errors import DeviceError, EtfarmError, FarmError, Kind, UserError


class NoCores(UserError):
    """A --cores option that leaves no cpu to run on."""

    reason = "NO_CORES"


class FolderInUse(UserError):
    """A data folder that another agent uses."""

    reason = "DATA_FOLDER_IN_USE"
    kind = Kind.FAILED_PRECONDITION


class FolderUnusable(UserError):
    """A data folder that the agent cannot write to."""

    reason = "DATA_FOLDER_UNUSABLE"

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(
            f"The agent cannot work in its data folder {folder}: {why}.",
            "Make it writable and free some space, or give another one with --data.",
            folder=folder,
            why=why,
        )


class DeviceBusy(DeviceError):
    """A run that arrived during another run."""

    reason = "DEVICE_BUSY"


class WrongDevice(DeviceError):
    """A run for a device that is not attached to this agent."""

    reason = "DEVICE_UNKNOWN"


class DeviceGone(DeviceError):
    """A device that was detached from its agent, or cannot be reached any more."""

    reason = "DEVICE_GONE"
    kind = Kind.UNAVAILABLE

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name} is gone: {why.rstrip('.')}.",
            "Check its cable, its power and its network; it is served again once it is back.",
            device=name,
            why=why,
        )


class Cancelled(UserError):
    """An attempt that the server cancelled."""

    reason = "CANCELLED"
    kind = Kind.CANCELLED


class AgentFailed(FarmError):
    """A bug of the agent."""

    reason = "AGENT_FAILED"


class DiskFull(DeviceError):
    """A device without room for what the run needs."""

    reason = "DEVICE_DISK_FULL"
    kind = Kind.RESOURCE_EXHAUSTED


class MalformedDigest(FarmError):
    """A server's artifact id that is not a digest."""

    reason = "DIGEST_MALFORMED"


class SelfTestFailed(DeviceError):
    """A runner that fails its self-test after a program ended abnormally: the device is to blame."""

    reason = "DEVICE_SELF_TEST_FAILED"

    def __init__(self, why: str, program_error: EtfarmError) -> None:
        super().__init__(
            f"The runner no longer answers on this device ({why}), after a program ended with {program_error.reason}.",
            "Check the device: memory, disk, temperature, the kernel's log.",
            stage=program_error.stage,
        )
        self.metadata.update(
            program_error.metadata, self_test=why, program_error=program_error.reason, program_message=program_error.message
        )


class RunnerDoesNotWork(DeviceError):
    """A bundle's runner that fails its self-test at its first use on this device, before it runs any program."""

    reason = "DEVICE_RUNNER_UNUSABLE"

    def __init__(self, digest: str, arch: str, why: str) -> None:
        super().__init__(
            f"The runner bundle {digest[:12]} for {arch} does not work on this device: {why.rstrip('.')}.",
            f"Build another one with `etfarm bundle build --arch {arch}` and add it with `etfarm bundle add`.",
            digest=digest,
            arch=arch,
            why=why,
        )


class TransferTimedOut(DeviceError):
    """An attempt whose time ran out while artifacts were still being transferred."""

    reason = "TRANSFER_TIMED_OUT"
    kind = Kind.DEADLINE_EXCEEDED

    def __init__(self, stage: str, deadline_s: float, what: str = "artifacts") -> None:
        super().__init__(
            f"The attempt's {deadline_s:g} s ended while {what} were still in progress.",
            "Check the link, or give the job a longer timeout.",
            stage=stage,
            deadline_s=deadline_s,
        )


class NotReached(UserError):
    """An attempt whose time ran out before this candidate's turn."""

    reason = "ATTEMPT_TIMED_OUT"
    kind = Kind.DEADLINE_EXCEEDED

    def __init__(self, deadline_s: float) -> None:
        super().__init__(
            f"The attempt's {deadline_s:g} s ended before this candidate's turn.",
            "Give the job a longer timeout.",
            deadline_s=deadline_s,
        )


class NoRunner(FarmError):
    """A run for which the server sent no runner that this device can start."""

    reason = "NO_RUNNER"


class ProgramMismatch(FarmError):
    """A program's manifest that does not match its digest."""

    reason = "DIGEST_MISMATCH"
    kind = Kind.DATA_LOSS


class GenerationUnsupported(FarmError):
    """A runner that cannot generate text as requested, because it was built before that was added.

    Args:
        kind: the runner's kind.
        what: what it cannot do.
    """

    reason = "GENERATION_UNSUPPORTED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, kind: str, what: str = "measure the generation of text") -> None:
        super().__init__(
            f"The {kind} runner cannot {what}.",
            "Build the runner's bundle again with `etfarm bundle build`, and add it with `bundle add`.",
            runner=kind,
        )


class ScoringUnsupported(FarmError):
    """A runner that cannot score tokens, because it was built before that was added."""

    reason = "SCORING_UNSUPPORTED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"The {kind} runner cannot score tokens, which the accuracy of generation needs.",
            "Build the runner's bundle again with `etfarm bundle build`, and add it with `bundle add`.",
            runner=kind,
        )
