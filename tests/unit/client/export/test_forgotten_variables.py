"""State in variables of a model's functions, in arrays and in iterators is named, and put back after the export."""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource, export_source

X = (torch.tensor([1.0, 2.0, 3.0]),)

NUM = 0
LATE: Any
G: dict[str, Tensor] = {"h": torch.zeros(3)}
LAST: deque[Tensor] = deque([torch.zeros(3)], maxlen=2)
STATE = SimpleNamespace(n=0)
MASKS: dict[int, Tensor] = {}
CALLS = 0


class Model(nn.Module):
    """A call with one attribute."""

    value: Any

    def __init__(self, body: Callable[[Any, Tensor], Tensor], value: Any = None) -> None:
        super().__init__()
        self.value = value
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def array(m: Any, x: Tensor) -> Tensor:
    y = x + torch.from_numpy(m.value)
    m.value[:] += 1
    return y


def array_element(m: Any, x: Tensor) -> Tensor:
    m.value[0] += 1
    return x * float(m.value[0])


def array_in_list(m: Any, x: Tensor) -> Tensor:
    m.value[0][1] += 1
    return x * float(m.value[0].sum())


def following(m: Any, x: Tensor) -> Tensor:
    return x * next(m.value)


def number(m: Any, x: Tensor) -> Tensor:
    global NUM
    NUM += 1
    return x * NUM


def late(m: Any, x: Tensor) -> Tensor:
    global LATE
    y = x * 2 if "LATE" in globals() else x * 1
    LATE = True
    return y


def element(m: Any, x: Tensor) -> Tensor:
    G["h"] = G["h"] + x
    return G["h"] * 1


def append(m: Any, x: Tensor) -> Tensor:
    LAST.append(x * 1)
    return torch.stack(list(LAST)).sum(0)


def attribute(m: Any, x: Tensor) -> Tensor:
    STATE.n += 1
    return x * STATE.n


def count() -> int:
    global NUM
    NUM += 1
    return NUM


def called(m: Any, x: Tensor) -> Tensor:
    return x * count()


def of_function(m: Any, x: Tensor) -> Tensor:
    of_function.n = getattr(of_function, "n", 0) + 1  # type: ignore[attr-defined]
    return x * of_function.n  # type: ignore[attr-defined]


def default(m: Any, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 - a state of the function
    seen.append(1)
    return x * len(seen)


def keyword_default(m: Any, x: Tensor, *, seen: dict[str, int] = {"n": 0}) -> Tensor:  # noqa: B006 - a state of the function
    seen["n"] += 1
    return x * seen["n"]


def counter() -> Callable[[Any, Tensor], Tensor]:
    n = 0

    def body(m: Any, x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x * n

    return body


def warm(m: Any, x: Tensor) -> Tensor:
    m.value += 1
    return x if m.value <= 5 else x * 2


def first_outputs(body: Callable[[Any, Tensor], Tensor], value: Any) -> list[Tensor]:
    """Return what the first and the second call return."""
    module = Model(body, value).eval()
    return [module(X[0].clone()) for _ in range(2)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("make", "body", "name"),
    [
        (lambda: np.zeros(3, np.float32), array, "self.value"),
        (lambda: np.zeros(2, np.int64), array_element, "self.value"),
        (lambda: [np.zeros(2)], array_in_list, "self.value[0]"),
        (lambda: itertools.count(1), following, "self.value"),
        (lambda: itertools.cycle([1, 2, 3]), following, "self.value"),
        (lambda: iter([1, 2, 3]), following, "self.value"),
        (lambda: None, number, "NUM"),
        (lambda: None, late, "LATE"),
        (lambda: None, element, 'G["h"]'),
        (lambda: None, append, "LAST"),
        (lambda: None, attribute, "STATE.n"),
        (lambda: None, called, "NUM"),
        (lambda: None, of_function, "of_function.n"),
        (lambda: None, default, "seen"),
        (lambda: None, keyword_default, 'seen["n"]'),
        (lambda: None, counter(), "n"),
        (lambda: 0, warm, "self.value"),
    ],
)
def test_state_outside_of_attributes_is_named(
    make: Callable[[], Any], body: Callable[[Any, Tensor], Tensor], name: str, strict: bool
) -> None:
    module, sentences = Model(body, make()).eval(), list[str]()
    model = export_source(ModelSource.of(module, X), name="m", strict=strict, say=sentences.append)
    assert model.methods["forward"].forgotten == (name,)
    assert sentences == [f"The program forgets what the model keeps in {name}: make that a buffer, and write to it with copy_()."]
    first = module(*X)  # of a model whose state is put back
    program = torch.export.load(io.BytesIO(model.methods["forward"].pt2)).module()  # type: ignore[arg-type]
    torch.testing.assert_close(program(*X), first)
