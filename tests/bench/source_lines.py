"""How much of the kernels' time of common networks has a source line in the report, and how much has a named cause without one.

python -m tests.bench.source_lines [--only REGEX] [--json FILE] [--rows]

Each network is exported as the client does it from a factory, compiled as the server does it, run with the tracer on, and
analyzed; a process for each. The time of a row of the report counts as

    line      the row has a source line,
    cause     it has none, but says why,
    neither   it has none and does not say why: a defect.

The networks of torchvision and timm are left out where those are not installed: `pip install --no-deps torchvision timm`, and
safetensors, huggingface_hub and pyyaml. `--rows` prints the rows without a line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from etfarm.client.export.eager import export_source
from etfarm.client.export.factory import load_source
from etfarm.client.export.spec import ModuleFactory
from etfarm.server.reports.analyze import analyze
from etfarm.server.reports.request import AnalyzeRequest
from etfarm.v1 import report_pb2

RUNS: Final = 8
RECIPE: Final = "xnnpack_fp32"
GOAL: Final = 0.95
"""Least fraction of the time that has a line or a cause."""

Network = tuple[nn.Module, tuple[Any, ...]]


def _image(size: int = 224) -> tuple[torch.Tensor]:
    return (torch.randn(1, 3, size, size),)


def _timm(name: str) -> Network:
    from tests.support.torchvision import torchvision_models

    torchvision_models()  # timm imports torchvision
    import timm

    return timm.create_model(name, pretrained=False).eval(), _image()


def _torchvision(name: str, size: int = 224) -> Network:
    from tests.support.torchvision import torchvision_models

    return getattr(torchvision_models(), name)(weights=None).eval(), _image(size)


def _example(name: str) -> Network:
    from executorch.examples.models import MODEL_NAME_TO_MODEL
    from executorch.examples.models.model_factory import EagerModelFactory

    module, inputs, _, _ = EagerModelFactory.create_model(*MODEL_NAME_TO_MODEL[name])
    return module.eval(), inputs


def timm_levit_128s() -> Network:
    """Return a network whose delegates have several reshapes in a row."""
    return _timm("levit_128s")


def timm_efficientvit_b0() -> Network:
    """Return a network with an autocast region."""
    return _timm("efficientvit_b0")


def torchvision_mobilenet_v3() -> Network:
    """Return a network of convolutions."""
    return _torchvision("mobilenet_v3_small")


def torchvision_resnet18() -> Network:
    """Return a network of convolutions."""
    return _torchvision("resnet18")


def torchvision_convnext_tiny() -> Network:
    """Return a network of convolutions, norms and linear layers in turns, on small images."""
    return _torchvision("convnext_tiny", 96)


def examples_llama2() -> Network:
    """Return a transformer of ExecuTorch's examples."""
    return _example("llama2")


def examples_mobilenet_v1_025() -> Network:
    """Return a network of ExecuTorch's examples."""
    return _example("mobilenet_v1_025")


def examples_lstm() -> Network:
    """Return the LSTM of ExecuTorch's examples."""
    return _example("lstm")


def torch_lstm() -> Network:
    """Return a module of torch's own as the whole model."""
    return nn.LSTM(32, 64, num_layers=2, batch_first=True).eval(), (torch.randn(1, 8, 32),)


def torch_sequential() -> Network:
    """Return a root that is a container of torch's."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8)).eval(), (torch.randn(4, 64),)


def torch_transformer_encoder() -> Network:
    """Return a root whose layers are copies that torch makes."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), (torch.randn(1, 16, 64),)


class _Cached(nn.Module):
    """Attention over a cache of keys and values that it writes into."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, 4, 64, 16))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        query, key, value = (part(x).view(1, -1, 4, 16).transpose(1, 2) for part in self.project)
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        attended = nn.functional.scaled_dot_product_attention(query, self.keys, self.values)
        return attended.transpose(1, 2).reshape(1, -1, 64)


def cached_attention() -> Network:
    """Return attention with a cache of keys and values."""
    return _Cached().eval(), (torch.randn(1, 4, 64), torch.arange(4))


class _Autocast(nn.Module):
    """An autocast region that is off, as vision transformers have for their normalizations, and one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        with torch.autocast("cpu", enabled=False):
            y = y * y.sigmoid()
            y = y / (y.mean(-1, keepdim=True) + 1e-5)
        with torch.no_grad():
            y = y.softmax(-1)
        return self.down(y)


def autocast_region() -> Network:
    """Return a network with regions that torch.export keeps as subgraphs."""
    return _Autocast().eval(), (torch.randn(8, 64),)


NETWORKS: Final = (
    timm_levit_128s, timm_efficientvit_b0, torchvision_mobilenet_v3, torchvision_resnet18, torchvision_convnext_tiny,
    examples_llama2, examples_mobilenet_v1_025, examples_lstm, torch_lstm, torch_sequential, torch_transformer_encoder,
    cached_attention, autocast_region,
)  # fmt: skip


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Return a network's shares of time, in this process."""
    model, inputs = _export(name, folder)
    _compile(model, folder)
    traced_ns = _run(inputs, folder)
    request = AnalyzeRequest(
        pte=folder / "model.pte", etdump=folder / "trace.etdp", etrecord=folder / "model.etrecord", model=None, inputs=None,
        outputs=None, samples=None, method="forward", output_names=(), traced_ns=traced_ns,
    )  # fmt: skip
    report = report_pb2.Report.FromString(analyze(request, folder, lambda event: None))
    return {
        "network": name,
        **_shares(report),
        "pt2_bytes": model.stat().st_size,
        "pte_bytes": (folder / "model.pte").stat().st_size,
        "etrecord_bytes": (folder / "model.etrecord").stat().st_size,
        "warnings": [warning.message for warning in report.compile.warnings],
        "rows_without_line": [_row(row, report) for row in _leaves(report) if not _has_line(row) and (row.share or 0) > 0],
    }


def _export(name: str, folder: Path) -> tuple[Path, tuple[Any, ...]]:
    source = load_source(ModuleFactory("tests.bench.source_lines", name))
    exported = export_source(source, name=name)
    model = folder / "model"
    pt2 = exported.methods["forward"].pt2
    assert isinstance(pt2, bytes)
    model.write_bytes(pt2)
    return model, source.example_inputs["forward"]


def _compile(model: Path, folder: Path) -> None:
    from etfarm.server.compile.lower import tasks
    from etfarm.server.compile.request import LowerRequest
    from etfarm.wire import recipes

    request = LowerRequest({"forward": model}, {"forward": model}, "network", recipes.parse(RECIPE).json)
    tasks.lower_model(request, folder, lambda event: None)


def _run(inputs: tuple[Any, ...], folder: Path) -> tuple[int, ...]:
    from executorch.extension.pybindings.portable_lib import _load_for_executorch

    module = _load_for_executorch(str(folder / "model.pte"), enable_etdump=True)
    leaves = torch.utils._pytree.tree_leaves(inputs)
    traced_ns = []
    for _ in range(RUNS):
        began_ns = time.perf_counter_ns()
        module.run_method("forward", leaves)
        traced_ns.append(time.perf_counter_ns() - began_ns)
    module.write_etdump_result_to_file(str(folder / "trace.etdp"))
    return tuple(traced_ns)


def _leaves(report: report_pb2.Report) -> list[report_pb2.OperatorRow]:
    """Return the rows of kernels: neither rests, nor delegates that list their kernels."""
    parents = {row.parent for row in report.operators if row.HasField("parent")}
    return [row for row in report.operators if row.kind != report_pb2.OPERATOR_KIND_REST and row.index not in parents]


def _has_line(row: report_pb2.OperatorRow) -> bool:
    return row.HasField("source") or bool(row.sources)


def _cause(row: report_pb2.OperatorRow, report: report_pb2.Report) -> str:
    parent = report.operators[row.parent].unaligned_reason if row.HasField("parent") and not row.debug_handles else ""
    return str(getattr(row, "source_reason", "") or parent)


def _shares(report: report_pb2.Report) -> dict[str, Any]:
    rows = _leaves(report)
    total = sum(row.share for row in rows)
    line = sum(row.share for row in rows if _has_line(row))
    cause = sum(row.share for row in rows if not _has_line(row) and _cause(row, report))
    return {
        "kernels": len(rows), "line": line / total, "cause": cause / total, "neither": 1.0 - (line + cause) / total,
        "inserted_with_line": sum(row.share for row in rows if _has_line(row) and _cause(row, report)) / total,
    }  # fmt: skip


def _row(row: report_pb2.OperatorRow, report: report_pb2.Report) -> dict[str, Any]:
    return {
        "name": row.name,
        "op_types": list(row.op_types),
        "module": row.module,
        "share": row.share,
        "cause": _cause(row, report),
    }


def _is_missing(name: str) -> bool:
    package = name.partition("_")[0]
    return package in ("timm", "torchvision") and importlib.util.find_spec(package) is None


def main() -> int:
    """Measure every network and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="networks whose names it is found in")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values, with the rows that have no line")
    parser.add_argument("--rows", action="store_true", help="print the rows without a line")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, folder = arguments.one
        (Path(folder) / "result.json").write_text(json.dumps(measure(name, Path(folder))))
        return 0
    results: list[dict[str, Any]] = []
    print(f"{'network':28} {'kernels':>7} {'line':>8} {'cause':>8} {'neither':>8}")
    for network in NETWORKS:
        name = network.__name__
        if re.search(arguments.only, name) and not _is_missing(name):
            results.append(_in_a_process(name))
            print(_text(results[-1], rows=arguments.rows), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"schema": "etfarm.bench.source_lines/1", "networks": results}, indent=1))
    return 0 if results and all("error" not in one and one["neither"] <= 1 - GOAL for one in results) else 1


def _text(result: dict[str, Any], *, rows: bool) -> str:
    if "error" in result:
        return f"{result['network']:28} {result['error']}"
    shares = " ".join(f"{result[key]:8.1%}" for key in ("line", "cause", "neither"))
    lines = [f"{result['network']:28} {result['kernels']:7} {shares}"]
    for row in sorted(result["rows_without_line"], key=lambda row: -row["share"])[:12] if rows else ():
        op_types = " ".join(row["op_types"])
        lines.append(f"    {row['share']:6.2%} {row['name'][:48]:48} {op_types[:60]} [{row['module']}] {row['cause']}")
    return "\n".join(lines)


def _in_a_process(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="source-lines-") as folder:
        command = [sys.executable, "-m", "tests.bench.source_lines", "--one", name, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        child = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        if child.returncode != 0:
            return {"network": name, "error": (child.stderr.strip().splitlines() or ["no output"])[-1]}
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return result


if __name__ == "__main__":
    sys.exit(main())
