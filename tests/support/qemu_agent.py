"""The real agent as an aarch64 process, its runner too: another machine to the farm, and processes here."""

from __future__ import annotations

from pathlib import Path

from tests.support.farm import Daemon
from tests.support.forks import COMMAND
from tests.support.rootfs import PYTHON, board_root, install_agent, on_board


class QemuAgent(Daemon):
    """`etfarm agent` under qemu's user mode, as `etfarm.device_agents` is in this checkout.

    Args:
        folder: for its data and its log; a short path.
        arguments: further ones of `etfarm agent`.
    """

    def __init__(self, server: str, folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.root = board_root()
        self.installed = install_agent(folder / "site")
        environment = {"PYTHONPATH": str(self.installed), "PYTHONDONTWRITEBYTECODE": "1"}
        values = ["--server", server, "--data", str(folder / "data"), "--exit-with-stdin", *arguments]
        super().__init__(["agent", *values], folder / "agent.log", environment, executes=True)
        self._started = on_board(self.root, folder, str(self.root / PYTHON), "-m", COMMAND)
