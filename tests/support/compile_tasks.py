"""Tasks with the contract of the compiling children and none of torch: cheap, real processes.

A model's bytes are its orders, a line each, to the task that they name first:
`TASK refuse`, `TASK die`, `TASK hang`, `TASK wait FILE` (while somebody holds its lock), `TASK escape`, `TASK flood` (it
tells of each stage again and again), `TASK move` (its folder is a link to another), `TASK say KEY JSON` (in place of what
it would answer), `TASK answer HEX` (these bytes in place of its whole answer), `TASK add HEX` (these bytes behind it).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etfarm.server.compile.request import InspectRequest, LowerRequest, QuantizeRequest
from etfarm.v1 import child_pb2, compile_pb2
from etfarm.wire.errors import UserError
from etfarm.wire.messages import fill

Emit = Callable[[bytes], None]
PLACES = [{"source": {"file": "net.py", "line": 3, "code": "y = x + 1"}, "module": "add", "count": 2}]
FEW = {"code": "FEW", "message": "One."}
FACTS = {"inputs": [], "outputs": [], "operators": ["aten::add.out"], "backends": ["XnnpackBackend"], "planned_bytes": [64]}


class Refused(UserError):
    """What a stage refuses."""

    reason = "STAGE_FAILED"


def quantize(request: QuantizeRequest, folder: Path, emit: Emit) -> bytes:
    stages = []
    for stage in ("QUANTIZE", "TORCH_EXPORT"):
        stages.append(_stage("quantize", stage, request.models, emit))
    programs = {}
    for method, path in request.models.items():
        samples = b"".join(sample.read_bytes() for sample in request.calibration[method])
        programs[method] = f"{method}.pt2"
        (folder / f"{method}.pt2").write_bytes(b"quantized " + samples + b"\n" + path.read_bytes())
    stayed = {method: [{"op": "aten.sin", "count": 2, "places": PLACES}] for method in programs}
    text = _find_overrides("quantize", request.models)
    result: Any = {"stages": stages, "programs": programs, "warnings": [FEW], "stayed_fp32": stayed} | text
    return _answer("quantize", request.models, _encode(result))


def lower(request: LowerRequest, folder: Path, emit: Emit) -> bytes:
    stages = [_stage("lower", "TO_EDGE_TRANSFORM_AND_LOWER", request.models, emit)]
    result: dict[str, Any] = {
        "stages": stages, "program": None, "etrecord": None, "stage_files": {}, "inputs": {}, "delegation": {},
        "toolchain": {}, "warnings": [], "facts": None, "sizes": None, "modules": [], "checks": [],
        "stayed_fp32": {},
    }  # fmt: skip
    if request.stop_after is not None:
        (folder / "delegation.csv").write_text(request.stop_after)
        stopped: Any = result | {"stage_files": {"delegation.csv": "delegation.csv"}}
        return _answer("lower", request.models, _encode(stopped))
    stages.append(_stage("lower", "TO_EXECUTORCH", request.models, emit))
    models = sorted(request.models.items())
    constants = [path.read_bytes() for _, path in sorted(request.constant_methods.items())]
    (folder / "model.pte").write_bytes(b"pte " + b"|".join([path.read_bytes() for _, path in models] + constants))
    (folder / "weights.ptd").write_bytes(b"ptd")
    (folder / "model.etrecord").write_bytes(b"etrecord")
    (folder / "forward.ett").write_bytes(b"inputs")
    if _find_orders("lower", "move", request.models):
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to("elsewhere")
    pte = "../model.pte" if _find_orders("lower", "escape", request.models) else "model.pte"
    outputs = [{"output": "0", "equal": False, "max_abs_error": 0.5, "sqnr_db": None}]
    whole: Any = (
        result
        | {
            "program": {"pte": pte, "data": {"weights": "weights.ptd"}},
            "etrecord": "model.etrecord",
            "inputs": {"forward": "forward.ett"},
            "delegation": {
                method: {
                    "subgraphs": 1, "delegated_nodes": 2, "non_delegated_nodes": 3,
                    "operators": [{"op": "aten.sin", "delegated": 0, "non_delegated": 2, "places": PLACES}],
                }
                for method, _ in models
            },
            "facts": {"methods": dict.fromkeys((*request.models, *request.constant_methods), FACTS)},
            "sizes": {
                "program_bytes": 1, "constant_bytes": 2, "delegate_bytes": 3, "data_bytes": {"weights": 3},
                "methods": {method: {"delegate_bytes": 3, "planned_bytes": [64]} for method, _ in models},
            },
            "checks": [
                {"method": method, "inputs": "EXAMPLE", "shapes": ["1x3"], "ran": True, "why": "", "outputs": outputs}
                for method, _ in models
            ],
        }
        | _find_overrides("lower", request.models)
    )  # fmt: skip
    return _answer("lower", request.models, _encode(whole))


def inspect(request: InspectRequest, folder: Path, emit: Emit) -> bytes:
    result: Any = {"warnings": [], "facts": {"methods": {"forward": FACTS}}, "stayed_fp32": {}}
    return _encode(result)


def list_recipes(request: object, folder: Path, emit: Emit) -> bytes:
    row = {"summary": "", "backend": "", "missing": "", "arguments": [], "available": True}
    known = {"xnnpack_fp32": "none", "acme.static": "pt2e-static", "acme.plain": "none"}
    rows = [row | {"name": name, "quantization": how} for name, how in known.items()]
    absent = row | {"name": "coreml_fp16", "quantization": "none", "available": False, "missing": "coremltools"}
    return fill(compile_pb2.ListRecipesResponse(), {"recipes": [*rows, absent]}).SerializeToString()


def _stage(task: str, stage: str, models: Mapping[str, Path], emit: Emit) -> dict[str, Any]:
    emit(_json(stage=stage, phase="START", duration_ms=None))
    print(f"{task} {stage}", flush=True)
    if _find_orders(task, "refuse", models) and stage in ("TORCH_EXPORT", "TO_EXECUTORCH"):
        raise Refused("No.", "Change it.", stage=stage)
    if _find_orders(task, "die", models):
        os.kill(os.getpid(), signal.SIGKILL)
    if _find_orders(task, "hang", models):
        signal.pause()
    for held in _find_orders(task, "wait", models):
        with Path(held).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    emit(_json(stage=stage, phase="END", duration_ms=1.5))
    while _find_orders(task, "flood", models):
        emit(_json(stage=stage, phase="END", duration_ms=1.5))
    return {"stage": stage, "duration_ms": 1.5, "where": "SERVER", "methods": dict.fromkeys(models, 1.0)}


def _encode(result: Mapping[str, Any]) -> bytes:
    """Return a CompileResult for JSON, in which the program's files are an object and the operators in fp32 are lists."""
    compilation: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for key, value in result.items():
        if key == "program":
            files |= value or {}
        elif key == "stayed_fp32":
            compilation[key] = {method: {"operators": rows} for method, rows in value.items()}
        elif key in _FILES:
            files[_FILES[key]] = value
        else:
            compilation[key] = value
    answer = child_pb2.CompileResult()
    fill(answer.compilation, compilation)
    return fill(answer, files).SerializeToString()


_FILES = {
    "programs": "exported_programs", "inputs": "example_inputs", "etrecord": "etrecord", "stage_files": "stage_files",
}  # fmt: skip


def _find_orders(task: str, order: str, models: Mapping[str, Path]) -> list[str]:
    """Return the arguments of each line with that order for the task."""
    lines = [line.split() for path in models.values() for line in path.read_text().splitlines()]
    return [" ".join(words[2:]) for words in lines if words[:2] == [task, order]]


def _find_overrides(task: str, models: Mapping[str, Path]) -> dict[str, Any]:
    return {key: json.loads(value) for key, _, value in (text.partition(" ") for text in _find_orders(task, "say", models))}


def _answer(task: str, models: Mapping[str, Path], answer: bytes) -> bytes:
    for instead in _find_orders(task, "answer", models):
        answer = bytes.fromhex(instead)
    return answer + b"".join(map(bytes.fromhex, _find_orders(task, "add", models)))


def _json(**values: object) -> bytes:
    return json.dumps(values).encode()
