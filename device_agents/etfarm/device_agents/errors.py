"""Errors on the agent's side of a run; errors of programs are in `runners.errors`."""

from __future__ import annotations

from pathlib import Path

from etfarm.wire.errors import DeviceError, EtfarmError, Kind, UserError, error_for


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


def device_gone(name: str, why: str) -> EtfarmError:
    """Return the error of a device that was detached from its agent, or cannot be reached any more."""
    return error_for(
        "DEVICE_GONE",
        f"{name} is gone: {why.rstrip('.')}.",
        "Check its cable, its power and its network; it is served again once it is back.",
        device=name,
        why=why,
    )


class DiskFull(DeviceError):
    """A device without room for what the run needs."""

    reason = "DEVICE_DISK_FULL"
    kind = Kind.RESOURCE_EXHAUSTED


def runner_does_not_work(digest: str, arch: str, why: str) -> EtfarmError:
    """Return the error of a bundle's runner that fails its self-test at its first use on this device, before any program."""
    return error_for(
        "DEVICE_RUNNER_UNUSABLE",
        f"The runner bundle {digest[:12]} for {arch} does not work on this device: {why.rstrip('.')}.",
        f"Build another one with `etfarm bundle build --arch {arch}` and add it with `etfarm bundle add`.",
        digest=digest,
        arch=arch,
        why=why,
    )


def transfer_timed_out(stage: str, deadline_s: float, what: str = "artifacts") -> EtfarmError:
    """Return the error of an attempt whose time ran out while artifacts were still being transferred."""
    return error_for(
        "TRANSFER_TIMED_OUT",
        f"The attempt's {deadline_s:g} s ended while {what} were still in progress.",
        "Check the link, or give the job a longer timeout.",
        stage=stage,
        deadline_s=deadline_s,
    )


def not_reached(deadline_s: float) -> EtfarmError:
    """Return the error of an attempt whose time ran out before this candidate's turn."""
    return error_for(
        "ATTEMPT_TIMED_OUT",
        f"The attempt's {deadline_s:g} s ended before this candidate's turn.",
        "Give the job a longer timeout.",
        deadline_s=deadline_s,
    )


def generation_unsupported(kind: str, what: str = "measure the generation of text") -> EtfarmError:
    """Return the error of a runner that cannot generate text as requested, because it was built before that was added.

    Args:
        kind: the runner's kind.
        what: what it cannot do.
    """
    return error_for(
        "GENERATION_UNSUPPORTED",
        f"The {kind} runner cannot {what}.",
        "Build the runner's bundle again with `etfarm bundle build`, and add it with `bundle add`.",
        runner=kind,
    )
