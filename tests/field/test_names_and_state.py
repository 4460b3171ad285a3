"""Structures, written inputs and shared state on the whole way: what a device gives is what eager PyTorch gives, by one name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etfarm.client import Farm
from etfarm.client.export import ModelSource
from etfarm.client.submit import npz
from tests.support.farm import FarmProcess
from tests.support.shared_state import counter

pytestmark = pytest.mark.slow(reason="programs are compiled and run on a farm")

NAMES = ["température", "box/score", "('a', 1)", "7", "0_plain"]


class Normalizes(nn.Module):
    """Works in place on its input, and returns what it computes under keys of all kinds."""

    def forward(self, x: Tensor) -> dict[Any, Any]:
        x.sub_(0.5).div_(0.25)
        return {"température": x * 2, "box/score": x + 1, ("a", 1): x.relu(), 7: x - 1, 0: {"plain": x.sum(1)}}


@pytest.fixture(scope="module")
def client(farm: FarmProcess) -> Iterator[Farm]:
    with farm.client() as client:
        yield client


def test_an_output_has_one_name_everywhere(client: Farm, tmp_path: Path) -> None:
    x = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    source = ModelSource.of(Normalizes().eval(), (x.clone(),))
    job = client.bench(source, recipes="portable", min_time_s=0.0, iterations=3)
    report = job.result().report
    assert report.compile is not None
    assert [warning.code for warning in report.compile.warnings] == ["INPUT_COPIED"]
    assert "'x' (24 bytes)" in report.compile.warnings[0].message
    names = NAMES
    assert [row.output for row in report.accuracy] == names
    assert all(row.sqnr_db is not None and row.sqnr_db > 120 for row in report.accuracy)
    outputs = job.outputs()
    assert [value.name for value in outputs] == list(job.output_names["forward"]) == names
    npz.write_outputs(tmp_path / "o.npz", {"forward": outputs}, {"forward": names})
    assert list(npz.read_named(tmp_path / "o.npz")[""]) == names

    (pte, *_) = job.save_program(tmp_path / "x.pte")
    inputs = x.numpy().copy()
    with client.session(program=pte) as session:
        answer = session.run(inputs)
    assert list(answer.names) == names and np.array_equal(inputs, x.numpy())
    assert np.allclose(answer["température"], Normalizes()(x.clone())["température"])


def test_what_a_model_writes_is_returned_on_request(client: Farm) -> None:
    x = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    source = ModelSource.of(Normalizes().eval(), (x.clone(),), keep_mutations=True)
    with client.session(program=source, recipe="portable") as session:
        answer = session.run(x.numpy())
    assert list(answer.names) == [*NAMES, "x"]
    assert np.allclose(answer["x"], (x.numpy() - 0.5) / 0.25)


def test_exported_programs_share_a_buffer_on_a_device(client: Farm) -> None:
    calls = [("set", 5.0), ("add", 1.0), ("add", 1.0), ("get", 10.0), ("set", 1.0), ("get", 1.0)]
    eager = counter()
    programs = {name: torch.export.export(module, (torch.ones(2),)) for name, module in counter().methods.items()}
    with client.session(program=programs, recipe="portable") as session, torch.no_grad():
        for method, value in calls:
            inputs = torch.full((2,), value)
            expected = eager.methods[method](inputs)
            assert session.run(method, inputs.numpy()).array().tolist() == expected.tolist(), method
