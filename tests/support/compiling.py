"""The daemon's part in compiling, for tests: real, jailed children of a warm forkserver, one after the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from etfarm.server.compile.prewarm import PRELOAD
from etfarm.server.compile.program import values
from etfarm.server.compile.request import LowerRequest, QuantizeRequest
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.v1 import child_pb2, common_pb2, compile_pb2
from etfarm.wire import recipes, tensors
from etfarm.wire.recipes import Recipe
from etfarm.wire.report_keys import project
from tests.support import models

Make = Callable[[], Any]
STATIC = "xnnpack_pt2e_int8_static_per_channel"
DYNAMIC = "xnnpack_pt2e_int8_dynamic_per_channel"
WIDTH, LENGTH = 32, 24
FOUR_BIT = "xnnpack_torchao_int8da_int4w_per_channel"


@asynccontextmanager
async def warm_workers(folder: Path) -> AsyncIterator[Workers]:
    """A warm forkserver; it ends with the block."""
    pool = Workers(preload=PRELOAD, limits=Limits(memory_bytes=4 << 30, threads=2), folder=folder / "jobs", concurrency=2)
    pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


@dataclass
class Compiled:
    """What the children answered, and the files that were beside it."""

    result: dict[str, Any]
    quantized: dict[str, Any] | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    quantized_files: dict[str, bytes] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    facts: compile_pb2.ProgramFacts = field(default_factory=compile_pb2.ProgramFacts)

    @property
    def pte(self) -> bytes:
        return self.files["model.pte"]

    @property
    def codes(self) -> list[str]:
        """The warnings' codes, in order."""
        return [w["code"] for w in (self.quantized["warnings"] if self.quantized else []) + self.result["warnings"]]

    @property
    def stages(self) -> list[str]:
        """The stages that were run."""
        return [s["stage"] for s in (self.quantized["stages"] if self.quantized else []) + self.result["stages"]]


async def compiled(
    workers: Workers,
    folder: Path,
    make: Make | Mapping[str, Make],
    recipe: str | Recipe = "xnnpack_fp32",
    *,
    calibration: Mapping[str, Sequence[Path]] | None = None,
    constants: Mapping[str, Path] | None = None,
    done: Sequence[str] = ("TORCH_EXPORT",),
    stop_after: str | None = None,
) -> Compiled:
    """Quantize if the recipe does and the client has not, and lower."""
    folder.mkdir(parents=True, exist_ok=True)
    created = dict(make) if isinstance(make, Mapping) else {"forward": make}
    # The store's names are digests, so no name ends in .pt2.
    originals = {
        m: models.save(one, folder / f"3a7bd3e2360a3d29eea436fcfb7e44c7{i}") for i, (m, one) in enumerate(created.items())
    }
    known = recipes.parse(recipe) if isinstance(recipe, str) else recipe
    answer = Compiled({})
    lowered: dict[str, Path] = dict(originals)
    quantizes = known.quantization in (recipes.Quantization.PT2E_STATIC, recipes.Quantization.PT2E_DYNAMIC)
    if (quantizes or "QUANTIZE" in known.stages) and "QUANTIZE" not in done:
        ask = QuantizeRequest(originals, "tiny", known.json, calibration or {}, threads=2)
        answer.quantized, answer.quantized_files = await _ran(workers, "quantize_model", ask, answer)
        kept = folder / "quantized"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for index, (method, name) in enumerate(answer.quantized["programs"].items()):
            lowered[method] = kept / f"{index}"
            lowered[method].write_bytes(answer.quantized_files[name])
    request = LowerRequest(
        lowered, originals, "tiny", known.json, answer.quantized is not None, constants or {},
        stop_after=stop_after, threads=2,
    )  # fmt: skip
    answer.result, answer.files = await _ran(workers, "lower_model", request, answer)
    return answer


def lowered_here(program: Any, recipe: str) -> bytes:
    """Return the .pte of an exported program, quantized or not, which is lowered in this process."""
    from etfarm.server.compile.lower import build, lowering
    from etfarm.server.compile.program import places

    programs, built = {"forward": program}, build.export_recipe(recipes.parse(recipe), ["forward"])
    pipeline = lowering.Pipeline(("TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"))
    stages = lowering.Stages(lambda event: None, programs, compile_pb2.Compilation())
    return bytes(lowering.lower(programs, built, pipeline, "tiny", stages, places.undelegated).manager.buffer)


def with_quantizer(recipe: str, arguments: str) -> Recipe:
    """Return a recipe whose quantizer has arguments of a recipe file."""
    scales = "dynamic = true\n" if recipe == DYNAMIC else ""
    file = f'recipe = "xnnpack_fp32"\n[[quantizers]]\nname = "xnnpack"\nper_channel = true\n{scales}{arguments}\n'
    return recipes.from_toml(file)


async def _ran(workers: Workers, task: str, request: object, answer: Compiled) -> tuple[Any, dict[str, bytes]]:
    async with await workers.run(
        f"etfarm.server.compile.lower.tasks:{task}", request, deadline_s=180,
        on_event=lambda event: answer.events.append(json.loads(event)), on_log=answer.log.append,
    ) as finished:  # fmt: skip
        files = {p.name: p.read_bytes() for p in finished.folder.iterdir() if p.is_file() and not p.is_symlink()}
        answer.facts = child_pb2.CompileResult.FromString(finished.result).compilation.facts
        return plain(finished.result), files


def plain(answer: bytes) -> Any:
    """Return the result that a compiling child answered with as JSON, whose static dims are numbers."""
    message = child_pb2.CompileResult.FromString(answer)
    compilation = project(message.compilation)
    facts, sizes = compilation["facts"], compilation["sizes"]
    for method, described in message.compilation.facts.methods.items():
        for side in ("inputs", "outputs"):
            facts["methods"][method][side] = [_plain_value(spec) for spec in getattr(described, side)]
    return {
        **{key: compilation[key] for key in ("stages", "warnings", "delegation", "checks", "toolchain")},
        "program": {"pte": message.pte, "data": dict(message.data)} if message.HasField("pte") else None,
        "etrecord": message.etrecord or None, "inputs": dict(message.example_inputs), "facts": facts, "sizes": sizes,
        "modules": [{**row, "module": row["module"] or ""} for row in compilation["modules"] or ()],
        "stayed_fp32": {method: rows["operators"] for method, rows in compilation["stayed_fp32"].items()},
        "stage_files": dict(message.stage_files), "programs": dict(message.exported_programs),
    }  # fmt: skip


def listed(answer: bytes) -> list[dict[str, Any]]:
    """Return the recipes that a child listed; texts that are absent are empty."""
    rows = project(compile_pb2.ListRecipesResponse.FromString(answer))["recipes"]
    return [{key: "" if value is None else value for key, value in row.items()} for row in rows]


def _plain_value(spec: compile_pb2.ValueSpec) -> dict[str, Any]:
    dims = [dim.min if dim.min == dim.max else {"min": dim.min, "max": dim.max} for dim in spec.dims]
    is_tensor = spec.kind == common_pb2.VALUE_KIND_TENSOR
    known = project(spec)
    order = known["dim_order"] if is_tensor else None
    value = {**{key: known[key] for key in ("name", "kind", "dtype")}, "dims": dims if is_tensor else None, "dim_order": order}
    return {**value, "value": known["value"]} if spec.HasField("value") else value


def run(pte: bytes, leaves: Sequence[Any], method: str = "forward", times: int = 1, data: Path | None = None) -> list[Any]:
    """Return what the program gives on this host, after `times` calls."""
    from executorch.runtime import Runtime

    loaded = Runtime.get().load_program(pte, data_path=data).load_method(method)
    assert loaded is not None
    for _ in range(times - 1):
        loaded.execute(leaves)
    return [o.clone() if isinstance(o, torch.Tensor) else o for o in loaded.execute(leaves)]


def sample(path: Path, *leaves: Any) -> Path:
    """Return a tensor file."""
    path.write_bytes(tensors.encode([values.to_value("", leaf) for leaf in leaves]))
    return path


def sqnr_db(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal to noise in dB."""
    return float(10 * torch.log10(expected.square().sum() / (expected - actual).square().sum()))


class VisionEncoder(torch.nn.Module):
    """An image to a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, WIDTH, 8, stride=8)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.patches(image)).mean((2, 3)))


class TokenEmbedding(torch.nn.Module):
    """Tokens to vectors; nothing in it can be quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(100, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


class TextDecoder(torch.nn.Module):
    """Vectors to logits; counts its calls from 7 on, and adds the count."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, 100)
        self.register_buffer("calls", torch.full((1,), 7.0))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        return self.down(torch.relu(self.up(vectors))) + self.calls


def vision_encoder() -> Any:
    return torch.export.export(VisionEncoder().eval(), (torch.rand(1, 3, 32, 32),))


def token_embedding() -> Any:
    return torch.export.export(TokenEmbedding().eval(), (torch.arange(8),), dynamic_shapes={"tokens": {0: _length()}})


def text_decoder() -> Any:
    return torch.export.export(TextDecoder().eval(), (torch.randn(8, WIDTH),), dynamic_shapes={"vectors": {0: _length()}})


def _length() -> Any:
    return torch.export.Dim("length", min=2, max=LENGTH)


ASSISTANT: Mapping[str, Make] = {
    "vision_encoder": vision_encoder,
    "token_embedding": token_embedding,
    "text_decoder": text_decoder,
}
"""A vision encoder, a token embedding, and a text decoder of any length that counts its calls from 7 on."""
