"""A started runner as a process: its streams, its end and its forked children; `LocalChild` is one on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from etfarm.wire.errors import EtfarmError, error_for

MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line of a runner's answer."""
VMSTAT = Path("/proc/vmstat")
_OOM_SCORE = "800"
"""Added to the kernel's badness score of a process, in thousandths of all memory; see proc(5), oom_score_adj."""


class Input(Protocol):
    """The input of a process, with the interface of asyncio.StreamWriter."""

    def write(self, data: bytes) -> None:
        """Queue bytes."""

    async def drain(self) -> None:
        """Wait until the process has taken most of what was written; raise OSError if it is gone."""

    def close(self) -> None:
        """End the input."""


class Child(Protocol):
    """A started process, on whatever machine it runs."""

    @property
    def pid(self) -> int:
        """The process id on the machine where it runs."""

    @property
    def stdin(self) -> Input:
        """Its input."""

    @property
    def stdout(self) -> asyncio.StreamReader:
        """Its output; lines have at most MAX_LINE_BYTES."""

    @property
    def stderr(self) -> asyncio.StreamReader:
        """Its error output."""

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended."""

    @property
    def lost(self) -> EtfarmError | None:
        """The error of a process whose machine is gone, so that its end cannot be known; otherwise None."""

    @property
    def memory_ran_out(self) -> bool | None:
        """Whether the kernel of its machine killed any process for lack of memory since its start; None if unknown."""

    def kill(self) -> None:
        """Send SIGKILL to the process and its forked children; harmless if it has ended."""

    async def wait(self) -> int | None:
        """Wait for the end and return the exit code, negative for a signal; None if it cannot be known."""


Spawn = Callable[[Sequence[str], Path], Awaitable[Child]]
"""Function that starts a command line in a folder; raises RUNNER_BROKEN if it cannot be started."""


class _Group(asyncio.subprocess.SubprocessStreamProtocol):
    """A process group that is killed as soon as its leader ends, since its members would hold the pipes open."""

    leader: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.SubprocessTransport)  # the type that subprocess_exec creates
        self.leader = transport.get_pid()

    def process_exited(self) -> None:
        if self.leader is not None:
            # The leader has been reaped, but its number stays taken while the group has members, and no system reuses a number
            # within so short a time.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.leader, signal.SIGKILL)
        super().process_exited()


class LocalChild:
    """A process of this machine that leads a process group of the same number.

    Args:
        process: the started process.
        kills: the result of `oom_kills` before the start.
    """

    lost: EtfarmError | None = None

    def __init__(self, process: asyncio.subprocess.Process, kills: int | None) -> None:
        # all three were opened as pipes
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self._kills = kills
        self.stdin: Input = process.stdin
        self.stdout = process.stdout
        self.stderr = process.stderr

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._process.pid

    def from_now(self) -> LocalChild:
        """Return the same process as if it had started now; used for a process that was started in advance."""
        return LocalChild(self._process, oom_kills())

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended."""
        return self._process.returncode is not None

    @property
    def memory_ran_out(self) -> bool | None:
        """See `Child.memory_ran_out`."""
        kills = oom_kills()
        return None if self._kills is None or kills is None else kills > self._kills

    def kill(self) -> None:
        """Send SIGKILL; see `Child.kill`."""
        # Only before the process is reaped: afterwards its number may belong to another process.
        if not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int | None:
        """Wait for the end; see `Child.wait`."""
        return await self._process.wait()


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory, in the system or a cgroup; None if unknown.

    Source: Linux, mm/oom_kill.c, since 4.13: the event OOM_KILL is counted wherever a cgroup's own is.
    """
    try:
        match = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


async def spawn_here(command: Sequence[str], folder: Path) -> LocalChild:
    """Start `command` on this machine.

    Raises:
        RUNNER_BROKEN: the command cannot be started.
    """
    loop = asyncio.get_running_loop()
    kills = oom_kills()
    try:
        # Like asyncio.create_subprocess_exec, which does not accept a protocol.
        transport, group = await loop.subprocess_exec(
            lambda: _Group(limit=MAX_LINE_BYTES, loop=loop),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            # The program must not see the agent's environment, above all its tokens; LD_* would change what is run.
            env={"LC_ALL": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder)},
            # A separate process group, so that one signal reaches all forked processes, and Ctrl-C does not reach them.
            start_new_session=True,
        )
    except OSError as error:
        number = errno.errorcode.get(error.errno or 0, str(error.errno))
        why = f"{error.strerror} ({number})"
        raise error_for("RUNNER_BROKEN", f"The runner {command[0]} cannot be started: {why}.", errno=number) from error
    except ValueError as error:
        raise error_for("RUNNER_BROKEN", f"The runner {command[0]} cannot be started: {error}.") from error
    with contextlib.suppress(OSError):  # it has ended already, or the kernel refuses
        # If memory runs out, the program is killed, and not the agent or another process of the machine.
        Path(f"/proc/{transport.get_pid()}/oom_score_adj").write_text(_OOM_SCORE)
    return LocalChild(asyncio.subprocess.Process(transport, group, loop), kills)
