"""Small folders of transformers, as save_pretrained writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

CONTEXT: Final = 64
VOCABULARY: Final = 96
_DECODER: Final[dict[str, Any]] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 2,
    # Ten times the usual, so that the most likely token is clearly ahead.
    "initializer_range": 0.2,
}  # fmt: skip
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama": {**_DECODER, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6},
    "qwen2": {**_DECODER, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6},
    "qwen3": {**_DECODER, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "mistral": {**_DECODER, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_positions": CONTEXT, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    },
    "vit": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 96, "image_size": 32, "patch_size": 8,
    },
    "mamba": {
        "model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8,
        "vocab_size": VOCABULARY,
    },
    "t5": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 96, "num_layers": 2,
        "num_heads": 4, "d_kv": 16, "vocab_size": VOCABULARY,
    },
}  # fmt: skip


def write_config(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a config.json into a new folder named after its kind; a change to None removes the key."""
    path = folder / kind
    path.mkdir()
    config = {name: value for name, value in {**CONFIGS[kind], **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path
