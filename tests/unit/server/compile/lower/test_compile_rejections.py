"""Why operators were not delegated: the partitioner's own words, at the operator's place."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from executorch.exir.backend.utils import WhyNoPartitionReporter  # noqa: E402

from etfarm.server.compile.lower import build, lowering, rejections  # noqa: E402
from etfarm.server.compile.program import places  # noqa: E402
from etfarm.v1 import compile_pb2  # noqa: E402
from etfarm.wire import recipes  # noqa: E402

pytestmark = pytest.mark.slow(reason="lowers a real model")


class Rejected(torch.nn.Module):
    """What XNNPACK has a rule for, but not with these arguments, and what it has none for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(torch.softmax(torch.relu(x), 1), 1)


class Unsupported(torch.nn.Module):
    """An operator that no partitioner of a GPU or NPU takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(torch.relu(x), 4, 0.0, 1.0) + 1.0


@pytest.mark.filterwarnings("ignore:This API and all of its related functionality")
def test_operators_outside_of_delegates_have_the_partitioners_reasons(caplog: pytest.LogCaptureFixture) -> None:
    program = torch.export.export(Rejected().eval(), (torch.randn(2, 3, 4),))
    recipe = build.export_recipe(recipes.parse("xnnpack_fp32"), ["forward", "other"])
    stages = lowering.Stages(lambda event: None, {"forward": program}, compile_pb2.Compilation())
    pipeline = lowering.Pipeline(["TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"])
    with caplog.at_level(logging.WARNING):
        lowered = lowering.lower({"forward": program, "other": program}, recipe, pipeline, "net", stages, places.undelegated)
    assert not [record for record in caplog.records if record.name.startswith("executorch") and record.levelno < logging.WARNING]
    assert logging.getLogger("executorch.backends.xnnpack").handlers == []
    for method in ("forward", "other"):
        operators = {row.op: row.places for row in lowered.delegation[method].operators if row.non_delegated}
        assert [place.undelegated_reason for place in operators["aten_cumsum_default"]] == [
            "XnnpackPartitioner has no rule for cumsum.default"
        ]
        (place,) = operators["aten__softmax_default"]
        assert place.undelegated_reason == "dim must be the last dim, got dim = 1 for tensor of rank 3"


def test_a_node_that_no_partitioner_judged_has_no_reason() -> None:
    with rejections.collected(lambda method: []) as rejected:
        program = torch.export.export(Rejected().eval(), (torch.randn(2, 3, 4),))
    assert {rejected.reason_of("forward", node) for node in program.graph.nodes} == {""}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(("partitioner", "reason"), [
    ("vulkan", "no operator implementation"),
    ("coreml", "not supported by CoreMLPartitioner, which gave no reason"),
])  # fmt: skip
def test_partitioners_without_a_log_of_reasons_are_quoted_or_named(partitioner: str, reason: str) -> None:
    if partitioner == "coreml":
        pytest.importorskip("coremltools")
    program = torch.export.export(Unsupported().eval(), (torch.randn(6),))
    recipe = build.export_recipe(recipes.from_toml(f'partitioners = ["{partitioner}"]'), ["forward"])
    pipeline = lowering.Pipeline(["TO_EDGE_TRANSFORM_AND_LOWER"])
    stages = lowering.Stages(lambda event: None, {"forward": program}, compile_pb2.Compilation())
    lowered = lowering.lower({"forward": program}, recipe, pipeline, "net", stages, places.undelegated)
    operators = {row.op: row.places for row in lowered.delegation["forward"].operators if row.non_delegated}
    assert [place.undelegated_reason for place in operators["aten_histc_default"]] == [reason]


def test_the_report_that_arms_partitioners_write_is_read_and_left_as_it_was() -> None:
    node = next(iter(torch.export.export(Rejected().eval(), (torch.randn(2, 3, 4),)).graph.nodes))
    original, reporter = WhyNoPartitionReporter.report_reject, WhyNoPartitionReporter()
    with rejections.collected(lambda method: []) as rejected:
        reporter.report_reject(node, "Needs rank <= 5,\ngot 6.")
    assert rejected.reason_of("forward", node) == "Needs rank <= 5, got 6"
    assert reporter._rejected_nodes == {node: "Needs rank <= 5,\ngot 6."}
    assert WhyNoPartitionReporter.report_reject is original
