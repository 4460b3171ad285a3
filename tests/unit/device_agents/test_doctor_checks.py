"""The agent's checks of `etfarm doctor` on machines that lack something."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.device_agents import checks
from etfarm.wire.doctor import Status


def test_a_kernel_without_pressure_is_a_warning_with_the_boot_option(tmp_path: Path) -> None:
    (finding,) = checks.check_pressure(tmp_path / "cpu")
    assert finding.status is Status.WARNING
    assert "psi=1" in finding.remedy


def test_a_machine_without_clock_governors_lacks_nothing(tmp_path: Path) -> None:
    (finding,) = checks.check_clocks(tmp_path)
    assert finding.status is Status.OK


def test_writable_clock_governors_can_be_set(tmp_path: Path) -> None:
    policy = tmp_path / "devices" / "system" / "cpu" / "cpufreq" / "policy0"
    policy.mkdir(parents=True)
    (policy / "scaling_governor").write_text("powersave")
    (finding,) = checks.check_clocks(tmp_path)
    assert (finding.status, finding.detail) == (Status.OK, "may be set for a measurement")


def test_without_programs_only_the_compiler_of_this_machine_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks.platform, "machine", lambda: "x86_64")
    statuses = {finding.name: finding.status for finding in checks.check_compilers()}
    assert statuses == {"compiler aarch64": Status.OPTIONAL, "compiler x86_64": Status.WARNING}
    assert [finding.status for finding in checks.check_emulators()] == [Status.OPTIONAL]
