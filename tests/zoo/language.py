"""Language models of transformers, of two layers and 64 features, without a cache of keys and values."""

from __future__ import annotations

from typing import Any, Final

import torch

from tests.support.torchvision import torchvision_models
from tests.zoo.network import Named, Network

_SMALL: Final = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 200,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""A transformer of this size has every operator of the large one."""


def _model(name: str, *names: str, constants: dict[str, Any] | None = None, **options: Any) -> torch.nn.Module:
    torchvision_models()
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    return Named(getattr(transformers, f"{name}Model")(config).eval(), *names, **(constants or {})).eval()


def _ids(length: int = 16) -> torch.Tensor:
    return torch.randint(3, 200, (1, length))


def _encoder(name: str, **options: Any) -> Network:
    return Network(_model(name, "input_ids", **{**_SMALL, **options}), (_ids(),))


def _decoder(name: str, **options: Any) -> Network:
    heads = {"num_key_value_heads": 2, "head_dim": 16}
    return Network(_model(name, "input_ids", constants={"use_cache": False}, **{**_SMALL, **heads, **options}), (_ids(),))


def bert() -> Network:
    return _encoder("Bert")


def roberta() -> Network:
    return _encoder("Roberta")


def electra() -> Network:
    return _encoder("Electra")


def albert() -> Network:
    return _encoder("Albert")


def mobilebert() -> Network:
    return _encoder("MobileBert")


def deberta() -> Network:
    return _encoder("DebertaV2")


def mpnet() -> Network:
    return _encoder("MPNet")


def convbert() -> Network:
    return _encoder("ConvBert")


def llama() -> Network:
    return _decoder("Llama")


def qwen2() -> Network:
    return _decoder("Qwen2")


def qwen3() -> Network:
    return _decoder("Qwen3")


def mistral() -> Network:
    return _decoder("Mistral")


def gemma() -> Network:
    return _decoder("Gemma")


def phi3() -> Network:
    return _decoder("Phi3")


def olmo2() -> Network:
    return _decoder("Olmo2")


def stablelm() -> Network:
    return _decoder("StableLm")


def smollm3() -> Network:
    return _decoder("SmolLM3")


def gpt2() -> Network:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2}
    return Network(_model("GPT2", "input_ids", constants={"use_cache": False}, **sizes), (_ids(),))


def mamba() -> Network:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 200, "state_size": 8}
    return Network(_model("Mamba", "input_ids", constants={"use_cache": False}, **sizes), (_ids(),))


def t5() -> Network:
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 200}
    names = ("input_ids", "decoder_input_ids")
    return Network(_model("T5", *names, constants={"use_cache": False}, **sizes), (_ids(), _ids(8)))


def bart() -> Network:
    sizes = {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip
    names = ("input_ids", "decoder_input_ids")
    return Network(_model("Bart", *names, constants={"use_cache": False}, **sizes), (_ids(), _ids(8)))
