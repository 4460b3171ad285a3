"""The names beside a compiled program: inputs that `run` of a .pte accepts, and outputs that it returns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from etfarm.client.submit.inputs import read_named, values_of
from etfarm.client.submit.names_file import names_path, read_names, write_names
from etfarm.client.submit.preparation import prepare
from etfarm.client.submit.submission import Submission
from etfarm.client.submit.value_names import ValueNames
from etfarm.v1 import job_pb2
from etfarm.wire.errors import EtfarmError
from etfarm.wire.pt2 import InputType
from etfarm.wire.tensors import Scalar
from tests.support.programs import program

NAMES = ValueNames({"forward": ("left", "right")}, {"forward": ("sum",)})


@pytest.fixture
def pte(tmp_path: Path) -> Path:
    """A program without names of its own."""
    path = tmp_path / "x.pte"
    path.write_bytes(program("add").path.read_bytes())
    return path


def test_inputs_of_a_program_are_taken_by_the_names_beside_it(pte: Path) -> None:
    arrays = {"right": np.full((2, 3), 2, np.float32), "left": np.ones((2, 3), np.float32)}
    with pytest.raises(EtfarmError, match=r"x\.pte has no input names"):
        values_of(read_named(arrays), prepare(str(pte)), [])
    assert write_names(pte, NAMES) == pte.with_name("x.inputs.json")
    values = values_of(read_named(arrays), prepare(str(pte)), [])["forward"]
    assert [value.name for value in values] == ["left", "right"]
    by_place = values_of(read_named({"1": arrays["right"], "0": arrays["left"]}), prepare(str(pte)), [])["forward"]
    assert [value.data for value in by_place] == [value.data for value in values]  # type: ignore[union-attr]


def test_a_job_checks_the_sizes_that_a_program_takes_and_leaves_dtypes_to_the_device(pte: Path) -> None:
    types = {"forward": (InputType("float32", (2, 3)), InputType("float32", (2, 3)))}
    write_names(pte, ValueNames(NAMES.inputs, types=types))
    half = np.ones((2, 3), np.float16)  # of a program that a recipe gave inputs of another dtype
    submission = Submission(job_pb2.JobSpec())
    submission.add_inputs(read_named([half, half]), [prepare(str(pte))], [])
    assert list(submission.spec.inputs) == ["forward"]
    with pytest.raises(EtfarmError, match=r"'right' of forward is float16 \[3, 2\]") as refused:
        submission.add_inputs(read_named([half, half.T]), [prepare(str(pte))], [])
    assert refused.value.reason == "INPUT_MISMATCH"


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"schema": "other/1", "methods": {}}', "x" * (1 << 21)])
def test_a_foreign_file_is_ignored(pte: Path, text: str) -> None:
    names_path(pte).write_text(text)
    assert not read_names(pte)


def test_the_names_of_another_program_are_not_used(pte: Path) -> None:
    write_names(pte, NAMES)
    assert read_names(pte) == NAMES
    pte.write_bytes(program("conv").path.read_bytes())
    assert not read_names(pte)


def test_a_file_of_an_older_etfarm_names_inputs_only(pte: Path) -> None:
    document = json.loads(write_names(pte, NAMES).read_text())
    del document["outputs"]
    names_path(pte).write_text(json.dumps(document))
    assert read_names(pte) == ValueNames(NAMES.inputs)


@pytest.mark.parametrize("part", [{"types": {"forward": [["float32"]]}}, {"relations": {"forward": 1}}])
def test_types_of_another_form_leave_the_names(pte: Path, part: dict[str, object]) -> None:
    document = json.loads(write_names(pte, NAMES).read_text())
    names_path(pte).write_text(json.dumps(document | part))
    assert read_names(pte) == NAMES


def test_a_file_of_many_names_is_read_as_it_was_written(pte: Path) -> None:
    names = ValueNames({"forward": tuple(f"{index:0100}" for index in range(20_000))})
    assert write_names(pte, names).stat().st_size > 1 << 21
    assert read_names(pte) == names


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (("a", "a", "b"), ["0", "1", "b"]),
        (("a", "a", "0"), ["0", "1", "2"]),
        (("1", "0", "b"), ["1", "0", "b"]),
        (("\ud800", "a\0b", "a/b"), ["0", "a\0b", "a/b"]),
        (("x", "x.dtype", "y" * 1001), ["x", "x.dtype", "2"]),
    ],
)
def test_names_that_are_not_of_one_output_alone_are_positions(names: tuple[str, ...], kept: list[str]) -> None:
    values = [Scalar("", place) for place in range(3)]
    assert [each.name for each in ValueNames(outputs={"forward": names}).name_outputs("forward", values)] == kept


def test_outputs_keep_their_positions_where_names_do_not_fit() -> None:
    values = [Scalar("0", 1), Scalar("1", 2)]
    assert [each.name for each in ValueNames(outputs={"forward": ("a", "b")}).name_outputs("forward", values)] == ["a", "b"]
    assert ValueNames(outputs={"forward": ("a",)}).name_outputs("forward", values) == values
    assert ValueNames(outputs={"forward": ("a", "b")}).name_outputs("encode", values) == values
