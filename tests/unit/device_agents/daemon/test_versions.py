"""The versions that an agent may run, and the launcher that switches between them."""

from __future__ import annotations

import json
import os
import textwrap
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from etfarm.device_agents.daemon.launcher import RESTART, Launcher
from etfarm.device_agents.daemon.versions import BadWheel, State, Version, Versions

DIGEST = "ab" * 32


def wheel(folder: Path, files: Mapping[str, str]) -> Path:
    path = folder / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def version(folder: str, number: str = "2", limit_s: float = 20.0) -> Version:
    return Version(folder, number, f"upgrade-to-{number}", limit_s)


def test_the_state_survives_and_a_damaged_one_starts_over(tmp_path: Path) -> None:
    versions = Versions(tmp_path, "1")
    assert versions.read() == State("1")
    name = versions.unpack(wheel(tmp_path, {"a.py": "x = 1"}), "2", DIGEST)
    state = State("1", current=version(name), outcome={"upgrade_id": "u", "version": "2"})
    versions.write(state)
    assert versions.read() == state
    assert (versions.path(version(name)) / "a.py").read_text() == "x = 1"
    (versions.folder / "state.json").write_text("{")
    assert versions.read() == State("1")


def test_an_installation_of_another_version_takes_precedence_over_wheels_before_it(tmp_path: Path) -> None:
    versions = Versions(tmp_path, "1")
    name = versions.unpack(wheel(tmp_path, {"a.py": ""}), "2", DIGEST)
    versions.write(State("1", current=version(name)))
    assert Versions(tmp_path, "3").read().current is None


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_damaged_compression_is_no_wheel(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a.py", "x = 1\n" * 500)
    data = bytearray(path.read_bytes())
    begin = data.index(b"a.py") + len(b"a.py")
    data[begin : begin + 16] = b"\xff" * 16
    path.write_bytes(data)
    with pytest.raises(BadWheel):
        Versions(tmp_path, "1").unpack(path, "2", DIGEST)


def test_a_version_whose_folder_is_gone_is_not_used(tmp_path: Path) -> None:
    versions = Versions(tmp_path, "1")
    versions.write(State("1", current=version("2-gone")))
    assert versions.read().current is None


@pytest.mark.parametrize("folder", ["../x", "/etc", ".", "..", "a/b", ""])
def test_a_folder_outside_of_the_versions_is_not_read(tmp_path: Path, folder: str) -> None:
    versions = Versions(tmp_path, "1")
    versions.write(State("1", current=replace(version("x"), folder=folder)))
    assert versions.read().current is None


@pytest.mark.parametrize("name", ["../../escaped.py", "/escaped.py", "a/../../b.py"])
def test_a_wheel_with_files_outside_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadWheel, match="outside"):
        Versions(tmp_path / "data", "1").unpack(wheel(tmp_path, {name: "x"}), "2", DIGEST)
    assert not list(tmp_path.rglob("*.py"))


def test_what_is_no_wheel_and_what_is_no_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"nothing")
    with pytest.raises(BadWheel, match="unpacked"):
        Versions(tmp_path, "1").unpack(tmp_path / "x.whl", "2", DIGEST)
    with pytest.raises(BadWheel, match="version"):
        Versions(tmp_path, "1").unpack(wheel(tmp_path, {}), "../2", DIGEST)


def test_folders_that_no_state_names_are_deleted(tmp_path: Path) -> None:
    versions = Versions(tmp_path, "1")
    kept, old = (versions.unpack(wheel(tmp_path, {"a.py": ""}), number, DIGEST) for number in ("2", "3"))
    versions.tidy(State("1", current=version(kept)))
    assert [path.name for path in versions.folder.iterdir()] == [kept] and old != kept


COMMAND = """
import os, sys
with open(os.environ["LOG"], "a") as log:
    log.write({name!r} + "\\n")
{body}
"""
CONNECT = 'os.write(int(os.environ["ETFARM_AGENT_CONNECTED_FD"]), b"+")'


class Farm:
    """Versions of a stand-in for the agent: each is a real process that a real launcher starts.

    The installation is a folder of PYTHONPATH, as that of a wheel is; what an agent does is a line of Python.
    """

    def __init__(self, folder: Path, **bodies: str) -> None:
        self.folder = folder
        self.versions = Versions(folder, "1")
        self.log = folder / "log"
        for name, body in bodies.items():
            package = (folder if name == "base" else self.versions.folder) / name / "etfarm" / "wire"
            package.mkdir(parents=True)
            (package / "__init__.py").touch()
            (package / "command.py").write_text(COMMAND.format(name=name, body=textwrap.dedent(body)))

    def run(self, state: State) -> int:
        self.versions.write(state)
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "base"), "LOG": str(self.log)}
        return Launcher(self.versions, [], environment, "1").run()

    def started(self) -> list[str]:
        return self.log.read_text().split()


def test_a_version_that_connects_stays(tmp_path: Path) -> None:
    farm = Farm(tmp_path, base="sys.exit(9)", new=f"{CONNECT}; sys.exit(0)")
    assert farm.run(State("1", trial=version("new"))) == 0
    assert farm.started() == ["new"]
    state = farm.versions.read()
    assert (state.current, state.trial) == (version("new"), None)
    assert state.outcome == {"upgrade_id": "upgrade-to-2", "version": "2"}


@pytest.mark.parametrize(
    ("body", "limit_s", "why"),
    [
        ("sys.exit(3)", 20.0, "ended with exit code 3 before it had connected"),
        ("import time; time.sleep(60)", 1.0, "has not connected within 1 s"),
        ("import nothing_of_that_name", 20.0, "ended with exit code 1 before it had connected"),
        ("os.close(int(os.environ['ETFARM_AGENT_CONNECTED_FD'])); sys.exit(0)", 20.0, "ended with exit code 0"),
    ],
)
def test_a_version_that_does_not_connect_is_given_up_for_the_former_one(
    tmp_path: Path, body: str, limit_s: float, why: str
) -> None:
    farm = Farm(tmp_path, base="sys.exit(9)", former="sys.exit(7)", new=body)
    assert farm.run(State("1", current=version("former", "1.5"), trial=version("new", limit_s=limit_s))) == 7
    assert farm.started() == ["new", "former"]
    state = farm.versions.read()
    assert state.current == version("former", "1.5") and state.trial is None
    assert why in (state.outcome or {})["error"]
    # It is not tried again.
    assert farm.run(state) == 7 and farm.started()[-1] == "former"


def test_an_agent_that_ends_with_restart_is_started_again(tmp_path: Path) -> None:
    state_file = tmp_path / "versions" / "state.json"
    trial = json.dumps({"folder": "new", "version": "2", "upgrade_id": "u", "time_limit_s": 20.0})
    installs = f"""
    import json, shutil
    if len(open(os.environ["LOG"]).readlines()) > 1:
        sys.exit(99)  # the new version was not started
    shutil.copytree({str(tmp_path / "spare")!r}, {str(tmp_path / "versions" / "new")!r})
    state = json.load(open({str(state_file)!r}))
    state["trial"] = json.loads({trial!r})
    json.dump(state, open({str(state_file)!r}, "w"))
    sys.exit({RESTART})
    """
    farm = Farm(tmp_path, base=installs, new=f"{CONNECT}; sys.exit(5)")
    (tmp_path / "versions" / "new").rename(tmp_path / "spare")  # a wheel that is not unpacked yet
    assert farm.run(State("1")) == 5
    assert farm.started() == ["base", "new"]


def test_the_exit_code_of_an_agent_that_was_killed_says_so(tmp_path: Path) -> None:
    farm = Farm(tmp_path, base="os.kill(os.getpid(), 9)")
    assert farm.run(State("1")) == 128 + 9
