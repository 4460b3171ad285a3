"""Small cases of errors, and what their remedies say to do instead."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from etfarm.client.datasets import metrics, samples
from etfarm.client.export import ModelSource, export_source, load_source
from etfarm.client.export.spec import check_pt2, resolve
from etfarm.client.sessions.calls import Outputs
from etfarm.client.submit.early_checks import check_source
from etfarm.client.submit.token_files import read_tokens
from etfarm.client.transport.server_wait import read_server_wait_s
from etfarm.client.web.job_filters import JobFilters
from etfarm.device_agents.adb import address as adb_address
from etfarm.server.arguments import parser
from etfarm.server.artifacts.digests import require_digest
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.devices.health.file import read_settings
from etfarm.server.operation import settings
from etfarm.server.reports.latency import thresholds
from etfarm.wire import recipes, selectors
from etfarm.wire.channel import parse_address
from etfarm.wire.comparison.gate import Limit
from etfarm.wire.tensors import from_array
from tests.support.refusals import refuses

X = torch.ones(4, 2)

MODEL = """
import torch
def net(): return torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),)
def bare(): return torch.nn.Linear(2, 2).eval()
def broken(): return 1 / 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a file of factories."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def load(text: str) -> ModelSource:
    """Return the source that the MODEL argument names."""
    return load_source(resolve(text))  # type: ignore[arg-type]


def export(module: nn.Module, *, shapes: Any = None) -> object:
    """Export a module with X as its input."""
    return export_source(ModelSource.of(module, (X,), dynamic_shapes=shapes), name="m")


def must_succeed(reason: str, refused: Callable[[Any], object], wrong: object, right: object) -> None:
    """Check that a function refuses one value, and takes another one that follows the remedy."""
    with refuses(reason):
        refused(wrong)
    refused(right)


@pytest.mark.remedy("UNKNOWN_DEMO", "MODEL_NOT_FOUND", "FACTORY_NOT_FOUND", "FACTORY_RETURNED_SOMETHING_ELSE")
@pytest.mark.remedy("FACTORY_FAILED", "BAD_MODEL_ARGUMENT")
@pytest.mark.parametrize(
    ("reason", "wrong", "right"),
    [
        ("UNKNOWN_DEMO", "demo:resnet9", "demo:resnet8"),
        ("MODEL_NOT_FOUND", "models.py:net", "model.py:net"),
        ("FACTORY_NOT_FOUND", "model.py:nets", "model.py:net"),
        ("FACTORY_RETURNED_SOMETHING_ELSE", "model.py:bare", "model.py:net"),
        ("FACTORY_FAILED", "model.py:broken", "model.py:net"),
        ("BAD_MODEL_ARGUMENT", "model.py", "model.py:net"),
    ],
)
def test_a_model_that_is_named_as_the_remedy_says_is_loaded(folder: Path, reason: str, wrong: str, right: str) -> None:
    must_succeed(reason, load, wrong, right)


@pytest.mark.remedy("EXAMPLE_INPUTS_NOT_A_TUPLE", "BAD_MODEL_SOURCE")
def test_a_source_whose_parts_fit_each_other_is_one() -> None:
    net = nn.ReLU().eval()
    must_succeed("EXAMPLE_INPUTS_NOT_A_TUPLE", lambda inputs: ModelSource.of(net, inputs), X, (X,))
    must_succeed("BAD_MODEL_SOURCE", lambda method: ModelSource(methods={"a": net}, example_inputs={method: (X,)}), "b", "a")


@pytest.mark.remedy("DIM_WITHOUT_MAXIMUM", "DYNAMIC_SHAPES_FORM", "TRAINING_MODE", "MODEL_NOT_ON_CPU")
def test_a_model_that_was_changed_as_the_remedy_says_is_exported() -> None:
    def with_dim(shapes: Any) -> object:
        return export(nn.ReLU().eval(), shapes=shapes)

    right = {"input": {0: Dim("n", max=64)}}
    must_succeed("DIM_WITHOUT_MAXIMUM", with_dim, {"input": {0: Dim("n")}}, right)
    must_succeed("DYNAMIC_SHAPES_FORM", with_dim, {"x": {0: Dim("n", max=64)}}, right)
    must_succeed("TRAINING_MODE", export, nn.Dropout(), nn.Dropout().eval())
    must_succeed("MODEL_NOT_ON_CPU", export, nn.Linear(2, 2, device="meta").eval(), nn.Linear(2, 2, device="cpu").eval())


@pytest.mark.remedy("NOT_A_PT2", "METHOD_MISSING")
def test_a_file_that_torch_saves_and_a_method_that_is_listed_are_taken(folder: Path) -> None:
    module = nn.ReLU().eval()
    (folder / "wrong.pt2").write_bytes(b"pickle")
    torch.export.save(torch.export.export(module, (X,)), folder / "right.pt2")
    must_succeed("NOT_A_PT2", check_pt2, folder / "wrong.pt2", folder / "right.pt2")
    source = ModelSource.of(module, (X,))
    must_succeed("METHOD_MISSING", lambda name: check_source("net", source, [name], None), "decode", "forward")


@pytest.mark.remedy("OUTPUT_UNKNOWN", "SEVERAL_OUTPUTS")
def test_an_output_that_the_remedy_names_is_there() -> None:
    two = np.ones(2, dtype=np.float32)
    outputs = Outputs([from_array("a", two), from_array("b", two)])
    must_succeed("OUTPUT_UNKNOWN", outputs.array, "c", "b")
    must_succeed("SEVERAL_OUTPUTS", outputs.array, None, 0)


@pytest.mark.remedy("METRIC_NOT_FOUND", "BAD_TEXT_FILE", "NO_SAMPLES", "INPUT_FILE_UNREADABLE", "BAD_OPTION")
def test_what_a_command_is_given_as_the_remedy_says_is_taken(folder: Path) -> None:
    must_succeed("METRIC_NOT_FOUND", metrics.find, "top2", "top1")
    (folder / "words.txt").write_text("the quick brown fox\n")
    (folder / "tokens.txt").write_text("5 12 7\n")
    must_succeed("BAD_TEXT_FILE", read_tokens, folder / "words.txt", folder / "tokens.txt")
    np.savez(folder / "none.npz", x=np.ones((0, 2), dtype=np.float32))
    np.savez(folder / "one.npz", x=np.ones((1, 2), dtype=np.float32))
    must_succeed("NO_SAMPLES", samples.of_batch, folder / "none.npz", folder / "one.npz")
    (folder / "cut.npz").write_bytes((folder / "one.npz").read_bytes()[:-30])
    must_succeed("INPUT_FILE_UNREADABLE", samples.of_batch, folder / "cut.npz", folder / "one.npz")
    now = datetime.now(UTC)
    must_succeed("BAD_OPTION", lambda since: JobFilters(since=since).conditions(now), "yesterday", "2d")


@pytest.mark.remedy("BAD_SERVER_WAIT", "BAD_GATE", "BAD_ADDRESS")
def test_what_an_option_is_given_as_the_remedy_says_is_taken() -> None:
    must_succeed("BAD_SERVER_WAIT", lambda text: read_server_wait_s("--server-wait", text), "long", "10m")
    must_succeed("BAD_GATE", Limit.parse, "accuracy=1%", "accuracy=1dB")
    must_succeed("BAD_ADDRESS", parse_address, "::1:80", "[::1]:80")


@pytest.mark.remedy("BAD_SELECTOR", "UNKNOWN_SELECTOR_KEY", "ADB_ADDRESS_MALFORMED")
def test_a_device_that_is_named_as_the_remedy_says_is_one() -> None:
    must_succeed("BAD_SELECTOR", selectors.parse, "arch", "arch=aarch64,memory>=2GiB")
    must_succeed("UNKNOWN_SELECTOR_KEY", selectors.parse, "core>=4", "cores>=4")
    must_succeed("ADB_ADDRESS_MALFORMED", adb_address.parse, "localhost:5037", "tcp:localhost:5037")


@pytest.mark.remedy("UNKNOWN_RECIPE", "UNKNOWN_RECIPE_ARGUMENT", "BAD_RECIPE_ARGUMENT", "BAD_RECIPE_FIELD", "BAD_RECIPE_TEXT")
def test_a_recipe_that_is_written_as_the_remedy_says_is_one() -> None:
    int4 = "xnnpack_torchao_int8da_int4w_per_tensor"
    must_succeed("UNKNOWN_RECIPE", recipes.parse, "xnnpack_fp23", "xnnpack_fp32")
    must_succeed("UNKNOWN_RECIPE_ARGUMENT", recipes.parse, f"{int4}:gs=32", f"{int4}:group_size=32")
    must_succeed("BAD_RECIPE_ARGUMENT", recipes.parse, f"{int4}:group_size=many", f"{int4}:group_size=32")
    must_succeed("BAD_RECIPE_TEXT", recipes.parse, "xnnpack_fp32+", "xnnpack_fp32")
    must_succeed("BAD_RECIPE_FIELD", recipes.from_toml, 'recipe = "xnnpack_fp32"\nstrikt = true', 'recipe = "xnnpack_fp32"')


@pytest.mark.remedy("BAD_THRESHOLDS", "BAD_HEALTH_POLICY", "BAD_BLOBS", "DIGEST_MALFORMED", "BAD_SETTING")
def test_what_a_server_is_given_as_the_remedy_says_is_taken(folder: Path) -> None:
    for name, text in (
        ("wrong", "max_drifts = 0.2\ninterval = 60\n"),
        ("drift", "max_drift = 0.2\n"),
        ("health", "interval_s = 60\n"),
    ):
        (folder / f"{name}.toml").write_text(text)
    must_succeed("BAD_THRESHOLDS", thresholds.read, folder / "wrong.toml", folder / "drift.toml")
    must_succeed("BAD_HEALTH_POLICY", read_settings, folder / "wrong.toml", folder / "health.toml")
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    must_succeed("BAD_BLOBS", lambda environment: BucketLocation.of("s3://bucket/farm", environment), {}, keys)
    must_succeed(
        "BAD_SETTING",
        lambda words: settings.parse(parser(), [], words),
        {"ETFARM_SERVE_WORKER": "2"},
        {"ETFARM_SERVE_WORKERS": "2"},
    )
    must_succeed("DIGEST_MALFORMED", require_digest, "A" * 64, "a" * 64)
