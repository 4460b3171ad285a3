"""Numbers among the inputs: a program has Python numbers fixed, and takes others as tensors."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from functorch.experimental.control_flow import map as mapped
from torch import Tensor, nn
from torch.export import Dim

from etfarm.client import Farm
from etfarm.client.export import ModelSource
from etfarm.wire.errors import EtfarmError
from tests.support.exports import Function
from tests.support.refusals import refuses

pytestmark = [pytest.mark.slow(reason="programs are compiled and run on a farm"), pytest.mark.numeric]

INDEX: Final = "pass a tensor and index with it (self.k[:, pos] = x, with pos a tensor of positions)"


class Fixed(nn.Module):
    """A cache that is written to from a position on, which is a Python int."""

    k: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 8, 4))

    def forward(self, x: Tensor, start_pos: int) -> Tensor:
        self.k[:, start_pos : start_pos + x.shape[1]] = x
        return self.k * 1


class Indexed(Fixed):
    """The same with a tensor of positions."""

    def forward(self, x: Tensor, pos: Any) -> Tensor:
        self.k[:, pos] = x
        return self.k * 1


class Scaled(nn.Module):
    """Multiplies with numbers, which are Python's or tensors."""

    def forward(self, x: Tensor, scale: Any, times: Any, on: bool, mask: None = None) -> Tensor:
        return x * scale * times if on else x


def warned(client: Farm, source: ModelSource, recipe: str = "portable") -> list[tuple[str, str]]:
    (report,) = client.compile(source, recipes=recipe).result().reports
    assert report.compile is not None
    return [(warning.code, warning.message) for warning in report.compile.warnings]


def test_a_position_that_is_fixed_is_named_and_a_tensor_of_positions_varies(client: Farm) -> None:
    chunks = [torch.rand(1, 2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    fixed = ModelSource.of(Fixed().eval(), (chunks[0], 4))
    ((code, message),) = warned(client, fixed)
    start = "start_pos is a Python int: the program of forward has it fixed at 4. To vary it between calls, "
    assert (code, message) == ("INPUT_FIXED", f"{start}{INDEX}.")
    with client.session(fixed, recipe="portable") as session:
        session.run(chunks[0].numpy(), 4)
        with pytest.raises(EtfarmError) as refused:
            session.run(chunks[0].numpy(), 2)
        assert "input 'start_pos' must be 4, a constant of the exported program" in refused.value.message
        assert (refused.value.reason, INDEX in refused.value.remedy) == ("INPUT_MISMATCH", True)

    indexed = ModelSource.of(Indexed().eval(), (chunks[0], torch.tensor([4, 5])))
    for recipe in ("portable", "xnnpack_fp32"):
        assert warned(client, indexed, recipe) == []
        eager = Fixed().eval()
        with client.session(indexed, recipe=recipe) as session:
            for chunk, begin in zip(chunks, (0, 2, 5), strict=True):
                output = session.run(chunk.numpy(), np.arange(begin, begin + 2)).array()
                assert np.allclose(output, eager(chunk, begin), atol=1e-6), (recipe, begin)


@pytest.mark.parametrize("recipe", ["portable", "xnnpack_pt2e_int8_dynamic_per_channel"])
def test_numbers_that_are_fixed_are_named_and_tensors_vary(client: Farm, recipe: str) -> None:
    class Net(Scaled):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: Any, times: Any, on: bool, mask: None = None) -> Tensor:
            return super().forward(self.linear(x), scale, times, on, mask)

    x = torch.rand(2, 8, generator=torch.Generator().manual_seed(0))
    messages = [m for code, m in warned(client, ModelSource.of(Net().eval(), (x, 2.5, 3, True, None)), recipe) if "FIXED" in code]
    (message,) = messages
    assert message.startswith("scale (2.5), times (3) are Python numbers: the program of forward has them fixed. To vary one ")
    model = Scaled().eval()
    source = ModelSource.of(model, (x, torch.tensor(2.5), torch.tensor(3), True, None))
    assert warned(client, source) == []
    with client.session(source, recipe="portable") as session:
        for scale, times in ((2.5, 3), (0.5, 7)):
            assert np.allclose(session.run(x.numpy(), scale, times, True, None).array(), model(x, scale, times, True), atol=1e-5)


def test_an_uploaded_program_with_a_dynamic_number_is_refused_before_it_is_lowered(client: Farm) -> None:
    shapes = (None, Dim.DYNAMIC)
    program = torch.export.export(Fixed().eval(), (torch.rand(1, 2, 4), 4), dynamic_shapes=shapes)
    with refuses("UNSUPPORTED_INPUT") as refused, client.session(program, recipe="portable"):
        pass
    words = "input 'start_pos' is a dynamic int: programs of ExecuTorch take numbers that vary only as tensors"
    assert words in refused.value.message
    assert INDEX in refused.value.remedy and "give None for it in dynamic_shapes" in refused.value.remedy


def test_a_session_names_the_input_whose_dynamic_dim_was_lost(client: Farm) -> None:
    # ExecuTorch fixes the number of rows at that of the example.
    rows = Function(lambda x: mapped(lambda row: row.sin(), x))
    source = ModelSource.of(rows.eval(), (torch.rand(2, 3),), dynamic_shapes=({0: Dim("n", min=2, max=4)},))
    assert [code for code, _ in warned(client, source)] == ["DYNAMIC_DIM_LOST"]
    with client.session(source, recipe="portable") as session:
        assert session.run(np.ones((2, 3), np.float32)).array().shape == (2, 3)
        with refuses("INPUT_MISMATCH", match=r"input 'x' must have the shape \[2, 3\]"):
            session.run(np.ones((4, 3), np.float32))
