"""`etfarm devices list` and `show`, as a terminal of 80 or 120 columns shows what a server tells."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import grpc
import pytest

from etfarm.client.cli.commands import devices
from etfarm.device_agents.device import inventory
from etfarm.v1 import common_pb2, device_pb2, device_pb2_grpc
from tests.support import dumps
from tests.support.fake_servers import ReadyFarm, serving_in_threads

UNAUTHORIZED = common_pb2.Error(
    fault=common_pb2.FAULT_DEVICE,
    reason="PHONE_NOT_READY",
    message="The phone has not allowed this machine to debug it.",
    remedy="Unlock it and accept the dialog that asks whether to allow USB debugging.",
)
LOADED = device_pb2.DeviceTelemetry(
    cpu_share=0.03, load_1m=0.42, memory_available_bytes=3 << 30, disk_free_bytes=50 << 30, temperature_c=27,
    frequency_hz=820_000_000, battery_share=0.94, charging=True, agent_rss_bytes=40 << 20,
)  # fmt: skip


def _device(dump: str, **more: object) -> device_pb2.Device:
    device = inventory.parse(dumps.load(dump))
    known = {"id": f"id-{dump}", "agent_id": "agent-1", "name": dump, "state": device_pb2.DEVICE_STATE_IDLE} | more
    device.MergeFrom(device_pb2.Device(**known))  # type: ignore[arg-type]
    device.last_seen_time.FromDatetime(datetime.now(UTC))
    return device


class Devices(device_pb2_grpc.DeviceServiceServicer, ReadyFarm):
    """The server's end: the devices that a test put there."""

    def __init__(self) -> None:
        self.known: list[device_pb2.Device] = []

    def List(self, request: device_pb2.ListDevicesRequest, context: grpc.ServicerContext) -> device_pb2.ListDevicesResponse:
        return device_pb2.ListDevicesResponse(devices=self.known)

    def Get(self, request: device_pb2.GetDeviceRequest, context: grpc.ServicerContext) -> device_pb2.Device:
        return next(device for device in self.known if device.name == request.device_id)


class Terminal:
    """Runs the command at a width."""

    def __init__(self, address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._address = address
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def lines(self, columns: int, *arguments: str) -> list[str]:
        self._monkeypatch.setenv("COLUMNS", str(columns))
        assert devices.main([*arguments, "--server", self._address]) == 0
        printed = self._capsys.readouterr()
        assert printed.err == ""
        lines = printed.out.splitlines()
        assert max(map(len, lines)) <= columns
        return lines


@pytest.fixture
def served() -> Devices:
    return Devices()


@pytest.fixture
def terminal(served: Devices, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    with serving_in_threads(served) as address:
        yield Terminal(address, capsys, monkeypatch)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_phone_is_shown_with_all_that_is_known_of_it(served: Devices, terminal: Terminal, columns: int) -> None:
    phone = _device(
        "pixel-8", thermal_zones=["LITTLE", "BIG"], has_battery=True, page_size_bytes=4096, memory_bytes=8 << 30,
        backends=["XnnpackBackend"], operator_count=312, runner="RUNNER_KIND_NATIVE", labels={"rack": "3"}, telemetry=LOADED,
    )  # fmt: skip
    phone.clusters[2].features[:] = phone.features[:] = ["dotprod", "fp16", "sve"]
    served.known = [phone]
    assert terminal.lines(columns, "show", "pixel-8") == [
        "name       pixel-8",
        "id         id-pixel-8",
        "state      IDLE, last seen now",
        "model      Google Pixel 8",
        "soc        zuma",
        "os         Android 14 (API 34)",
        "arch       aarch64",
        "cores      9, 3 % busy, load 0.42 over a minute, clock 0.82 GHz",
        "           Cortex-X3    cpu 8     up to 2.91 GHz  sched_pixel",
        "           Cortex-A715  cpus 4-7  up to 2.37 GHz  sched_pixel",
        "           Cortex-A510  cpus 0-3  up to 1.70 GHz  sched_pixel",
        "features   dotprod fp16 sve",
        "           Cortex-X3 has i8mm sve2 as well",
        "           Cortex-A715 has i8mm sve2 as well",
        "memory     8.00 GiB, 3.00 GiB free",
        "pages      4 KiB each",
        "disk       50.0 GiB free",
        "sensors    hottest 27.0 °C: LITTLE, BIG",
        "battery    94 %, charging",
        "runner     native, the farm's bundle",
        "backends   XnnpackBackend",
        "operators  312",
        "labels     rack=3",
        "agent      agent-1, 40.0 MiB of memory",
    ]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_device_that_cannot_be_used_says_why_and_what_to_do(served: Devices, terminal: Terminal, columns: int) -> None:
    served.known = [
        _device("galaxy-s9-us", state=device_pb2.DEVICE_STATE_UNUSABLE, problem=UNAUTHORIZED),
        _device("kunpeng-920"),
    ]
    sentence = f"{UNAUTHORIZED.message} {UNAUTHORIZED.remedy}"
    shown = " ".join(" ".join(terminal.lines(columns, "show", "galaxy-s9-us")).split())
    assert f"state UNUSABLE, last seen now problem {sentence} model" in shown
    assert "runner" not in shown
    heads, phone, server, *below = terminal.lines(columns, "list")
    assert heads.split()[-3:] == ["STATE", "LAST", "SEEN"]
    assert phone.split()[-2:] == ["UNUSABLE", "now"] and server.split()[-2:] == ["IDLE", "now"]
    assert " ".join(" ".join(below).split()) == f"galaxy-s9-us: {sentence}"


def test_health_is_listed_as_soon_as_a_device_has_some(served: Devices, terminal: Terminal) -> None:
    reason = "2 device faults, the last at 2026-06-01 12:00 UTC: The runner does not answer"
    quarantined = device_pb2.DeviceHealth(state=device_pb2.HEALTH_STATE_QUARANTINED, reason=reason, fault_score=2.75)
    quarantined.start_time.FromDatetime(datetime(2026, 6, 1, 12, tzinfo=UTC))
    served.known = [_device("galaxy-s9-us", health=quarantined), _device("kunpeng-920")]
    heads, phone, server, *below = terminal.lines(120, "list")
    assert heads.split()[-4:] == ["STATE", "HEALTH", "LAST", "SEEN"]
    assert phone.split()[-3:] == ["IDLE", "QUARANTINED", "now"] and server.split()[-3:] == ["IDLE", "UNKNOWN", "now"]
    assert " ".join(" ".join(below).split()) == f"galaxy-s9-us: quarantined, {reason}"
    shown = " ".join(" ".join(terminal.lines(120, "show", "galaxy-s9-us")).split())
    assert f"health QUARANTINED since 2026-06-01 12:00 UTC: {reason}, fault score 2.8" in shown


def test_the_machine_below_an_emulated_device_is_not_reported_as_the_device(served: Devices, terminal: Terminal) -> None:
    served.known = [_device("odroid-c2", emulated=True, telemetry=LOADED, memory_bytes=4 << 30)]
    shown = "\n".join(terminal.lines(80, "show", "odroid-c2"))
    assert "its times mean nothing" in shown and "4.00 GiB, 3.00 GiB free" in shown
    for own in ("busy", "load", "clock", "°C", "battery"):
        assert own not in shown


def test_of_many_sensors_some_are_named(served: Devices, terminal: Terminal) -> None:
    served.known = [_device("galaxy-s9-us", thermal_zones=[f"cpu-{number}" for number in range(84)], telemetry=LOADED)]
    shown = " ".join(" ".join(terminal.lines(80, "show", "galaxy-s9-us")).split())
    assert "sensors hottest 27.0 °C: cpu-0, cpu-1," in shown and "cpu-11 and 72 more" in shown and "cpu-12" not in shown


@pytest.mark.parametrize(
    ("has_one", "expected", "says"),
    [
        (False, {}, "battery none"),
        (True, {}, "battery yes"),
        (True, {"battery_share": 0.5, "charging": False}, "battery 50 %, not charging"),
        (None, {}, None),
    ],
)
def test_a_battery_is_shown(
    served: Devices, terminal: Terminal, has_one: bool | None, expected: dict[str, float], says: str | None
) -> None:
    more = {} if has_one is None else {"has_battery": has_one}
    served.known = [_device("odroid-c2", telemetry=device_pb2.DeviceTelemetry(**expected), **more)]
    lines = [" ".join(line.split()) for line in terminal.lines(80, "show", "odroid-c2")]
    assert [line for line in lines if line.startswith("battery")] == ([says] if says else [])


def test_shared_cores_and_isolated_cpus_are_reported(served: Devices, terminal: Terminal) -> None:
    device = _device("odroid-c2")
    del device.clusters[:]
    device.clusters.add(part="Xeon", cpus=[0, 1, 2, 5, 8, 9], physical_cores=3)
    served.known = [device]
    assert "Xeon cpus 0-2, 5, 8-9 (3 cores)" in [" ".join(line.split()) for line in terminal.lines(80, "show", "odroid-c2")]
