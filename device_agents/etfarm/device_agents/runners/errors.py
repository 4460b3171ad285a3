"""Errors of running a program; the caller attributes a crash after the device's self-test."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.wire.errors import EtfarmError, Kind, UserError, error_for

_WITHOUT_DATA = "If its weights are in a .ptd file, give that too: without it XNNPACK crashes here."
_KILLED = "Check what kills processes on the device, such as a watchdog or a limit of a service."
_CRASHED = "Check its log. The recipe portable, which has no delegate, shows whether a delegate crashes."


class ProgramCrashed(UserError):
    """A runner process that ended by itself while it served a program."""

    reason = "PROGRAM_CRASHED"
    kind = Kind.ABORTED

    def __init__(
        self, stage: str, *, signal: str, exit_code: int | None, abort_message: str, log: Sequence[str], without_data: bool
    ) -> None:
        how = f"by {signal}" if signal else f"with exit code {exit_code}"
        abort_text = f": {abort_message.strip().rstrip('.')}" if abort_message else ""
        hint = _CRASHED
        if "log_evalue" in abort_message:
            hint = "ExecuTorch records no output that is None: leave it out of what the model returns."
        if signal == "SIGKILL":
            hint, abort_text = _KILLED, ", and the kernel killed nothing for lack of memory"
        if without_data and stage == "LOAD_METHOD" and signal == "SIGSEGV":
            hint = _WITHOUT_DATA
        super().__init__(
            f"The program ended the runner {how} at {stage}{abort_text}.",
            hint,
            stage=stage,
            signal=signal,
            exit_code="" if exit_code is None else exit_code,
            abort_message=abort_message,
            log="\n".join(log),
        )
        self.signal = signal
        """The signal's name, such as `SIGSEGV`; empty if the process exited."""
        self.exit_code = exit_code
        """The exit code; None if a signal ended the process."""
        self.abort_message = abort_message
        """ExecuTorch's abort message; empty if it printed none."""
        self.log = tuple(log)
        """The latest lines of the runtime's log and of stderr, oldest first."""


class ProgramHung(UserError):
    """A command that did not end by its deadline; the process was killed."""

    reason = "PROGRAM_TIMED_OUT"
    kind = Kind.DEADLINE_EXCEEDED

    def __init__(self, stage: str, deadline_s: float, log: Sequence[str]) -> None:
        super().__init__(
            f"The program did not finish {stage} within {deadline_s:g} s and was killed.",
            "If it is only slow, give it more time with --timeout (timeout_s=).",
            stage=stage,
            deadline_s=deadline_s,
            log="\n".join(log),
        )
        self.log = tuple(log)


class ProgramOutOfMemory(UserError):
    """A program that needs more memory than the runner may use."""

    reason = "PROGRAM_OUT_OF_MEMORY"
    kind = Kind.RESOURCE_EXHAUSTED

    def __init__(self, stage: str, limit_bytes: int | None, detail: str, log: Sequence[str]) -> None:
        limit = "this device has" if limit_bytes is None else f"the {limit_bytes} bytes that it may use"
        super().__init__(
            f"The program needs more memory at {stage} than {limit}: {detail}.",
            "Choose a device with more memory or a smaller model.",
            stage=stage,
            limit_bytes="" if limit_bytes is None else limit_bytes,
            detail=detail,
            log="\n".join(log),
        )
        self.limit_bytes = limit_bytes
        self.log = tuple(log)


class ProgramFailed(UserError):
    """An error that ExecuTorch returned."""

    reason = "PROGRAM_FAILED"

    def __init__(self, stage: str, message: str, code: str, log: Sequence[str]) -> None:
        super().__init__(_sentence(message), stage=stage, code=code, log="\n".join(log))
        self.code = code
        """ExecuTorch's name of the error, such as `InvalidProgram`; empty if the runner itself refused the command."""
        self.log = tuple(log)


class InputMismatch(UserError):
    """An input that does not match the one that the program was exported with.

    Args:
        more: what else helps.
    """

    reason = "INPUT_MISMATCH"

    def __init__(self, stage: str, message: str, more: str = "") -> None:
        super().__init__(
            f"The inputs do not fit the program: {_sentence(message)}",
            f"Export for these inputs, or give inputs like the example inputs. {more}".rstrip(),
            stage=stage,
            detail=message,
        )


def operator_missing(stage: str, operators: Sequence[str]) -> EtfarmError:
    """Return the error of operators of the program for which the runner has no kernel."""
    return error_for(
        "OPERATOR_MISSING",
        f"The runner has no kernel for {', '.join(operators) or 'an operator of the program'}.",
        "Use a recipe that decomposes or delegates it.",
        stage=stage,
        operators=",".join(operators),
    )


def backend_missing(stage: str, backends: Sequence[str]) -> EtfarmError:
    """Return the error of a delegate that the program needs and the runner does not have."""
    return error_for(
        "BACKEND_MISSING",
        f"The runner has no backend {', '.join(backends)}, which the program was lowered for.",
        "Use a recipe of a backend that the device has.",
        stage=stage,
        backends=",".join(backends),
    )


def data_missing(stage: str, keys: Sequence[str]) -> EtfarmError:
    # A delegate's keys are hashes.
    """Return the error of weights of the program that are in none of the .ptd files supplied with it."""
    shown = ", ".join(key if len(key) <= 40 else f"{key[:12]}..." for key in keys[:5])
    shown += f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    return error_for(
        "PROGRAM_DATA_MISSING",
        f"The program needs data that none of its .ptd files contains: {shown}.",
        "Give the .ptd files that were written with the .pte.",
        stage=stage,
        keys=",".join(keys),
    )


def runner_lacks(stage: str, message: str) -> EtfarmError:
    """Return the error of a request that this kind of runner does not support, but the C++ runner does."""
    return error_for(
        "RUNNER_LACKS", _sentence(message), "Add a runner bundle for the device with `etfarm bundle add`.", stage=stage
    )


def cores_unavailable(stage: str, message: str) -> EtfarmError:
    """Return the error of requested CPUs on which the process may not run."""
    return error_for("CORES_UNAVAILABLE", _sentence(message), "Choose cores that the device has.", stage=stage, detail=message)


def device_storage_failed(stage: str, message: str) -> EtfarmError:
    """Return the error of a file that the device could not write, mostly because its disk is full."""
    return error_for("DEVICE_STORAGE_FAILED", _sentence(message), "Free space on the device.", stage=stage, detail=message)


def runner_killed(stage: str, log: Sequence[str]) -> EtfarmError:
    """Return the error of a runner that was killed before it had a program, so that no program is to blame."""
    return error_for(
        "DEVICE_RUNNER_KILLED",
        f"The runner was killed by SIGKILL at {stage}, before it had a program.",
        _KILLED,
        stage=stage,
        log="\n".join(log),
    )


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."
