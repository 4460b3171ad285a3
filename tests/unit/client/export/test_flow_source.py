"""`ModelSource.flow`: encoder, token embedding and decoder that fit each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etfarm.client import ModelSource
from etfarm.client.export.eager import export_source
from tests.support.refusals import refuses

WIDTH, VOCABULARY, CONTEXT = 8, 16, 32
IMAGE = torch.rand(1, 3, 8, 8)


class Encoder(torch.nn.Module):
    """Patches of an image as rows."""

    def __init__(self, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.patches, self.dtype = torch.nn.Conv2d(3, width, 4, 4), dtype

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.patches(image).flatten(2).transpose(1, 2).to(self.dtype)


class Decoder(torch.nn.Module):
    """A decoder that sums up what it has seen, in a cache."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.looks = looks
        self.register_buffer("rows", torch.zeros(1, CONTEXT, WIDTH))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, embeddings: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if self.looks:
            start = position[0].item()
            torch._check(start >= 0)
        self.rows.index_copy_(1, position + torch.arange(embeddings.shape[1]), embeddings)
        return self.head(self.rows.sum(1))


def flow(**changes: Any) -> ModelSource:
    torch.manual_seed(3)
    own = {
        "text_decoder": Decoder().eval(), "token_embedding": torch.nn.Embedding(VOCABULARY, WIDTH).eval(),
        "encoders": {"vision_encoder": (Encoder().eval(), (IMAGE,))}, "max_context_tokens": CONTEXT, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return ModelSource.flow(**{**own, **changes})


def test_a_flow_has_the_methods_and_metadata_of_executorchs_runner() -> None:
    source = flow(constant_methods={"get_bos_id": 1})
    assert list(source.methods) == ["vision_encoder", "token_embedding", "text_decoder"]
    assert source.constant_methods["get_max_seq_len"] == CONTEXT and source.constant_methods["get_bos_id"] == 1
    (tokens,) = source.example_inputs["token_embedding"]
    rows, position = source.example_inputs["text_decoder"]
    assert tokens.shape == (1, 3) and rows.shape == (1, 3, WIDTH) and position.tolist() == [0]
    assert torch.equal(rows, source.methods["token_embedding"](tokens)), "calibration sees embeddings"
    assert source.dynamic_shapes["text_decoder"][0][1].max == CONTEXT - 1
    assert not source.methods["text_decoder"].rows.any(), "the check leaves the cache as it is"
    assert not flow(max_prompt_tokens=1).dynamic_shapes


def test_a_flow_exports() -> None:
    exported = export_source(flow(), name="m")
    assert list(exported.methods) == ["vision_encoder", "token_embedding", "text_decoder"]
    assert exported.methods["text_decoder"].input_names == ("embeddings", "position")


def test_a_decoder_that_looks_at_values_is_checked_on_a_copy() -> None:
    decoder = Decoder(looks=True).eval()
    assert flow(text_decoder=decoder).methods["text_decoder"] is decoder and not decoder.rows.any()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"encoders": {"vision_encoder": (Encoder(12), (IMAGE,))}},
            r"'vision_encoder' returns float32\[1, 4, 12\], but 'token_embedding' returns float32\[1, 3, 8\]: 'text_dec",
        ),
        ({"encoders": {"vision_encoder": (Encoder(dtype=torch.float16), (IMAGE,))}}, r"returns float16\[1, 4, 8\], but"),
        (
            {"token_embedding": torch.nn.Embedding(VOCABULARY, 12), "encoders": {}},
            r"'text_decoder' does not take float32\[1, 3, 12\], the output of 'token_embedding', and int64\[1\]",
        ),
        ({"token_embedding": torch.nn.Flatten()}, r"must return embeddings, .* returns int64\[1, 3\]"),
        ({"encoders": {"image_encoder": (Encoder(), (IMAGE,))}}, "no encoder 'image_encoder'"),
        ({"encoders": {"vision_encoder": Encoder()}}, "is an Encoder, not a module with its example inputs"),
        ({"encoders": {"vision_encoder": (Encoder(), (IMAGE[0, 0],))}}, "'vision_encoder' does not take its example inputs"),
        ({"text_decoder": torch.nn.Identity()}, "'text_decoder' must take embeddings and positions, and takes input"),
        ({"vocab_size": 17}, r"must return logits, float\[..., 17\], and returns float32\[1, 16\]"),
        ({"max_context_tokens": 6}, "leave no room for text in a context of 6"),
        ({"max_prompt_tokens": 0}, "needs 2 or more tokens"),
    ],
)
def test_modules_that_do_not_fit_are_refused_before_any_export(changes: dict[str, Any], why: str) -> None:
    with refuses("BAD_MODEL_SOURCE", match=why):
        flow(**changes)
