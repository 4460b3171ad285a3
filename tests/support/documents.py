"""Documents of etfarm.report/1 written by hand, for the pure functions that take them; every key is there."""

from __future__ import annotations

from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor

from etfarm.v1 import report_pb2
from etfarm.wire.report import SCHEMA
from etfarm.wire.report_keys import Key, Shape, Type, keys_of, project

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&`|_*"
"""A name that does harm wherever it is not escaped."""


def completed(values: dict[str, Any], message: Descriptor = report_pb2.Report.DESCRIPTOR) -> dict[str, Any]:
    """A REPORT, or another object, with every key: those of `values`, and the others empty. Required texts may be missing."""
    full = project(message_factory.GetMessageClass(message)())
    for key in keys_of(message):
        value = values.get(key.name)
        if value is None or value == []:
            continue
        if key.shape is Shape.MAP:
            full[key.name] = {name: _item(key, item) for name, item in sorted(value.items())}
        else:
            full[key.name] = [_item(key, item) for item in value] if key.shape is Shape.LIST else _item(key, value)
    assert set(values) <= set(full), f"no keys of {message.name}: {set(values) - set(full)}"
    return full


def _item(key: Key, value: Any) -> Any:
    if key.message is not None:
        return completed(value, key.message)
    return float(value) if key.type is Type.NUMBER else value


def row(index: int, kind: str, name: str, share: float, p50_ns: float | None, **more: Any) -> dict[str, Any]:
    """Return an operator's row, as the contract's JSON has it."""
    return {"index": index, "kind": kind, "name": name, "share": share, "p50_ns": p50_ns, **more}


def report(**changes: Any) -> dict[str, Any]:
    """One REPORT: a delegate with a kernel, an operator, a rest; measured, quantized and compared."""
    where = {"file": "models/resnet.py", "line": 31, "code": "y = self.conv2(y)"}
    message = {
        "id": "r1", "cell": "c1", "recipe": "xnnpack_fp32", "method": "forward", "threads": 4, "state": "SUCCEEDED",
        "model": {"name": "resnet8", "digest": "0" * 64},
        "device": {"id": "d1", "name": "pi5-a", "arch": "aarch64", "soc": "cortex-a76", "os": "Linux", "cores": 4},
        "runner": {"kind": "native", "executorch": "1.5.1"},
        "measurement": {"warmup": 10, "iterations": 4, "duration_ns": 10**9},
        "latency": {"samples_ns": [1_840_000, 1_850_000, 1_830_000, 2_900_000], "p50_ns": 1_840_000,
                    "p50_ci95_ns": [1_820_000, 1_860_000]},
        "profile": {"iterations": 10, "p50_ns": 1_880_000},
        "verdict": {"status": "VALID"},
        "operators": [
            row(0, "DELEGATE", "XnnpackBackend", 0.8, 1_504_000, backend="XnnpackBackend", delegated=True),
            row(1, "KERNEL", "Convolution (NHWC, F32) IGEMM #2", 0.412, 760_000, parent=0, backend="XnnpackBackend",
                delegated=True, op_types=["aten.convolution.default"], module="layer1.conv", source=where, aligned=True,
                debug_handles=[4, 5], times_ns=[760_000, 761_000]),
            row(2, "KERNEL", "Add (ND) #1", 0.001, None, parent=0, backend="XnnpackBackend", delegated=True,
                resolution_ns=1000.0, module="layer1", aligned=True, op_types=["aten.add.Tensor"]),
            row(3, "REST", "REST", 0.387, 727_000, parent=0, backend="XnnpackBackend", delegated=True),
            row(4, "OPERATOR", "aten::mean.out", 0.18, 330_000, op_types=["aten.mean.dim"],
                source={"file": "models/resnet.py", "line": 44, "code": "y = y.mean((2, 3))"}),
            row(5, "REST", "REST", 0.02, 46_000),
        ],
        "compile": {
            "stages": [{"stage": "TO_EXECUTORCH", "duration_ms": 195.0, "where": "ACTOR_SERVER"}],
            "program": {"digest": "1" * 64, "size_bytes": 320_512},
            "delegation": {"forward": {"subgraphs": 1, "delegated_nodes": 36, "non_delegated_nodes": 1}},
            "warnings": [{"code": "ONE_SAMPLE", "message": "forward was calibrated with one input."}],
        },
        "accuracy": [{"output": "linear", "reference": "program before quantization", "sqnr_db": 38.21, "max_abs_error": 0.0012}],
        "memory": {"peak_rss_bytes": 8 << 20, "planned_bytes": [24_800]},
        "timeline": [
            {"actor": "CLIENT", "phase": "TORCH_EXPORT", "start_ms": -856.0, "duration_ms": 856.0},
            {"actor": "SERVER", "phase": "COMPILE", "start_ms": 16.0, "duration_ms": 900.0},
            {"actor": "DEVICE", "phase": "TIMED", "start_ms": 1000.0, "duration_ms": 1001.0},
        ],
    }  # fmt: skip
    message.update(changes)
    return completed(message)


def document(*reports: dict[str, Any], error: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a document of a job with those reports."""
    job = {
        "id": "0123456789abcdef", "name": None, "labels": {}, "state": "SUCCEEDED", "submitted_at": "2026-01-02T03:04:05Z",
        "finished_at": "2026-01-02T03:04:09Z", "server_version": "0.1.0", "tags": [],
    }  # fmt: skip
    return {"schema": SCHEMA, "job": job, "reports": list(reports), "error": error}


def numerics() -> dict[str, Any]:
    """Return the fields of a report with a numerics pass, whose second operator is bad."""
    values = {"dtype": "float32", "shape": [1, 8], "min": -1.0, "max": 2.0, "mean": 0.1, "stddev": 0.5}
    histogram = {"low": -1.0, "high": 2.0, "expected": [1, 4, 3], "actual": [2, 4, 2]}
    where = {"file": "models/resnet.py", "line": 31, "code": "y = self.conv2(y)"}
    gaps = []
    for place, decibels in enumerate((58.0, -1.5, -1.2)):
        for reference, gain in (("QUANTIZED", 20.0), ("EAGER", 0.0)):
            gaps.append(
                {"ops": ["aten.convolution.default"], "snr_db": decibels + gain * (place == 0), "mse": 0.01, "max_abs_error": 0.2,
                 "reference": reference, "source": where, "module": f"layer{place}.conv", "expected": values, "actual": values,
                 "histogram": histogram, "first_bad": place == 1 and reference == "QUANTIZED"}
            )  # fmt: skip
    return {
        "numeric_gap": gaps,
        "numerics": {"program": {"digest": "2" * 64, "size_bytes": 4096}, "threshold_db": 10.0, "first_bad": 2},
    }


def known_part(after: Any, before: Any) -> Any:
    """Return `after` without the keys that an older release did not have, all of which must be empty in what it wrote."""
    if isinstance(after, dict) and isinstance(before, dict):
        added = {key: value for key, value in after.items() if key not in before}
        assert not any(added.values()), added
        return {key: known_part(value, before[key]) for key, value in after.items() if key in before}
    if isinstance(after, list) and isinstance(before, list) and len(after) == len(before):
        return [known_part(*pair) for pair in zip(after, before, strict=True)]
    return after
