"""`etfarm recipes show`: the whole content of a file, and its errors before anything is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.client.cli.commands import recipes as command
from etfarm.client.fleet import recipe_devices
from etfarm.client.models import Device, DeviceState, RecipeInfo
from etfarm.v1 import common_pb2, compile_pb2, compile_pb2_grpc, device_pb2, device_pb2_grpc
from etfarm.wire import recipes
from tests.support.fake_servers import ReadyFarm, serving_in_threads

FILE = """
recipe = "xnnpack_fp32"
[[quantizers]]
name = "xnnpack"
skip_modules = ["head"]
[methods.decoder]
partitioners = []
[replace]
TO_EXECUTORCH = "acme.write"
"""


def test_all_facts_of_a_file_are_reported() -> None:
    recipe = recipes.from_toml(FILE, "mine")
    reported = dict(command._whole(recipe))
    assert reported["name"] == "mine"
    assert reported["quantizers"] == 'xnnpack (dynamic=false, per_channel=false, skip_modules=["head"])'
    assert reported["method decoder"] == "partitioners none"
    assert reported["replace"] == 'TO_EXECUTORCH="acme.write"'
    assert reported["quantizes"] == "PT2E_STATIC"
    assert reported["stages"] == "QUANTIZE TORCH_EXPORT TO_EDGE_TRANSFORM_AND_LOWER TO_EXECUTORCH"
    assert reported["canonical"] == recipe.json
    assert reported["digest"] == recipe.digest


def test_a_plugins_recipe_is_as_the_server_describes_it() -> None:
    here = recipe_devices.FarmRecipe(
        name="acme.fast",
        summary="acme's fast path",
        backend="acme",
        quantization="pt2e-static",
        available=True,
        arguments=("level=an integer from 0 to 3: how much",),
        devices=None,
    )
    reported = dict(command._part("acme.fast", here))
    assert (reported["what"], reported["backend"], reported["quantization"]) == ("acme's fast path", "acme", "pt2e-static")
    assert reported["argument"] == "level=an integer from 0 to 3: how much"
    assert dict(command._part("acme.fast", None))["here"] == "not available: this farm has no plug-in with that name"
    assert dict(command._whole(recipes.parse("acme.fast")))["stages"].endswith("unless its plug-in quantizes")


def test_a_file_with_a_typo_is_refused_before_a_farm_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETFARM_DATA", str(tmp_path / "data"))
    file = tmp_path / "x.toml"
    file.write_text('recipe = "xnnpack_fp32"\n[executorch]\nmemory_planning = "gredy"\n')
    assert command.main(["show", str(file)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert '[executorch] memory_planning cannot be "gredy". Allowed: greedy, naive. Did you mean greedy?' in error
    assert not (tmp_path / "data").exists()


def device(name: str, *backends: str, state: DeviceState = DeviceState.IDLE, runner: str = "native") -> Device:
    """Return a device whose runner has some backends."""
    return Device(
        id=name,
        agent_id="agent",
        name=name,
        arch="aarch64",
        os="linux",
        cores=4,
        memory_bytes=1 << 30,
        backends=backends,
        state=state,
        runner=runner,
    )


DEVICES = [
    device("pi", "XnnpackBackend"),
    device("mac", "XnnpackBackend", "CoreMLBackend"),
    device("far", "QnnBackend", state=DeviceState.OFFLINE),
    device("bare", runner=""),
]


@pytest.mark.parametrize(
    ("name", "places", "missing"),
    [
        ("portable", ("pi", "mac"), ""),
        ("xnnpack_fp32", ("pi", "mac"), ""),
        ("coreml_fp32", ("mac",), ""),
        ("qnn_fp16", (), "no connected device has QnnBackend: needs a Snapdragon with a Hexagon NPU"),
        ("arm_ethos_u55_int8", (), "no connected device has EthosUBackend: needs a Cortex-M"),
        ("acme.fast", None, ""),
    ],
)
def test_a_recipe_runs_on_the_connected_devices_that_have_its_backend(
    name: str, places: tuple[str, ...] | None, missing: str
) -> None:
    info = RecipeInfo(name=name, summary="what", quantization="none", available=True)
    row = recipe_devices.locate(info, DEVICES)
    assert (row.devices, row.undecided) == (places, ())
    described = recipe_devices.describe_missing_device(row)
    assert described.startswith(missing) and bool(described) == bool(missing)


@pytest.mark.parametrize("name", ["portable", "xnnpack_fp32"])
def test_a_device_whose_runner_is_still_being_built_lacks_nothing_yet(name: str) -> None:
    coming = dataclasses.replace(device("new", runner=""), is_runner_coming=True)
    info = RecipeInfo(name=name, summary="what", quantization="none", available=True)
    row = recipe_devices.locate(info, [coming, *DEVICES[2:]])
    assert (row.devices, row.undecided) == ((), ("new",))
    assert recipe_devices.describe_missing_device(row) == "the runner of new is still being built"
    row = recipe_devices.locate(info, [coming, *DEVICES])
    assert (row.devices, recipe_devices.describe_missing_device(row)) == (("pi", "mac"), "")


def test_every_recipe_s_backend_on_a_device_is_known() -> None:
    assert None not in {recipes.runtime_backend(name) for name in recipes.RECIPES}


class Farm(compile_pb2_grpc.CompileServiceServicer, device_pb2_grpc.DeviceServiceServicer, ReadyFarm):
    """The server's end: 18 recipes, of which 2 do not compile there, and 6 equal devices."""

    def ListRecipes(self, request: object, context: object) -> compile_pb2.ListRecipesResponse:
        names = ["acme.r00", "acme.r01", "xnnpack_fp32", *(f"acme.r{number:02}" for number in range(3, 18))]
        known = [compile_pb2.RecipeInfo(name=name, summary="what", available=name not in names[:2]) for name in names]
        return compile_pb2.ListRecipesResponse(recipes=known)

    def List(self, request: object, context: object) -> device_pb2.ListDevicesResponse:
        known = [
            device_pb2.Device(
                id=f"id{number}", name=f"pi{number}", state=device_pb2.DEVICE_STATE_IDLE, backends=["XnnpackBackend"],
                runner=common_pb2.RUNNER_KIND_NATIVE,
            )
            for number in range(6)
        ]  # fmt: skip
        return device_pb2.ListDevicesResponse(devices=known)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A farm with many recipes and devices."""
    with serving_in_threads(Farm()) as address:
        monkeypatch.setenv("ETFARM_SERVER", address)
        monkeypatch.setenv("COLUMNS", "140")
        monkeypatch.setenv("NO_COLOR", "1")
        yield


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert command.main(["list", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_terminal_shows_the_first_recipes_and_devices_and_says_how_many_more_there_are(
    many: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    first, last = shown(capsys)[1:], "and 3 more: etfarm recipes list --all"
    assert last in first[-1] and len(first) == command.SHOWN_RECIPES + 1
    assert "xnnpack_fp32" in first[0] and "pi0, pi1, pi2 and 3 more" in first[0]
    assert not any("acme.r00" in line or "acme.r01" in line for line in first), "those that compile here come first"
    every = shown(capsys, "--all")[1:]
    assert len(every) == 18 and not any(" more" in line for line in every)
    assert "pi0, pi1, pi2, pi3, pi4, pi5" in every[0]


def test_a_pipe_gets_all_recipes(many: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys) == shown(capsys, "--all")
    assert len(shown(capsys)) == 1 + 18


def test_a_single_further_recipe_is_shown(
    many: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SHOWN_RECIPES", 17)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert len(shown(capsys)) == 1 + 18
