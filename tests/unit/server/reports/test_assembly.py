"""A cell's report: all that is known of it, and nothing that never came about."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from etfarm.server.reports.assembly import assemble, model_digest, since
from etfarm.server.reports.verdict import Thresholds
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.wire import digest, recipes
from etfarm.wire.chunks import artifact_of
from etfarm.wire.report import report_json

AT = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
RECIPE = recipes.parse("xnnpack_fp32").json
DEVICE = Device(id="pi", name="board", arch="aarch64", soc="BCM", os="Debian", cores=4, memory_bytes=8)


def job() -> job_pb2.Job:
    created = job_pb2.Job(id="j")
    created.create_time.FromDatetime(AT)
    candidate = created.spec.candidates.add(name="net", recipe=RECIPE)
    candidate.model.methods["forward"].exported_program.CopyFrom(artifact_of(b"model"))
    return created


def cell(state: str = "SUCCEEDED", **more: Any) -> job_pb2.Cell:
    value = common_pb2.CellState.Value(f"CELL_STATE_{state}")
    return job_pb2.Cell(id="c", job_id="j", method="forward", state=value, recipe_name="xnnpack_fp32", **more)


def compilation() -> compile_pb2.Compilation:
    created = compile_pb2.Compilation(
        key="k", stages=[compile_pb2.Stage(stage="TO_EXECUTORCH", duration_ms=5, where=common_pb2.ACTOR_SERVER)]
    )
    created.program.pte.CopyFrom(artifact_of(b"pte"))
    created.program.data["w"].CopyFrom(artifact_of(b"weights"))
    created.program.digest = "d"
    created.etrecord.CopyFrom(artifact_of(b"etrecord"))
    created.warnings.add(code="COMPILE", message="first")
    created.facts.methods["forward"].planned_bytes.extend([64, 128])
    created.facts.methods["other"].planned_bytes.append(1)
    return created


def result() -> agent_pb2.CandidateResult:
    created = agent_pb2.CandidateResult(
        cell_id="c", threads=4, warmup=10, iterations=100, duration_ns=9, stop_reason=common_pb2.STOP_REASON_ENOUGH
    )
    created.steady, created.repeatability.outcome = False, report_pb2.REPEATABILITY_OUTCOME_EQUAL
    created.runner.kind = common_pb2.RUNNER_KIND_NATIVE
    created.load.load_ns = 0
    created.memory.peak_rss_bytes = 1000
    created.telemetry.wall_time_ns = 10
    for name in ("outputs", "samples", "etdump"):
        getattr(created, name).CopyFrom(artifact_of(name.encode()))
    return created


def analysis() -> report_pb2.Report:
    created = report_pb2.Report()
    created.latency.p50_ns = 5.0
    created.trace_times.size_bytes = 8
    created.interleaved.ratio = 0.9
    created.compile.warnings.add(code="ANALYSIS", message="second")
    return created


def measured(**parts: Any) -> report_pb2.Report:
    """Return the report of a measured cell, with other parts than the usual ones."""
    usual = {"at": AT, "compilation": compilation(), "device": DEVICE, "result": result(), "analysis": analysis()}
    return assemble("r", job(), cell(), **usual | parts)


@pytest.mark.parametrize(
    ("executed", "why", "words"),
    [
        (2, "", ""),
        (0, "", "The device executed 0 of the calls set, get, which compare its state with the model's. The device's agent"),
        (
            1,
            "It takes too long.",
            "The device executed 1 of the calls set, get, which compare its state with the model's. It ",
        ),
    ],
)
def test_calls_that_the_device_did_not_execute_are_named(executed: int, why: str, words: str) -> None:
    returned = result()
    if executed:
        returned.calls.samples = executed
    if why:
        returned.calls.error.message = why
    calls = [agent_pb2.RunCall(method=method) for method in ("set", "get")]
    report = measured(result=returned, analysis=None, calls=calls)
    warnings = {warning.code: warning.message for warning in report.compile.warnings}
    assert ("CALLS_NOT_RUN" in warnings) == bool(words) and warnings.get("CALLS_NOT_RUN", "").startswith(words)


def test_outputs_that_differ_between_executions_have_the_names_of_the_model() -> None:
    compiled, returned = compilation(), result()
    compiled.facts.methods["forward"].outputs.add(name="y")
    compiled.facts.methods["forward"].outputs.add(name="h")
    compiled.facts.methods["forward"].outputs.add()
    returned.repeatability.outcome = report_pb2.REPEATABILITY_OUTCOME_NONDETERMINISTIC
    for place in ("1", "2"):
        returned.repeatability.differences.add(output=place, max_abs_difference=3 - int(place))
    report = assemble("r", job(), cell(), at=AT, compilation=compiled, device=DEVICE, result=returned, analysis=analysis())
    assert [each.output for each in report.measurement.repeatability.differences] == ["h", "2"]
    (reason,) = [each for each in report.verdict.reasons if each.code == "OUTPUTS_DIFFER"]
    assert "output 'h', by up to 2" in reason.message


def test_what_the_program_forgets_is_a_warning() -> None:
    forgetful = job()
    forgetful.spec.candidates[0].model.methods["forward"].forgotten_buffers.extend(["state.n", "m"])
    report = assemble("r", forgetful, cell(), at=AT, compilation=compilation())
    (warning,) = [each for each in report.compile.warnings if each.code == "STATE_FORGOTTEN"]
    assert warning.message.startswith("The program of forward forgets what the model assigns to state.n, m, so that later calls")


def test_a_cell_that_never_compiled_has_only_what_was_asked_for() -> None:
    ended = cell("FAILED")
    ended.error.reason = "STAGE_FAILED"
    report = assemble("r", job(), ended, at=AT)
    named = {field.name for field, _ in report.ListFields()}
    assert named == {"id", "cell", "recipe", "recipe_digest", "method", "state", "error", "model", "create_time"}
    assert (report.id, report.cell, report.state, report.error.reason) == ("r", "c", common_pb2.CELL_STATE_FAILED, "STAGE_FAILED")
    assert (report.recipe, report.recipe_digest) == ("xnnpack_fp32", digest.of_bytes(RECIPE.encode()))
    assert report.model.name == "net"
    assert report.create_time.ToDatetime(UTC) == AT


def test_a_measured_cell_has_everything() -> None:
    ended = cell(threads=2, compile_cached=True, attempts=[job_pb2.Attempt(id="a1"), job_pb2.Attempt(id="a2")])
    ended.timeline.add(actor=common_pb2.ACTOR_SERVER, phase="COMPILE", start_ms=1, duration_ms=2)
    report = assemble("r", job(), ended, at=AT, compilation=compilation(), device=DEVICE, result=result(), analysis=analysis())
    assert report.attempt == "a2"
    assert report.threads == 4, "what was used, not what was asked for"
    assert report.compile.cached
    assert report.compile.compilation == compilation()
    shown = report_json(report)["compile"]
    assert shown["program"] == {"digest": "d", "size_bytes": len(b"pte") + len(b"weights")}
    assert shown["etrecord"]["size_bytes"] == len(b"etrecord")
    assert [warning["code"] for warning in shown["warnings"]] == ["COMPILE", "ANALYSIS"]
    assert (report.device.id, report.device.soc, report.device.emulated) == ("pi", "BCM", False)
    assert report.runner.kind == common_pb2.RUNNER_KIND_NATIVE
    assert (report.measurement.iterations, report.measurement.stop_reason) == (100, common_pb2.STOP_REASON_ENOUGH)
    assert report.measurement.HasField("steady") and not report.measurement.steady
    assert report.measurement.repeatability.outcome == report_pb2.REPEATABILITY_OUTCOME_EQUAL and not report.measurement.HasField(
        "warmup_ns"
    )
    assert report.load.HasField("load_ns") and report.load.load_ns == 0
    assert (report.memory.peak_rss_bytes, list(report.memory.planned_bytes)) == (1000, [64, 128])
    assert (report.latency.p50_ns, report.interleaved.ratio) == (5.0, 0.9)
    assert report.verdict.status != report_pb2.VERDICT_STATUS_UNSPECIFIED
    assert (report.samples, report.trace_times.size_bytes) == (artifact_of(b"samples"), 8)
    assert [phase.phase for phase in report.timeline] == ["COMPILE"]


@pytest.mark.parametrize(
    ("reference", "warned", "kept"),
    [
        ("QUANTIZED", False, ["other"]),
        ("QUANTIZED", True, ["other", "device"]),
        ("EAGER", True, ["other", "device"]),  # a model that the client quantized is its own reference
        ("EAGER", False, ["forward", "other"]),
    ],
)
def test_a_device_that_was_compared_with_the_quantized_graph_replaces_the_servers_comparison(
    reference: Any, warned: bool, kept: list[str]
) -> None:
    compiled, analyzed = compilation(), analysis()
    for method in ("forward", "other"):
        compiled.warnings.add(code="FAR_FROM_QUANTIZED_GRAPH", message=f"{method} on the server: far")
    analyzed.accuracy.add(reference=f"REFERENCE_{reference}")
    if warned:
        analyzed.compile.warnings.add(code="FAR_FROM_QUANTIZED_GRAPH", message="device: far")
    warnings = report_json(measured(compilation=compiled, analysis=analyzed))["compile"]["warnings"]
    far = [each["message"] for each in warnings if each["code"] == "FAR_FROM_QUANTIZED_GRAPH"]
    assert [message.partition(" ")[0].strip(":") for message in far] == kept
    assert "COMPILE" in [each["code"] for each in warnings]


def test_inputs_of_a_run_are_reported_and_whether_a_runner_made_them_up() -> None:
    actual = analysis()
    actual.inputs.tensors.add(name="x", dtype="float32", shape=[2, 3])
    reported = measured(analysis=actual, inputs=artifact_of(b"inputs")).inputs
    assert (reported.digest, list(reported.tensors)) == (artifact_of(b"inputs").digest, list(actual.inputs.tensors))
    made_up = measured()
    assert made_up.HasField("inputs") and not made_up.inputs.HasField("digest") and not made_up.inputs.tensors
    never_ran = assemble("r", job(), cell("FAILED"), at=AT, compilation=compilation(), inputs=artifact_of(b"inputs"))
    assert not never_ran.HasField("inputs")


def test_accuracy_has_the_digest_of_its_samples_and_why_there_are_no_more() -> None:
    error = common_pb2.Error(reason="PROGRAM_FAILED", message="It failed, in aten::add.", remedy="Give other inputs.")
    run, sent = result(), [artifact_of(str(place).encode()) for place in range(4)]
    run.further.samples = 2
    run.further.error.CopyFrom(error)

    def digest_of(compared: int, inputs: bytes = b"inputs") -> str | None:
        actual = analysis()
        actual.accuracy.add(output="y", samples=compared)
        report = measured(result=run, samples=sent, analysis=actual, inputs=artifact_of(inputs))
        (warning,) = [each for each in report.compile.warnings if each.code == "SAMPLES_LEFT_OUT"]
        assert warning.message == "Accuracy is over 3 samples: It failed, in aten::add. Give other inputs."
        return report.accuracy[0].samples_digest if report.accuracy[0].HasField("samples_digest") else None

    assert digest_of(1) is None and digest_of(3) == digest_of(3)
    assert len({digest_of(2), digest_of(3), digest_of(2, b"others")}) == 3


def test_a_compilation_reports_all_its_facts() -> None:
    submitted, created = job(), compilation()
    submitted.spec.candidates[0].stages_done.add(stage="TORCH_EXPORT", where=common_pb2.ACTOR_CLIENT, duration_ms=3)
    created.stages[0].cached = True
    created.stages[0].methods["forward"] = 4.0
    created.sizes.delegate_bytes = 7
    created.checks.add(method="forward", inputs=compile_pb2.HOST_CHECK_INPUTS_EXAMPLE, ran=True)
    created.stayed_fp32["forward"].operators.add(op="aten.sin", count=2)
    created.exported_programs["forward"].CopyFrom(artifact_of(b"quantized"))
    report = assemble("r", submitted, cell(), at=AT, compilation=created)
    assert report.compile.compilation == created
    actual = report_json(report)["compile"]
    assert [(stage["stage"], stage["where"], stage["cached"]) for stage in actual["stages"]] == [
        ("TORCH_EXPORT", "CLIENT", False),
        ("TO_EXECUTORCH", "SERVER", True),
    ]
    assert actual["stages"][1]["methods"] == {"forward": 4.0}
    assert actual["sizes"]["delegate_bytes"] == 7
    assert (actual["checks"][0]["inputs"], actual["checks"][0]["ran"]) == ("EXAMPLE", True)
    assert [row["op"] for row in actual["stayed_fp32"]["forward"]["operators"]] == ["aten.sin"]
    assert actual["data"]["w"]["size_bytes"] == len(b"weights")
    assert actual["exported_programs"]["forward"]["size_bytes"] == len(b"quantized")
    assert actual["stopped_after"] is None and not actual["stage_files"]


def test_a_compilation_that_stopped_has_its_stage_s_files_and_no_program() -> None:
    stopped = compile_pb2.Compilation(key="k", stopped_after="TORCH_EXPORT")
    stopped.stage_files["forward.txt"].CopyFrom(artifact_of(b"printed"))
    actual = report_json(assemble("r", job(), cell(), at=AT, compilation=stopped))["compile"]
    assert (actual["stopped_after"], actual["stage_files"]["forward.txt"]["size_bytes"]) == ("TORCH_EXPORT", len(b"printed"))
    assert [actual[name] for name in ("program", "etrecord", "sizes")] == [None, None, None]


def test_it_is_a_function_of_its_arguments_and_leaves_them_as_they_are() -> None:
    values: dict[str, Any] = {"compilation": compilation(), "device": DEVICE, "result": result(), "analysis": analysis()}
    kept = {name: type(message).FromString(message.SerializeToString()) for name, message in values.items()}
    ended = cell()
    assert assemble("r", job(), ended, at=AT, **values) == assemble("r", job(), ended, at=AT, **values)
    assert values == kept
    assert ended == cell()


def test_a_run_without_a_measurement_has_no_measurement_latency_or_verdict() -> None:
    run = result()
    run.ClearField("samples")
    report = measured(result=run, analysis=report_pb2.Report())
    for name in ("measurement", "latency", "verdict"):
        assert not report.HasField(name)
    assert report.outputs == artifact_of(b"outputs")


def traced_run() -> tuple[agent_pb2.CandidateResult, report_pb2.Report]:
    """Return the result of a run that was traced, and its analysis."""
    run, analyzed = result(), analysis()
    run.traced_ns.extend([10] * 30)
    analyzed.profile.iterations, analyzed.profile.traced_ratio = 30, 1.1
    analyzed.profile.events, analyzed.profile.event_cost_ns = 10, 5e6
    return run, analyzed


def test_a_traced_pass_has_its_own_counters_and_verdict_whatever_the_child_answers() -> None:
    run, analyzed = traced_run()
    run.traced_telemetry.cpu_time_ns, run.traced_telemetry.wall_time_ns = 100, 300
    analyzed.profile.telemetry.cpu_time_ns = 7
    analyzed.profile.verdict.status = report_pb2.VERDICT_STATUS_VALID
    report = measured(result=run, analysis=analyzed)
    assert (report.profile.telemetry.cpu_time_ns, report.profile.traced_ratio) == (100, 1.1)
    assert [reason.code for reason in report.profile.verdict.reasons] == ["CPU_STARVED"]
    assert report.verdict != report.profile.verdict
    assert not report.profile.HasField("event_cost_ns"), "a starved pass does not show what tracing costs"
    lenient = Thresholds(min_cpu_share=0.1)
    again = measured(result=run, analysis=analyzed, thresholds=lenient)
    assert again.profile.verdict.status == report_pb2.VERDICT_STATUS_VALID and again.profile.event_cost_ns == 5e6


def test_beside_a_disturbed_timed_pass_the_cost_of_tracing_is_unknown() -> None:
    run, analyzed = traced_run()
    run.telemetry.cpu_time_ns, run.telemetry.wall_time_ns = 1, 300
    report = measured(result=run, analysis=analyzed)
    assert report.verdict.status == report_pb2.VERDICT_STATUS_INVALID
    assert report.profile.traced_ratio == 1.1 and not report.profile.HasField("event_cost_ns")


def test_an_emulated_device_is_not_benchmarkable() -> None:
    report = measured(device=Device(id="emu", emulated=True))
    assert report.verdict.status == report_pb2.VERDICT_STATUS_NOT_BENCHMARKABLE


def test_a_ready_program_has_no_recipe_and_its_own_digest() -> None:
    submitted = job()
    candidate = submitted.spec.candidates[0]
    candidate.recipe = ""
    candidate.program.digest = "of the program"
    report = assemble("r", submitted, cell(), at=AT)
    assert not report.HasField("recipe") and not report.HasField("recipe_digest")
    assert report.model.digest == "of the program"


def test_a_models_digest_is_of_its_methods_whatever_its_name() -> None:
    one, other = job().spec.candidates[0], job().spec.candidates[0]
    other.name = "renamed"
    assert model_digest(one) == model_digest(other)
    other.model.methods["forward"].exported_program.CopyFrom(artifact_of(b"other"))
    assert model_digest(one) != model_digest(other)


@pytest.mark.parametrize("seconds", [0, 1.5, -2])
def test_instants_are_relative_to_the_submission(seconds: float) -> None:
    assert since(job(), AT + timedelta(seconds=seconds)) == seconds * 1000


def test_a_run_of_the_python_binding_has_a_warning_and_no_reason_against_it() -> None:
    actual = result()
    actual.runner.kind = common_pb2.RUNNER_KIND_PYTHON
    native, python = measured(), measured(result=actual)
    (added,) = python.compile.warnings[len(native.compile.warnings) :]
    assert added.code == "PYTHON_RUNNER"
    assert "no runner bundle for aarch64" in added.message
    assert python.verdict == native.verdict
