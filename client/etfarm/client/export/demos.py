"""`demo:NAME`: models that run on any machine, with meaningful numbers.

With their initial weights, all inputs give nearly the same output, so that the accuracy of an int8 program cannot be
judged. Each demo is therefore trained briefly on synthetic classes: a smooth template per class, with noise.
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
"""Number of calibration inputs of a demo. One input gave 4 to 14 dB on other inputs; eight were enough."""


@dataclass(frozen=True)
class _Recipe:
    make: Callable[[], Any]
    shape: tuple[int, ...]
    classes: int
    batch: int
    steps: int = 60
    learning_rate: float = 2e-3
    noise: float = 0.3
    weight_decay: float = 0.0
    seed: int = 0
    opposed: bool = False
    """Whether the second of two classes has the negative template of the first. A network this deep and narrow leaves little
    room for int8's noise: with these four values and seed 1 it keeps 22 dB on new samples, with others 8 to 20 dB.
    """


def make_demo(name: str) -> ModelSource:
    """Create the demo `name`, in eval mode, with eight calibration inputs; the first is the example input.

    This takes a second or two. The weights are equal in every process on one machine: all draws are seeded, and the
    training runs on one thread, since several threads add in varying order. The caller's random state and thread
    count are restored.

    Raises:
        UnknownDemo: no demo has the name.
    """
    import torch

    if name not in DEMOS:
        raise UnknownDemo(name, (), DEMOS)
    recipe = _recipe(name)
    with torch.random.fork_rng(devices=()), _one_thread():
        torch.manual_seed(recipe.seed)
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
            mobilenet_v1_025.MobileNetV1,
            mobilenet_v1_025.INPUT_SHAPE,
            mobilenet_v1_025.CLASSES,
            batch=8,
            learning_rate=3e-3,
            noise=0.1,
            weight_decay=0.1,
            seed=1,
            opposed=True,
        ),
    }
    return recipes[name]


def _templates(recipe: _Recipe) -> Tensor:
    """Return a smooth random image per class, (classes, C, H, W), with zero mean and unit deviation."""
    import torch

    _, channels, height, width = recipe.shape
    coarse = torch.randn(recipe.classes, channels, 6, 5)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
    templates = (smooth - smooth.mean((1, 2, 3), keepdim=True)) / smooth.std((1, 2, 3), keepdim=True)
    return torch.cat([templates[:1], -templates[:1]]) if recipe.opposed else templates


def _draw(images: Tensor, noise: float) -> Tensor:
    import torch

    return images + noise * torch.randn_like(images)


def _train(module: nn.Module, templates: Tensor, recipe: _Recipe) -> None:
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
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
