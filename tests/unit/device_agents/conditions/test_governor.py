"""The clock governor: set for a measurement where that is allowed, restored whatever happens, reported where it is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etfarm.device_agents.conditions.governor import Governors
from tests.support.refusals import refuses

POLICIES = "sys/devices/system/cpu/cpufreq"


def board(root: Path, **governors: str) -> Path:
    """Two clusters of four cpus, as a phone's kernel shows them."""
    for policy, cpus in (("policy0", "0 1 2 3"), ("policy4", "4 5 6 7")):
        folder = root / POLICIES / policy
        folder.mkdir(parents=True)
        (folder / "related_cpus").write_text(f"{cpus}\n")
        (folder / "scaling_governor").write_text(f"{governors.get(policy, 'schedutil')}\n")
        (folder / "scaling_available_governors").write_text("powersave schedutil performance \n")
    return root


def _now(root: Path) -> list[str]:
    return [(root / POLICIES / policy / "scaling_governor").read_text().strip() for policy in ("policy0", "policy4")]


def test_it_is_set_for_the_measurement_and_put_back(tmp_path: Path) -> None:
    root, kept = board(tmp_path, policy0="powersave"), tmp_path / "kept"
    with Governors(kept, "performance", root).held() as settings:
        assert _now(root) == ["performance", "performance"]
        assert kept.exists()
        reported = [(each.name, each.cpus, each.found, each.wanted, each.applied, each.HasField("why")) for each in settings]
        assert reported == [
            ("governor", "0-3", "powersave", "performance", True, False),
            ("governor", "4-7", "schedutil", "performance", True, False),
        ]
    assert _now(root) == ["powersave", "schedutil"]
    assert not kept.exists()


def test_it_is_put_back_when_the_measurement_fails(tmp_path: Path) -> None:
    root = board(tmp_path)
    with pytest.raises(RuntimeError), Governors(tmp_path / "kept", "performance", root).held():
        raise RuntimeError
    assert _now(root) == ["schedutil", "schedutil"]


def test_an_agent_that_was_killed_puts_it_back_at_its_next_start(tmp_path: Path) -> None:
    root, kept = board(tmp_path, policy4="powersave"), tmp_path / "kept"
    code = (
        "import os, signal, sys; from pathlib import Path; from etfarm.device_agents.conditions.governor import Governors\n"
        "root = Path(sys.argv[1])\n"
        "with Governors(root / 'kept', 'performance', root).held(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(root)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert _now(root) == ["performance", "performance"]
    Governors(kept, None, root).restore()
    assert _now(root) == ["schedutil", "powersave"]
    assert not kept.exists()
    Governors(kept, None, root).restore()  # nothing is left to do


def test_an_agent_beside_another_leaves_its_governor_and_says_so(tmp_path: Path) -> None:
    root = board(tmp_path)
    one, other = Governors(tmp_path / "one", "performance", root), Governors(tmp_path / "other", "powersave", root)
    alike = Governors(tmp_path / "alike", "performance", root)
    with one.held({5}):
        for beside, result in ((other, ["schedutil", "performance"]), (alike, ["schedutil", "performance"])):
            with beside.held() as settings:
                assert _now(root)[1] == "performance"
                assert [each.found for each in settings] == result
                assert [each.applied for each in settings] == [True, False]
                assert settings[1].why == "another agent of this machine has set it for a measurement of its own"
        assert _now(root) == ["schedutil", "performance"], "who ends first puts back its own alone"
    assert _now(root) == ["schedutil", "schedutil"]
    with other.held():
        assert _now(root) == ["powersave", "powersave"], "the first one has let it go"


def test_what_a_killed_agent_left_is_put_back_once_no_other_agent_has_it(tmp_path: Path) -> None:
    root, kept = board(tmp_path, policy0="performance"), tmp_path / "kept"
    kept.write_text(json.dumps({f"/{POLICIES}/policy{number}/scaling_governor": "ondemand" for number in (0, 4)}))
    again = Governors(kept, "performance", root)
    with Governors(tmp_path / "other", "powersave", root).held({0}):
        again.restore()
        assert _now(root) == ["powersave", "ondemand"]
        with again.held({5}):
            assert _now(root) == ["powersave", "performance"]
        assert _now(root) == ["powersave", "ondemand"] and kept.exists()
    with again.held({5}):
        assert _now(root) == ["ondemand", "performance"]
    assert _now(root) == ["ondemand", "ondemand"] and not kept.exists()


def test_only_the_runners_cpus_are_touched(tmp_path: Path) -> None:
    root = board(tmp_path)
    with Governors(tmp_path / "kept", "performance", root).held({5}) as settings:
        assert _now(root) == ["schedutil", "performance"]
        assert [each.cpus for each in settings] == ["4-7"]


def test_a_correct_governor_is_left_unchanged_and_not_reported(tmp_path: Path) -> None:
    root = board(tmp_path, policy0="performance", policy4="performance")
    with Governors(tmp_path / "kept", "performance", root).held() as settings:
        assert not settings and not (tmp_path / "kept").exists()


@pytest.mark.parametrize("wanted", [None, "performance"])
def test_a_machine_without_governors_has_nothing_to_set(tmp_path: Path, wanted: str | None) -> None:
    with Governors(tmp_path / "kept", wanted, tmp_path).held() as settings:
        assert not settings
    assert list(tmp_path.iterdir()) == []


def test_a_governor_that_may_not_be_written_is_reported_with_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = board(tmp_path)
    real = os.access
    # Root may write everything, so the kernel's answer to a user is given here.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    with Governors(tmp_path / "kept", "performance", root).held() as settings:
        assert [(each.applied, each.found, each.why) for each in settings] == [
            (False, "schedutil", "the agent may not write it")
        ] * 2
    assert _now(root) == ["schedutil", "schedutil"] and not (tmp_path / "kept").exists()


def test_a_governor_that_the_kernel_lacks_is_reported(tmp_path: Path) -> None:
    root = board(tmp_path)
    with Governors(tmp_path / "kept", "userspace", root).held() as settings:
        assert {each.why for each in settings} == {"the kernel has no governor userspace here"}
    assert _now(root) == ["schedutil", "schedutil"]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"/etc/passwd": "performance"}),
        json.dumps({"/sys/devices/system/cpu/cpufreq/policy0/../../../../../../etc/passwd": "performance"}),
        json.dumps({f"/{POLICIES}/policy0/scaling_governor": "a b\\n"}),
        json.dumps({f"/{POLICIES}/policy0/scaling_governor": 7}),
        "[1]",
        "{",
    ],
)
def test_a_file_of_somebody_else_writes_nothing_into_the_system(tmp_path: Path, content: str) -> None:
    root, kept = board(tmp_path), tmp_path / "kept"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root")
    kept.write_text(content)
    Governors(kept, None, root).restore()
    assert _now(root) == ["schedutil", "schedutil"]
    assert (tmp_path / "etc/passwd").read_text() == "root"


@pytest.mark.remedy("GOVERNOR_UNKNOWN")
def test_one_that_the_kernel_does_not_list_is_refused_at_the_start(tmp_path: Path) -> None:
    root = board(tmp_path)
    only = root / POLICIES / "policy4" / "scaling_available_governors"
    only.write_text("userspace\n")

    def check(wanted: str | None, *cpus: int) -> None:
        Governors(tmp_path / "kept", wanted, root).check(cpus or None)

    with refuses("GOVERNOR_UNKNOWN") as refused:
        check("nosuch")
    assert str(refused.value) == (
        "The kernel has no governor 'nosuch' here. Give --governor one of performance, powersave, schedutil, userspace, or keep."
    )
    with refuses("GOVERNOR_UNKNOWN", match="one of userspace, or keep"):
        check("performance", 4, 5)
    for wanted, cpus in ((None, ()), ("performance", ()), ("performance", (0, 4)), ("userspace", (7,))):
        check(wanted, *cpus)
    # A kernel that lists none may have any.
    only.unlink()
    check("nosuch", 4)
    Governors(tmp_path / "kept", "nosuch", tmp_path / "no-cpufreq").check()


def test_the_reason_for_an_unapplied_setting_is_reported_if_the_kernel_lists_none(tmp_path: Path) -> None:
    root = board(tmp_path)
    for policy in ("policy0", "policy4"):
        (root / POLICIES / policy / "scaling_available_governors").unlink()
        governor = root / POLICIES / policy / "scaling_governor"
        governor.unlink()
        # Takes what is written and stays as it is, or refuses it, as the kernel may.
        governor.symlink_to("/proc/self/comm" if policy == "policy0" else "/proc/version")
    with Governors(tmp_path / "kept", "a-governor-of-no-kernel", root).held({0}) as settings:
        (reported,) = settings
    assert (reported.applied, reported.why) == (False, "the kernel set another")
    with Governors(tmp_path / "kept", "nosuch", root).held({4}) as settings:
        (reported,) = settings
    assert not reported.applied and reported.why
