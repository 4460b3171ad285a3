"""The answers of jailed children: messages of the contract with any content, `etfarm.server.workers.answers`."""

from __future__ import annotations

from typing import Any

from etfarm.server.workers.answers import decode
from etfarm.server.workers.errors import BadWorkerAnswer
from etfarm.v1 import child_pb2, common_pb2, compile_pb2, report_pb2

TOKENS = (b"\x00", b"\xff\xff\xff\xff\x0f", b"\x0a\x00", b"model.pte", b"\x00\x00\x00\x00\x00\x00\xf8\x7f", b"QUANTIZE")

_KINDS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (child_pb2.CompileResult, ("compilation.stages", "compilation.facts", "pte", "data")),
    (compile_pb2.ListRecipesResponse, ("recipes",)),
    (report_pb2.Report, ("latency", "operators", "interleaved", "compile.warnings")),
)


def seeds() -> list[bytes]:
    """Return a compiling child's answer, a list of recipes and an analysis."""
    value = compile_pb2.ValueSpec(kind=common_pb2.VALUE_KIND_DOUBLE, value=compile_pb2.Scalar(number=0.5))
    compilation = compile_pb2.Compilation(
        stages=[compile_pb2.Stage(stage="QUANTIZE", duration_ms=1.5, methods={"forward": 1.0})],
        facts=compile_pb2.ProgramFacts(methods={"forward": compile_pb2.MethodFacts(inputs=[value], planned_bytes=[64])}),
    )
    report = report_pb2.Report(
        latency=report_pb2.Latency(p50_ns=1.5, p50_ci95_ns=[1.0, 2.0]),
        interleaved=report_pb2.PairedRatio(ratio=1.5, ratios=[1.0, 2.0]),
        operators=[report_pb2.OperatorRow(index=1, name="k", op_types=["aten.add"], p50_ns=3.5)],
    )
    recipes = compile_pb2.ListRecipesResponse(recipes=[{"name": "r", "quantization": common_pb2.QUANTIZATION_NONE}])
    answers = (child_pb2.CompileResult(compilation=compilation, pte="model.pte", data={"w": "w.ptd"}), recipes, report)
    return [answer.SerializeToString() for answer in answers]


def fuzz(data: bytes) -> None:
    """Bytes are an answer that is read again as it is, without another field or a NUL in its text, or a BadWorkerAnswer."""
    for kind, fields in _KINDS:
        try:
            answer = decode(data, kind, fields)
        except BadWorkerAnswer as error:
            assert len(error.message) < 1000
            continue
        assert {field.name for field, _ in answer.ListFields()} <= {name.partition(".")[0] for name in fields}
        written = answer.SerializeToString()
        assert decode(written, kind, fields).SerializeToString(deterministic=True) == answer.SerializeToString(deterministic=True)
