"""`AsyncLocalSession`: a session on this machine's own runner, without a farm.

with LocalSession("x.pte") as s:
    y = s.run(x)
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from etfarm.client.sessions.open_calls import Line, TextCallback
from etfarm.client.sessions.program import ServedModel, send_program
from etfarm.client.sessions.session import AsyncSession
from etfarm.client.submit.options import one_spelling, to_list
from etfarm.client.transport.retry import Patience
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import session_pb2
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.errors import error_for

START_S = 60.0
"""Seconds that the runner's server may take to start, on a busy machine."""

_END_S = 5.0
_SOCKET_BYTES = 90
"""Maximum length of the folder's path: a unix socket's path may have 107 bytes, and the socket's name needs some."""


class AsyncLocalSession(AsyncSession):
    """An `AsyncSession` on this machine's own runner.

    The runner is that of the user's embedded farm, if it has one; else it is built once.

    Use it with `async with`.
    """

    _USE = "with LocalSession(...) as s:"

    def __init__(
        self,
        program: str | Path,
        *,
        data: Sequence[str | Path] = (),
        methods: str | Sequence[str] | None = None,
        method: str | Sequence[str] | None = None,
        threads: int | None = None,
        cores: str = "",
        on_wait: TextCallback | None = None,
        on_log: TextCallback | None = None,
    ) -> None:
        """Prepare a local session; `async with` opens it.

        Args:
            program: a .pte.
            on_wait: as in AsyncFarm.session; when None, the build of a runner, or that none can be built, is reported on
                stderr.
            data, methods, method, threads, cores, on_log: as in AsyncFarm.session.

        Raises, when it is entered:
            LOCAL_NEEDS_PROGRAM: `program` is a model that is not compiled.
            EtfarmError: the program cannot be loaded, or there is no runner for this machine and none can be built.
        """
        served = ServedModel(program, data=data)
        chosen = to_list(one_spelling("method", method, "methods", methods, ()))
        request = session_pb2.OpenSessionRequest(methods=chosen, threads=threads, cores=cores)

        async def connect(stack: AsyncExitStack) -> Line:
            folder = stack.enter_context(_folder())
            model = await asyncio.to_thread(served.prepared, folder)
            if model.program is None:
                raise error_for(
                    "LOCAL_NEEDS_PROGRAM",
                    f"{model.name} is not compiled, and a local session has no farm to compile it.",
                    "Give a .pte, as written by `etfarm compile MODEL -o x.pte`, or use Farm().session.",
                    model=model.name,
                )
            server = await _start(stack, folder)
            channel = open_channel(Access(server))
            stack.push_async_callback(channel.close)
            # A process that has ended does not come back.
            stubs = Stubs.of(channel, Patience.of(channel, server, wait_s=0.0))
            request.program.CopyFrom(await send_program(stubs, model))
            return Line(stubs, request, model.names)

        super().__init__(connect, on_wait=on_wait or _report_build, on_log=on_log)


def _report_build(why: str) -> None:
    """Print that a runner is being built, which takes long, or cannot be built; other waits are short."""
    if why.startswith(("building", "using ExecuTorch's Python binding")):
        print(f"etfarm: {why}", file=sys.stderr, flush=True)


def _folder() -> _Folder:
    usual = tempfile.gettempdir()
    return _Folder(usual if len(usual) < _SOCKET_BYTES - 30 else "/tmp")


class _Folder:
    """A temporary folder for one session's socket and files."""

    def __init__(self, parent: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="etfarm-local-", dir=parent, ignore_cleanup_errors=True)

    def __enter__(self) -> Path:
        return Path(self._folder.name)

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


async def _start(stack: AsyncExitStack, folder: Path) -> str:
    """Start a process that serves sessions, and return its address.

    The process ends with the stack or with this process.
    """
    log = folder / "log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "etfarm.device_agents.daemon.serve_local", str(folder),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
            # Ctrl-C is left to the caller, which stops this process in order.
            start_new_session=True,
        )  # fmt: skip

    async def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    stack.push_async_callback(end)
    assert process.stdout is not None
    line = b""
    with suppress(TimeoutError):
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
    if not line:
        log_lines = log.read_text(errors="replace").strip().splitlines()
        raise error_for(
            "LOCAL_RUNNER_FAILED",
            f"The local runner's server did not start: {log_lines[-1] if log_lines else 'no output'}.",
            "Install etfarm[agent,export].",
        )
    return line.decode().strip().rpartition(" ")[2]
