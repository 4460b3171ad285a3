"""`demo:NAME`: models that run on any machine, with meaningful numbers.

Weights and inputs are files of the package, equal on every machine; `client/generate_demos.py` trains the models and writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from etfarm.client.export.errors import unknown_demo
from etfarm.client.export.source import ModelSource
from etfarm.client.export.spec import DEMOS


def make_demo(name: str) -> ModelSource:
    """Create the demo `name`, in eval mode, with eight calibration inputs; the first is the example input.

    Bytes are equal on every machine. The caller's random state is kept.

    Raises:
        UNKNOWN_DEMO: no demo has the name.
    """
    import torch

    from etfarm.client.export import demo_models

    if name not in DEMOS:
        raise unknown_demo(name, (), DEMOS)
    with np.load(Path(demo_models.__file__).with_name(f"{name}.npz"), allow_pickle=False) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    samples = arrays.pop(demo_models.SAMPLES_KEY).float()
    with torch.random.fork_rng(devices=()):  # modules draw initial weights
        module = _module(name)
    module.load_state_dict(arrays)
    module.eval().requires_grad_(False)
    inputs = [(sample.unsqueeze(0).clone(),) for sample in samples]
    return ModelSource.of(module, inputs[0], calibration_inputs=inputs)


def _module(name: str) -> Any:
    from etfarm.client.export.demo_models import ds_cnn, mobilenet_v1_025, resnet8

    modules = {"resnet8": resnet8.ResNet8, "ds_cnn": ds_cnn.DsCnn, "mobilenet_v1_025": mobilenet_v1_025.MobileNetV1}
    return modules[name]()
