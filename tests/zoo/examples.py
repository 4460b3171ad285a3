"""Networks of executorch.examples.models that need no other library."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from tests.zoo.network import Network


def _example(name: str) -> Network:
    from executorch.examples.models import MODEL_NAME_TO_MODEL
    from executorch.examples.models.model_factory import EagerModelFactory

    module, inputs, _, _ = EagerModelFactory.create_model(*MODEL_NAME_TO_MODEL[name])
    return Network(module.eval(), inputs)


linear = partial(_example, "linear")
add_mul = partial(_example, "add_mul")
softmax = partial(_example, "softmax")
conv1d = partial(_example, "conv1d")
lstm = partial(_example, "lstm")
sdpa = partial(_example, "sdpa")
deep_autoencoder = partial(_example, "deep_autoencoder")
ds_cnn = partial(_example, "ds_cnn")
resnet8 = partial(_example, "resnet8")
mobilenet_v1_025 = partial(_example, "mobilenet_v1_025")


def torch_lstm() -> Network:
    return Network(nn.LSTM(16, 24, num_layers=2, batch_first=True).eval(), (torch.randn(1, 6, 16),))


def torch_gru() -> Network:
    return Network(nn.GRU(16, 24, batch_first=True).eval(), (torch.randn(1, 6, 16),))


def torch_transformer() -> Network:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return Network(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), (torch.randn(1, 8, 32),))
