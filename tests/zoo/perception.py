"""Models of transformers for images, sound, and both with text."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from tests.support.torchvision import torchvision_models
from tests.zoo.network import Named, Network, of_transformers, settled

_SMALL: Final = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_SIZE: Final = 64


def _image(size: int = _SIZE) -> tuple[torch.Tensor]:
    return (torch.randn(1, 3, size, size),)


def _transformer(name: str) -> Network:
    return Network(of_transformers(name, "pixel_values", image_size=_SIZE, patch_size=16, **_SMALL), _image())


vit = partial(_transformer, "ViT")
deit = partial(_transformer, "DeiT")
dinov2 = partial(_transformer, "Dinov2")
beit = partial(_transformer, "Beit")
siglip_vision = partial(_transformer, "SiglipVision")
clip_vision = partial(_transformer, "CLIPVision")


def segformer() -> Network:
    return Network(of_transformers("Segformer", "pixel_values", depths=[1, 1, 1, 1]), _image())


def mobilevit() -> Network:
    return settled(of_transformers("MobileViT", "pixel_values", image_size=_SIZE), 1, 3, _SIZE, _SIZE)


def mobilenet_v2() -> Network:
    return settled(of_transformers("MobileNetV2", "pixel_values"), 1, 3, _SIZE, _SIZE)


def resnet() -> Network:
    sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "embedding_size": 16, "layer_type": "basic"}
    return settled(of_transformers("ResNet", "pixel_values", **sizes), 1, 3, _SIZE, _SIZE)


def convnext() -> Network:
    return Network(of_transformers("ConvNext", "pixel_values", depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64]), _image())


def poolformer() -> Network:
    return Network(of_transformers("PoolFormer", "pixel_values", depths=[1, 1, 1, 1]), _image())


def wav2vec2() -> Network:
    sizes = {"conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4), "num_feat_extract_layers": 3}
    module = of_transformers(
        "Wav2Vec2", "input_values", num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, **sizes, **_SMALL
    )
    return Network(module, (torch.randn(1, 4000),))


def whisper() -> Network:
    sizes = {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 200, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1, "max_source_positions": 100, "num_mel_bins": 16,
    }  # fmt: skip
    names = ("input_features", "decoder_input_ids")
    module = of_transformers("Whisper", *names, constants={"use_cache": False}, **sizes)
    return Network(module, (torch.randn(1, 16, 200), torch.randint(3, 200, (1, 8))))


def detr() -> Network:
    torchvision_models()
    import transformers

    backbone = transformers.ResNetConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64], embedding_size=16, layer_type="basic", out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=64,
        encoder_layers=2, decoder_layers=2, encoder_ffn_dim=128, decoder_ffn_dim=128, encoder_attention_heads=4,
        decoder_attention_heads=4, num_queries=10,
    )  # fmt: skip
    return Network(Named(transformers.DetrForObjectDetection(config).eval(), "pixel_values").eval(), _image())


def clip() -> Network:
    text = {**_SMALL, "vocab_size": 200, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"text_config": text, "vision_config": {**_SMALL, "image_size": _SIZE, "patch_size": 16}, "projection_dim": 32}
    module = of_transformers("CLIP", "input_ids", "pixel_values", **sizes)
    return Network(module, (torch.randint(3, 200, (1, 8)), *_image()))
