"""XNNPACK's graph in a program: read as ExecuTorch reads it, and refused where it is none."""

from __future__ import annotations

import importlib.resources
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from executorch.backends.xnnpack import serialization

from etfarm.server.reports.trace import graph, xnnpack
from tests.support.traces import traced

NAMES = ["residual", "residual_int8", "gated_dynamic", "int8", "xnnpack"]


def _payloads(name: str) -> list[bytes]:
    run = traced(name)
    program = graph.read_program(run.pte, run.method)
    return [bytes(part.data) for part in program.values() if part.name == xnnpack.NAME and part.data is not None]


def _schema() -> str:
    return importlib.resources.files(serialization).joinpath("schema.fbs").read_text()


def _decoded(payload: bytes, folder: Path) -> dict[str, Any]:
    """Return the same graph by ExecuTorch's flatc and schema."""
    from executorch.exir._serialize._flatbuffer import _get_flatc_path

    offset, size = int.from_bytes(payload[10:14], "little"), int.from_bytes(payload[14:18], "little")
    (folder / "schema.fbs").write_text(_schema())
    (folder / "graph.bin").write_bytes(payload[offset : offset + size])
    command = [
        _get_flatc_path(),
        "--json",
        "--strict-json",
        "--defaults-json",
        "--raw-binary",
        "-o",
        str(folder),
        "schema.fbs",
        "--",
        "graph.bin",
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    result: dict[str, Any] = json.loads(re.sub(r"(: -?)inf\b", r"\1Infinity", (folder / "graph.json").read_text()))
    return result


def test_kinds_and_fields_are_those_of_the_schema() -> None:
    schema = _schema()
    union = re.search(r"union XNodeUnion \{(.*?)\}", schema, re.DOTALL)
    assert union
    tables = dict(re.findall(r"^table (\w+) \{(.*?)\}", schema, re.DOTALL | re.MULTILINE))
    members = [member.strip().partition(":") for member in union[1].strip(" \n,").split(",")]
    assert len(members) == len(xnnpack._KINDS)
    for (name, _, table), (kind, (inputs, outputs)) in zip(members, xnnpack._KINDS, strict=True):
        fields = re.findall(r"(\w+)\s*:", tables[table.strip() or name])
        ids = [slot for slot, field in enumerate(fields) if field.endswith("_id")]
        assert name == f"XNN{kind}"
        assert list(inputs) == [slot for slot in ids if not fields[slot].startswith("output")]
        assert list(outputs) == [slot for slot in ids if fields[slot].startswith("output")]


@pytest.mark.parametrize("name", NAMES)
def test_a_real_graph_is_what_executorch_reads(name: str, tmp_path: Path) -> None:
    for payload in _payloads(name):
        wanted, result = _decoded(payload, tmp_path), xnnpack.read(payload)
        assert [f"XNN{node.kind}" for node in result.nodes] == [node["xnode_union_type"] for node in wanted["xnodes"]]
        for node, other in zip(result.nodes, wanted["xnodes"], strict=True):
            union = other["xnode_union"]
            assert node.debug_handle == (None if other["debug_handle"] == 65535 else other["debug_handle"])
            assert node.clamped == ("output_min_max" in other)
            assert set(node.outputs) == {id_ for field, id_ in union.items() if re.fullmatch(r"output\w*_id", field)}
            assert set(node.inputs) <= {id_ for field, id_ in union.items() if field.endswith("_id")}
        for value in wanted["xvalues"]:
            tensor = value["xvalue_union"].get("tensor_value", value["xvalue_union"])
            known = result.values[tensor.get("id_out", 0)]
            assert known.constant == bool(tensor.get("constant_buffer_idx"))
            assert known.output == bool(tensor.get("flags", 0) & 2)
            assert (known.datatype == 3) == (tensor["datatype"] == "xnn_datatype_qint8")


def test_bytes_without_a_header_are_refused() -> None:
    for data in (b"", b"no header", bytes(400)):
        with pytest.raises(xnnpack.BadGraph):
            xnnpack.read(data)
