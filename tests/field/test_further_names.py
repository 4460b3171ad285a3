"""Names of outputs as networks in several languages, pyramids and guided samplers have them: one name everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etfarm.client import Farm
from etfarm.client.export import ModelSource
from etfarm.client.submit import npz
from tests.support.farm import FarmProcess, etfarm
from tests.support.quick_jobs import QUICK

pytestmark = pytest.mark.slow(reason="programs are compiled and run on a farm")

LABELS: Final = [
    "Straßenschild", "l'arrêt d'autobus", "信号機", "50 % off", "encoder/block.0", "e\u0301tat", "tab\there", 'a "quote"',
]  # fmt: skip


class SignHeads(nn.Module):
    """A head for each label, by the label's own text."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in LABELS)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = torch.relu(self.features(x))
        return {label: head(features) for label, head in zip(LABELS, self.heads, strict=True)}


class Pyramid(nn.Module):
    """Levels by number, not in order; anchors by stride and side; and with and without guidance, as samplers return them."""

    def forward(self, x: Tensor) -> dict[Any, Any]:
        levels = {level: x * level for level in (5, 3, 4)}
        anchors = {(stride, side): x.sum(1) * stride for stride in (16, 8) for side in ("w", "h")}
        return {True: x + 1, False: x - 1, "levels": levels, **anchors, (8, True): x.relu()}


class Normalizes(nn.Module):
    """Works in place on its input, and returns what it computes under keys of all kinds."""

    def forward(self, x: Tensor) -> dict[Any, Any]:
        x.sub_(0.5).div_(0.25)
        return {"température": x * 2, "box/score": x + 1, ("a", 1): x.relu(), 7: x - 1, 0: {"plain": x.sum(1)}}


class Clashing(nn.Module):
    """Two outputs whose paths read the same, one that reads like a place, and one that has no text at all."""

    def forward(self, x: Tensor) -> dict[Any, Any]:
        return {"hidden_states_0": x + 1, "hidden_states": [x + 2, x + 3], "1": x + 4, "": x + 5}


CASES: Final[list[tuple[Callable[[], nn.Module], list[str] | None]]] = [
    (SignHeads, LABELS),
    (
        Pyramid,
        [
            "True", "False", "levels_5", "levels_3", "levels_4", "(16, 'w')", "(16, 'h')", "(8, 'w')", "(8, 'h')", "(8, True)",
        ],
    ),
    (Normalizes, ["température", "box/score", "('a', 1)", "7", "0_plain"]),
    (Clashing, None),
]  # fmt: skip


def leaves(value: Any) -> list[np.ndarray]:
    """Return the tensors of a structure in the order in which it was built."""
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each)]
    return [value.numpy()]


@pytest.mark.parametrize(
    ("build", "names"), CASES, ids=["labels", "numbers, bools and tuples", "of written inputs", "names that clash"]
)
def test_each_output_has_its_own_value_under_one_name_everywhere(
    farm: FarmProcess, client: Farm, tmp_path: Path, build: Callable[[], nn.Module], names: list[str] | None
) -> None:
    torch.manual_seed(0)
    model = build().eval()
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = leaves(model(x.clone()))
    job = client.bench(ModelSource.of(model, (x.clone(),)), recipes="portable", **QUICK)
    report = job.result().report
    reported = [row.output for row in report.accuracy or ()]
    assert len(set(reported)) == len(expected) and names in (None, reported)
    assert all(row.sqnr_db is not None and row.sqnr_db > 120 for row in report.accuracy or ())
    assert list(job.output_names["forward"]) == [value.name for value in job.outputs()] == reported

    def must_be_right(actual_names: Any, values: Any) -> None:
        assert list(actual_names) == reported
        for name, actual, value in zip(reported, values, expected, strict=True):
            assert np.allclose(actual, value, atol=1e-5), name

    if names != LABELS:
        return  # the ways of sessions, data sets and files are the same for all names
    (pte, *_) = job.save_program(tmp_path / "x.pte")
    with client.session(program=pte) as session:
        answer = session.run(x.numpy())
    must_be_right(answer.names, [answer[name] for name in reported])
    ((_, sample),) = client.run_dataset(pte, [x.numpy()])
    must_be_right(sample.names, list(sample))
    np.savez(tmp_path / "in.npz", x=x.numpy())
    done = etfarm("run", "x.pte", "--inputs", "in.npz", "-o", "out.npz", "--server", farm.address, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as arrays:
        assert not [key for key in arrays.files if "/" in key or "\t" in key]
        values = {npz.name_of(key): arrays[key] for key in arrays.files}
    must_be_right(values, list(values.values()))


class Batch(nn.Module):
    """Takes a batch as a dict, with keys of a data set."""

    def forward(self, batch: dict[Any, Tensor]) -> dict[str, Tensor]:
        return {"résultat": batch["größe/cm"] * 2 - batch[7], "n° 2": batch["masque d'attention"] + batch[(1, "b")]}


def test_inputs_with_such_keys_are_taken_by_the_names_that_a_session_lists(client: Farm) -> None:
    keys: list[Any] = ["größe/cm", 7, "masque d'attention", (1, "b")]
    batch = {key: torch.full((2,), float(place + 1)) for place, key in enumerate(keys)}
    source = ModelSource.of(Batch().eval(), (batch,))
    with client.session(program=source, recipe="portable") as session:
        names = session.input_names("forward")
        assert len(set(names)) == len(keys)  # PyTorch's names of the arguments: batch_7
        values = [value.numpy() for value in batch.values()]
        by_place = session.run(*values)
        by_name = session.run(**dict(zip(reversed(names), reversed(values), strict=True)))
    for answer in (by_place, by_name):
        assert list(answer.names) == ["résultat", "n° 2"]
        assert answer["résultat"].tolist() == [0, 0] and answer["n° 2"].tolist() == [7, 7]
