"""What is refused before an export, with a remedy that works."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource, export_source
from etfarm.client.export.errors import UnsupportedInput


class Scale(nn.Module):
    """A factor."""

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor


def test_arrays_of_numpy_are_refused() -> None:
    array, module = np.ones(2, np.float32), Scale().eval()
    with pytest.raises(UnsupportedInput, match=r"^forward: input '0' is an array of NumPy. Give torch.from_numpy\(...\) of it.$"):
        export_source(ModelSource.of(module, (array,)), name="m")
    export_source(ModelSource.of(module, (torch.from_numpy(array),)), name="m")
    with pytest.raises(UnsupportedInput, match=r"input '1' is a number of NumPy. Give a number of Python, as its .item"):
        export_source(ModelSource.of(module, (torch.ones(2), np.float32(3))), name="m")
    export_source(ModelSource.of(module, (torch.ones(2), np.float32(3).item())), name="m")
