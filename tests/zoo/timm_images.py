"""Networks of timm, for images of 64 by 64 pixels."""

from __future__ import annotations

from functools import partial

from tests.support.torchvision import torchvision_models
from tests.zoo.network import Network, settled


def _network(name: str, **options: object) -> Network:
    torchvision_models()
    import timm

    return settled(timm.create_model(name, pretrained=False, num_classes=10, **options), 1, 3, 64, 64)


resnetv2_18 = partial(_network, "resnetv2_18")
mobilenetv4 = partial(_network, "mobilenetv4_conv_small")
efficientnet_lite0 = partial(_network, "efficientnet_lite0")
ghostnet = partial(_network, "ghostnet_050")
lcnet = partial(_network, "lcnet_050")
mobileone = partial(_network, "mobileone_s0")
repvgg = partial(_network, "repvgg_a0")
rexnet = partial(_network, "rexnetr_100")
hrnet = partial(_network, "hrnet_w18_small")
mixnet = partial(_network, "mixnet_s")
tinynet = partial(_network, "tinynet_e")
fbnet = partial(_network, "fbnetc_100")
convnextv2 = partial(_network, "convnextv2_atto", depths=[1, 1, 1, 1])
edgenext = partial(_network, "edgenext_xx_small")
mobilevit = partial(_network, "mobilevit_xxs")
mobilevitv2 = partial(_network, "mobilevitv2_050")
efficientvit = partial(_network, "efficientvit_b0")
fastvit = partial(_network, "fastvit_t8")
repvit = partial(_network, "repvit_m0_9")
poolformer = partial(_network, "poolformer_s12")
vit_tiny = partial(_network, "vit_tiny_patch16_224", img_size=64, depth=2)
deit_tiny = partial(_network, "deit_tiny_patch16_224", img_size=64, depth=2)
mixer = partial(_network, "mixer_s32_224", img_size=64)
starnet = partial(_network, "starnet_s1")
