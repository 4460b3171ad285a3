"""A data set's files: read sample by sample whatever their size, written in order, each mistake in a sentence."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from etfarm.client.datasets.outputs import INDEX, Folder, Stack, open_sink
from etfarm.client.datasets.samples import Sample, number_samples, of_batch, of_folder
from etfarm.client.errors import EtfarmError
from etfarm.client.sessions.calls import Outputs
from etfarm.client.submit.inputs import value_of
from etfarm.wire.tensors import Scalar, Tensor, to_array
from tests.support.golden import Golden


def outputs(*values: Any, names: tuple[str, ...] = ("y", "n")) -> Outputs:
    """As a session gives them."""
    return Outputs([value_of(name, value) for name, value in zip(names, values, strict=False)])


def arrays(sample: Sample) -> dict[str, Any]:
    assert isinstance(sample.values, dict)
    return {key: to_array(value) if isinstance(value, Tensor) else value for key, value in sample.values.items()}


def test_a_batch_is_given_row_by_row_with_what_all_samples_share(tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    half = np.arange(4, dtype=np.float32).astype(ml_dtypes.bfloat16)
    text = np.array(["cat", "dog", "cat", "ox"])
    np.savez_compressed(
        tmp_path / "many.npz", x=x, half=half.view(np.uint16), k=np.asarray(7), text=text,
        **{"half.dtype": "bfloat16", "k.dtype": "scalar"},  # type: ignore[arg-type]
    )  # fmt: skip
    source = of_batch(tmp_path / "many.npz")
    samples = list(source.samples)
    assert (source.count, [sample.name for sample in samples]) == (4, [f"many.npz[{i}]" for i in range(4)])
    for index, sample in enumerate(samples):
        assert sample.index == index
        result = arrays(sample)
        np.testing.assert_array_equal(result["x"], x[index])
        assert (result["half"].dtype, result["half"].item()) == (half.dtype, half[index])
        assert result["k"] == Scalar("k", 7)
        assert result["text"] == text[index]
        assert result.keys() == {"x", "half", "k", "text"}


def test_a_batch_larger_than_what_is_read_at_once_holds_one_row(golden: Golden, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "many.npz", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array_header_2_0(member, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 1000)})
        member.write(np.ones(2000, np.float32).tobytes())
    source = of_batch(tmp_path / "many.npz")
    assert source.count == 1 << 40
    rows = iter(source.samples)
    assert [arrays(next(rows))["x"].sum() for _ in range(2)] == [1000, 1000]
    with golden.refuses("INPUT_FILE_UNREADABLE"):
        next(rows)


@pytest.mark.parametrize(
    "content",
    [
        {"x": np.zeros((3, 2)), "y": np.zeros((2, 2))},
        {"x": np.zeros((3, 2)), "y": np.float32(1)},
        {"x": np.zeros((0, 2))},
        {},
        {"x": np.zeros((3, 2)).T},
        {"x": np.array([None, {}])},
    ],
    ids=range(6),
)
def test_an_invalid_batch_is_refused_before_anything_starts(golden: Golden, tmp_path: Path, content: dict[str, Any]) -> None:
    np.savez(tmp_path / "many.npz", **content)
    with pytest.raises(EtfarmError) as refused:
        of_batch(tmp_path / "many.npz")
    golden.check(refused.value)


@pytest.mark.parametrize("content", [b"", b"PK\3\4nothing", b"\x93NUMPY"], ids=range(3))
def test_a_batch_that_cannot_be_read_is_refused(golden: Golden, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "many.npz").write_bytes(content)
    with pytest.raises(EtfarmError) as refused:
        of_batch(tmp_path / "many.npz")
    assert refused.value.reason == "INPUT_FILE_UNREADABLE"
    with golden.refuses("INPUT_FILE_UNREADABLE"):
        of_batch(tmp_path / "none.npz")


def test_a_folder_s_files_are_samples_by_name_and_a_bad_one_is_a_failed_sample(golden: Golden, tmp_path: Path) -> None:
    for name in ("b", "a"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros(2, np.float32))
    (tmp_path / "c.npz").write_bytes(b"PK")
    (tmp_path / "notes.txt").write_text("none")
    source = of_folder(tmp_path)
    samples = list(source.samples)
    assert (source.count, [sample.name for sample in samples]) == (3, ["a.npz", "b.npz", "c.npz"])
    assert [sample.error is None for sample in samples] == [True, True, False]
    with golden.refuses("INPUT_FILE_UNREADABLE"):
        of_folder(tmp_path / "..")


def test_a_program_s_inputs_are_mappings_sequences_or_one_array() -> None:
    x = np.zeros(2)
    assert [type(sample.values) for sample in number_samples([{"x": x}, [x, x], (x,), x])] == [dict, list, tuple, tuple]


def test_outputs_are_stacked_as_numpy_would(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((5, 2, 3)).astype(np.float32)
    sink = open_sink(tmp_path / "out.npz")
    for index, row in enumerate(rows):
        sink.add(index, f"many.npz[{index}]", outputs(row, index * 2))
    assert list(tmp_path.iterdir()) == [], "nothing is there before all of it is"
    assert sink.close() == 5
    with np.load(tmp_path / "out.npz") as stacked:
        assert set(stacked.files) == {"y", "n"}
        np.testing.assert_array_equal(stacked["y"], rows)
        assert stacked["n"].tolist() == [0, 2, 4, 6, 8]
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz"]


def test_a_stack_says_which_samples_it_has_where_some_failed(tmp_path: Path) -> None:
    sink = Stack(tmp_path / "out.npz")
    for index in (0, 3):
        sink.add(index, str(index), outputs(np.full(2, index, np.float32).astype(ml_dtypes.bfloat16)))
    sink.close()
    with np.load(tmp_path / "out.npz") as stacked:
        assert stacked[INDEX].tolist() == [0, 3]
        assert (str(stacked["y.dtype"]), stacked["y"].dtype, stacked["y"].shape) == ("bfloat16", np.uint16, (2, 2))


@pytest.mark.remedy("OUTPUTS_DIFFER")
def test_outputs_that_do_not_stack_are_refused_and_those_before_are_kept(golden: Golden, tmp_path: Path) -> None:
    sink = Stack(tmp_path / "out.npz")
    sink.add(0, "a", outputs(np.zeros((4, 2), np.float32)))
    with golden.refuses("OUTPUTS_DIFFER"):
        sink.add(1, "b", outputs(np.zeros((3, 2), np.float32)))
    assert sink.close() == 1
    with np.load(tmp_path / "out.npz") as stacked:
        assert stacked["y"].shape == (1, 4, 2)
    one_by_one = open_sink(tmp_path / "out")
    for index, rows in enumerate((4, 3)):
        one_by_one.add(index, f"{index}.npz", outputs(np.zeros((rows, 2), np.float32)))
    assert one_by_one.close() == 2


def test_a_stack_of_nothing_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out.npz").write_text("before")
    assert Stack(tmp_path / "out.npz").close() == 0
    assert (tmp_path / "out.npz").read_text() == "before"


def test_a_folder_has_a_file_a_sample_called_as_the_sample_s(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "out")
    assert isinstance(sink, Folder)
    sink.add(0, "img.npz", outputs(np.zeros((4, 2), np.float32)))
    sink.add(7, "many.npz[7]", outputs(np.zeros((3, 2), np.float32)))
    assert sink.close() == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000007.npz", "img.npz"]
