"""Language models of transformers, of two layers and 64 features, without a cache of keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from tests.zoo.network import Network, of_transformers

_SMALL: Final = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 200,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""A transformer of this size has every operator of the large one."""


def _ids(length: int = 16) -> torch.Tensor:
    return torch.randint(3, 200, (1, length))


def _encoder(name: str, **options: Any) -> Network:
    return Network(of_transformers(name, "input_ids", **{**_SMALL, **options}), (_ids(),))


def _decoder(name: str, **options: Any) -> Network:
    heads = {"num_key_value_heads": 2, "head_dim": 16}
    return Network(
        of_transformers(name, "input_ids", constants={"use_cache": False}, **{**_SMALL, **heads, **options}), (_ids(),)
    )


bert = partial(_encoder, "Bert")
roberta = partial(_encoder, "Roberta")
electra = partial(_encoder, "Electra")
albert = partial(_encoder, "Albert")
mobilebert = partial(_encoder, "MobileBert")
deberta = partial(_encoder, "DebertaV2")
mpnet = partial(_encoder, "MPNet")
convbert = partial(_encoder, "ConvBert")
llama = partial(_decoder, "Llama")
qwen2 = partial(_decoder, "Qwen2")
qwen3 = partial(_decoder, "Qwen3")
mistral = partial(_decoder, "Mistral")
gemma = partial(_decoder, "Gemma")
phi3 = partial(_decoder, "Phi3")
olmo2 = partial(_decoder, "Olmo2")
stablelm = partial(_decoder, "StableLm")
smollm3 = partial(_decoder, "SmolLM3")


def gpt2() -> Network:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2}
    return Network(of_transformers("GPT2", "input_ids", constants={"use_cache": False}, **sizes), (_ids(),))


def mamba() -> Network:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 200, "state_size": 8}
    return Network(of_transformers("Mamba", "input_ids", constants={"use_cache": False}, **sizes), (_ids(),))


def t5() -> Network:
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 200}
    names = ("input_ids", "decoder_input_ids")
    return Network(of_transformers("T5", *names, constants={"use_cache": False}, **sizes), (_ids(), _ids(8)))


def bart() -> Network:
    sizes = {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    names = ("input_ids", "decoder_input_ids")
    return Network(of_transformers("Bart", *names, constants={"use_cache": False}, **sizes), (_ids(), _ids(8)))
