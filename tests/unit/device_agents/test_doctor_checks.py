"""The agent's checks of `etfarm doctor` on machines that lack something."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

import pytest

from etfarm.device_agents import checks
from etfarm.device_agents.daemon import local_bundle
from etfarm.wire.doctor import Status
from tests.support.runner import runner_archive


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
    archive = runner_archive()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks.platform, "machine", lambda: "x86_64")
    statuses = {finding.name: finding.status for finding in checks.check_compilers()}
    assert statuses == {"compiler aarch64": Status.OPTIONAL, "compiler x86_64": Status.WARNING}
    assert [finding.status for finding in checks.check_emulators()] == [Status.OPTIONAL]
    monkeypatch.setattr(local_bundle, "prebuilt_runner", lambda: archive)
    assert {finding.status for finding in checks.check_compilers()} == {Status.OPTIONAL}, "etfarm-runner has what it would build"


def test_an_agents_folder_that_others_may_enter_is_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    folder.chmod(0o755)
    first, *_ = checks.check_agent_folder(folder)
    assert first.status is Status.WARNING and f"Other users may enter {folder} (mode 0755)." in first.detail
    os.chown(folder, 4712, 4712)
    (only,) = checks.check_agent_folder(folder)
    assert only.status is Status.WARNING and f"chown -R {os.geteuid()} {folder}" in only.remedy


def test_cpus_that_a_thread_may_use_can_be_bound_to_and_stay_as_they_were() -> None:
    before = os.sched_getaffinity(0)
    (finding,) = checks.check_affinity()
    assert finding.status in (Status.OK, Status.OPTIONAL) and "threads may be bound to cpus" in finding.detail
    assert os.sched_getaffinity(0) == before


def test_a_system_that_refuses_to_bind_threads_is_a_warning_with_the_remedy() -> None:
    def refuse(thread: int, cpus: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    (finding,) = checks.check_affinity(refuse)
    assert finding.status is Status.WARNING
    assert finding.detail == "A thread cannot be bound to a cpu: Operation not permitted."
    assert "--cores" in finding.cost and "sched_setaffinity" in finding.remedy


def test_a_thread_that_cannot_be_bound_to_one_cpu_may_use_all_again() -> None:
    bound: list[set[int]] = []

    def bind(_: int, cpus: Collection[int]) -> None:
        if bound and len(cpus) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        bound.append(set(cpus))

    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        bound.append(allowed)
    (finding,) = checks.check_affinity(bind)
    assert finding.status is Status.WARNING and bound[-1] == allowed


def test_a_thread_with_restricted_cpus_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(os.sched_getaffinity(0))
    monkeypatch.setattr(checks.os, "cpu_count", lambda: count + 1)
    (finding,) = checks.check_affinity()
    assert (finding.status, finding.detail.endswith(f", {count} of {count + 1}")) == (Status.OPTIONAL, True)


def test_the_prebuilt_runner_starts_and_computes_known_results(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(checks.check_prebuilt_runner()) == [], "it is not installed here"
    installed = ModuleType("etfarm_runner")
    installed.BUNDLE = runner_archive()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "etfarm_runner", installed)
    (finding,) = checks.check_prebuilt_runner()
    assert finding.status is Status.OK, finding
    assert finding.detail.startswith("the prebuilt runner computed ") and "aten::" in finding.detail


def test_a_prebuilt_runner_that_is_damaged_or_cannot_start_has_a_remedy(tmp_path: Path) -> None:
    damaged = tmp_path / "bundle.tar.gz"
    damaged.write_bytes(runner_archive().read_bytes()[:-1000])
    (finding,) = checks.check_prebuilt_runner(damaged)
    assert finding.status is Status.WARNING and "etfarm-runner" in finding.remedy
    (finding,) = checks.check_prebuilt_runner(tmp_path / "absent")
    assert finding.status is Status.WARNING and "No such file" in finding.detail
