"""`etfarm projects`, `devices restrict` and `--project` against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.client import Farm
from etfarm.client.cli.commands import devices, jobs, projects
from etfarm.client.cli.commands.projects import size_of
from etfarm.client.models import CellState
from etfarm.client.submit.bench_options import BenchOptions
from etfarm.client.submit.run_options import RunOptions
from etfarm.client.transport.connection import CHOSEN_PROJECT
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.errors import UserError
from etfarm.wire.names import PROJECT_VARIABLE, is_project_name
from tests.support.farm import FarmProcess, wait_until
from tests.support.programs import program
from tests.support.refusals import refuses


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    with FarmProcess(tmp_path_factory.mktemp("projects"), bundle=False) as created:
        yield created.start(agents=1)


@pytest.fixture(autouse=True)
def no_choice() -> Iterator[None]:
    """Commands of this process choose a project for this test only."""
    token = CHOSEN_PROJECT.set(None)
    yield
    CHOSEN_PROJECT.reset(token)


@pytest.mark.slow(reason="each command is a process")
def test_projects_are_created_changed_and_listed(farm: FarmProcess, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--server", farm.address]
    assert projects.main(["create", "vision", "--member", "ann", "--member", "bob", "--storage", "20GiB", *server]) == 0
    assert projects.main(["add", "vision", "cat", "dan", *server]) == 0
    assert projects.main(["remove", "vision", "bob", "dan", *server]) == 0
    assert projects.main(["limit", "vision", "--storage", "default", *server]) == 0
    capsys.readouterr()
    assert projects.main(["list", *server]) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert head[:2] == ["PROJECT", "MEMBERS"]
    assert ["vision", "ann,", "cat", "0", "0", "B", "default"] in rows
    assert rows[0][0] == "default"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["create", "Vision"], 2, "'Vision' cannot be a project's name."),
        (["create", "x", "--storage", "lots"], 2, "--storage must be a size or default, got 'lots'."),
        (["add", "nothing", "ann"], 2, "There is no project 'nothing'."),
        (["remove", "default", "ann"], 2, "'ann' is not a member of default."),
    ],
)
def test_an_impossible_request_is_a_single_error_line(
    farm: FarmProcess, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    assert projects.main([*arguments, "--server", farm.address]) == code
    printed = capsys.readouterr().err
    assert says in printed and printed.count("\n") == 1


def test_a_device_is_labelled_drained_and_undrained(farm: FarmProcess, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--server", farm.address]
    assert devices.main(["label", "board-0", "rack=3", "lab=north", *server]) == 0
    assert devices.main(["label", "board-0", "--remove", "lab", *server]) == 0
    assert "board-0 has the labels rack=3." in capsys.readouterr().out
    assert devices.main(["drain", "board-0", "--reason", "new cable", *server]) == 0
    assert "takes nothing new" in capsys.readouterr().out
    assert devices.main(["list", "--device", "label.rack=3", *server]) == 0
    listed = capsys.readouterr().out
    assert "DRAINING" in listed and "new cable" in listed
    with Farm(farm.address) as client:
        known = client.device("board-0")
        assert known.drain is not None and (known.drain.reason, known.attempt_id) == ("new cable", "")
        client.create_project("waiting")
    with Farm(farm.address, project="waiting") as client:
        job = client.submit_run(_pte(farm), RunOptions(device="name=board-0"))
        assert wait_until(lambda: "board-0 is drained: new cable" in job.refresh().cells[0].waiting_for)
        capsys.readouterr()
        assert jobs.main(["list", "--state", "RUNNING", *server, "--project", "waiting"]) == 0
        assert "WAITING" in (listed := capsys.readouterr().out) and "RUNNING" not in listed
        job.cancel()
    assert devices.main(["drain", "board-0", "board-9", *server]) == 2
    assert "takes nothing new" in capsys.readouterr().out, "what has been done is told"
    assert devices.main(["undrain", "board-0", *server]) == 0
    assert "is idle" in capsys.readouterr().out
    for wrong in (
        ["label", "board-0"],
        ["label", "board-0", "rack"],
        ["label", "board-0", "a=1", "a=2"],
        ["label", "board-0", "a b=1"],
        ["drain", "board-9"],
    ):
        assert devices.main([*wrong, *server]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow(reason="two jobs whose programs are inspected")
def test_the_failed_cells_of_a_job_run_again(farm: FarmProcess, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--server", farm.address, "--project", "again"]
    with Farm(farm.address) as client:
        client.create_project("again")
    with Farm(farm.address, project="again") as client:
        options = BenchOptions(device="name=board-0", iterations=1, min_time_s=0, warmup=0)
        first = client.submit_bench([_pte(farm), program("external_xnnpack").path], options)
        first.wait()
        assert [cell.state for cell in first.refresh().cells] == [CellState.SUCCEEDED, CellState.FAILED]
        capsys.readouterr()
        assert jobs.main(["retry", first.id, *server]) == 1, "the program still lacks its data"
        printed = capsys.readouterr().err
        assert f"runs 1 of 2 cells of job {first.id} again" in printed and ".ptd files" in printed
        again = client.job("latest").info
        assert (dict(again.labels), [cell.model for cell in again.cells]) == ({"retry_of": first.id}, [first.info.cells[1].model])
        assert jobs.main(["retry", again.id, "--detach", *server]) == 0
        assert client.job(capsys.readouterr().out.strip()).info.labels["retry_of"] == again.id
    assert jobs.main(["retry", "nothing", *server]) == 2


def test_a_device_is_restricted_and_unrestricted(farm: FarmProcess, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--server", farm.address]
    assert projects.main(["create", "audio", *server]) == 0
    assert devices.main(["restrict", "board-0", "--project", "audio", *server]) == 0
    assert "board-0 runs jobs of audio." in capsys.readouterr().out
    with Farm(farm.address) as client, pytest.raises(UserError, match=r"No device has ever connected|No known device"):
        client.run(_pte(farm), device="name=board-0")
    assert devices.main(["restrict", "board-0", "--all", *server]) == 0
    assert "board-0 runs jobs of every project." in capsys.readouterr().out
    assert devices.main(["restrict", "board-0", *server]) == 2
    assert devices.main(["restrict", "board-0", "--project", "nothing", *server]) == 2


def _pte(farm: FarmProcess) -> Path:
    path = farm.folder / "add.pte"
    path.write_bytes(program("add").bytes)
    return path


def test_the_project_option_precedes_the_environment_variable(
    farm: FarmProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Farm(farm.address) as client:
        client.create_project("here")
        client.create_project("there")
    monkeypatch.setenv(PROJECT_VARIABLE, "there")
    with Farm(farm.address) as client:
        assert client.compile(_pte(farm)).info.project == "there"
    with Farm(farm.address, project="here") as client:
        assert client.compile(_pte(farm)).info.project == "here"
    for chosen, code in ((["--project", "here"], 0), (["--project=nothing"], 2), (["--project"], 2), (["--project", "No"], 2)):
        assert jobs.main(["show", "latest", "--server", farm.address, *chosen]) == code, capsys.readouterr().err
    monkeypatch.setenv(PROJECT_VARIABLE, "default")
    CHOSEN_PROJECT.set(None)
    assert jobs.main(["show", "latest", "--server", farm.address]) == 2
    assert "There is no job 'latest'." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "A", "a b", "a\n", "-a", "a" * 65, "agent:pi", "é"])
def test_an_invalid_project_name_is_not_sent(name: str) -> None:
    assert not is_project_name(name)
    if name:
        with refuses("BAD_PROJECT"):
            open_channel(Access("127.0.0.1:1", project=name))


@pytest.mark.parametrize(("text", "size"), [("20GiB", 20 << 30), ("7", 7), ("1 mib", 1 << 20), ("default", None), ("", None)])
def test_sizes_are_parsed(text: str, size: int | None) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["-1", "1.5GiB", "GiB", "1GB", "0x10", "9" * 30])
def test_an_invalid_size_is_refused(text: str) -> None:
    with refuses("USAGE"):
        size_of(text)
