"""`--inputs` and `-o`: what an .npz may hold, and the sentence for an invalid one."""

from __future__ import annotations

import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from etfarm.client.errors import OutputUnwritable
from etfarm.client.submit import input_names, npz
from etfarm.wire.tensors import Scalar, Tensor, from_array, to_array
from tests.support.golden import Golden
from tests.support.refusals import refuses


def saved(folder: Path, **arrays: object) -> Path:
    path = folder / "in.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def test_keys_may_be_names_places_and_numpys_own(tmp_path: Path) -> None:
    a, b, c = (np.full((2, 3), value, np.float32) for value in (1, 2, 3))
    path = saved(tmp_path, **{"mask": c, "0": a, "arr_1": b})
    values = npz.read_inputs(path, {"forward": ["x", "y", "mask"]})["forward"]
    assert [value.name for value in values] == ["x", "y", "mask"]
    assert [to_array(tensor(value))[0, 0] for value in values] == [1, 2, 3]


def test_a_leading_method_selects_it(tmp_path: Path) -> None:
    path = saved(tmp_path, **{"encode/image": np.zeros(2, np.float32), "decode/0": np.ones(3, np.int64)})
    values = npz.read_inputs(path, {"encode": ["image"], "decode": ["tokens"], "unused": ["x"]})
    assert {method: [value.name for value in arguments] for method, arguments in values.items()} == {
        "encode": ["image"],
        "decode": ["tokens"],
    }


def test_a_file_without_keys_gives_a_method_none(golden: Golden, tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert npz.read_inputs(path, {"reset": []}) == {"reset": []}
    for batched in (False, True):
        (sample,) = npz.read_samples(path, batched=batched)
        with golden.refuses("INPUT_MISSING"):
            input_names.order(input_names.by_method(sample, ["forward"])["forward"], ["x"], "forward")
    with golden.refuses("INPUT_MISSING"):
        npz.read_inputs(path, {"encode": ["x"], "decode": ["x"]})


def test_a_key_without_a_method_is_the_only_methods_or_forwards(golden: Golden, tmp_path: Path) -> None:
    path = saved(tmp_path, x=np.zeros(1, np.float32))
    assert list(npz.read_inputs(path, {"encode": ["x"]})) == ["encode"]
    assert list(npz.read_inputs(path, {"encode": ["x"], "forward": ["x"]})) == ["forward"]
    with golden.refuses("UNKNOWN_INPUT"):
        npz.read_inputs(path, {"encode": ["x"], "decode": ["x"]})


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_dtypes_that_npz_lacks_come_back_as_they_were_written(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    value = from_array("x", np.full(shape, 1.5, np.dtype(getattr(ml_dtypes, dtype))))
    npz.write_outputs(tmp_path / "o.npz", {"forward": [value]}, {"forward": ["x"]})
    with np.load(tmp_path / "o.npz") as file:
        assert str(file["x.dtype"]) == dtype
        assert file["x"].dtype == (np.uint16 if dtype == "bfloat16" else np.uint8)
    assert npz.read_named(tmp_path / "o.npz") == {"": {"x": value}}


@pytest.mark.remedy("UNSUPPORTED_INPUT")
def test_a_bfloat16_array_saved_without_its_dtype_is_refused_with_a_reason(tmp_path: Path) -> None:
    path = saved(tmp_path, x=np.ones(2, ml_dtypes.bfloat16))
    with refuses("UNSUPPORTED_INPUT", match=r"x\.dtype"):
        npz.read_named(path)
    path = saved(tmp_path, **{"x": np.ones(2, ml_dtypes.bfloat16), "x.dtype": np.asarray("bfloat16")})
    assert to_array(tensor(npz.read_named(path)[""]["x"])).tolist() == [1, 1]


def test_outputs_are_read_as_they_were_written(tmp_path: Path) -> None:
    channels_last = from_array("y", np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4), (0, 2, 3, 1))
    scalars = [Scalar("n", 3), Scalar("f", 0.5), Scalar("b", True), Scalar("none", None)]
    path = tmp_path / "file without suffix"
    npz.write_outputs(path, {"forward": [channels_last, *scalars]}, {"forward": ["file", "n", "f", "b", "none"]})
    read = npz.read_named(path)[""]
    assert np.array_equal(to_array(tensor(read["file"])), to_array(channels_last))
    assert tensor(read["file"]).is_contiguous
    assert [read[scalar.name] for scalar in scalars] == scalars
    assert isinstance(read["b"], Scalar) and read["b"].value is True


def test_outputs_of_several_methods_have_them_in_their_keys_and_equal_names_give_places(tmp_path: Path) -> None:
    one = from_array("", np.zeros(1, np.int8))
    npz.write_outputs(tmp_path / "o.npz", {"a": [one, one], "b": [one]}, {"a": ["z", "z"], "b": ["y"]})
    with np.load(tmp_path / "o.npz") as file:
        assert file.files == ["a/0", "a/1", "b/y"]
    first = (tmp_path / "o.npz").read_bytes()
    npz.write_outputs(tmp_path / "o.npz", {"a": [one, one], "b": [one]}, {"a": ["z", "z"], "b": ["y"]})
    assert (tmp_path / "o.npz").read_bytes() == first


NAMES = [
    "température",
    "it's",
    "box/score",
    "100 %",
    "a%2Fb",
    "tab\tnul\0",
    "\x85",
    "x.dtype",
    "x.dim_order",
    "x.npy",
    "a b",
    "('a', 1)",
]


def test_any_name_of_an_output_is_a_key(tmp_path: Path) -> None:
    values = [from_array("", np.full(1, place, np.int8)) for place in range(len(NAMES))]
    npz.write_outputs(tmp_path / "o.npz", {"": values}, {"": NAMES})
    with np.load(tmp_path / "o.npz") as file:
        assert file.files[:4] == ["température", "it's", "box%2Fscore", "100 %25"]
        assert file.files[6:10] == ["%C2%85", "x%2Edtype", "x%2Edim_order", "x%2Enpy"]
    read = npz.read_named(tmp_path / "o.npz")[input_names.UNSAID]
    assert list(read) == NAMES
    assert [to_array(tensor(value)).tolist() for value in read.values()] == [[place] for place in range(len(NAMES))]


def test_an_escape_that_is_no_text_stays(tmp_path: Path) -> None:
    assert list(npz.read_named(saved(tmp_path, **{"a%FF": np.zeros(1), "50%": np.zeros(1)}))[""]) == ["a%FF", "50%"]


def test_fortran_order_and_foreign_byte_order_become_plain(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    value = tensor(npz.read_named(saved(tmp_path, x=np.asfortranarray(array)))[""]["x"])
    assert (value.dtype, value.is_contiguous) == ("float32", True)
    assert to_array(value).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.remedy("UNKNOWN_INPUT", "INPUT_MISSING", "DUPLICATE_INPUT")
def test_keys_that_do_not_match_are_reported_with_those_that_would(golden: Golden) -> None:
    one = Scalar("", 1)
    with golden.refuses("UNKNOWN_INPUT") as unknown:
        input_names.order({"x": one, "z": one}, ["x", "y"])
    assert unknown.value.metadata["inputs"] == "x,y"
    with pytest.raises(input_names.UnknownInput):
        input_names.order({"2": one}, ["x", "y"])
    with pytest.raises(input_names.InputMissing, match="'y' is missing"):
        input_names.order({"x": one}, ["x", "y"])
    with golden.refuses("DUPLICATE_INPUT"):
        input_names.order({"x": one, "0": one, "y": one}, ["x", "y"])
    assert input_names.order({"y": one, "0": one}, ["x", "y"])


def test_a_name_wins_over_a_place() -> None:
    values = input_names.order({"arr_0": Scalar("", 1), "0": Scalar("", 2)}, ["x", "arr_0"])
    assert values == [Scalar("x", 2), Scalar("arr_0", 1)]


def test_unreadable_files_are_reported_in_a_sentence(tmp_path: Path) -> None:
    good = saved(tmp_path, x=np.zeros(1000, np.float32)).read_bytes()
    bad = {
        "cut": good[: len(good) // 2],
        "flipped": good[:2000] + bytes([good[2000] ^ 255]) + good[2001:],
        "empty": b"",
        "text": b"hello",
        "pickle": pickle.dumps({"x": 1}),
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", x=np.asarray([{}, {}], object))
    for name in [*bad, "one.npy", "objects.npz", "not there.npz"]:
        with refuses("INPUT_FILE_UNREADABLE") as error:
            npz.read_named(tmp_path / name)
        assert name in error.value.message and "\n" not in error.value.message
    with refuses("UNSUPPORTED_INPUT", match="complex64"):
        npz.read_named(saved(tmp_path, x=np.zeros(2, np.complex64)))


@pytest.mark.remedy("OUTPUT_FILE_UNWRITABLE")
def test_an_unwritable_place_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OutputUnwritable):
        npz.write_outputs(tmp_path / "no folder" / "o.npz", {"forward": []})
    npz.write_outputs(tmp_path / "o.npz", {"forward": []})


def test_samples_are_a_folders_files_or_axis_0(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    for index in range(3):
        np.savez(folder / f"{index}.npz", x=np.full(2, index, np.float32))
    assert [to_array(tensor(s[""]["x"]))[0] for s in npz.read_samples(folder)] == [0, 1, 2]
    batched = saved(
        tmp_path, **{"x": np.arange(6, dtype=np.int32).reshape(3, 2), "k": np.asarray(7), "k.dtype": np.asarray("scalar")}
    )
    samples = list(npz.read_samples(batched, batched=True))
    assert [to_array(tensor(s[""]["x"])).tolist() for s in samples] == [[0, 1], [2, 3], [4, 5]]
    assert [s[""]["k"] for s in samples] == [Scalar("k", 7)] * 3
    with refuses("UNSUPPORTED_INPUT", match="several lengths"):
        list(npz.read_samples(saved(tmp_path, x=np.zeros((2, 1)), y=np.zeros((3, 1))), batched=True))
    with refuses("INPUT_FILE_UNREADABLE"):
        list(npz.read_samples(tmp_path / "samples" / "none"))


def test_the_samples_of_a_batch_keep_the_dim_order_that_the_file_says(tmp_path: Path) -> None:
    images = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    np.savez(tmp_path / "batch.npz", x=images, **{"x.dim_order": np.array([0, 2, 3, 1])})
    for image, sample in zip(images, npz.read_samples(tmp_path / "batch.npz", batched=True), strict=True):
        value = sample[input_names.UNSAID]["x"]
        assert isinstance(value, Tensor)
        assert value.dim_order == (1, 2, 0)
        np.testing.assert_array_equal(to_array(value), image)
