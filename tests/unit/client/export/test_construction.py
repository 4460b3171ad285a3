"""The lines that construct modules: a user's line also for models that are made of torch's modules only."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402 - needs torch

from etfarm.client.export import construction  # noqa: E402
from etfarm.client.export.eager import export_source  # noqa: E402
from etfarm.client.export.factory import load_source  # noqa: E402
from etfarm.client.export.source import ModelSource  # noqa: E402
from etfarm.client.export.spec import FileFactory  # noqa: E402
from etfarm.client.export.traces import is_users  # noqa: E402
from etfarm.server.graphs.sources import Source, source_of  # noqa: E402
from tests.support.exports import read_program  # noqa: E402

FILE = """
import torch
from torch import nn


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x).relu()


def sequential():
    first = nn.Linear(8, 8)
    return nn.Sequential(
        first,
        nn.GELU(),
        Head(),
    ).eval(), (torch.randn(2, 8),)


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), (torch.randn(1, 4, 8),)


def recurrent():
    return nn.LSTM(8, 8).eval(), (torch.randn(2, 1, 8),)
"""


def lines(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Source | None]]:
    """Return the lines of each operator of a factory's model, as its archive has them."""
    monkeypatch.chdir(folder)
    path = folder / "net.py"
    path.write_text(FILE)
    archive = export_source(load_source(FileFactory(path, name)), name=name).methods["forward"].pt2
    assert isinstance(archive, bytes) and str(folder).encode() not in archive
    result: dict[str, set[Source | None]] = {}
    for node in read_program(archive).graph.nodes:
        if node.op == "call_function":
            result.setdefault(node.name, set()).add(source_of(node.meta.get("stack_trace")))
    return result


def line_of(code: str) -> Source:
    (number,) = [at for at, line in enumerate(FILE.splitlines(), 1) if line.strip() == code]
    return Source("net.py", number, code)


def test_a_container_of_torchs_has_the_lines_that_construct_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(tmp_path, "sequential", monkeypatch) == {
        "linear": {line_of("first = nn.Linear(8, 8)")},
        "gelu": {line_of("nn.GELU(),")},
        "layer_norm": {line_of("return self.norm(x).relu()")},
        "relu": {line_of("return self.norm(x).relu()")},
    }


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("encoder", "layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)"),
        ("recurrent", "return nn.LSTM(8, 8).eval(), (torch.randn(2, 1, 8),)"),
    ],
)
def test_copies_and_parts_have_the_line_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str
) -> None:
    """torch itself constructs what is in a layer, and copies the layer for each position."""
    result = lines(tmp_path, name, monkeypatch)
    assert result
    assert set().union(*result.values()) == {line_of(code)}


def test_only_a_factory_is_recorded_and_torch_stays_as_it_was() -> None:
    before = nn.Module.__init__
    with construction.recorded(Path.cwd()):
        inside = nn.Linear(2, 2)
    assert nn.Module.__init__ is before
    outside = nn.Linear(2, 2)
    assert inside.state_dict().keys() == outside.state_dict().keys()
    with pytest.raises(RuntimeError), construction.recorded(Path.cwd()):
        raise RuntimeError
    assert nn.Module.__init__ is before
    archive = export_source(ModelSource.of(nn.Sequential(outside).eval(), (torch.ones(1, 2),)), name="m").methods["forward"].pt2
    assert isinstance(archive, bytes)
    (linear,) = [node for node in read_program(archive).graph.nodes if node.op == "call_function"]
    assert source_of(linear.meta["stack_trace"]) is None


def test_what_replaces_the_constructor_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    constructed: list[str] = []
    monkeypatch.setattr(nn.Module, "__init__", nn.Module.__init__)  # restored after the test
    with construction.recorded(Path.cwd()):
        inner = nn.Module.__init__

        def count(self: nn.Module, *args: object, **kwargs: object) -> None:
            constructed.append(type(self).__name__)
            inner(self, *args, **kwargs)

        nn.Module.__init__ = count  # type: ignore[method-assign]
        recorded = nn.ReLU()
    unrecorded = nn.GELU()
    assert constructed == ["ReLU", "GELU"]
    assert construction._ATTRIBUTE in vars(recorded) and construction._ATTRIBUTE not in vars(unrecorded)


def test_models_that_executorch_brings_along_are_the_users() -> None:
    folder = "/venv/lib/python3.11/site-packages/executorch"
    assert is_users(f"{folder}/examples/models/llama/norm.py", Path("/work"))
    assert not is_users(f"{folder}/exir/capture.py", Path("/work"))
