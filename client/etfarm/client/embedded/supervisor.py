"""The process that owns an embedded farm; see etfarm.client.embedded.lease for its rules.

Run as `python -m etfarm.client.embedded.supervisor DATA LISTENER [OPTION...]`, with the descriptor of a listening unix socket
and further options of `etfarm serve`. To each connection it writes JSON lines: {"status": ...} while it starts, then
{"address": ..., "keeper": PID}, or {"error": ...}.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from etfarm.client.embedded.lease import Place
from etfarm.wire.names import TOKEN_PREFIX

FIRST_CONNECTION_S = 10.0
"""Seconds to wait for the command that started this process, which connects at once unless it was killed."""

START_TIMEOUT_S = 300.0
"""Seconds without a new line in its log that the server or the agent may take to report that it is ready: on a busy machine, its
imports alone take minutes. A server logs how far it has converted an old database."""

STATUS_S = 15.0
"""Seconds between two reports that the server or the agent is still starting."""

LEAVING_TIMEOUT_S = 20.0
"""Seconds that the previous farm may take to exit."""

STDIN_GRACE_S, TERMINATE_GRACE_S = 2.0, 3.0
"""Seconds that a child may take to exit after its stdin closes, and after SIGTERM; then it is killed."""

_LINE = 300
"""Maximum number of characters of a log's line in a message."""

_STRUCTURED = "timestamp="
"""Prefix of the lines of the server's log, which do not explain why it ended."""

_OWN = re.compile(r"etfarm( \w+)?: ")
"""Prefix of the sentences that are written for users."""


def last_words(log: str) -> str:
    """Return the reason that a program printed for its end.

    That is the last line that begins with `etfarm:`, else the last line that does not come from a log.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    own = [line for line in lines if _OWN.match(line)]
    others = [line for line in lines if not line.startswith(_STRUCTURED)]
    sentence = _OWN.sub("", (own or others or [""])[-1], count=1)
    return f"{sentence}." if sentence and sentence[-1] not in ".?!" else sentence


class _Failed(Exception):
    """The farm cannot run; the text is one clear sentence for the user."""


def describe_load() -> str:
    """Return how busy the machine is, like `load 7.5 on 2 CPUs`."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count() or 1} CPUs"


class _Child:
    """The server process or the agent process."""

    def __init__(self, what: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.what, self.log, self.process = what, log, process

    async def read_line_after(self, start: str, on_status: Callable[[str], None]) -> str:
        """Read its stdout up to the line that begins with `start`, and return the rest of that line.

        Args:
            on_status: called with a sentence about the wait from time to time.

        Raises:
            _Failed: it ended, or neither printed the line nor logged anything in time.
        """
        assert self.process.stdout is not None
        reading = asyncio.create_task(self._find_line(self.process.stdout, start))
        clock = asyncio.get_running_loop().time
        started = last_progress = clock()
        size_bytes = 0
        try:
            while not (await asyncio.wait({reading}, timeout=STATUS_S))[0]:
                if size_bytes != (size_bytes := self.log.stat().st_size):
                    last_progress = clock()
                elif clock() - last_progress >= START_TIMEOUT_S:
                    raise _Failed(self._late(clock() - started))
                waited = f"{clock() - started:.0f} s, {describe_load()}"
                on_status(f"Waiting for the embedded farm's {self.what} to start ({waited}).")
            if (text := reading.result()) is None:
                raise _Failed(await self.ended())
            return text
        finally:
            reading.cancel()

    def _late(self, waited_s: float) -> str:
        """Return a sentence about a process that still runs and is not ready."""
        late = f"The embedded farm's {self.what} did not start within {waited_s:.0f} s"
        lines = self.log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if not last:
            return f"{late} and wrote no log; the machine may be too busy ({describe_load()})."
        return f"{late} ({describe_load()}). Its log {self.log} ends in: {last[-_LINE:]}"

    @staticmethod
    async def _find_line(stream: asyncio.StreamReader, start: str) -> str | None:
        """Return the rest of the line that begins with `start`; None if the stream ends before."""
        while line := await stream.readline():
            text = line.decode(errors="replace").strip()
            if text.startswith(start):
                return text.removeprefix(start).strip()
        return None

    async def ended(self) -> str:
        """Wait for its end and return a sentence about it."""
        code = await self.process.wait()
        if code < 0:  # its earlier log lines do not explain the signal
            return f"The embedded farm's {self.what} was killed by {signal.Signals(-code).name}. Its log is {self.log}."
        why = last_words(self.log.read_text(errors="replace"))
        return f"The embedded farm's {self.what} ended with exit code {code}{f': {why}' if why else '.'} Its log is {self.log}."

    async def drain(self) -> None:
        """Discard its stdout, so that it never blocks on it."""
        assert self.process.stdout is not None
        while await self.process.stdout.read(65536):
            pass

    async def stop(self) -> None:
        """End it: close its stdin, then send SIGTERM, then SIGKILL."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        for wait_s, number in ((STDIN_GRACE_S, signal.SIGTERM), (TERMINATE_GRACE_S, signal.SIGKILL)):
            try:
                await asyncio.wait_for(self.process.wait(), wait_s)
                return
            except TimeoutError:
                self.process.send_signal(number)
        await self.process.wait()


class Supervisor:
    """One embedded farm from its first connection to its last."""

    def __init__(self, place: Place, listener: socket.socket, options: Sequence[str] = ()) -> None:
        """Prepare to run a farm.

        Args:
            listener: bound to `place.supervisor_socket`; this object closes it.
            options: further options of `etfarm serve`.
        """
        self._options = options
        self._place = place
        self._listener = listener
        self._listener.setblocking(False)
        self._last_message: dict[str, Any] = {"status": "Starting the embedded farm."}
        self._accepted = 0
        self._connections: dict[int, asyncio.StreamWriter | None] = {}
        """Connections that hold the farm; they have a writer after their first line."""
        self._keepers: dict[int, int] = {}
        """Process ids of the `etfarm up` commands, by connection, the first one first."""
        self._parting: list[asyncio.StreamWriter] = []
        """Connections of the last commands, which wait for this process to exit."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._children: list[_Child] = []
        self._failure = ""

    async def run(self) -> None:
        """Run the farm until its last user leaves or it fails."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener.fileno(), self._accept)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._fail, "The embedded farm received a request to end.")
        self._start(self._serve(), "server and agent")
        try:
            await self._wait_until_unused()
        finally:
            await self._stop()

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self) -> None:
        # Count in the callback that accepts the connection, so that `_stop_answering` misses none.
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if (uid := _uid_of_peer(connection)) not in (None, os.getuid()):
            print(f"refused a connection of user {uid}", file=sys.stderr, flush=True)
            connection.close()
            return
        key = self._accepted
        self._accepted += 1
        self._connections[key] = None
        self._changed.set()
        self._start(self._talk(key, connection), f"connection {key}")

    async def _talk(self, key: int, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        held: set[str] = set()
        try:
            if first := await reader.readline():
                joined = json.loads(first)
                if joined.get("kind") == "up":
                    self._keepers[key] = int(joined["pid"])
                self._connections[key] = writer
                self._send(writer, self._last_message)
                while line := await reader.readline():
                    self._track_jobs(json.loads(line), held)
        except (OSError, ValueError) as error:
            print(f"connection {key}: {error}", file=sys.stderr, flush=True)
        finally:
            self._keepers.pop(key, None)
            del self._connections[key]
            self._changed.set()
        if self._connections:
            for job in held:
                self._start(self._cancel(job), f"cancel {job}")
            self._send_stays(writer)
        else:
            self._parting.append(writer)

    def _track_jobs(self, message: dict[str, str], held: set[str]) -> None:
        """Record the jobs that end with a command, also on disk: this process may be killed like any other."""
        job = message.get("job") or message.get("done") or ""
        if not (job.isascii() and job.isalnum()):
            raise ValueError(f"no job id: {job!r}")
        if "job" in message:
            held.add(job)
            (self._place.held_jobs / job).touch()
        else:
            held.discard(job)
            (self._place.held_jobs / job).unlink(missing_ok=True)

    async def _cancel(self, job: str) -> None:
        """Cancel the job of a command that died."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "etfarm.wire.command", "jobs", "cancel", job),
            *("--server", f"unix:{self._place.server_socket}"),
            stdin=asyncio.subprocess.DEVNULL,
        )
        if await process.wait() in (0, 2):  # cancelled, or unknown to the server
            (self._place.held_jobs / job).unlink(missing_ok=True)

    def _send_stays(self, writer: asyncio.StreamWriter) -> None:
        """Tell a leaving command that the farm stays for others."""
        self._send(writer, {"stays": True})
        writer.close()

    def _send(self, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        if "address" in message:
            keeper = next(iter(self._keepers.values()), None)
            message = {**message, "keeper": keeper}
        if not writer.is_closing():
            writer.write(json.dumps(message).encode() + b"\n")

    def _broadcast(self, **message: Any) -> None:
        self._last_message = message
        for writer in self._connections.values():
            if writer is not None:
                self._send(writer, message)

    def _report(self, status: str) -> None:
        self._broadcast(status=status)

    def _fail(self, why: str) -> None:
        if not self._failure:
            self._failure = why
            self._broadcast(error=why)
            self._changed.set()

    async def _wait_until_unused(self) -> None:
        """Wait until the farm is unused and has stopped answering."""
        try:
            async with asyncio.timeout(FIRST_CONNECTION_S):
                while not self._accepted:
                    await self._change()
        except TimeoutError:
            print("no client connected", file=sys.stderr, flush=True)
        while True:
            while self._connections and not self._failure:
                await self._change()
            if await self._stop_answering():
                return
            while self._parting:
                self._send_stays(self._parting.pop())

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def _stop_answering(self) -> bool:
        """Stop accepting connections, unless a new one just arrived."""
        lock = await asyncio.to_thread(self._place.lock, "lock")
        try:
            if not self._failure and (self._connections or select.select([self._listener], [], [], 0)[0]):
                return False
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._place.supervisor_socket.unlink(missing_ok=True)
            self._listener.close()
            return True
        finally:
            os.close(lock)

    async def _serve(self) -> None:
        """Start the server, then the agent, and watch both."""
        place = self._place
        unix = f"unix:{place.server_socket}"
        try:
            running = await self._wait_for_previous_farm()
            self._broadcast(status="Starting the embedded farm's server.")
            place.server_socket.unlink(missing_ok=True)
            _write_token(place.token_file)
            here = ("--listen", unix, "--data", str(place.data / "server"), "--address-file", str(place.address_file))
            secret = ("--tokens", str(place.token_file))
            # A command's own job is what its only device is for.
            without = ("--health-interval", "0")
            server = await self._launch("server", running, "serve", *here, *secret, *without, *self._options)
            await server.read_line_after("etfarm serve: listening on", self._report)
            self._start(server.drain(), "server's stdout")
            for orphan in sorted(place.held_jobs.iterdir()):
                self._broadcast(status=f"Cancelling job {orphan.name}, whose command was killed.")
                await self._cancel(orphan.name)
            self._broadcast(status="Starting the embedded farm's agent.")
            agent = await self._launch("agent", running, "agent", "--server", unix, "--data", str(place.data / "agent"))
            await agent.read_line_after("etfarm agent: connected to", self._report)
            self._start(agent.drain(), "agent's stdout")
            self._broadcast(address=unix)
            ends = [asyncio.create_task(child.ended(), name=f"end of the {child.what}") for child in (server, agent)]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self._fail(done.pop().result())
        except _Failed as failure:
            self._fail(str(failure))
        except OSError as error:
            self._fail(f"The embedded farm cannot start: {error}.")

    async def _wait_for_previous_farm(self) -> int:
        """Wait until every process of the previous farm is gone, and return the descriptor of the lock that shows it.

        Raises:
            _Failed: they do not exit in time.
        """
        try:
            return self._place.lock("running", wait=False)
        except BlockingIOError:
            self._broadcast(status="Waiting for the previous embedded farm to end.")
        try:
            async with asyncio.timeout(LEAVING_TIMEOUT_S):
                return await asyncio.to_thread(self._place.lock, "running")
        except TimeoutError:
            raise _Failed("The previous embedded farm did not end; its processes hold the data folder.") from None

    async def _launch(self, what: str, running: int, *command: str) -> _Child:
        log = self._place.data / f"{command[0]}.log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "etfarm.wire.command", *command, "--exit-with-stdin"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                pass_fds=(running,),
                cwd=self._place.data,
            )
        child = _Child(what, log, process)
        self._children.append(child)
        return child

    async def _stop(self) -> None:
        """End both children in any case, and remove the files with their addresses."""
        starting = [task for task in self._tasks if task.get_name() == "server and agent"]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self._children))
        for path in (self._place.server_socket, self._place.address_file, self._place.token_file):
            path.unlink(missing_ok=True)
        if self._place.sockets != self._place.data:
            # Another farm of this folder may already be starting, with its socket there.
            try:
                self._place.sockets.rmdir()
            except OSError as error:
                print(f"kept {self._place.sockets}: {error.strerror}", file=sys.stderr, flush=True)


def _write_token(path: Path) -> None:
    """Write the farm's secret in the format of a server's token file; its holder is an admin of the farm."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(f"local admin {TOKEN_PREFIX}{secrets.token_urlsafe(32)}\n")


def _uid_of_peer(connection: socket.socket) -> int | None:
    """Return the user id of the process at the other end; None if the system does not provide it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def main(argv: list[str]) -> int:
    """Run a supervisor; see the module."""
    os.umask(0o077)
    folder, descriptor, *options = argv
    os.set_inheritable(int(descriptor), False)
    asyncio.run(Supervisor(Place(Path(folder)), socket.socket(fileno=int(descriptor)), options).run())
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Not sys.exit: a thread may still wait for the lock of a farm that does not end.
    os._exit(code)
