"""A whole emulated phone behind the real adb: its shell, its files, what it tells of itself, and the runner in its own loader."""

# ruff: noqa: F811 - fixtures are imported by name
from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("executorch")

from etfarm.device_agents.device import android
from etfarm.device_agents.runners.bundle import unpack
from tests.support.emulation import aarch64_archive
from tests.support.vms import PluggedPhone, phone_vm  # noqa: F401 - a fixture

pytestmark = [pytest.mark.boards, pytest.mark.slow(reason="boots a virtual phone")]

FOLDER = "/data/local/tmp/etfarm"


def shell(plugged: PluggedPhone, command: str) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a command line in the phone's shell."""
    done = plugged.adb("shell", command, serial=plugged.phone.serial)
    return done.returncode, done.stdout, done.stderr


def test_the_phones_shell_is_unprivileged_with_exit_codes_and_separate_streams(phone_vm: PluggedPhone) -> None:
    assert shell(phone_vm, "echo out; echo err >&2; exit 7") == (7, "out\n", "err\n")
    assert shell(phone_vm, "id -u; id -un; pwd") == (0, "2000\nshell\n/\n", "")
    # No C library but its own, which no other loader finds.
    code, _, text = shell(phone_vm, "ls /lib /usr")
    assert code != 0 and text.count("No such file or directory") == 2
    code, _, text = shell(phone_vm, "touch /system/x")
    assert code != 0 and "Read-only file system" in text
    assert shell(phone_vm, "sh -c 'kill -SYS $$'")[0] == 128 + 31


def test_pushed_files_are_pulled_unchanged(phone_vm: PluggedPhone, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    files = {"one": bytes(range(256)) * 4096, "below/two": b"", "below/three with blanks": b"3\n"}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    serial = phone_vm.phone.serial
    pushed = phone_vm.adb("push", str(folder), "/data/local/tmp/", serial=serial)
    assert pushed.returncode == 0, pushed.stderr
    pulled = phone_vm.adb("pull", "/data/local/tmp/folder", str(tmp_path / "back"), serial=serial)
    assert pulled.returncode == 0, pulled.stderr
    assert {name: (tmp_path / "back" / name).read_bytes() for name in files} == files
    refused = phone_vm.adb("push", str(folder / "one"), "/data/one", serial=serial)
    assert refused.returncode != 0 and "ermission denied" in refused.stdout + refused.stderr


def test_the_emulated_phone_reports_a_phones_facts(phone_vm: PluggedPhone) -> None:
    asked = {**android.INVENTORY_COMMANDS, **android.READING_COMMANDS}
    facts = {name: shell(phone_vm, command)[1] for name, command in asked.items()}
    properties = android.properties(facts)
    assert properties["ro.serialno"] == phone_vm.phone.serialno
    assert (android.model(properties), android.os(properties)) == ("Google Pixel 8", "Android 14 (API 34)")
    assert android.arch(properties) == facts["uname -m"].strip() == "aarch64"
    assert (android.has_battery(facts), android.battery_share(facts), android.charging(facts)) == (True, 0.94, True)
    assert (android.thermal_status(facts), android.screen_on(facts)) == (0, True)
    assert {zone.name: round(zone.temperature_c, 1) for zone in android.temperatures(facts)}["VIRTUAL-SKIN"] == 24.8
    free = android.disk_free_bytes(facts)
    assert free is not None and 100 << 20 < free < 512 << 20
    phone_vm.phone.say("battery", "Current Battery Service state:\n  status: 3\n  present: true\n  level: 5\n  scale: 100\n")
    try:
        facts[android.BATTERY] = shell(phone_vm, android.READING_COMMANDS[android.BATTERY])[1]
        assert (android.battery_share(facts), android.charging(facts)) == (0.05, False)
    finally:
        phone_vm.phone.say("battery", None)


def test_the_runner_works_through_its_own_loader(phone_vm: PluggedPhone, tmp_path: Path) -> None:
    bundle = unpack(aarch64_archive(), tmp_path / "bundle")
    assert shell(phone_vm, f"mkdir -p {FOLDER}")[0] == 0
    pushed = phone_vm.adb("push", str(bundle.folder), FOLDER, serial=phone_vm.phone.serial)
    assert pushed.returncode == 0, pushed.stderr
    there = f"{FOLDER}/bundle"
    runner = f"{there}/{bundle.manifest.loader} --library-path {there} {there}/{bundle.manifest.entry}"
    code, text, errors = shell(phone_vm, f"printf 'hello\\nself_test\\nquit\\n' | {runner}")
    assert code == 0, errors
    hello, tested, *_ = [json.loads(line) for line in text.splitlines() if json.loads(line)["event"] in ("result", "error")]
    assert hello["arch"] == "aarch64" and "XnnpackBackend" in hello["backends"]
    assert tested["event"] == "result" and len(tested["passed"]) > 3


def test_the_phones_files_survive_a_power_cut(phone_vm: PluggedPhone) -> None:
    plugged, phone = phone_vm, phone_vm.phone
    assert shell(plugged, "echo kept > /data/local/tmp/kept && sync") == (0, "", "")
    serialno = phone.serialno
    plugged.adb.disconnect(phone)
    phone.power_cut()
    phone.start(wait_for="phone: up")
    plugged.adb.connect(phone)
    assert shell(plugged, "cat /data/local/tmp/kept; getprop ro.serialno") == (0, f"kept\n{serialno}\n", "")
