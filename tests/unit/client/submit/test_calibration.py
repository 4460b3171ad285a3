"""Calibration sets: streamed, checked sample by sample, in every form that is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from etfarm.client.errors import FAILED, USAGE, exit_code
from etfarm.client.export import ModelSource
from etfarm.client.submit.preparation import prepare
from etfarm.client.submit.prepared import PreparedModel
from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError

INT8 = "xnnpack_pt2e_int8_static_per_channel"


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def source(**more: Any) -> ModelSource:
    return ModelSource.of(Scale().eval(), (torch.zeros(1, 2),), **more)


def first_numbers(model: PreparedModel, method: str = "forward") -> list[float]:
    """Return the first element of each sample."""
    numbers = []
    for sample in model.methods[method].calibration:
        (value,) = tensors.decode(sample.read_bytes() if isinstance(sample, Path) else sample)
        assert isinstance(value, tensors.Tensor)
        numbers.append(float(tensors.to_array(value).reshape(-1)[0]))
    return numbers


def arrays(count: int) -> list[np.ndarray[Any, Any]]:
    return [np.full((1, 2), index, np.float32) for index in range(1, count + 1)]


def test_a_generator_is_drawn_one_sample_at_a_time_and_kept_in_files(tmp_path: Path) -> None:
    on_disk: list[int] = []

    def samples() -> Iterator[tuple[Tensor]]:
        for array in arrays(5):
            on_disk.append(len(list(tmp_path.iterdir())))
            yield (torch.from_numpy(array),)

    created = prepare(source(calibration_inputs=samples), recipes=[INT8], folder=tmp_path)
    assert first_numbers(created) == [1, 2, 3, 4, 5]
    assert on_disk == [1, 2, 3, 4, 5]  # the archive, and every sample before
    assert all(isinstance(sample, Path) for sample in created.methods["forward"].calibration)


def test_samples_that_nothing_reads_are_not_drawn() -> None:
    def samples() -> Iterator[tuple[Tensor]]:
        raise AssertionError("drawn")

    assert first_numbers(prepare(source(calibration_inputs=samples), recipes=["xnnpack_fp32"])) == []


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ((torch.zeros(1, 2, dtype=torch.float64),), "calibration sample 0 differs from the example inputs"),
        (torch.zeros(1, 2), "the example inputs are a Tensor, not a tuple"),
    ],
)
def test_a_wrong_sample_of_a_generator_is_refused(sample: Any, says: str) -> None:
    with pytest.raises(EtfarmError, match=says) as caught:
        prepare(source(calibration_inputs=lambda: iter([sample])), recipes=[INT8])
    assert exit_code(caught.value) == FAILED, "these are the model's"


def test_a_generator_that_fails_is_reported_with_its_line() -> None:
    def samples() -> Iterator[tuple[Tensor]]:
        yield (torch.zeros(1, 2),)
        raise OSError("the disk is gone")

    with pytest.raises(EtfarmError, match=r"raised OSError: the disk is gone, at .*test_calibration\.py:\d+"):
        prepare(source(calibration_inputs=samples), recipes=[INT8])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "set").mkdir()
    for index, array in enumerate(arrays(3)):
        np.savez(tmp_path / "set" / f"{index}.npz", x=array)
    return tmp_path / "set"


def test_a_folder_is_a_set_of_its_files(folder: Path) -> None:
    assert first_numbers(prepare(source(), recipes=[INT8], calibration=folder)) == [1, 2, 3]


def test_axis_0_is_the_samples_where_it_is_said(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", x=np.stack(arrays(4)))
    assert first_numbers(prepare(source(), calibration=tmp_path / "set.npz", batched=True)) == [1, 2, 3, 4]


def test_arrays_of_this_process_are_a_set() -> None:
    assert first_numbers(prepare(source(), calibration=[{"x": array} for array in arrays(2)])) == [1, 2]
    assert first_numbers(prepare(source(), calibration=lambda: ([array] for array in arrays(3)))) == [1, 2, 3]
    assert first_numbers(prepare(source(), calibration=[(torch.ones(1, 2),)])) == [1]  # type: ignore[list-item]


def test_a_set_stands_in_place_of_the_models_own(folder: Path) -> None:
    own = source(calibration_inputs=[(torch.full((1, 2), 9.0),)])
    assert first_numbers(prepare(own, recipes=[INT8])) == [9]
    assert first_numbers(prepare(own, recipes=[INT8], calibration=folder)) == [1, 2, 3]


@pytest.mark.remedy("NO_CALIBRATION_SAMPLES")
def test_a_set_without_samples_is_no_set(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz", x=np.zeros((0, 1, 2), np.float32))
    for calibration in (tmp_path / "none.npz", []):
        with pytest.raises(EtfarmError, match="has no sample") as caught:
            prepare(source(), recipes=[INT8], calibration=calibration, batched=True)
        assert (caught.value.reason, exit_code(caught.value)) == ("NO_CALIBRATION_SAMPLES", USAGE)
    np.savez(tmp_path / "one.npz", x=np.zeros((1, 1, 2), np.float32))
    assert prepare(source(), recipes=[INT8], calibration=tmp_path / "one.npz", batched=True)


def test_keys_name_methods(tmp_path: Path) -> None:
    two = ModelSource(
        methods={"a": Scale().eval(), "b": Scale().eval()},
        example_inputs={"a": (torch.zeros(1, 2),), "b": (torch.zeros(3),)},
    )
    np.savez(tmp_path / "set.npz", **{"a/x": np.stack(arrays(3)), "b/x": np.ones((2, 3), np.float32)})
    created = prepare(two, calibration=tmp_path / "set.npz", batched=True)
    assert first_numbers(created, "a") == [1, 2, 3] and first_numbers(created, "b") == [1, 1]


def test_an_archive_is_checked_against_without_loading_it(tmp_path: Path, folder: Path) -> None:
    program = torch.export.export(Scale().eval(), (torch.zeros(2, 2),), dynamic_shapes={"x": {0: Dim("n", max=8)}})
    torch.export.save(program, tmp_path / "x.pt2")
    created = prepare(tmp_path / "x.pt2", recipes=[INT8], calibration=folder)  # of one row, where the example has two
    assert first_numbers(created) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arrays_", "says"),
    [
        ({"x": np.zeros((1, 2))}, r"sample bad.npz differs .*: 'x' is float64 \[1, 2\], not float32 \[1, 2\]"),
        ({"x": np.zeros((1, 3), np.float32)}, r"'x' is float32 \[1, 3\], not float32 \[1, 2\]"),
        ({"x": np.zeros(2, np.float32)}, r"'x' is float32 \[2\], not"),
        ({"x": np.asarray(1.0), "x.dtype": np.asarray("scalar")}, "'x' is 1.0, not float32"),
        ({"y": np.zeros((1, 2), np.float32)}, "sample bad.npz: forward: there is no input 'y'. The inputs are x."),
        ({}, "sample bad.npz: forward: the input 'x' is missing. The inputs are x."),
        (
            {"decode/x": np.zeros((1, 2), np.float32)},
            "bad.npz: .*'decode/x' does not belong to a method. The methods are forward.",
        ),
    ],
)
def test_a_sample_that_does_not_fit_is_named(tmp_path: Path, arrays_: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "bad.npz", **arrays_)
    with pytest.raises(EtfarmError, match=says) as caught:
        prepare(source(), recipes=[INT8], calibration=tmp_path / "bad.npz")
    assert caught.value.metadata["sample"] == "bad.npz"
    assert exit_code(caught.value) == USAGE, "the command is at fault, and not the model's own samples"
