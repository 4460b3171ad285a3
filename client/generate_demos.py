"""Generates the weights and the inputs of the demo models, `etfarm/client/export/demo_models/NAME.npz`.

With their initial weights, all inputs give nearly the same output, so that the accuracy of an int8 program cannot be judged. Each
demo is therefore trained briefly on synthetic classes: a smooth template per class, with noise.

The results are committed, because torch draws and computes other values where a processor has other vector instructions. On the
processors that the committed files come from (x86-64 with AVX2), this program writes equal bytes again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from etfarm.client.export.demo_models import SAMPLES_KEY, ds_cnn, mobilenet_v1_025, resnet8

FOLDER: Final = Path(__file__).resolve().parent / "etfarm/client/export/demo_models"

SAMPLES: Final = 8
"""Number of calibration inputs of a demo. One input gave 4 to 14 dB on other inputs; eight were enough."""


@dataclass(frozen=True)
class Training:
    """How one demo is trained."""

    module: type[Any]
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
    compact: bool = False
    """Whether the file has rounded values, compressed: a quarter of the size, and int8 keeps 22 dB with them and without."""


TRAININGS: Final = {
    "resnet8": Training(resnet8.ResNet8, resnet8.INPUT_SHAPE, resnet8.CLASSES, batch=20),
    "ds_cnn": Training(ds_cnn.DsCnn, ds_cnn.INPUT_SHAPE, ds_cnn.CLASSES, batch=24),
    "mobilenet_v1_025": Training(
        mobilenet_v1_025.MobileNetV1,
        mobilenet_v1_025.INPUT_SHAPE,
        mobilenet_v1_025.CLASSES,
        batch=8,
        learning_rate=3e-3,
        noise=0.1,
        weight_decay=0.1,
        seed=1,
        opposed=True,
        compact=True,
    ),
}


def train(training: Training) -> dict[str, np.ndarray]:
    """Return the arrays of a demo's file: the module's state by its names, and the inputs.

    All draws are seeded, and the training runs on one thread, since several threads add in varying order. The caller's random
    state and thread count are restored.
    """
    with torch.random.fork_rng(devices=()), _one_thread():
        torch.manual_seed(training.seed)
        module = training.module()
        templates = _templates(training)
        _train(module, templates, training)
        samples = _draw(templates[torch.arange(SAMPLES) % training.classes], training.noise)
    return {**{name: value.detach().numpy() for name, value in module.state_dict().items()}, SAMPLES_KEY: samples.numpy()}


def write(arrays: dict[str, np.ndarray], path: Path, *, compact: bool) -> None:
    """Write the arrays as they are; or compact: six significant bits of each weight, inputs in sixteenths, as float16.

    Only the compact file is compressed: other weights hardly become smaller, and compressed bytes depend on zlib's version.
    """
    if compact:
        samples = np.round(arrays[SAMPLES_KEY] * 16) / 16
        rounded = {name: _round(array).astype(np.float16) for name, array in arrays.items() if array.dtype == np.float32}
        np.savez_compressed(path, allow_pickle=False, **{**arrays, **rounded, SAMPLES_KEY: samples.astype(np.float16)})
    else:
        np.savez(path, allow_pickle=False, **arrays)


def _round(array: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(array)
    rounded: np.ndarray = np.ldexp(np.round(mantissa * 64) / 64, exponent)
    return rounded


def _templates(training: Training) -> Tensor:
    """Return a smooth random image per class, (classes, C, H, W), with zero mean and unit deviation."""
    _, channels, height, width = training.shape
    coarse = torch.randn(training.classes, channels, 6, 5)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
    templates = (smooth - smooth.mean((1, 2, 3), keepdim=True)) / smooth.std((1, 2, 3), keepdim=True)
    return torch.cat([templates[:1], -templates[:1]]) if training.opposed else templates


def _draw(images: Tensor, noise: float) -> Tensor:
    return images + noise * torch.randn_like(images)


def _train(module: nn.Module, templates: Tensor, training: Training) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), training.learning_rate, weight_decay=training.weight_decay)
    module.train()
    for _ in range(training.steps):
        labels = torch.randint(training.classes, (training.batch,))
        loss = torch.nn.functional.cross_entropy(module(_draw(templates[labels], training.noise)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """Write the files of the chosen demos."""
    parser = argparse.ArgumentParser(description="Train the demo models and write their weights and inputs.")
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"demo to train (default: all): {', '.join(TRAININGS)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder to write NAME.npz to (default: the package's)")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.name) - set(TRAININGS)):
        parser.error(f"NAME must be one of {', '.join(TRAININGS)}, got {', '.join(unknown)}.")
    for name in arguments.name or TRAININGS:
        path = arguments.folder / f"{name}.npz"
        write(train(TRAININGS[name]), path, compact=TRAININGS[name].compact)
        print(f"{name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
