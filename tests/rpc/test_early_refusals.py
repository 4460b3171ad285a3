"""What a job is refused for before its model is exported: the factory that makes the model is not even called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etfarm.client import Farm
from etfarm.client.admin.access import open_access
from etfarm.wire.errors import EtfarmError
from tests.support.farm import FarmProcess, etfarm, private_file
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="starts a server and an agent, and commands that load torch")

TOKENS = {role: f"token-of-the-{role}-0123456789" for role in ("admin", "user", "agent", "viewer")}

FACTORY = """
import pathlib, torch

class Net(torch.nn.Module):
    def forward(self, image):
        pathlib.Path(__file__).with_name("exported").touch()
        return torch.relu(image)

def make():
    pathlib.Path(__file__).with_name("called").touch()
    return Net().eval(), (torch.zeros(1, 4),)
"""


@dataclass(frozen=True)
class World:
    farm: FarmProcess
    folder: Path

    @property
    def model(self) -> str:
        return f"{self.folder / 'net.py'}:make"

    def touched(self) -> set[str]:
        """Which of `called` and `exported` the model's file has left, from now on afresh."""
        files = [path for name in ("called", "exported") if (path := self.folder / name).exists()]
        for file in files:
            file.unlink()
        return {file.name for file in files}

    def client(self, role: str = "user") -> Farm:
        return Farm(self.farm.address, token=TOKENS[role])

    def refused(self, *arguments: str, role: str = "user", command: str = "bench") -> tuple[int, str]:
        """Return the exit code and reason of a command with the model."""
        environment = {"ETFARM_SERVER": self.farm.address, "ETFARM_TOKEN": TOKENS[role]}
        done = etfarm(command, self.model, *arguments, "--json", "-", cwd=self.folder, environment=environment)
        return done.returncode, str(json.loads(done.stdout)["error"]["reason"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("early")
    (folder / "net.py").write_text(FACTORY)
    np.savez(folder / "wrong.npz", sound=np.zeros((1, 4), np.float32))
    tokens = private_file(folder / "tokens", "".join(f"the-{role} {role} {token}\n" for role, token in TOKENS.items()))
    with FarmProcess(folder, bundle=False, serve=("--tokens", str(tokens))) as farm:
        farm.restart()
        farm.add_agent(environment={"ETFARM_TOKEN": TOKENS["agent"]})
        yield World(farm, folder)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"devices": "name=nowhere"}, "NO_SUCH_DEVICE"),
        ({"cores": "4000"}, "CORES_UNKNOWN"),
        ({"threads": 1024}, "TOO_MANY_THREADS"),
        ({"recipes": "acme.int8"}, "UNKNOWN_RECIPE"),
        ({"recipes": "coreai_fp16"}, "RECIPE_UNAVAILABLE"),
        ({"recipes": "coreml_fp32"}, "BACKEND_MISSING"),
        ({"timeout_s": -1.0}, "BAD_JOB"),
        ({"interleave": True}, "BAD_JOB"),
    ],
)
def test_what_the_server_knows_is_refused_before_the_factory_is_called(
    world: World, keywords: dict[str, object], reason: str
) -> None:
    with world.client() as farm, pytest.raises(EtfarmError) as refused:
        farm.bench(world.model, **keywords)  # type: ignore[arg-type]
    assert refused.value.reason == reason
    assert world.touched() == set()


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"device": "name=nowhere"}, "NO_SUCH_DEVICE"),
        ({"cores": "4000"}, "CORES_UNKNOWN"),
        ({"threads": 1024}, "TOO_MANY_THREADS"),
        ({"recipe": "coreai_fp16"}, "RECIPE_UNAVAILABLE"),
    ],
)
def test_a_session_and_a_data_set_are_refused_before_the_factory_is_called(
    world: World, keywords: dict[str, Any], reason: str
) -> None:
    with world.client() as farm:
        with pytest.raises(EtfarmError) as refused, farm.session(world.model, **keywords):
            pass
        assert refused.value.reason == reason
        with pytest.raises(EtfarmError) as refused:
            list(farm.run_dataset(world.model, [np.zeros((1, 4), np.float32)], **keywords))
        assert refused.value.reason == reason
    assert world.touched() == set()


def test_a_session_with_a_method_that_the_model_lacks_exports_nothing(world: World) -> None:
    with world.client() as farm, refuses("METHOD_MISSING"), farm.session(world.model, method="decode"):
        pass
    assert world.touched() == {"called"}


def test_a_viewer_may_not_submit_and_exports_nothing(world: World) -> None:
    with world.client("viewer") as farm:
        for submit in (farm.bench, farm.compile, farm.run):
            with refuses("PERMISSION_DENIED"):
                submit(world.model)
    assert world.touched() == set()


@pytest.mark.parametrize(
    ("arguments", "code", "reason", "touched"),
    [
        (("--device", "name=nowhere"), 2, "NO_SUCH_DEVICE", set()),
        (("--method", "decode"), 2, "METHOD_MISSING", {"called"}),
        (("--inputs", "wrong.npz"), 2, "UNKNOWN_INPUT", {"called"}),
    ],
)
def test_a_command_is_refused_before_the_export(
    world: World, arguments: tuple[str, ...], code: int, reason: str, touched: set[str]
) -> None:
    assert world.refused(*arguments) == (code, reason)
    assert world.touched() == touched


@pytest.mark.parametrize(
    ("arguments", "reason", "touched"),
    [
        (("--device", "name=nowhere"), "NO_SUCH_DEVICE", set()),
        (("--threads", "1024"), "TOO_MANY_THREADS", set()),
        (("--devices", "2"), "TOO_FEW_DEVICES", set()),
        (("--method", "decode"), "METHOD_MISSING", {"called"}),
    ],
)
def test_a_run_of_a_data_set_is_refused_before_the_export(
    world: World, arguments: tuple[str, ...], reason: str, touched: set[str]
) -> None:
    samples = world.folder / "samples"
    samples.mkdir(exist_ok=True)
    np.savez(samples / "0.npz", image=np.zeros((1, 4), np.float32))
    assert world.refused("--inputs", str(samples), *arguments, command="run") == (2, reason)
    assert world.touched() == touched


def test_a_check_leaves_no_job_and_no_entry_in_the_audit_log(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.client() as farm:
        before = len(farm.jobs())
        with pytest.raises(EtfarmError):
            farm.bench(world.model, methods="decode")  # the server has accepted it before
        assert len(farm.jobs()) == before
        job = farm.compile(world.model)
        job.cancel()
        assert [listed.id for listed in farm.jobs()][: len(farm.jobs()) - before] == [job.id]
    monkeypatch.setenv("ETFARM_TOKEN", TOKENS["admin"])

    async def submissions() -> list[str]:
        async with open_access(world.farm.address) as access:
            return [entry.subject for entry in await access.audit(action="JobService.Submit") if entry.outcome == "OK"]

    assert asyncio.run(submissions()) == [job.id]
