"""Uploads that attack a server: real .pt2 files of torch.export.save whose JSON or zip was changed afterwards."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
SAMPLES = "data/sample_inputs/model.pt"
LENGTH = 48
"""Elements that `Host` takes from the node that an attack replaces."""

Members = dict[str, bytes]


class Host(nn.Module):
    """A linear, to be quantized, and bytes that an attack puts its own node in place of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(LENGTH, LENGTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.ones(LENGTH, dtype=torch.uint8).float()


class Branches(nn.Module):
    """A condition, whose branches are graphs within an argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + torch.ones(LENGTH), lambda y: y - torch.ones(LENGTH), (x,))


def host() -> Any:
    torch.manual_seed(0)
    return torch.export.export(Host().eval(), (torch.zeros(2, LENGTH),))


def branches() -> Any:
    return torch.export.export(Branches(), (torch.ones(LENGTH),))


def members(program: Any, folder: Path) -> Members:
    """Return the members of the program's .pt2, by name without the root."""
    path = folder / "good.pt2"
    torch.export.save(program, path)
    with zipfile.ZipFile(path) as archive:
        return {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}


def write(path: Path, contents: Members, root: str = "archive/") -> Path:
    """Write members as torch does: stored, in one root folder."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in contents.items():
            archive.writestr(root + name, data)
    return path


def changed(contents: Members, change: Callable[[Any], None], name: str = MODEL) -> Members:
    """Return the members with one JSON document changed."""
    document = json.loads(contents[name])
    change(document)
    return contents | {name: json.dumps(document).encode()}


def node(graph: Any, target: str) -> Any:
    """Return the first node of a serialized graph with the target."""
    return next(one for one in graph["nodes"] if one["target"] == target)


def replaces_ones(target: str, inputs: list[Any]) -> Callable[[Any], None]:
    """Put an operator in the place of the program's first `aten.ones`."""

    def change(program: Any) -> None:
        result = node(program["graph_module"]["graph"], "torch.ops.aten.ones.default")
        result.update(target=target, inputs=inputs)

    return change


def argument(name: str, kind: str, value: Any, *, keyword: bool = False) -> Any:
    """One argument of a serialized node, as `("size", "as_int", 4)`."""
    return {"name": name, "arg": {kind: value}, "kind": 2 if keyword else 1}


def reads(file: Path) -> Callable[[Any], None]:
    """Make the program read a file's first bytes."""
    return replaces_ones(
        "torch.ops.aten.from_file.default",
        [
            argument("filename", "as_string", str(file)),
            argument("shared", "as_bool", False),
            argument("size", "as_int", LENGTH),
            argument("dtype", "as_scalar_type", 1, keyword=True),
        ],
    )
