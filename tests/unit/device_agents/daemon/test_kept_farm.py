"""What an agent keeps of its farm, and a phone's trial, where something is missing."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.config import AgentConfig, PhoneOptions
from etfarm.device_agents.daemon.enrolment import _Kept, _own_access, enroll
from etfarm.device_agents.daemon.phones.fleet import Trial
from etfarm.wire.channel import Access


def test_a_folder_that_cannot_be_written_does_not_end_an_agent_that_found_its_farm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gone" / "token"
    access = _own_access(Access("farm:1"), path, _Kept("farm:1", "token", "sha"))
    assert access.proofs is not None
    with caplog.at_level(logging.WARNING):
        access.proofs.prove("the-farm", "farm:1", b"PEM")
    assert access.proofs.farm_id == "the-farm" and access.proofs.certificates == {"farm:1": b"PEM"}
    assert "is not kept" in caplog.text
    # The next proof is kept, once there is room.
    path.parent.mkdir()
    access.proofs.prove("the-farm", "farm:1", b"PEM")
    assert '"farm_id": "the-farm"' in path.read_text()


async def test_a_token_of_the_environment_that_hides_the_agents_own_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _Kept("farm:1", "own", "sha").write(tmp_path / "token")
    for token, is_named in (("", False), ("own", False), ("of-an-admin", True)):
        caplog.clear()
        enrolment = await enroll(Access("farm:1", token), tmp_path, "agent", [], None, "boot")
        assert enrolment.access.token == (token or "own")
        assert ("the token in ETFARM_TOKEN is used" in caplog.text) == is_named


async def test_a_phone_is_left_to_its_first_job_if_no_channel_can_be_opened(tmp_path: Path) -> None:
    access = Access("farm:1", tls_ca=tmp_path / "missing.pem")
    config = AgentConfig(access, "board", tmp_path, phones=PhoneOptions())
    phone: Any = SimpleNamespace(serial="SERIAL", has_own_runner=False, device=SimpleNamespace(arch="aarch64"))
    await Trial(config, Cache(tmp_path / "cache", 1 << 20)).run(phone)
