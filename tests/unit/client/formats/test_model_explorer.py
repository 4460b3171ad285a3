"""Graphs for Model Explorer: each executed row once, the data flow between them, and times by the same ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etfarm.client.formats import model_explorer
from tests.support.documents import HOSTILE, document, report, row

ROWS = [
    row(0, "OPERATOR", "aten::permute_copy.out", 0.1, 100_000.0, op_types=["aten.permute_copy.default"], mean_ns=110_000.0),
    row(1, "DELEGATE", "XnnpackBackend", 0.8, 800_000.0, backend="XnnpackBackend", delegated=True, input_rows=[0]),
    row(2, "KERNEL", "Convolution", 0.5, 500_000.0, parent=1, backend="XnnpackBackend", delegated=True, module="layer1.conv",
        op_types=["aten.convolution.default", "aten.relu.default"], mean_ns=510_000.0),
    row(3, "KERNEL", "Add", 0.2, None, parent=1, backend="XnnpackBackend", delegated=True, module="layer1", input_rows=[2],
        op_types=["aten.add.Tensor"], resolution_ns=1000.0),
    row(4, "REST", "REST", 0.1, 1.0, parent=1),
    row(5, "OPERATOR", "aten::mean.out", 0.1, 100_000.0, op_types=["aten.mean.dim"], input_rows=[1, 0], mean_ns=90_000.0),
    row(6, "REST", "REST", 0.1, 1.0),
]  # fmt: skip


def _graphs(created: dict[str, Any]) -> list[dict[str, Any]]:
    collection = json.loads(model_explorer.write(created))
    assert set(collection) == {"label", "graphs"}
    graphs: list[dict[str, Any]] = collection["graphs"]
    return graphs


def _edges(graph: dict[str, Any]) -> dict[str, list[str]]:
    return {node["id"]: [edge["sourceNodeId"] for edge in node["incomingEdges"]] for node in graph["nodes"]}


def test_kernels_stand_for_their_delegate_which_is_a_layer() -> None:
    (graph,) = _graphs(document(report(operators=ROWS)))
    assert {node["id"]: (node["namespace"], node["label"]) for node in graph["nodes"]} == {
        "0": ("", "aten.permute_copy.default"),
        "2": ("XNNPACK 1/layer1/conv", "aten.convolution.default + aten.relu.default"),
        "3": ("XNNPACK 1/layer1", "aten.add.Tensor"),
        "5": ("", "aten.mean.dim"),
    }
    assert _edges(graph) == {"0": [], "2": ["0"], "3": ["2"], "5": ["0", "3"]}
    assert graph["groupNodeAttributes"]["XNNPACK 1"]["share"] == "80.0 %"
    assert graph["groupNodeAttributes"][""]["edges"] == "data flow"
    attributes = {each["key"]: each["value"] for each in graph["nodes"][2]["attrs"]}
    assert attributes["time"] == "< 1.00 µs" and attributes["backend"] == "XNNPACK"


def test_without_a_data_flow_the_edges_are_the_order_of_execution_and_the_graph_says_so() -> None:
    (graph,) = _graphs(document(report(operators=[{**each, "input_rows": []} for each in ROWS])))
    assert _edges(graph) == {"0": [], "2": ["0"], "3": ["2"], "5": ["3"]}
    assert graph["groupNodeAttributes"][""]["edges"] == "order of execution: the data flow is unknown"


def test_the_times_of_each_graph_have_the_ids_of_its_nodes() -> None:
    created = document(report(operators=ROWS), report(id="r2", operators=ROWS), report(id="r3", operators=[]))
    graphs = _graphs(created)
    times = json.loads(model_explorer.write_times(created))
    assert [graph["id"] for graph in graphs] == list(times) and len(set(times)) == 2, "equal names are numbered"
    for data in times.values():
        assert data["results"] == {"0": {"value": 110.0}, "2": {"value": 510.0}, "5": {"value": 90.0}}
        assert [item["stop"] for item in data["gradient"]] == [0, 1]


@pytest.mark.parametrize("module", ["a/b", HOSTILE, "..", "x.\n.y"])
def test_no_name_adds_a_layer_or_a_line(module: str) -> None:
    rows = [row(0, "OPERATOR", HOSTILE, 1.0, 10.0, op_types=[HOSTILE + "\n"], module=module)]
    (graph,) = _graphs(document(report(operators=rows)))
    (node,) = graph["nodes"]
    assert node["namespace"].count("/") <= module.count(".")
    assert "" not in node["namespace"].split("/") or not node["namespace"]
    assert "\n" not in node["label"] + node["namespace"] + "".join(each["value"] for each in node["attrs"])
