"""Networks of timm, for images of 64 by 64 pixels."""

from __future__ import annotations

from tests.support.torchvision import torchvision_models
from tests.zoo.network import Network, settled


def _network(name: str, **options: object) -> Network:
    torchvision_models()
    import timm

    return settled(timm.create_model(name, pretrained=False, num_classes=10, **options), 1, 3, 64, 64)


def resnetv2_18() -> Network:
    return _network("resnetv2_18")


def mobilenetv4() -> Network:
    return _network("mobilenetv4_conv_small")


def efficientnet_lite0() -> Network:
    return _network("efficientnet_lite0")


def ghostnet() -> Network:
    return _network("ghostnet_050")


def lcnet() -> Network:
    return _network("lcnet_050")


def mobileone() -> Network:
    return _network("mobileone_s0")


def repvgg() -> Network:
    return _network("repvgg_a0")


def rexnet() -> Network:
    return _network("rexnetr_100")


def hrnet() -> Network:
    return _network("hrnet_w18_small")


def mixnet() -> Network:
    return _network("mixnet_s")


def tinynet() -> Network:
    return _network("tinynet_e")


def fbnet() -> Network:
    return _network("fbnetc_100")


def convnextv2() -> Network:
    return _network("convnextv2_atto", depths=[1, 1, 1, 1])


def edgenext() -> Network:
    return _network("edgenext_xx_small")


def mobilevit() -> Network:
    return _network("mobilevit_xxs")


def mobilevitv2() -> Network:
    return _network("mobilevitv2_050")


def efficientvit() -> Network:
    return _network("efficientvit_b0")


def fastvit() -> Network:
    return _network("fastvit_t8")


def repvit() -> Network:
    return _network("repvit_m0_9")


def poolformer() -> Network:
    return _network("poolformer_s12")


def vit_tiny() -> Network:
    return _network("vit_tiny_patch16_224", img_size=64, depth=2)


def deit_tiny() -> Network:
    return _network("deit_tiny_patch16_224", img_size=64, depth=2)


def mixer() -> Network:
    return _network("mixer_s32_224", img_size=64)


def starnet() -> Network:
    return _network("starnet_s1")
