"""Tiny language models with a KV cache, as ExecuTorch's users export them. Importing this imports torch."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any, Final

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from torch import nn

from etfarm.wire import tensors
from etfarm.wire.generation import draw_tokens
from etfarm.wire.tensors import Tensor

VOCABULARY: Final = 96
CONTEXT: Final = 64
LONG_CONTEXT: Final = 1 << 14
"""Of the kind `long`, whose text takes a minute, so that a test can end it in the middle."""
SEED: Final = 7
PROMPT: Final = 12
"""Number of tokens of `inputs`."""
GENERATED: Final = 24
"""Number of tokens of `expected`, which follow the prompt."""
_HEADS: Final = 2
_WIDTH: Final = 16
_DIM: Final = _HEADS * _WIDTH


class Attention(nn.Module):
    """Attention over a cache of keys and values."""

    def __init__(self, *, custom: bool, context: int) -> None:
        super().__init__()
        self.custom, self.context = custom, context
        self.project = nn.Linear(_DIM, 3 * _DIM, bias=False)
        self.out = nn.Linear(_DIM, _DIM, bias=False)
        self.register_buffer("keys", torch.zeros(1, context, _HEADS, _WIDTH))
        self.register_buffer("values", torch.zeros(1, context, _HEADS, _WIDTH))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        query, key, value = (part.view(1, length, _HEADS, _WIDTH) for part in self.project(x).split(_DIM, dim=-1))
        if self.custom:
            start = positions[0].item()
            torch._check_is_size(start)
            torch._check(start < self.context)
            torch.ops.llama.update_cache(key, self.keys, start)
            torch.ops.llama.update_cache(value, self.values, start)
            attended = torch.ops.llama.custom_sdpa(query, self.keys, self.values, start, None, 0.0, True)
            return self.out(attended.reshape(1, length, _DIM))
        self.keys.index_copy_(1, positions, key)
        self.values.index_copy_(1, positions, value)
        seen = torch.arange(self.context) <= positions[:, None]
        scores = query.transpose(1, 2) @ self.keys.transpose(1, 2).transpose(2, 3) / _WIDTH**0.5
        weights = torch.softmax(scores.masked_fill(torch.logical_not(seen), float("-inf")), dim=-1)
        return self.out((weights @ self.values.transpose(1, 2)).transpose(1, 2).reshape(1, length, _DIM))


class Decoder(nn.Module):
    """Two layers. Takes tokens and the position of the first one, or with `vector` that of each; returns logits.

    The logits are those of the last token, or with `vector` of each.
    """

    def __init__(
        self, *, custom: bool = False, vector: bool = False, dtype: torch.dtype = torch.float32, context: int = CONTEXT
    ) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.vector, self.dtype, self.context = vector, dtype, context
        self.tokens = nn.Embedding(VOCABULARY, _DIM)
        self.places = nn.Embedding(context, _DIM)
        self.layers = nn.ModuleList(Attention(custom=custom, context=context) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(_DIM) for _ in range(3))
        self.head = nn.Linear(_DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not self.vector:
            positions = positions + torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.places(positions)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x), positions)
        logits = self.head(self.norms[2](x if self.vector else x[:, -1]))
        return logits.to(self.dtype)


def custom() -> Any:
    """The model with ExecuTorch's own attention, as an exported program."""
    return exported("custom")["forward"]


def exported(kind: str) -> dict[str, Any]:
    """The exported programs of a kind, by method."""
    return _export(_model(kind), kind)


def example(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The eager model of a kind, and inputs to export it with."""
    model = _model(kind)
    return model, _example(model, [1, 2, 3], 0, _integer(kind))


def make(folder: Path, kind: str) -> None:
    """Write the program of a kind, a prompt, and the tokens that eager PyTorch generates after it."""
    model = _model(kind)
    prompt = draw_tokens(SEED, VOCABULARY, PROMPT)
    with torch.no_grad():
        expected = _continued(model, list(prompt), _integer(kind))
    programs = _export(model, kind)
    partitioner = {name: [XnnpackPartitioner()] for name in programs} if kind == "xnnpack" else None
    metadata = {"get_max_seq_len": model.context, "get_vocab_size": VOCABULARY, "use_kv_cache": True}
    edge = to_edge_transform_and_lower(programs, partitioner=partitioner, constant_methods=metadata)
    planning = MemoryPlanningPass(share_mutable_buffers=kind in ("shared", "chunked"))
    (folder / "program.pte").write_bytes(edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning)).buffer)
    _write_texts(folder, prompt, expected)


def _model(kind: str) -> Decoder:
    if kind == "custom":
        importlib.import_module("executorch.extension.llm.custom_ops.custom_ops")  # registers the operators
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16}.get(kind, torch.float32)
    return Decoder(
        custom=kind == "custom", vector=kind == "vector", dtype=dtype, context=LONG_CONTEXT if kind == "long" else CONTEXT
    ).eval()


def _integer(kind: str) -> torch.dtype:
    return torch.int32 if kind == "int32" else torch.int64


def _export(model: Decoder, kind: str) -> dict[str, Any]:
    length = torch.export.Dim("length", max=model.context - 1)
    dynamic: dict[str, Any] = {"tokens": {1: length}, "positions": {0: length} if kind == "vector" else None}
    several = _example(model, [1, 2, 3], 0, _integer(kind))
    single = _example(model, [1], 0, _integer(kind))
    if kind == "shared":
        return {
            "prefill": torch.export.export(model, several, dynamic_shapes=dynamic, strict=True),
            "decode": torch.export.export(model, single, strict=True),
        }
    if kind == "chunked":
        return {
            "prefill": torch.export.export(model, _example(model, [1, 2, 3, 4], 0, _integer(kind)), strict=True),
            "decode": torch.export.export(model, single, strict=True),
        }
    if kind in ("static", "int32"):
        return {"forward": torch.export.export(model, single, strict=True)}
    return {"forward": torch.export.export(model, several, dynamic_shapes=dynamic, strict=True)}


def _example(model: Decoder, tokens: list[int], start: int, integer: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    positions = [start + index for index in range(len(tokens))] if model.vector else [start]
    return torch.tensor([tokens], dtype=integer), torch.tensor(positions, dtype=integer)


def _continued(model: Decoder, tokens: list[int], integer: torch.dtype) -> list[int]:
    """The greedy continuation, for which each step takes the whole text, so that no cache has a part in it."""
    for _ in range(GENERATED):
        logits = model(*_example(model, tokens, 0, integer)).reshape(-1, VOCABULARY)[-1].float()
        best = logits.topk(2).values
        # Closer ones would let a rounding error decide.
        assert best[0] - best[1] > 1e-3 or model.dtype != torch.float32
        tokens = [*tokens, int(logits.argmax())]
    return tokens[PROMPT:]


def make_llama(folder: Path) -> None:
    """Write a tiny Llama with ExecuTorch's fast attention; else as `make`."""
    shape = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCABULARY, "hidden_dim": 128}
    model = export_llama(folder, shape, CONTEXT)
    prompt = draw_tokens(SEED, VOCABULARY, PROMPT)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(GENERATED):
            logits = model(torch.tensor([tokens])).reshape(-1, VOCABULARY)[-1]
            tokens.append(int(logits.argmax()))
    _write_texts(folder, prompt, tokens[PROMPT:])


def export_llama(folder: Path, shape: dict[str, int], context: int) -> nn.Module:
    """Write program.pte, which ExecuTorch's `export_llm` makes of a Llama with random weights; return the eager model.

    Args:
        folder: where to write it, with what `export_llm` needs and leaves.
        shape: arguments of ExecuTorch's `ModelArgs`.
        context: maximum number of tokens.
    """
    from executorch.examples.models.llama.llama_transformer import construct_transformer
    from executorch.examples.models.llama.model_args import ModelArgs

    torch.manual_seed(13)
    arguments: dict[str, Any] = {"max_seq_len": context, "max_context_len": context, **shape}
    model = construct_transformer(ModelArgs(**arguments)).eval()
    for parameter in model.parameters():
        # Larger than the usual initial weights, so that the most likely token is clearly ahead.
        nn.init.normal_(parameter, std=0.5)
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith("mask") and "freqs" not in name}
    # Without a checkpoint, export_llm leaves norms uninitialized.
    torch.save(weights, folder / "checkpoint.pth")
    (folder / "params.json").write_text(json.dumps(shape))
    subprocess.run(
        [
            sys.executable, "-m", "executorch.extension.llm.export.export_llm", "base.checkpoint=checkpoint.pth",
            "base.params=params.json", "model.use_kv_cache=True", "model.use_sdpa_with_kv_cache=True",
            "backend.xnnpack.enabled=True", f"export.max_seq_length={context}", f"export.max_context_length={context}",
            "export.output_name=program.pte",
        ],
        cwd=folder, capture_output=True, check=True,
    )  # fmt: skip
    return model


def _write_texts(folder: Path, prompt: array[int], continuation: list[int]) -> None:
    for name, text in (("inputs", prompt), ("expected", array("i", continuation))):
        (folder / f"{name}.ett").write_bytes(tensors.encode([Tensor(name, "int32", (len(text),), text.tobytes(), (0,))]))


def forced_logits(kind: str, tokens: list[int]) -> Any:
    """The logits of eager PyTorch after each token of a text: float32 [tokens, VOCABULARY]."""
    model = _model(kind)
    with torch.no_grad():
        texts = [tokens[: end + 1] for end in range(len(tokens))]
        rows = [model(*_example(model, text, 0, _integer(kind))).reshape(-1, VOCABULARY)[-1].float() for text in texts]
    return torch.stack(rows).numpy()
