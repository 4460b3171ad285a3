"""The key of a compilation: another one whenever the outcome may be another, the same one otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from etfarm.server.compile import keys
from etfarm.server.compile.keys import Plan, installed_version, plan
from etfarm.v1.job_pb2 import Candidate
from etfarm.wire import recipes
from etfarm.wire.chunks import artifact_of

FP32 = recipes.parse("xnnpack_fp32").json
INT8 = recipes.parse("xnnpack_pt2e_int8_static_per_channel").json


def model(recipe: str = INT8) -> Candidate:
    created = Candidate(name="net", recipe=recipe)
    created.model.name = "net"
    created.model.methods["forward"].exported_program.CopyFrom(artifact_of(b"model"))
    created.model.methods["forward"].calibration.append(artifact_of(b"sample"))
    return created


def program() -> Candidate:
    created = Candidate(name="x.pte")
    created.program.pte.CopyFrom(artifact_of(b"pte"))
    created.program.data["weights"].CopyFrom(artifact_of(b"weights"))
    return created


def planned(candidate: Candidate, stop_after: str = "", **versions: str) -> Plan:
    """Return the plan where these packages have other versions than the installed ones."""
    recipe = None if candidate.WhichOneof("source") == "program" else recipes.from_json(candidate.recipe)
    return plan(candidate, recipe, stop_after, version_of=lambda package: versions.get(package) or installed_version(package))


def key(candidate: Candidate) -> str:
    return planned(candidate).key


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
        (model, lambda c: c.model.constant_methods["eos"].CopyFrom(artifact_of(b"constant"))),
        (model, lambda c: c.stages_done.add(stage="QUANTIZE")),
        (model, lambda c: method(c).reference.CopyFrom(artifact_of(b"before"))),
        (model, lambda c: c.model.calls.add(method="forward")),
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
        (model, lambda c: c.model.sources.add(path="helper.py", sha256=artifact_of(b"helper").digest)),
        (model, lambda c: method(c).samples.append(artifact_of(b"further"))),
        (program, lambda c: setattr(c, "name", "renamed")),
        (program, lambda c: setattr(c.program, "digest", "as the client says")),
    ],
)
def test_what_only_reports_show_changes_no_key(make: Callable[[], Candidate], change: Callable[[Candidate], object]) -> None:
    other = make()
    change(other)
    assert other != make()
    assert key(other) == key(make())


def test_a_model_and_a_program_never_share_a_key() -> None:
    assert key(model()) != key(program())


def test_calibration_is_of_no_consequence_where_the_server_quantizes_nothing() -> None:
    for recipe, done in ((FP32, ()), (INT8, ("QUANTIZE", "TORCH_EXPORT"))):
        one, other = model(recipe), model(recipe)
        for candidate in (one, other):
            for stage in done:
                candidate.stages_done.add(stage=stage)
        method(other).ClearField("calibration")
        assert key(one) == key(other)
        assert not planned(one).quantization_key


def test_an_exported_program_is_one_whether_its_client_says_so_or_not() -> None:
    text = model()
    text.stages_done.add(stage="TORCH_EXPORT", duration_ms=5)
    assert key(text) == key(model())
    assert planned(model()).done == ("TORCH_EXPORT",)


def test_where_it_stops_changes_the_key_and_the_last_stage_is_no_stop() -> None:
    assert planned(model(), "TO_EXECUTORCH").key == key(model())
    assert planned(model(), "TO_EDGE_TRANSFORM_AND_LOWER").key != key(model())
    assert planned(model(), "TO_EDGE_TRANSFORM_AND_LOWER").quantization_key == planned(model()).quantization_key


def test_what_stops_before_it_quantizes_does_not() -> None:
    staged = recipes.from_toml(
        'recipe = "xnnpack_pt2e_int8_static_per_channel"\n'
        'stages = ["SOURCE_TRANSFORM", "QUANTIZE", "TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"]\n'
    )
    assert planned(model(staged.json), "QUANTIZE").quantization_key
    assert not planned(model(staged.json), "SOURCE_TRANSFORM").quantization_key


@pytest.mark.parametrize(
    ("toml", "is_shared"),
    [
        ('[executorch]\nmemory_planning = "naive"\n', True),
        ("[edge]\nskip_dim_order = true\n", True),
        ('[[partitioners]]\nname = "xnnpack"\nper_op = true\n', True),
        ("strict = true\n", False),
        ('[[quantizers]]\nname = "xnnpack"\nper_channel = false\n', False),
    ],
)
def test_recipes_share_a_quantization_when_they_differ_only_in_what_comes_after(toml: str, is_shared: bool) -> None:
    head, table = ("", toml) if toml.startswith("[") else (toml, "")
    other = recipes.from_toml(f'recipe = "xnnpack_pt2e_int8_static_per_channel"\n{head}{table}').json
    assert key(model(other)) != key(model())
    assert (planned(model(other)).quantization_key == planned(model()).quantization_key) is is_shared


@pytest.mark.parametrize("name", ["methods", "calibration"])
def test_a_quantization_depends_on_models_and_samples(name: str) -> None:
    other = model()
    if name == "methods":
        method(other).exported_program.CopyFrom(artifact_of(b"other"))
    else:
        method(other).calibration.append(artifact_of(b"another"))
    assert planned(other).quantization_key != planned(model()).quantization_key


def test_a_plug_ins_version_changes_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    candidate = model(recipes.parse("acme.fast").json)
    result = [key(candidate)]
    for version in ("1.0", "1.1"):
        info = tmp_path / version / f"acme-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[etfarm.recipes]\nacme.fast = acme.missing:fast\n")
        monkeypatch.syspath_prepend(tmp_path / version)
        assert keys.plugin_versions(("acme.fast",)) == {"etfarm.recipes:acme.fast": f"acme {version}"}, "nothing is imported"
        result.append(key(candidate))
    assert len(set(result)) == 3


def test_a_stage_that_a_plug_in_replaces_does_not_change_the_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = recipes.from_toml(
        'recipe = "xnnpack_pt2e_int8_static_per_channel"\n[replace]\nTO_EXECUTORCH = "acme.stage"\n'
    ).json
    before = planned(model(replaced))
    monkeypatch.setattr(keys, "plugin_versions", lambda names: dict.fromkeys(names, "acme 1.0"))
    after = planned(model(replaced))
    assert after.key != before.key
    assert after.quantization_key == before.quantization_key == planned(model()).quantization_key


@pytest.mark.parametrize("package", ["torch", "executorch", "torchao", "etfarm"])
def test_the_toolchain_s_versions_change_the_key(package: str) -> None:
    before = planned(model())
    after = planned(model(), **{package: "99"})
    assert after.key != before.key
    assert after.quantization_key != before.quantization_key


COREML = 'partitioners = ["coreml"]\n[[quantizers]]\nname = "coreml"\n'


@pytest.mark.parametrize(
    ("toml", "takes_part", "quantizes"),
    [
        ('recipe = "coreml_fp16"\n', True, False),
        ('recipe = "coreml_pt2e_int8_static"\n', True, True),
        ('combine = ["coreml_fp16", "xnnpack_fp32"]\n', True, False),
        (COREML, True, True),
        ('partitioners = []\n[methods.forward]\npartitioners = ["coreml"]\n', True, False),
        ('recipe = "xnnpack_pt2e_int8_static_per_channel"\npartitioners = ["coreml"]\n', True, False),
        ('recipe = "xnnpack_fp32"\n', False, False),
    ],
)
def test_the_version_of_a_backend_s_own_compiler_changes_the_key(toml: str, takes_part: bool, quantizes: bool) -> None:
    candidate = model(recipes.from_toml(toml).json)
    one, other = (planned(candidate, coremltools=version) for version in ("9.0", "9.1"))
    assert (one.key != other.key) is takes_part
    assert (one.quantization_key != other.quantization_key) is quantizes
