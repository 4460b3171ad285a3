"""A started runner as a process: its streams, its end, and whatever it forked. Here it is one of this machine."""

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

from etfarm.device_agents.runners import errors
from etfarm.wire.errors import EtfarmError

MAX_LINE_BYTES = 16 << 20
"""Of what a runner answers."""
VMSTAT = Path("/proc/vmstat")
_OOM_SCORE = "800"
"""Added to what the kernel makes of a process's memory, in thousandths of all there is; see proc(5), oom_score_adj."""


class Input(Protocol):
    """What a process reads; as asyncio.StreamWriter."""

    def write(self, data: bytes) -> None:
        """Queues bytes."""

    async def drain(self) -> None:
        """Waits until the process has taken most of what was written; an OSError where it is gone."""

    def close(self) -> None:
        """The end of what it reads."""


class Child(Protocol):
    """A process that was started, wherever it runs."""

    @property
    def pid(self) -> int:
        """Its number where it runs."""

    @property
    def stdin(self) -> Input:
        """What it reads."""

    @property
    def stdout(self) -> asyncio.StreamReader:
        """What it writes; lines up to MAX_LINE_BYTES."""

    @property
    def stderr(self) -> asyncio.StreamReader:
        """What it writes beside."""

    @property
    def ended(self) -> bool:
        """Whether it was seen to end."""

    @property
    def lost(self) -> EtfarmError | None:
        """Why nobody can know its end: what it runs on is gone. None where it is not."""

    @property
    def memory_ran_out(self) -> bool | None:
        """Whether the kernel where it runs has killed anything for lack of memory since it started; None where nobody tells."""

    def kill(self) -> None:
        """SIGKILL to it and to whatever it forked; harmless where it has ended."""

    async def wait(self) -> int | None:
        """Its exit code once it has ended, negative for a signal; None where nobody can know."""


Spawn = Callable[[Sequence[str], Path], Awaitable[Child]]
"""Starts a command line in a folder. RunnerBroken where it cannot be started."""


class _Group(asyncio.subprocess.SubprocessStreamProtocol):
    """Takes down what the program forked as soon as the leader is gone: it would hold the pipes open for ever."""

    leader: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.SubprocessTransport)  # what subprocess_exec makes
        self.leader = transport.get_pid()

    def process_exited(self) -> None:
        if self.leader is not None:
            # The leader is reaped by now, but its number stays taken while the group has members, and no system hands
            # out a number again within the moment since.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.leader, signal.SIGKILL)
        super().process_exited()


class LocalChild:
    """A process of this machine, which leads a group of the same number.

    Args:
        kills: `oom_kills` from before it started.
    """

    lost: EtfarmError | None = None

    def __init__(self, process: asyncio.subprocess.Process, kills: int | None) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # PIPE was asked for
        self._process = process
        self._kills = kills
        self.stdin: Input = process.stdin
        self.stdout = process.stdout
        self.stderr = process.stderr

    @property
    def pid(self) -> int:
        """The process, and its group."""
        return self._process.pid

    def from_now(self) -> LocalChild:
        """Return the same process as if it had started now; for a process that was started in advance."""
        return LocalChild(self._process, oom_kills())

    @property
    def ended(self) -> bool:
        """Whether it was seen to end."""
        return self._process.returncode is not None

    @property
    def memory_ran_out(self) -> bool | None:
        """See `Child.memory_ran_out`."""
        kills = oom_kills()
        return None if self._kills is None or kills is None else kills > self._kills

    def kill(self) -> None:
        """See `Child.kill`."""
        # Only before it was reaped: afterwards the number may be somebody else's.
        if not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int | None:
        """See `Child.wait`."""
        return await self._process.wait()


def oom_kills() -> int | None:
    """How many processes this machine's kernel has killed for lack of memory, its own or a cgroup's; None where it does not tell.

    Source: Linux, mm/oom_kill.c, since 4.13: the event OOM_KILL is counted wherever a cgroup's own is.
    """
    try:
        found = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


async def spawn_here(command: Sequence[str], folder: Path) -> LocalChild:
    """A process of `command` on this machine.

    Raises:
        RunnerBroken: it cannot be started.
    """
    loop = asyncio.get_running_loop()
    kills = oom_kills()
    try:
        # As asyncio.create_subprocess_exec does, which takes no protocol.
        transport, group = await loop.subprocess_exec(
            lambda: _Group(limit=MAX_LINE_BYTES, loop=loop),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            # Nothing of ours, tokens least of all, is a program's business; LD_* would change what is run.
            env={"LC_ALL": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder)},
            # A group of its own, so that one signal reaches whatever the program forked, and Ctrl-C does not.
            start_new_session=True,
        )
    except OSError as error:
        number = errno.errorcode.get(error.errno or 0, str(error.errno))
        why = f"{error.strerror} ({number})"
        raise errors.RunnerBroken(f"The runner {command[0]} cannot be started: {why}.", errno=number) from error
    except ValueError as error:
        raise errors.RunnerBroken(f"The runner {command[0]} cannot be started: {error}.") from error
    with contextlib.suppress(OSError):  # it has ended already, or the kernel does not let us
        # Where memory runs out it is the program that goes, and neither the agent nor anything else of the machine.
        Path(f"/proc/{transport.get_pid()}/oom_score_adj").write_text(_OOM_SCORE)
    return LocalChild(asyncio.subprocess.Process(transport, group, loop), kills)
