"""Small cases of the agent's errors, and what their remedies say to do instead."""

from __future__ import annotations

import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from etfarm.device_agents import main
from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.daemon.upgrade import Upgrader
from etfarm.device_agents.jail.box import require_plain_file
from etfarm.device_agents.native.toolchain import Compiler
from etfarm.device_agents.runners.process import Limits
from etfarm.device_agents.targets.phones.runner import PhoneRunner
from etfarm.v1 import agent_pb2
from etfarm.wire.channel import Access
from tests.support.refusals import refuses


@pytest.mark.remedy("NO_CORES")
def test_cpus_that_the_machine_has_are_used(tmp_path: Path) -> None:
    def device(*cores: int) -> Any:
        return main._device(AgentConfig(Access("127.0.0.1:1"), "board", tmp_path, cores=frozenset(cores)))

    with refuses("NO_CORES"):
        device(4000)
    assert device(min(os.sched_getaffinity(0))).cores == 1


@pytest.mark.remedy("RUNNER_LEFT_NO_FILE")
def test_a_plain_file_of_a_runner_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"outputs")
    (tmp_path / "link").symlink_to("file")
    with refuses("RUNNER_LEFT_NO_FILE"):
        require_plain_file(tmp_path / "link")
    require_plain_file(tmp_path / "file")


@pytest.mark.remedy("RUNNER_NOT_CONFINED")
async def test_a_runner_that_is_not_confined_is_used_where_that_is_not_required(tmp_path: Path) -> None:
    hello = {
        "event": "result", "command": "hello", "protocol": 1, "executorch": "1.5.1", "arch": "aarch64", "backends": [],
        "operators": [], "confined": ["rlimits"],
    }  # fmt: skip
    command = ["/bin/sh", "-c", f"while read command; do echo '{json.dumps(hello)}'; done"]
    async with PhoneRunner.connect(command, tmp_path, Limits(), None) as runner:
        runner.must_be_confined = True
        with refuses("RUNNER_NOT_CONFINED", match="rlimits only"):
            await runner.hello()
        runner.must_be_confined = False
        assert (await runner.hello()).confined == ("rlimits",)


@pytest.mark.remedy("UPGRADE_REFUSED")
def test_an_agent_that_may_be_upgraded_and_has_no_runs_is(tmp_path: Path) -> None:
    active = ["a1"]

    def upgrader(*, allowed: bool) -> Upgrader:
        config = AgentConfig(Access("127.0.0.1:1"), "board", tmp_path, allow_upgrade=allowed)
        return Upgrader(config, Cache(tmp_path, 1 << 20), cast(Any, None), lambda _: None, lambda: active, lambda: None)

    with refuses("UPGRADE_REFUSED", match="--allow-upgrade"):
        upgrader(allowed=False)._require_possible(agent_pb2.Upgrade())
    with refuses("UPGRADE_REFUSED", match="Wait until they have ended"):
        upgrader(allowed=True)._require_possible(agent_pb2.Upgrade())
    active.clear()
    upgrader(allowed=True)._require_possible(agent_pb2.Upgrade())


@pytest.mark.remedy("COMPILER_MISSING")
def test_a_compiler_that_was_installed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        with refuses("COMPILER_MISSING"):
            Compiler.find(platform.machine())
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler: apt-get install g++")
    assert Compiler.find(platform.machine())
