"""The key of a compilation: another one whenever the outcome may be another, the same one otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from etfarm.server.compile.compiler import Compiler
from etfarm.v1.job_pb2 import Candidate
from etfarm.wire import recipes
from etfarm.wire.chunks import artifact_of


def model() -> Candidate:
    made = Candidate(name="net", recipe=recipes.parse("xnnpack_fp32").json)
    made.model.name = "net"
    made.model.methods["forward"].exported_program.CopyFrom(artifact_of(b"model"))
    made.model.methods["forward"].calibration.append(artifact_of(b"sample"))
    return made


def program() -> Candidate:
    made = Candidate(name="x.pte")
    made.program.pte.CopyFrom(artifact_of(b"pte"))
    made.program.data["weights"].CopyFrom(artifact_of(b"weights"))
    return made


def key(candidate: Candidate) -> str:
    return Compiler(None, None, None, deadline_s=1, threads=1).key(candidate)  # type: ignore[arg-type]


def method(candidate: Candidate):  # type: ignore[no-untyped-def]
    return candidate.model.methods["forward"]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (model, lambda c: setattr(c, "recipe", recipes.parse("portable").json)),
        (model, lambda c: method(c).exported_program.CopyFrom(artifact_of(b"other"))),
        (model, lambda c: method(c).calibration.append(artifact_of(b"another"))),
        (model, lambda c: method(c).ClearField("calibration")),
        (model, lambda c: c.model.methods["encode"].CopyFrom(c.model.methods["forward"])),
        (model, lambda c: c.stages_done.add(stage="QUANTIZE")),
        (program, lambda c: c.program.pte.CopyFrom(artifact_of(b"other"))),
        (program, lambda c: c.program.data["weights"].CopyFrom(artifact_of(b"other"))),
        (program, lambda c: c.program.data["more"].CopyFrom(artifact_of(b"other"))),
        (program, lambda c: c.program.data.clear()),
    ],
)
def test_what_changes_the_outcome_changes_the_key(make: Callable[[], Candidate], change: Callable[[Candidate], object]) -> None:
    other = make()
    change(other)
    assert other != make()
    assert key(other) != key(make())


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (model, lambda c: setattr(c, "name", "renamed")),
        (model, lambda c: setattr(c.model, "name", "renamed")),
        (program, lambda c: setattr(c, "name", "renamed")),
        (program, lambda c: setattr(c.program, "digest", "as the client says")),
    ],
)
def test_names_do_not_change_the_key(make: Callable[[], Candidate], change: Callable[[Candidate], object]) -> None:
    other = make()
    change(other)
    assert other != make()
    assert key(other) == key(make())


def test_a_model_and_a_program_never_share_a_key() -> None:
    assert key(model()) != key(program())
