"""Networks of executorch.examples.models that need no other library."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.network import Network


def _example(name: str) -> Network:
    from executorch.examples.models import MODEL_NAME_TO_MODEL
    from executorch.examples.models.model_factory import EagerModelFactory

    module, inputs, _, _ = EagerModelFactory.create_model(*MODEL_NAME_TO_MODEL[name])
    return Network(module.eval(), inputs)


def linear() -> Network:
    return _example("linear")


def add_mul() -> Network:
    return _example("add_mul")


def softmax() -> Network:
    return _example("softmax")


def conv1d() -> Network:
    return _example("conv1d")


def lstm() -> Network:
    return _example("lstm")


def sdpa() -> Network:
    return _example("sdpa")


def deep_autoencoder() -> Network:
    return _example("deep_autoencoder")


def ds_cnn() -> Network:
    return _example("ds_cnn")


def resnet8() -> Network:
    return _example("resnet8")


def mobilenet_v1_025() -> Network:
    return _example("mobilenet_v1_025")


def torch_lstm() -> Network:
    return Network(nn.LSTM(16, 24, num_layers=2, batch_first=True).eval(), (torch.randn(1, 6, 16),))


def torch_gru() -> Network:
    return Network(nn.GRU(16, 24, batch_first=True).eval(), (torch.randn(1, 6, 16),))


def torch_transformer() -> Network:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return Network(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), (torch.randn(1, 8, 32),))
