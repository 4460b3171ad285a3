"""torch.vmap and torch's own loops reach a device as plain operators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan

from etfarm.client.export import ModelSource
from tests.support.farm import FarmProcess

pytestmark = [pytest.mark.slow(reason="programs are compiled and run on a farm"), pytest.mark.numeric]


class Model(nn.Module):
    """A call with a linear layer."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layer, x)


@pytest.mark.parametrize(
    "body",
    [
        lambda layer, x: torch.vmap(lambda v: layer(v).sin() + v.sum())(x),
        lambda layer, x: layer(torch.vmap(lambda v: v.sin() + v.sum())(x)),
        lambda layer, x: layer(associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")),
    ],
)
def test_a_device_gives_what_eager_pytorch_gives(farm: FarmProcess, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module, x = Model(body).eval(), torch.rand(4, 3)
    with farm.client() as client, client.session(ModelSource.of(module, (x,)), recipe="xnnpack_fp32") as session:
        assert np.allclose(session.run(x.numpy()).array(), module(x).detach(), atol=1e-5)
