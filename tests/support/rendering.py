"""A measured report, and what the command line shows of it."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from etfarm.client.cli.views import render
from tests.support.documents import completed


def report_row(index: int, kind: str, name: str, share: float, p50_ns: float | None, **more: Any) -> dict[str, Any]:
    return {"index": index, "kind": kind, "name": name, "share": share, "p50_ns": p50_ns, **more}


def report_document(**changes: Any) -> dict[str, Any]:
    message = {
        "id": "r1", "cell": "c1", "recipe": "xnnpack_fp32", "method": "forward", "threads": 4, "state": "SUCCEEDED",
        "model": {"name": "resnet8", "digest": "0" * 64},
        "device": {"id": "d1", "name": "pi5-a", "arch": "aarch64", "soc": "cortex-a76", "os": "Linux", "cores": 4},
        "latency": {"samples_ns": [1_840_000] * 543, "p50_ns": 1_840_000, "p50_ci95_ns": [1_820_000, 1_860_000]},
        "profile": {"iterations": 10, "p50_ns": 1_880_000},
        "verdict": {"status": "VALID"},
        "operators": [
            report_row(0, "DELEGATE", "XnnpackBackend", 0.8, 1_504_000, backend="XnnpackBackend", delegated=True),
            report_row(1, "KERNEL", "Convolution (NHWC, F32) IGEMM #2", 0.412, 760_000, parent=0, backend="XnnpackBackend",
                       source={"file": "models/resnet.py", "line": 31, "code": "y = self.conv2(y)"}),
            report_row(2, "KERNEL", "Add (ND) #1", 0.001, None, parent=0, backend="XnnpackBackend", resolution_ns=1000.0),
            report_row(3, "REST", "REST", 0.387, 727_000, parent=0),
            report_row(4, "OPERATOR", "aten.mean.dim", 0.18, 330_000,
                       source={"file": "models/resnet.py", "line": 44, "code": "y = y.mean((2, 3))"}),
            report_row(5, "REST", "REST", 0.02, 46_000),
        ],
        "compile": {
            "cached": True,
            "stages": [{"stage": "TO_EXECUTORCH", "duration_ms": 195.0, "where": "SERVER"}],
            "program": {"digest": "1" * 64, "size_bytes": 320_512},
            "delegation": {"forward": {"subgraphs": 1, "delegated_nodes": 36, "non_delegated_nodes": 1}},
            "warnings": [{"code": "ONE_SAMPLE", "message": "forward was calibrated with one input."}],
        },
        "accuracy": [{"output": "linear", "reference": "program before quantization", "sqnr_db": 38.21, "max_abs_error": 0.0012}],
        "memory": {"peak_rss_bytes": 8 << 20, "planned_bytes": [24_800]},
    }  # fmt: skip
    message.update(changes)
    return completed(message)


def printed(*parts: Any, width: int = 120) -> str:
    """Return what a terminal without colours shows of each part, without the blanks at the ends of lines."""
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def render_text(document: dict[str, Any], width: int = 120, **options: Any) -> str:
    return printed(render.report(document, width=width, **options), width=width)
