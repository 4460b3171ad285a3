"""The id under which an agent serves its machine: the machine's, unless another live agent serves that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.device_agents.daemon.data_folder import DataFolder
from etfarm.device_agents.daemon.device_choice import DeviceChoice
from etfarm.wire.errors import Fault, error_of

SERVED = error_of(Fault.USER, "DEVICE_SERVED", "Device m is served by another agent.", "")
IDS = ["m", "own"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    created = DataFolder(tmp_path / "agent")
    yield created
    created.close()


def test_a_new_folder_takes_the_machines_id_and_keeps_it(folder: DataFolder) -> None:
    choice = DeviceChoice(folder, IDS)
    assert choice.id == "m"
    choice.keep()
    assert not choice.give_way(SERVED), "a device that was accepted does not become another one"
    again = DeviceChoice(folder, IDS)
    assert again.id == "m" and not again.give_way(SERVED)


def test_a_new_folder_beside_a_live_agent_takes_an_id_of_its_own_and_keeps_it(folder: DataFolder) -> None:
    choice = DeviceChoice(folder, IDS)
    assert not choice.give_way(error_of(Fault.USER, "DEVICE_NOT_YOURS", "Not yours.", "")) and choice.id == "m"
    assert choice.give_way(SERVED) and choice.id == "own"
    assert not choice.give_way(SERVED), "there is no third id"
    choice.keep()
    assert DeviceChoice(folder, IDS).id == "own"


def test_an_id_that_no_server_has_accepted_is_not_kept(folder: DataFolder) -> None:
    assert DeviceChoice(folder, IDS).give_way(SERVED)
    assert DeviceChoice(folder, IDS).id == "m"


def test_a_folder_from_another_machine_is_new(folder: DataFolder, caplog: pytest.LogCaptureFixture) -> None:
    DeviceChoice(folder, IDS).keep()
    moved = DeviceChoice(folder, ["other", "others-own"])
    assert moved.id == "other" and "has moved here from the machine of device m" in caplog.text
    assert moved.give_way(SERVED) and moved.id == "others-own"


def test_a_machine_without_an_id_has_the_agents(folder: DataFolder) -> None:
    choice = DeviceChoice(folder, ["agent", "agent"])
    assert choice.id == "agent" and not choice.give_way(SERVED)
