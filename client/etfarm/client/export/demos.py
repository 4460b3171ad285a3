"""Step 1, client: `demo:NAME`, models that run anywhere at once and whose numbers mean something.

With the weights that they are initialised with, all inputs give nearly one output, and no accuracy of an int8 program
can be judged. So each is trained for a moment on synthetic classes: a smooth template per class, with noise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.errors import UnknownDemo
from etfarm.client.export.source import ModelSource
from etfarm.client.export.spec import DEMOS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

SAMPLES: Final = 8
"""How many calibration inputs a demo has. One gave 4 to 14 dB on other inputs, eight were enough."""


@dataclass(frozen=True)
class _Recipe:
    make: Callable[[], Any]
    shape: tuple[int, ...]
    classes: int
    batch: int
    steps: int = 60
    learning_rate: float = 2e-3
    noise: float = 0.3


def make_demo(name: str) -> ModelSource:
    """The demo `name`, in eval mode, with eight calibration inputs of which the first is the example input.

    Takes a second or two. The weights are the same in every process of one machine: all draws are seeded, and the
    training runs on one thread, since sums over several are not in one order. The caller's random state and thread
    count are left as they were.

    Raises:
        UnknownDemo: there is none of that name.
    """
    import torch

    if name not in DEMOS:
        raise UnknownDemo(name, (), DEMOS)
    recipe = _recipe(name)
    with torch.random.fork_rng(devices=()), _one_thread():
        torch.manual_seed(0)
        module = recipe.make()
        templates = _templates(recipe)
        _train(module, templates, recipe)
        labels = torch.arange(SAMPLES) % recipe.classes
        samples = _draw(templates[labels], recipe.noise)
    inputs = [(sample.unsqueeze(0).clone(),) for sample in samples]
    return ModelSource.of(module, inputs[0], calibration_inputs=inputs)


def _recipe(name: str) -> _Recipe:
    from etfarm.client.export.demo_models import ds_cnn, mobilenet_v1_025, resnet8

    recipes = {
        "resnet8": _Recipe(resnet8.ResNet8, resnet8.INPUT_SHAPE, resnet8.CLASSES, batch=20),
        "ds_cnn": _Recipe(ds_cnn.DsCnn, ds_cnn.INPUT_SHAPE, ds_cnn.CLASSES, batch=24),
        "mobilenet_v1_025": _Recipe(
            mobilenet_v1_025.MobileNetV1, mobilenet_v1_025.INPUT_SHAPE, mobilenet_v1_025.CLASSES, batch=8
        ),
    }
    return recipes[name]


def _templates(recipe: _Recipe) -> Tensor:
    """A smooth random image per class, (classes, C, H, W), of zero mean and unit deviation."""
    import torch

    _, channels, height, width = recipe.shape
    coarse = torch.randn(recipe.classes, channels, 6, 5)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
    return (smooth - smooth.mean((1, 2, 3), keepdim=True)) / smooth.std((1, 2, 3), keepdim=True)


def _draw(images: Tensor, noise: float) -> Tensor:
    import torch

    return images + noise * torch.randn_like(images)


def _train(module: nn.Module, templates: Tensor, recipe: _Recipe) -> None:
    import torch

    optimizer = torch.optim.Adam(module.parameters(), recipe.learning_rate)
    module.train()
    with torch.enable_grad():
        for _ in range(recipe.steps):
            labels = torch.randint(recipe.classes, (recipe.batch,))
            loss = torch.nn.functional.cross_entropy(module(_draw(templates[labels], recipe.noise)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    module.eval()
    module.requires_grad_(False)


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
