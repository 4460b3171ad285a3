"""Phones through a real farm: a job's numbers, outputs and lines, and what people see of one that comes, goes or is cut off."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("executorch")

from etfarm.wire import tensors
from tests.support.adbd import AdbPhone, running_phone
from tests.support.farm import FarmProcess, etfarm, wait_until
from tests.support.programs import program
from tests.support.quick_jobs import QUICK_OPTIONS, bench
from tests.support.two_machines import measured_on_both

pytestmark = [
    pytest.mark.boards,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow(reason="a farm measures on an emulated phone"),
]


class Desk:
    """A farm of this machine and a phone."""

    def __init__(self, farm: FarmProcess, phone: AdbPhone) -> None:
        self.farm = farm
        self.phone = phone

    def etfarm(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return etfarm(*arguments, "--server", self.farm.address, cwd=cwd)

    def listed(self) -> str:
        """Return what `devices list` prints of the phone."""
        done = self.etfarm("devices", "list", cwd=self.farm.folder)
        assert done.returncode == 0, done.stderr
        return next((line for line in done.stdout.splitlines() if self.phone.serial in line), "")

    def shows(self, *words: str) -> bool:
        # Others may compute beside this.
        return wait_until(lambda: any(word in self.listed() for word in words), 120)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    farm = FarmProcess(tmp_path_factory.mktemp("desk"))
    async with running_phone() as phone:
        try:
            farm.start(agents=1)
            farm.add_agent("--adb", environment={"ADB_SERVER_SOCKET": phone.server.address})
            desk = Desk(farm, phone)
            assert desk.shows("IDLE"), farm.agents[1].log.read_text()
            yield desk
        finally:
            farm.stop()


async def test_a_phone_returns_the_outputs_and_lines_of_this_machine(desk: Desk, tmp_path: Path) -> None:
    bundles = [path.name for path in (desk.phone.files / "data/local/tmp/etfarm/bundles").iterdir()]
    assert len(bundles) == 1, "the runner was tried when the phone came"
    choices = ("--device", f"id={desk.phone.serial}", "--device", "name=board-0", "--numerics")
    phone, _ = measured_on_both(desk.farm, tmp_path, *choices)
    assert phone["numerics"]["first_bad"] is None and phone["numeric_gap"]
    assert phone["runner"]["kind"] == "native" and phone["latency"]["p50_ns"] > 0
    assert phone["telemetry"]["before"]["memory_available_bytes"] > 0


async def test_candidates_are_interleaved_on_a_phone(desk: Desk, tmp_path: Path) -> None:
    created = str(program("conv").path)
    choices = ("--device", f"id={desk.phone.serial}", "--interleave", *QUICK_OPTIONS)
    document, _ = bench(desk.farm, tmp_path, created, created, *choices)
    assert [report["state"] for report in document["reports"]] == ["SUCCEEDED", "SUCCEEDED"]


async def test_a_session_on_a_phone_answers_calls(desk: Desk) -> None:
    created = program("add")
    with desk.farm.client() as client, client.session(created.path, device=f"id={desk.phone.serial}") as session:
        values = [tensors.to_array(value) for value in created.inputs]
        for _ in range(2):
            (output,) = session.run("forward", *values)
            np.testing.assert_allclose(output, tensors.to_array(created.expected[0]))


async def test_an_unresponsive_phone_is_listed_with_a_remedy(desk: Desk, tmp_path: Path) -> None:
    def devices_output() -> str:
        return " ".join(desk.etfarm("devices", "show", desk.phone.serial, cwd=tmp_path).stdout.split())

    desk.phone.kill_adbd()
    assert wait_until(lambda: "is connected and does not answer adb (offline)" in devices_output())
    assert "state UNUSABLE" in devices_output() and "Plug the phone in again" in devices_output()
    desk.phone.start_adbd()
    await desk.phone.connect()
    assert desk.shows("IDLE")
