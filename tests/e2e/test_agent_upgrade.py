"""`etfarm agents upgrade`: a real agent of an installed wheel gets another one, and falls back if that does not connect."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etfarm.client.models import AgentWheel, DeviceState
from etfarm.wire.digest import of_file as digest_of_file
from tests.support import wheels
from tests.support.farm import WAIT_FOR_NOTHING, Daemon, FarmProcess, descendants, etfarm, wait_until
from tests.support.runner import know_own_runners

pytestmark = pytest.mark.slow(reason="builds wheels, installs one, and starts agents of several versions")

BASE, NEW, MUTE, BROKEN = "0.2.1", "0.2.2", "0.2.3", "0.2.4"
MAIN = "etfarm/device_agents/main.py"
NEVER_CONNECTS = {MAIN: ("        await connection.run(stop)\n", "        await stop.wait()\n")}
NEEDS_MORE = {MAIN: ("import asyncio\n", "import asyncio\nimport a_library_that_is_not_here\n")}


class Rack:
    """A farm with an agent of BASE in an environment of its own, and the wheels of later versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        base = wheels.build(folder / "wheels", BASE)
        later = ((NEW, None), (MUTE, NEVER_CONNECTS), (BROKEN, NEEDS_MORE))
        self.wheels = {BASE: base} | {version: wheels.changed(base, version, changes) for version, changes in later}
        self.farm = FarmProcess(folder, bundle=False, serve=("--agent-wheel", str(self.wheels[NEW])))
        self.python = wheels.install(folder / "venv", self.wheels[BASE])
        self.farm.restart()
        self.agent = self.new_agent("agent", "--allow-upgrade")

    def new_agent(self, name: str, *arguments: str) -> Daemon:
        know_own_runners(self.folder / name)
        return Daemon(
            ["agent", "--server", self.farm.address, "--data", str(self.folder / name), "--name", name, "--exit-with-stdin",
             *WAIT_FOR_NOTHING, *arguments],
            self.folder / f"{name}.log", python=self.python,
        )  # fmt: skip

    def start(self, agent: Daemon) -> None:
        agent.start()
        agent.expect("connected to")

    def upgrade(self, version: str | None, *arguments: str) -> Any:
        """Upgrade the agents to a version, by default the server's."""
        wheel = () if version is None else ("--wheel", str(self.wheels[version]))
        command = ("agents", "upgrade", "--all", "--yes", *wheel, "--server", self.farm.address, *arguments)
        return etfarm(*command, cwd=self.folder)

    def versions(self) -> dict[str, str]:
        done = etfarm("agents", "list", "--json", "-", "--server", self.farm.address, cwd=self.folder)
        return {agent["device_ids"][0]: agent["version"] for agent in json.loads(done.stdout)["agents"]}


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    running = Rack(tmp_path_factory.mktemp("rack"))
    try:
        running.start(running.agent)
        yield running
    finally:
        running.agent.stop()
        running.farm.stop()


def test_an_agent_is_upgraded_in_place_and_falls_back_to_what_works(rack: Rack) -> None:
    pid = rack.agent.pid
    assert list(rack.versions().values()) == [BASE]

    done = rack.upgrade(None)
    assert done.returncode == 0, (done.stderr, rack.agent.log.read_text())
    assert f"etfarm {BASE} -> {NEW}" in done.stderr and f"Versions now: 1 x etfarm {NEW}." in done.stdout
    assert [step in done.stderr for step in ("drains", "downloads", "installs it", "starts the new version")] == [True] * 4
    with rack.farm.client() as client:
        (device,) = client.devices()
        assert device.state is DeviceState.IDLE and device.drain is None
    assert list(rack.versions().values()) == [NEW]
    # The supervisor's process is the same.
    assert rack.agent.pid == pid and os.kill(pid, 0) is None

    # The wheel is no longer held.
    with rack.farm.client() as client:
        assert client.info().agent_wheel == AgentWheel(version=NEW, digest=digest_of_file(rack.wheels[NEW]))
        client.delete_artifact(digest_of_file(rack.wheels[NEW]), force=True)

    # A version that never connects is given up for the former one.
    done = rack.upgrade(MUTE, "--connect-timeout", "5")
    assert done.returncode == 1 and f"etfarm {MUTE} has not connected within 5 s" in done.stderr, done.stderr
    assert list(rack.versions().values()) == [NEW]

    # One that does not start at all is not even tried.
    done = rack.upgrade(BROKEN, "--parallel", "4", "--keep-going")
    assert done.returncode == 1 and "a_library_that_is_not_here" in done.stderr, done.stderr
    assert "1 agent not upgraded: " in done.stderr
    assert list(rack.versions().values()) == [NEW]
    with rack.farm.client() as client:
        (device,) = client.devices()
        assert device.state is DeviceState.IDLE and device.drain is None

    # A start of the same command runs the upgraded version again.
    children = descendants(pid)
    assert rack.agent.stop() == 0
    assert wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    rack.agent.start()
    rack.agent.expect("connected to")
    assert list(rack.versions().values()) == [NEW]

    # Whatever kills the launcher takes the agent along.
    children = descendants(rack.agent.pid)
    rack.agent.signal(signal.SIGKILL)
    assert wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    rack.agent.process.wait()  # type: ignore[union-attr]
    rack.agent.start()
    rack.agent.expect("connected to")


def test_an_agent_that_allows_no_upgrade_is_left_out(rack: Rack) -> None:
    other = rack.new_agent("other")
    rack.start(other)
    try:
        done = etfarm(
            *("agents", "upgrade", "name=other", "--yes", "--wheel", str(rack.wheels[NEW]), "--server", rack.farm.address),
            cwd=rack.folder,
        )  # fmt: skip
    finally:
        other.stop()
    assert done.returncode == 1 and "was started without --allow-upgrade; it is left out" in done.stderr, done.stderr


def test_an_artifact_that_is_no_wheel_is_refused(rack: Rack, tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"PK\x03\x04 no archive")
    done = etfarm(
        *("agents", "upgrade", "--all", "--yes", "--wheel", str(tmp_path / "x.whl"), "--server", rack.farm.address), cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 1 and "not a wheel" in done.stderr
