"""A tiny vision-language model: encoder, token embedding and decoder in one program. Importing this imports torch."""

from __future__ import annotations

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
from tests.support.language_models import CONTEXT, GENERATED, PROMPT, SEED, VOCABULARY, Attention

IMAGE: Final = (1, 3, 16, 16)
POSITIONS: Final = 16
"""Number of positions of an encoded image."""
WIDTH: Final = 32


class VisionEncoder(nn.Module):
    """Takes an image, float32 [1, 3, 16, 16]; returns embeddings of its 16 patches, [1, 16, width]."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.norm = nn.LayerNorm(width)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.norm(self.patches(image).flatten(2).transpose(1, 2))


class TextDecoder(nn.Module):
    """Two layers with a static cache. Takes embeddings and the position of the first one, or with `vector` that of each."""

    def __init__(self, *, vector: bool = False) -> None:
        super().__init__()
        self.vector = vector
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Attention(custom=False, context=CONTEXT) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not self.vector:
            positions = positions + torch.arange(embeddings.shape[1])
        x = embeddings + self.places(positions)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x), positions)
        return self.head(self.norms[2](x[:, -1]))


def modules(*, vector: bool = False, encoder_width: int = WIDTH) -> dict[str, nn.Module]:
    """The model's modules by ExecuTorch's names of their methods, with random weights that are always the same."""
    torch.manual_seed(20)
    own: dict[str, nn.Module] = {
        "vision_encoder": VisionEncoder(encoder_width), "token_embedding": nn.Embedding(VOCABULARY, WIDTH),
        "text_decoder": TextDecoder(vector=vector),
    }  # fmt: skip
    return {name: module.eval() for name, module in own.items()}


def image() -> torch.Tensor:
    """An image that is always the same."""
    return torch.rand(IMAGE, generator=torch.Generator().manual_seed(19))


def make(folder: Path, kind: str) -> None:
    """Write the program of a kind, an image and a prompt, and the tokens that eager PyTorch generates after them.

    Args:
        folder: where to write.
        kind: `start`, `vector` (a position for each token), `static` (one token at a time), `short` (the embedding takes 5 tokens
            at once), `shared` (two methods with one cache), `xnnpack`, or `misfit` (an encoder of another width).
    """
    own = modules(vector=kind == "vector", encoder_width=24 if kind == "misfit" else WIDTH)
    prompt = draw_tokens(SEED, VOCABULARY, PROMPT)
    expected = [] if kind == "misfit" else continued(own, image(), list(prompt))
    programs = _export(own, kind)
    metadata = {"get_max_seq_len": CONTEXT, "get_vocab_size": VOCABULARY, "use_kv_cache": True}
    partitioner = {name: [XnnpackPartitioner()] for name in programs} if kind == "xnnpack" else None
    edge = to_edge_transform_and_lower(programs, partitioner=partitioner, constant_methods=metadata)
    planning = MemoryPlanningPass(share_mutable_buffers=kind == "shared")
    (folder / "program.pte").write_bytes(edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning)).buffer)
    picture = tensors.from_array("image", image().numpy(), (0, 1, 2, 3))
    _write(folder / "inputs.ett", [picture, _integers("prompt", list(prompt))])
    _write(folder / "expected.ett", [_integers("tokens", expected)])


def continued(own: dict[str, nn.Module], picture: torch.Tensor, tokens: list[int], count: int = GENERATED) -> list[int]:
    """The greedy continuation, for which each step takes the image and the whole text, so that no cache has a part in it."""
    length = len(tokens)
    with torch.no_grad():
        encoded = own["vision_encoder"](picture)
        for _ in range(count):
            rows = torch.cat([encoded, own["token_embedding"](torch.tensor([tokens]))], dim=1)
            is_vector = own["text_decoder"].vector
            logits = own["text_decoder"](rows, torch.arange(rows.shape[1]) if is_vector else torch.zeros(1, dtype=torch.int64))[0]
            best = logits.topk(2).values
            # Closer ones would let a rounding error decide.
            assert best[0] - best[1] > 1e-3
            tokens = [*tokens, int(logits.argmax())]
    return tokens[length:]


def _export(own: dict[str, nn.Module], kind: str) -> dict[str, Any]:
    length = torch.export.Dim("length", max=CONTEXT - 1)
    several = 1 if kind == "static" else 3
    tokens, rows = torch.zeros(1, several, dtype=torch.int64), torch.zeros(1, several, WIDTH)
    positions = torch.arange(several) if kind == "vector" else torch.zeros(1, dtype=torch.int64)
    of_tokens: Any = None if kind == "static" else ({1: torch.export.Dim("part", max=5) if kind == "short" else length},)
    of_rows: Any = None if kind == "static" else ({1: length}, {0: length} if kind == "vector" else None)
    decoder = torch.export.export(own["text_decoder"], (rows, positions), dynamic_shapes=of_rows, strict=True)
    programs = {
        "vision_encoder": torch.export.export(own["vision_encoder"], (image(),), strict=True),
        "token_embedding": torch.export.export(own["token_embedding"], (tokens,), dynamic_shapes=of_tokens, strict=True),
    }
    if kind != "shared":
        return {**programs, "text_decoder": decoder}
    single = torch.export.export(own["text_decoder"], (rows[:, :1], positions), strict=True)
    return {**programs, "prefill": decoder, "decode": single}


def _integers(name: str, values: list[int]) -> Tensor:
    flat = torch.tensor(values, dtype=torch.int32).numpy()
    return tensors.from_array(name, flat, (0,))


def _write(path: Path, values: list[Tensor]) -> None:
    path.write_bytes(tensors.encode(values))
