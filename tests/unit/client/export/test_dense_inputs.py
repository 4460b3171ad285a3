"""Example inputs that ExecuTorch does not support as they lie in memory are copied, and the client says so."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from etfarm.client.export.samples import dense  # noqa: E402

X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("tensor", "strides", "is_told"),
    [
        (torch.ones(1, 3).expand(2, 3), (3, 1), True),
        (X[:, ::2], (2, 1), True),
        (torch.ones(1, 1).expand(4, 1)[:, 0], (1,), True),
        (X, (4, 1), False),
        (X.t(), (3, 1), True),
        (torch.rand(1, 2, 3, 4).permute(3, 0, 1, 2), (6, 6, 3, 1), True),
        (torch.rand(1, 2, 3, 4).to(memory_format=torch.channels_last), (24, 1, 8, 2), False),
        (torch.rand(1, 1, 7, 5).to(memory_format=torch.channels_last), (35, 35, 5, 1), False),
        (torch.tensor(3), (), False),
        (torch.zeros(0, 3), (3, 1), False),
    ],
)
def test_tensors_with_gaps_or_repetitions_are_copied(tensor: torch.Tensor, strides: tuple[int, ...], is_told: bool) -> None:
    sentences: list[str] = []
    args, kwargs = dense(["x", "n", "mask"], (tensor, 3), {"mask": tensor}, sentences.append)
    for copied in (args[0], kwargs["mask"]):
        assert copied.stride() == strides
        assert torch.equal(copied, tensor)
    assert args[1] == 3
    assert [("'x'" in each or "'mask'" in each) for each in sentences] == [True, True] * is_told
    assert not is_told or "strides" in sentences[0]
