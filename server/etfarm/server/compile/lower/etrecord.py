"""ETRecords of any methods and stages, as complete as ExecuTorch's of a single method `forward`, with weights stored once.

ExecuTorch only keeps the exported program of `forward`, stores a single method's edge program as `forward` whatever its
name is, and drops the edge programs of EDGE_PROGRAM_MANAGER_TRANSFORM. It writes the weights with each of these programs.

Here, one program of each method has its weights: the one that Inspector runs to compare the device's values with. That is the
exported program if the record has it as `exported_program`, and the edge program otherwise. The weights of the other programs are
fake tensors, which have a shape and a dtype but no values; ExecuTorch stores and reads them like others. Graphs, JSON with the
stack trace of each node, are compressed.
Source: executorch.devtools.etrecord._etrecord, whose reader accepts everything that is added here.
"""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from zipfile import ZIP_DEFLATED, ZipFile

import torch
from executorch.devtools.etrecord import ETRecord
from executorch.exir.serde.serialize import serialize
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from etfarm.server.workers.errors import is_out_of_memory

EDGE: Final = "edge_dialect_exported_program/"
"""Prefix of the edge programs, from which reports have their lines."""

EXPORTED: Final = "exported"
"""Prefix of the exported programs of several methods in a record: `exported/METHOD`."""

AFTER_TRANSFORM: Final = "edge_after_transform"
"""ExecuTorch's prefix of edge programs that passes have changed: `edge_after_transform/METHOD`."""


_FAST: Final = 1
"""Level of compression; higher ones take several times as long for a little less."""


def save(record: Any, programs: Mapping[str, Any], transformed: Mapping[str, Any], path: Path) -> None:
    """Complete a session's ETRecord and write it to a file.

    Args:
        programs: the lowered exported programs by method.
        transformed: edge programs after EDGE_PROGRAM_MANAGER_TRANSFORM by method; empty if that stage did not run.
    """
    edge = record.edge_dialect_program
    if not isinstance(edge, dict):
        (method,) = programs
        edge = {method: edge}
    exported, graph_id = record.exported_program, record.export_graph_id
    graphs = dict(record.graph_map or {})
    if len(programs) == 1:
        exported = next(iter(programs.values()))
        graph_id = id(exported.graph)
    else:
        # `exported_program` holds a single method, where other readers expect `forward`.
        graphs.update({f"{EXPORTED}/{m}": p for m, p in programs.items() if p is not exported})
    graphs.update({f"{AFTER_TRANSFORM}/{method}": program for method, program in transformed.items()})
    _Record(
        exported, graph_id,
        {method: _without_weights(p) if programs[method] is exported else p for method, p in edge.items()},
        {name: _without_weights(program) for name, program in graphs.items()} or None,
        record._debug_handle_map, record._delegate_map, record._instruction_id_to_num_outs_map,
    ).save(path)  # fmt: skip


class _Record(ETRecord):  # type: ignore[misc]
    """An ETRecord that is written without a copy of the weights in memory; ExecuTorch's own makes two."""

    def _save_exported_program(self, etrecord_zip: ZipFile, module_name: str, method_name: str, ep: Any) -> None:
        try:
            _write(etrecord_zip, f"{module_name}/{method_name}" if method_name else module_name, ep)
        except Exception as error:  # lines come from the edge program
            if is_out_of_memory(error):
                raise
            traceback.print_exc()

    def _save_edge_dialect_program(self, etrecord_zip: ZipFile, method_name: str, edge_dialect_program: Any) -> None:
        _write(etrecord_zip, f"{EDGE}{method_name}", edge_dialect_program)


def _write(archive: ZipFile, name: str, program: Any) -> None:
    weights = {key: value for key, value in program.state_dict.items() if not isinstance(value, FakeTensor)}
    is_fake = len(weights) < len(program.state_dict)
    try:
        artifact = serialize(program if is_fake else _with_state(program, {}, program.constants))
    except Exception as error:
        if is_out_of_memory(error) or not name.startswith(EDGE):
            raise
        traceback.print_exc()
        _write_lines(archive, name, program)
        return
    archive.writestr(name, artifact.exported_program, ZIP_DEFLATED, _FAST)
    if is_fake:
        archive.writestr(f"{name}_state_dict", artifact.state_dict)
    else:
        with archive.open(f"{name}_state_dict", "w", force_zip64=True) as entry:
            torch.save(weights, entry)
    archive.writestr(f"{name}_constants", artifact.constants)
    archive.writestr(f"{name}_example_inputs", artifact.example_inputs)


def _write_lines(archive: ZipFile, name: str, program: Any) -> None:
    """Write what a report's lines need of a program that ExecuTorch cannot serialize, such as one with a scan.

    It is JSON as ExecuTorch's, with the operators of branches and loop bodies after those around them; Inspector cannot read it.
    """
    nodes = []
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.op == "call_function":
                stack = node.meta.get("nn_module_stack") or {}
                metadata = {
                    "nn_module_stack": ";".join(f"{key},{path},{kind}" for key, (path, kind) in stack.items()),
                    "stack_trace": node.meta.get("stack_trace") or "",
                    "debug_handle": str(node.meta.get("debug_handle") or 0),
                }
                operator = (
                    node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "_op", node.target)
                )
                nodes.append({"target": str(operator), "inputs": [], "outputs": [], "metadata": metadata})
    module = {"graph": {"nodes": nodes, "outputs": [], "tensor_values": {}}, "signature": {}}
    archive.writestr(name, json.dumps({"graph_module": module}), ZIP_DEFLATED, _FAST)
    archive.writestr(f"{name}_state_dict", b"")


def _without_weights(program: Any) -> Any:
    """Return a program with the same graph whose weights and constants are fake tensors."""
    mode = FakeTensorMode()

    def fake(values: Mapping[str, Any]) -> dict[str, Any]:
        # Constants may be objects of other types.
        return {
            name: mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }

    return _with_state(program, fake(program.state_dict), fake(program.constants))


def _with_state(program: Any, state_dict: dict[str, Any], constants: dict[str, Any]) -> Any:
    """Return a program with the same graph and other weights and constants."""
    duplicate = copy.copy(program)
    duplicate._state_dict = state_dict
    duplicate._constants = constants
    return duplicate
