"""What calibration did not show: which inputs are changed to find it, and what stays in fp32 for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from structlog.testing import capture_logs  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchao.quantization.pt2e.observer import ObserverBase  # noqa: E402

from etfarm.server.compile.lower import build, far_values, quantize  # noqa: E402
from etfarm.server.compile.lower.unseen_values import Exploration  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from tests.support.compiling import STATIC, sample, sqnr_db  # noqa: E402

pytestmark = [pytest.mark.numeric, pytest.mark.slow(reason="quantizes")]

WIDTH: Final = 32
TOKENS: Final = 8
PADDED: Final = (torch.arange(TOKENS) < 5).float()[None]


def in_graph(folder: Path, model: nn.Module, samples: Sequence[tuple[Tensor, ...]]) -> tuple[nn.Module, far_values.Kept]:
    """Return the quantized graph of a model that was calibrated on samples, and what stays in fp32."""
    program, kept = torch.export.export(model.eval(), samples[0]), far_values.Kept()
    files = [sample(folder / f"{index}.ett", *inputs) for index, inputs in enumerate(samples[1:])]
    module = quantize.quantize(program, build.quantization(recipes.parse(STATIC), "forward"), STATIC, "forward", files, kept=kept)
    return module, kept


def names(kept: far_values.Kept) -> list[str]:
    """Return the names of the operators that stay in fp32 for what calibration did not show."""
    return [str(node.target).split(".")[1] for reason, node in kept.nodes if reason is far_values.Reason.UNSEEN]


class Placed(nn.Module):
    """Attention with a padding mask and an input that has few values: an offset into a table, or a divisor of integers."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
        places = torch.arange(TOKENS)
        x = x + self.table.index_select(0, number + places if self.form == "offset" else places // number)
        scores = self.q(x) @ self.k(x).transpose(1, 2) / WIDTH**0.5
        scores = scores + (1 - mask)[:, None, :] * -1e4
        out: Tensor = scores.softmax(-1) @ self.v(x)
        return out


@pytest.mark.parametrize(("form", "number"), [("offset", 0), ("divisor", 2)])
def test_an_input_that_cannot_be_another_hides_no_mask(tmp_path: Path, form: str, number: int) -> None:
    torch.manual_seed(0)
    model = Placed(form)
    few = torch.tensor([number])
    module, kept = in_graph(tmp_path, model, [(torch.randn(1, TOKENS, WIDTH), torch.ones(1, TOKENS), few) for _ in range(6)])
    assert kept.inputs == ["mask"] and names(kept) == ["mul", "add"]
    x = torch.randn(1, TOKENS, WIDTH)
    assert sqnr_db(model(x, PADDED, few), module(x, PADDED, few)) > 25


def test_a_model_that_does_not_run_again_is_logged() -> None:
    graph: Any = torch.export.export(nn.Linear(4, 4), (torch.ones(1, 4),)).module(check_guards=False)
    exploration = Exploration(graph, ObserverBase, (), lambda: None)
    with capture_logs() as logs:
        exploration.run([(torch.ones(1, 3),)])
    assert [(line["log_level"], "shapes cannot be multiplied" in line["error"]) for line in logs] == [("warning", True)]
    assert exploration.inputs == []
