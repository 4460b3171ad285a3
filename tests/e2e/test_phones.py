"""Phones through a real farm: a job's numbers, outputs and lines, and what people see of one that comes, goes or is cut off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("executorch")

from etfarm.device_agents.adb import AdbRefused
from etfarm.wire import tensors
from tests.support.adbd import AdbPhone, running_phone
from tests.support.farm import FarmProcess, etfarm, wait_until
from tests.support.programs import program

pytestmark = [
    pytest.mark.boards,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow(reason="a farm measures on an emulated phone"),
]

QUICK = ("--warmup", "1", "--iterations", "3", "--min-time", "0", "--threads", "1")


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

    def works(self) -> bool:
        """Return whether a run is in progress on the phone."""
        with self.farm.client() as client:
            (state,) = (device.state.name for device in client.devices() if device.id == self.phone.serial)
        return state == "BUSY" and any(self.phone.files.glob("data/local/tmp/etfarm/runs/*"))

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


def bench(desk: Desk, folder: Path, *arguments: str) -> dict[str, Any]:
    done = desk.etfarm("bench", *arguments, *QUICK, "--json", "r.json", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads((folder / "r.json").read_text(), parse_constant=pytest.fail)
    return document


async def test_a_phone_returns_the_outputs_and_lines_of_this_machine(desk: Desk, tmp_path: Path) -> None:
    bundles = [path.name for path in (desk.phone.files / "data/local/tmp/etfarm/bundles").iterdir()]
    assert len(bundles) == 1, "the runner was tried when the phone came"
    document = bench(
        desk, tmp_path, "demo:resnet8", "--device", f"id={desk.phone.serial}", "--device", "name=board-0", "--numerics"
    )
    with desk.farm.client() as client:
        job = client.job(document["job"]["id"])
        outputs = [[tensors.to_array(value) for value in job.outputs(cell)] for cell in range(2)]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=1e-5)
    phone, here = sorted(document["reports"], key=lambda report: report["device"]["name"] == "board-0")
    assert [row["source"] for row in phone["operators"]] == [row["source"] for row in here["operators"]]
    assert "y = self.conv(image)" in {row["source"]["code"] for row in phone["operators"] if row["source"]}
    assert phone["numerics"]["first_bad"] is None and phone["numeric_gap"]
    assert phone["runner"]["kind"] == "native" and phone["latency"]["p50_ns"] > 0
    assert phone["telemetry"]["before"]["memory_available_bytes"] > 0


async def test_candidates_are_interleaved_on_a_phone(desk: Desk, tmp_path: Path) -> None:
    created = str(program("conv").path)
    document = bench(desk, tmp_path, created, created, "--device", f"id={desk.phone.serial}", "--interleave")
    assert [report["state"] for report in document["reports"]] == ["SUCCEEDED", "SUCCEEDED"]


async def test_a_session_on_a_phone_answers_calls(desk: Desk) -> None:
    created = program("add")
    with desk.farm.client() as client, client.session(created.path, device=f"id={desk.phone.serial}") as session:
        values = [tensors.to_array(value) for value in created.inputs]
        for _ in range(2):
            (output,) = session.run("forward", *values)
            np.testing.assert_allclose(output, tensors.to_array(created.expected[0]))


async def test_a_run_is_placed_again_after_its_phone_disconnects(desk: Desk, tmp_path: Path) -> None:
    waiting = subprocess.Popen(  # noqa: ASYNC220 - nothing else waits here
        [sys.executable, "-m", "etfarm.wire.command", "bench", str(program("conv").path), "--device", f"id={desk.phone.serial}",
         "--min-time", "6", "--json", "r.json", "--server", desk.farm.address],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        # Before the command line could tell of it, the run may be over.
        assert wait_until(desk.works)
        await desk.phone.disconnect()
        assert desk.shows("OFFLINE", "UNUSABLE")
        await desk.phone.connect()
        printed, _ = waiting.communicate(timeout=200)
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 0, printed
    document = json.loads((tmp_path / "r.json").read_text())
    assert [report["state"] for report in document["reports"]] == ["SUCCEEDED"]
    with desk.farm.client() as client:
        assert client.job(document["job"]["id"]).info.cells[0].attempts == 2


async def test_an_unresponsive_phone_is_listed_with_a_remedy(desk: Desk, tmp_path: Path) -> None:
    def devices_output() -> str:
        return " ".join(desk.etfarm("devices", "show", desk.phone.serial, cwd=tmp_path).stdout.split())

    desk.phone.kill_adbd()
    assert wait_until(lambda: "is connected and does not answer adb (offline)" in devices_output())
    assert "state UNUSABLE" in devices_output() and "Plug the phone in again" in devices_output()
    desk.phone.start_adbd()
    await desk.phone.connect()
    assert desk.shows("IDLE")


async def test_an_unauthorized_phone_is_listed_with_a_remedy(desk: Desk, tmp_path: Path) -> None:
    def printed(*arguments: str) -> str:
        return " ".join(desk.etfarm("devices", *arguments, cwd=tmp_path).stdout.split())

    await desk.phone.disconnect()
    serial = desk.phone.lock()
    with pytest.raises(AdbRefused):
        await desk.phone.server.connect(serial)
    assert wait_until(lambda: "has not allowed this machine to debug it (unauthorized)" in printed("show", serial))
    shown, remedy = (
        printed("show", serial),
        "Unlock the phone and allow USB debugging for this machine in the dialog that it shows.",
    )
    assert "state UNUSABLE" in shown and remedy in shown
    assert f"{serial}: The phone {serial} has not allowed this machine to debug it (unauthorized). {remedy}" in printed("list")
    desk.phone.allow()
    assert wait_until(lambda: "state IDLE" in printed("show", serial)), printed("show", serial)
    await desk.phone.server.disconnect(serial)
    await desk.phone.connect()
    assert desk.shows("IDLE")
