"""Facts of a .pt2 that are read without torch: a part of the archive that cannot be read leaves the others known."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest

from etfarm.wire.pt2 import read_archive

LEAF = {"type": None, "context": None, "children_spec": []}


def archive(call_graph: Any, outputs: int = 1) -> bytes:
    """Return an archive of one float32 input with this call graph."""
    tensor = {"as_tensor": {"name": "x"}}
    module = {
        "graph": {"tensor_values": {"x": {"dtype": 7, "sizes": [{"as_int": 3}]}}, "nodes": [{"target": "aten.add"}]},
        "signature": {
            "input_specs": [{"user_input": {"arg": tensor}}],
            "output_specs": [{"user_output": {"arg": tensor}}] * outputs,
        },
        "module_call_graph": call_graph,
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("m/models/model.json", json.dumps({"graph_module": module}))
    return file.getvalue()


def structure(kind: str, context: Any, *children: Any) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": list(children)}


def returning(spec: Any) -> Any:
    return [{"fqn": "", "signature": {"out_spec": json.dumps([1, spec])}}]


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (LEAF, ("0",)),
        (structure("builtins.dict", '["a", "b"]', LEAF, structure("builtins.list", "null", LEAF)), ("a", "b_0")),
        (structure("collections.OrderedDict", '["z", "q"]', LEAF, LEAF), ("z", "q")),
        (structure("builtins.tuple", "null", LEAF, structure("builtins.dict", '["b"]', LEAF)), ("0", "1_b")),
        (structure("builtins.dict", "[1]", LEAF), ("1",)),
        (structure("builtins.dict", '["b", "a"]', LEAF, structure("builtins.dict", '["é/"]', LEAF)), ("b", "a_é/")),
        (structure("builtins.dict", '["", "0"]', LEAF, LEAF), ("0", "1")),
        (structure("my.Class", "null", LEAF), ("0",)),
        (structure("builtins.dict", '["a"]', LEAF, LEAF), ()),
    ],
)
def test_outputs_are_named_by_their_keys(spec: Any, names: tuple[str, ...]) -> None:
    assert read_archive(archive(returning(spec), max(1, len(names)))).output_names == names


@pytest.mark.parametrize("call_graph", [None, [], [{}], [{"fqn": "", "signature": None}], returning("x"), returning(LEAF) * 2])
def test_an_unreadable_call_graph_leaves_the_inputs_known(call_graph: Any) -> None:
    facts = read_archive(archive(call_graph, outputs=2))
    assert (facts.input_names, facts.output_names) == (("x",), ())
    assert str(facts.input_types[0]) == "float32 [3]"


def test_a_structure_that_is_too_deep_leaves_the_inputs_known() -> None:
    deep = "[" * 100_000
    facts = read_archive(archive([{"fqn": "", "signature": {"out_spec": deep}}]))
    assert (facts.input_names, facts.output_names) == (("x",), ())
