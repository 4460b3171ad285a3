"""The samples that accuracy is over, as a submission has them: of a folder of inputs, and of a model's calibration inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource
from etfarm.client.submit.input_names import InputMissing, UnknownInput
from etfarm.client.submit.input_types import InputMismatch
from etfarm.client.submit.inputs import Inputs
from etfarm.client.submit.recipes import read_recipe
from etfarm.client.submit.submission import Submission, SubmissionRequest
from etfarm.v1 import common_pb2, job_pb2
from etfarm.wire import samples, tensors
from etfarm.wire.samples import MAX_SAMPLES, AccuracySamples, round_down
from tests.support.programs import program
from tests.support.refusals import refuses

INT8 = "xnnpack_pt2e_int8_static_per_channel"


class Add(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


ADD = ModelSource.of(Add().eval(), (torch.zeros(2), torch.zeros(2)))


def gathered(
    folder: Path, model: Any = ADD, inputs: Inputs | None = None, recipes: tuple[str, ...] = ("portable",)
) -> Submission:
    """Return the submission of a measured job."""
    parsed = [read_recipe(recipe) for recipe in recipes]
    spec = job_pb2.JobSpec(measurement=job_pb2.Measurement())
    return SubmissionRequest(model, parsed, inputs=inputs).gather(spec, parsed, folder)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def write(folder: Path, name: str, **values: float) -> None:
    np.savez(folder / name, **{key: np.full(2, value, np.float32) for key, value in values.items()})  # type: ignore[arg-type]


def values_of(created: Submission, artifact: common_pb2.Artifact) -> list[tuple[str, float]]:
    source = created.blobs[artifact.digest][1]
    decoded = tensors.decode(source.read_bytes() if isinstance(source, Path) else source)
    return [(each.name, float(tensors.to_array(each)[0])) for each in decoded if isinstance(each, tensors.Tensor)]


def test_a_folder_has_a_sample_in_each_npz_in_the_order_of_names(files: Path, tmp_path: Path) -> None:
    write(files, "b.npz", y=2, x=1)
    write(files, "a.npz", x=3, y=4)
    write(files, "c.npz", **{"arr_0": 5, "1": 6})
    (files / "notes.txt").write_text("no sample")
    created = gathered(tmp_path, inputs=files)
    assert values_of(created, created.spec.inputs["forward"]) == [("x", 3), ("y", 4)]
    further = created.spec.further_inputs["forward"].samples
    assert [values_of(created, each) for each in further] == [[("x", 1), ("y", 2)], [("x", 5), ("y", 6)]]


@pytest.mark.parametrize(("kind", "expected"), [("model", "Using 64 of the 66 files"), ("program", "Using 1 of the 66 files")])
def test_files_that_are_left_out_are_said(files: Path, tmp_path: Path, kind: str, expected: str) -> None:
    for index in range(66):
        arrays = {str(place): np.full((2, 3), index, np.float32) for place in range(2)}
        np.savez(files / f"{index:02}.npz", **arrays)  # type: ignore[arg-type]
    zeros = torch.zeros(2, 3)
    model = ModelSource.of(Add().eval(), (zeros, zeros)) if kind == "model" else str(program("add").path)
    sentences: list[str] = []
    recipe = read_recipe("portable")
    spec = job_pb2.JobSpec(measurement=job_pb2.Measurement())
    SubmissionRequest(model, [recipe], inputs=files).gather(spec, [recipe], tmp_path, sentences.append)
    assert [sentence for sentence in sentences if sentence.startswith(expected)]


def test_a_folder_that_is_used_as_a_whole_is_not_said(files: Path, tmp_path: Path) -> None:
    for index in range(2):
        write(files, f"{index}.npz", x=index, y=index)
    sentences: list[str] = []
    recipe = read_recipe("portable")
    spec = job_pb2.JobSpec(measurement=job_pb2.Measurement())
    SubmissionRequest(ADD, [recipe], inputs=files).gather(spec, [recipe], tmp_path, sentences.append)
    assert not [sentence for sentence in sentences if sentence.startswith("Using")]


def test_an_empty_folder_is_refused_before_the_export(files: Path, tmp_path: Path) -> None:
    trained = ModelSource.of(nn.ReLU(), (torch.zeros(2),))  # whose export is refused
    with refuses("INPUT_FILE_UNREADABLE", match=r"data has no \.npz file"):
        gathered(tmp_path, trained, files)


@pytest.mark.parametrize("name", ["a.npz", "c.npz"])
@pytest.mark.parametrize(
    ("values", "error"),
    [({"x": 1}, InputMissing), ({"x": 1, "y": 2, "z": 3}, UnknownInput), ({"x": 1, "y": np.zeros(3, np.float32)}, InputMismatch)],
)
def test_an_error_names_the_file_of_the_sample(
    files: Path, tmp_path: Path, name: str, values: dict[str, Any], error: type[InputMissing]
) -> None:
    write(files, "b.npz", x=1, y=2)
    np.savez(files / name, **{key: np.broadcast_to(np.float32(value), np.shape(value) or 2) for key, value in values.items()})
    with pytest.raises(error, match=rf"^{name}: ") as refused:
        gathered(tmp_path, inputs=files)
    assert refused.value.metadata["file"] == name


def test_a_method_that_only_a_later_file_has_is_refused(files: Path, tmp_path: Path) -> None:
    methods = {"encode": Scale().eval(), "decode": Scale().eval()}
    model = ModelSource(methods, example_inputs={name: (torch.zeros(2),) for name in methods})
    np.savez(files / "a.npz", **{"encode/x": np.zeros(2, np.float32)})  # type: ignore[arg-type]
    np.savez(files / "b.npz", **{"encode/x": np.ones(2, np.float32), "decode/x": np.ones(2, np.float32)})  # type: ignore[arg-type]
    with pytest.raises(InputMissing, match=r"^b\.npz: it has inputs of decode") as refused:
        gathered(tmp_path, model, files)
    assert refused.value.metadata["method"] == "decode"


def test_files_that_do_not_count_are_not_read(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in range(3):
        write(files, f"{place}.npz", x=place, y=place)
    (files / "3.npz").write_bytes(b"not an npz")
    with refuses("INPUT_FILE_UNREADABLE"):
        gathered(tmp_path, inputs=files)
    size_bytes = gathered(tmp_path, inputs=files / "0.npz").spec.inputs["forward"].size_bytes
    monkeypatch.setattr(samples, "MAX_SAMPLES_BYTES", 2 * size_bytes)
    created = gathered(tmp_path, inputs=files)
    assert len(created.spec.further_inputs["forward"].samples) == 1


def test_only_the_first_files_of_a_large_folder_are_read(files: Path, tmp_path: Path) -> None:
    for place in range(MAX_SAMPLES):
        write(files, f"{place:02}.npz", x=place, y=0)
    (files / "99.npz").write_bytes(b"not an npz")
    assert len(gathered(tmp_path, inputs=files).spec.further_inputs["forward"].samples) == MAX_SAMPLES - 1


def test_a_ready_program_is_sent_the_timed_inputs_alone(files: Path, tmp_path: Path) -> None:
    for place in range(2):
        np.savez(files / f"{place}.npz", **{"0": np.full(2, place, np.float32)})  # type: ignore[arg-type]
    created = gathered(tmp_path, str(program("add").path), files)
    assert list(created.spec.inputs) == ["forward"] and not created.spec.further_inputs


def calibrated(count: int) -> ModelSource:
    """Return a model whose first calibration input is its example input."""
    inputs = [(torch.full((2,), float(place)),) for place in range(count)]
    return ModelSource.of(Scale().eval(), inputs[0], calibration_inputs=inputs)


def sent(created: Submission, place: int = 0) -> job_pb2.MethodSource:
    return created.spec.candidates[place].model.methods["forward"]


def test_programs_with_and_without_calibration_are_of_the_same_samples(tmp_path: Path) -> None:
    together = gathered(tmp_path, calibrated(70), recipes=(INT8, "portable"))
    alone = gathered(tmp_path, calibrated(70))
    of_calibration = [each.digest for each in sent(together, 0).calibration]
    assert len(of_calibration) == 69
    assert [each.digest for each in sent(together, 1).samples] == of_calibration[:MAX_SAMPLES]
    assert [each.digest for each in sent(alone).samples] == of_calibration[: MAX_SAMPLES - 1]  # all that count
    assert set(together.blobs) >= set(of_calibration)


def test_no_more_is_uploaded_for_accuracy_than_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = sent(gathered(tmp_path, calibrated(2))).samples[0].size_bytes
    monkeypatch.setattr(samples, "MAX_SAMPLES_BYTES", 3 * size_bytes)
    folder = tmp_path / "parts"
    folder.mkdir()
    created = gathered(folder, calibrated(9))
    used = {each.digest for each in sent(created).samples}
    assert len(used) == 2 and set(created.blobs) == used | {sent(created).exported_program.digest}
    assert {path.name for path in folder.iterdir()} == set(created.blobs)


def taken(*sizes: int) -> list[bool]:
    chosen = AccuracySamples()
    return [chosen.take(str(place), size_bytes) for place, size_bytes in enumerate(sizes)]


def test_samples_are_distinct_and_bounded() -> None:
    whole = samples.MAX_SAMPLES_BYTES
    assert taken(*[1] * 70) == [True] * MAX_SAMPLES + [False] * 6
    assert taken(whole + 1, 1) == [True, False], "the timed inputs may have any size"
    assert taken(1, whole - 1, 1) == [True, True, False]
    assert taken(1, whole, 1) == [True, False, False]
    chosen = AccuracySamples()
    assert [chosen.take(digest, 1) for digest in "aab"] == [True, False, True]


def test_a_time_limit_leaves_a_power_of_two() -> None:
    assert [round_down(count) for count in (1, 2, 3, 4, 12, 33, 63, 64)] == [1, 2, 2, 4, 8, 32, 32, 64]
