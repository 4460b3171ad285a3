"""A farm with tokens of each role, simulated devices, and its page: what tests of the page in a browser share.

`python -m tests.support.simulated_web` serves one until its stdin ends, and prints the page's address and tokens.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from etfarm.client import Farm
from etfarm.v1 import agent_pb2
from tests.support.farm import FarmProcess, private_file
from tests.support.simulated_agent import Act, SimulatedAgent
from tests.support.web import start_page

TOKENS: Final = {role: f"secret-of-{role}-0123456789" for role in ("admin", "user", "viewer", "agent")}
WAIT_S: Final = 180.0
"""For what agents do, which takes up to 20 s on an idle machine."""

T = TypeVar("T")


class SimulatedWebFarm:
    """The processes of a farm and its page, and simulated agents in a thread of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tokens = private_file(folder / "tokens", "".join(f"{role} {role} {token}\n" for role, token in TOKENS.items()))
        self.farm = FarmProcess(folder, bundle=False, serve=["--tokens", str(tokens)])
        self.farm.start(agents=0)
        self.agents = AgentThread(self.farm.address)
        self.page, self.url = start_page(self.farm.address, folder / "web.log")

    def client(self, role: str = "admin") -> Farm:
        """Return a client with the token of a role."""
        return Farm(self.farm.address, token=TOKENS[role])

    def stop(self) -> None:
        """End all of it."""
        self.agents.stop()
        try:
            self.page.stop()
        finally:
            self.farm.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


class AgentThread:
    """An event loop in a thread, for simulated agents."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._agents: list[SimulatedAgent] = []
        threading.Thread(target=self._run, name="simulated agents", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def add(
        self,
        name: str,
        *,
        devices: tuple[str, ...] = (),
        act: Callable[[agent_pb2.StartRun], Act] | None = None,
        run_s: float = 0.0,
        shown_name: str = "",
    ) -> SimulatedAgent:
        """Start an agent; it has connected when this returns.

        Args:
            shown_name: the name of its devices, in place of those that their ids are made of.
        """

        async def start() -> SimulatedAgent:
            options: dict[str, Any] = {} if act is None else {"act": act}
            agent = SimulatedAgent(
                self._server, name, devices=devices, run_s=run_s, pause_s=0.2, token=TOKENS["agent"], **options
            )
            for device in agent.devices.values():
                device.name = shown_name or device.name
            agent.start()
            await agent.wait_connected()
            return agent

        agent = self.run(start())
        self._agents.append(agent)
        return agent

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the thread, and return its result."""
        done: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(WAIT_S)

    def stop(self) -> None:
        """Stop all agents and the thread."""
        try:
            for agent in self._agents:
                self.run(agent.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)


def main() -> None:
    """Serve one until stdin ends."""
    os.environ.pop("ETFARM_SERVER", None)
    with tempfile.TemporaryDirectory() as folder, SimulatedWebFarm(Path(folder)) as web:
        web.agents.add("rack-1", devices=("pi5-a", "pi5-b"), run_s=1.0)
        print(web.url, TOKENS, web.farm.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
