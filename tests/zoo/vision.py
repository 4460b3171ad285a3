"""Networks of torchvision: classification, segmentation, detection's backbone, video and optical flow."""

from __future__ import annotations

from functools import partial

import torch

from tests.support.torchvision import torchvision_models
from tests.zoo.network import Network, settled


def _classifier(name: str, size: int = 64, **options: object) -> Network:
    return settled(getattr(torchvision_models(), name)(weights=None, **options), 1, 3, size, size)


resnet18 = partial(_classifier, "resnet18")
resnext50 = partial(_classifier, "resnext50_32x4d")
squeezenet = partial(_classifier, "squeezenet1_1")
mobilenet_v2 = partial(_classifier, "mobilenet_v2")
mobilenet_v3_small = partial(_classifier, "mobilenet_v3_small")
efficientnet_b0 = partial(_classifier, "efficientnet_b0")
shufflenet = partial(_classifier, "shufflenet_v2_x0_5")
mnasnet = partial(_classifier, "mnasnet0_5")


def densenet() -> Network:
    torchvision_models()
    from torchvision.models import DenseNet

    return settled(DenseNet(growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16, num_classes=10), 1, 3, 64, 64)


googlenet = partial(_classifier, "googlenet", init_weights=False, aux_logits=False)
regnet = partial(_classifier, "regnet_y_400mf")


def convnext() -> Network:
    torchvision_models()
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
    return settled(ConvNeXt(blocks, num_classes=10), 1, 3, 64, 64)


def vision_transformer() -> Network:
    torchvision_models()
    from torchvision.models import VisionTransformer

    return settled(VisionTransformer(64, 16, 2, 4, 64, 128, num_classes=10), 1, 3, 64, 64)


def swin() -> Network:
    torchvision_models()
    from torchvision.models import SwinTransformer

    return settled(SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10), 1, 3, 64, 64)


def fcn() -> Network:
    models = torchvision_models()
    return settled(models.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=4), 1, 3, 32, 32)


def deeplab() -> Network:
    make = torchvision_models().segmentation.deeplabv3_mobilenet_v3_large
    return settled(make(weights=None, weights_backbone=None, num_classes=4), 1, 3, 64, 64)


def lraspp() -> Network:
    make = torchvision_models().segmentation.lraspp_mobilenet_v3_large
    return settled(make(weights=None, weights_backbone=None, num_classes=4), 1, 3, 64, 64)


def r3d() -> Network:
    module = torchvision_models().video.r3d_18(weights=None)
    return Network(module.eval(), (torch.randn(1, 3, 4, 32, 32),))


def raft() -> Network:
    module = torchvision_models().optical_flow.raft_small(weights=None)
    return Network(module.eval(), (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)))
