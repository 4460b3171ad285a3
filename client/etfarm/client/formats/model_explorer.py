"""The executed graph of each report for Google's Model Explorer, and the times of its nodes as node data.

A node is an operator that the runtime executed, or a kernel inside a delegate. Layers are delegates, and modules in them. Edges
are the data flow between rows; without it, as in reports of an older server, they are the order of execution, and the graph's
attributes say so.

Source: `Graph`, `GraphCollection` (graph_builder.py) and `ModelNodeData` (node_data_builder.py) of ai-edge-model-explorer 0.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from etfarm.client.formats import answers, label, units
from etfarm.wire import views
from etfarm.wire.escapes import in_a_line

Json = Mapping[str, Any]

_DELEGATED: Final = {"backgroundColor": "#cfe0f8", "borderColor": "#3f7fd1"}
_PORTABLE: Final = {"backgroundColor": "#f7dcbd", "borderColor": "#d9822b"}
_HEAT: Final = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#e8590c"}]


def write(document: Json) -> bytes:
    """Return the graphs of a document, a `GraphCollection` with a graph for each report that was traced, as JSON."""
    job = document["job"] or {}
    collection = {"label": f"etfarm {job.get('id') or ''}".strip(), "graphs": [graph(*named) for named in _named(document)]}
    return _dumped(collection)


def write_times(document: Json) -> bytes:
    """Return the nodes' mean times in microseconds, the node data of the graphs that `write` returns, as JSON."""
    return _dumped({name: node_data(report) for name, report in _named(document)})


def _dumped(value: Json) -> bytes:
    return (json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _named(document: Json) -> Iterator[tuple[str, Json]]:
    """Yield the traced reports with ids that are unique in the document."""
    for place, report in enumerate(document["reports"]):
        if report["operators"]:
            yield in_a_line(f"{place} {label(report)}"), report


def graph(name: str, report: Json) -> dict[str, Any]:
    """Return a report's graph: {id, nodes, groupNodeAttributes}."""
    rows = _Rows(report["operators"])
    return {
        "id": name,
        "nodes": [
            {
                "id": str(row["index"]),
                "label": _label(row),
                "namespace": rows.namespace(row),
                "attrs": [{"key": key, "value": in_a_line(value)} for key, value in _attributes(row)],
                "incomingEdges": [
                    {"sourceNodeId": str(source), "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}
                    for place, source in enumerate(rows.sources(row))
                ],
                "style": _DELEGATED if row["delegated"] else _PORTABLE,
            }
            for row in rows.nodes
        ],
        "groupNodeAttributes": {"": dict(_facts(report, rows)), **rows.layers()},
    }


def node_data(report: Json) -> dict[str, Any]:
    """Return the mean time of each node, `GraphNodeData`."""
    nodes = _Rows(report["operators"]).nodes
    results = {str(row["index"]): {"value": row["mean_ns"] / 1e3} for row in nodes if row["mean_ns"] is not None}
    return {"name": "mean time, µs", "results": results, "gradient": _HEAT}


class _Rows:
    """The rows of a report as nodes: kernels instead of their delegate, and no rest."""

    def __init__(self, operators: Sequence[Json]) -> None:
        rows = [row for row in operators if row["kind"] != "REST"]
        self._by_index = {row["index"]: row for row in rows}
        self._kernels: dict[int, list[int]] = {}
        for row in rows:
            if row["parent"] is not None:
                self._kernels.setdefault(row["parent"], []).append(row["index"])
        self.nodes = [row for row in rows if row["index"] not in self._kernels]
        self._before = dict(zip((row["index"] for row in self.nodes[1:]), (row["index"] for row in self.nodes), strict=False))
        self.has_data_flow = any(row["input_rows"] for row in rows)

    def sources(self, row: Json) -> list[int]:
        """Return the nodes that a node takes its inputs from; without data flow, the node executed before it."""
        if not self.has_data_flow:
            return [self._before[row["index"]]] if row["index"] in self._before else []
        inputs = list(row["input_rows"])
        parent = row["parent"]
        if parent in self._kernels and self._kernels[parent][0] == row["index"]:
            inputs += self._by_index.get(parent, {}).get("input_rows", ())
        # A delegate with kernels is no node: its last kernel yields its outputs.
        nodes = [self._kernels.get(source, [source])[-1] for source in inputs if source in self._by_index]
        return sorted({source for source in nodes if source != row["index"]})

    def namespace(self, row: Json) -> str:
        """Return a node's layers: `XNNPACK 3/layer1/conv`."""
        delegate = self._by_index.get(row["parent"]) if row["parent"] is not None else None
        layers = [self._layer(delegate)] if delegate is not None else []
        return "/".join([*layers, *(_plain(part) for part in (row["module"] or "").split(".") if part)])

    def layers(self) -> dict[str, dict[str, str]]:
        """Return the attributes of the delegates' layers."""
        return {
            self._layer(self._by_index[index]): {key: in_a_line(value) for key, value in _attributes(self._by_index[index])}
            for index in self._kernels
            if index in self._by_index
        }

    def _layer(self, delegate: Json) -> str:
        return _plain(f"{answers.backend(delegate)} {delegate['index']}")


def _plain(text: str) -> str:
    """Return a layer's name, which must not contain a slash."""
    return in_a_line(text).replace("/", "_")


def _label(row: Json) -> str:
    return in_a_line(" + ".join(row["op_types"]) or row["name"] or "operator")


def _attributes(row: Json) -> Iterator[tuple[str, str]]:
    spread = [units.time(row[key]) for key in ("p10_ns", "p90_ns") if row[key] is not None]
    source = row["source"] or {}
    values = {
        "row": str(row["index"]),
        "kernel": row["name"],
        "backend": answers.backend(row),
        "time": answers.time_of(row),
        "mean, 95 % interval": " to ".join(units.time(end) for end in row.get("mean_ci95_ns") or ()),
        "p10 to p90": " to ".join(spread) if len(spread) == 2 else "",
        "share": units.percent(row["share"]),
        "module": row["module"],
        "source": views.line_of(row) or "",
        "code": (source.get("code") or "").strip(),
        "kernels without lines": row["unaligned_reason"],
        "line": row["source_reason"],
    }
    return ((key, str(value)) for key, value in values.items() if value)


def _facts(report: Json, rows: _Rows) -> Iterator[tuple[str, str]]:
    latency = answers.latency(report)
    facts = {
        "report": label(report),
        "p50": f"{latency.text} {latency.detail}".strip(),
        "verdict": answers.verdict(report).text,
        "traced p50": units.time(report["profile"]["p50_ns"]) if report["profile"] else "",
        "delegated": answers.delegated_nodes(report),
        "edges": "data flow" if rows.has_data_flow else "order of execution: the data flow is unknown",
    }
    return ((key, in_a_line(value)) for key, value in facts.items() if value)
