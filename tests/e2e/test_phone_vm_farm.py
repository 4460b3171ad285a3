"""A whole emulated Arm phone in a real farm: a job as on this machine, over a slow link, and power that is cut in the middle."""

# ruff: noqa: F811 - fixtures are imported by name
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("executorch")

from tests.support.farm import FarmProcess, etfarm, wait_until
from tests.support.programs import program
from tests.support.proxy import link_to
from tests.support.two_machines import farm_for_aarch64, measured_on_both
from tests.support.vms import PluggedPhone, phone_vm  # noqa: F401 - a fixture
from tests.support.watched_jobs import until_phase

pytestmark = [pytest.mark.boards, pytest.mark.slow(reason="boots a virtual phone")]


@pytest.fixture(scope="module")
def lab(phone_vm: PluggedPhone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm of this machine, and of the phone over a link of 4 MB/s while its runner is carried there."""
    with farm_for_aarch64(tmp_path_factory.mktemp("lab")) as farm:
        phone_vm.adb.disconnect(phone_vm.phone)
        with link_to(phone_vm.phone.serial) as slow:
            slow.limit(4_000_000)
            assert wait_until(lambda: "connected to" in phone_vm.adb("connect", slow.address).stdout)
            farm.add_agent("--adb", environment={"ADB_SERVER_SOCKET": phone_vm.adb.address})
            assert served(farm, phone_vm, 180), farm.agents[1].log.read_text()
            phone_vm.adb("disconnect", slow.address)
            assert wait_until(lambda: state(farm, phone_vm) == "OFFLINE")
        phone_vm.adb.connect(phone_vm.phone)
        assert served(farm, phone_vm)
        yield farm


def state(farm: FarmProcess, plugged: PluggedPhone) -> str:
    with farm.client() as client:
        return next((device.state.name for device in client.devices() if device.id == plugged.phone.serialno), "")


def served(farm: FarmProcess, plugged: PluggedPhone, timeout_s: float = 120.0) -> bool:
    return wait_until(lambda: state(farm, plugged) == "IDLE", timeout_s)


def test_a_phone_returns_the_outputs_and_lines_of_x86(lab: FarmProcess, phone_vm: PluggedPhone, tmp_path: Path) -> None:
    there, _ = measured_on_both(lab, tmp_path, "--device", "arch=aarch64", "--device", "arch=x86_64")
    assert (there["device"]["id"], there["device"]["arch"]) == (phone_vm.phone.serialno, "aarch64")
    assert there["device"]["os"].startswith("Android 14 (API 34)") and there["device"]["emulated"]
    assert there["verdict"]["status"] == "NOT_BENCHMARKABLE"
    telemetry = there["telemetry"]
    assert (telemetry["before"]["screen_on"], telemetry["after"]["thermal_status"]) == (True, 0)
    assert telemetry["before"]["battery_share"] == pytest.approx(0.94)
    shown = etfarm("devices", "show", phone_vm.phone.serialno, "--server", lab.address, cwd=tmp_path).stdout
    assert "Pixel" in shown and "Cortex-A72" in shown and "VIRTUAL-SKIN" in shown


def test_a_run_repeats_after_its_phone_lost_power(lab: FarmProcess, phone_vm: PluggedPhone) -> None:
    plugged, phone = phone_vm, phone_vm.phone
    with lab.client() as client:
        job = client.bench(program("conv").path, devices="arch=aarch64", iterations=100, min_time_s=5.0, profile=False)
        until_phase(job, "TIMED")
        phone.power_cut()
        assert wait_until(lambda: state(lab, plugged) in ("OFFLINE", "UNUSABLE"))
        phone.start(wait_for="phone: up")
        # On another port of this machine; it is the same phone all the same.
        plugged.adb.connect(phone)
        report = job.result().report
        assert report.state == "SUCCEEDED"
        assert client.job(job.id).info.cells[0].attempts == 2
