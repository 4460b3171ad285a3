"""State in variables of a model's functions, in arrays and in iterators is named, and put back after the export."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etfarm.client.export import ModelSource, export_source
from etfarm.client.export.forgetting import attributes_kept
from tests.support.exports import Body, read_program

X = (torch.tensor([1.0, 2.0, 3.0]),)

NUM = 0
LATE: Any
G: dict[str, Tensor] = {"h": torch.zeros(3)}
LAST: deque[Tensor] = deque([torch.zeros(3)], maxlen=2)
STATE = SimpleNamespace(n=0)
MASKS: dict[int, Tensor] = {}
CALLS = 0


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
    y = x * 2 if globals().get("LATE") else x * 1
    LATE = True
    return y


def element(m: Any, x: Tensor) -> Tensor:
    G["h"] = G["h"] + x
    return G["h"] * 1


def append(m: Any, x: Tensor) -> Tensor:
    LAST.append(x * 1)
    return LAST[0] + LAST[1]


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


@pytest.fixture(autouse=True)
def _variables_as_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    variables = {"NUM": 0, "CALLS": 0, "G": {"h": torch.zeros(3)}, "MASKS": {}, "STATE": SimpleNamespace(n=0)}
    for name, value in {**variables, "LAST": deque([torch.zeros(3)], maxlen=2)}.items():
        monkeypatch.setattr(module, name, value)


def must_forget(body: Callable[[Any, Tensor], Tensor], value: Any, name: str, *, strict: bool) -> None:
    """Check that an export names a state, and that the model's and the program's first call are right afterwards."""
    module, sentences = Body(body, value).eval(), list[str]()
    model = export_source(ModelSource.of(module, X), name="m", strict=strict, say=sentences.append)
    assert model.methods["forward"].forgotten == (name,)
    assert sentences == [f"The program forgets what the model keeps in {name}: make that a buffer, and write to it with copy_()."]
    program = read_program(model.methods["forward"].pt2).module()
    torch.testing.assert_close(program(*X), X[0])
    torch.testing.assert_close(module(*X), X[0])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("make", "body", "name"),
    [
        (lambda: np.zeros(3, np.float32), array, "self.value"),
        (lambda: np.zeros(2, np.int64), array_element, "self.value"),
        (lambda: [np.zeros(2)], array_in_list, "self.value[0]"),
        (lambda: None, number, "NUM"),
        (lambda: None, element, 'G["h"]'),
        (lambda: None, called, "NUM"),
        (lambda: 0, warm, "self.value"),
    ],
)
def test_state_outside_of_plain_attributes_is_named(
    make: Callable[[], Any], body: Callable[[Any, Tensor], Tensor], name: str, strict: bool
) -> None:
    must_forget(body, make(), name, strict=strict)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (counter, "n"),
        (lambda: late, "LATE"),
        (lambda: attribute, "STATE.n"),
        (lambda: append, "LAST"),
        (lambda: of_function, "of_function.n"),
        (lambda: default, "seen"),
        (lambda: keyword_default, 'seen["n"]'),
    ],
)
def test_state_that_a_strict_export_does_not_support_is_named(make: Callable[[], Any], name: str) -> None:
    must_forget(make(), None, name, strict=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.count(1),
        lambda: itertools.cycle([1, 2, 3]),
        lambda: itertools.islice([1, 2, 3] * 9, 27),
        lambda: iter([1, 2] * 9),
    ],
)
def test_positions_of_iterators_are_named(make: Callable[[], Any]) -> None:
    must_forget(following, make(), "self.value", strict=False)


def test_iterators_that_cannot_be_copied_are_left() -> None:
    module = Body(lambda m, x: x * (1 if m.value else 2), (number for number in range(9))).eval()
    assert export_source(ModelSource.of(module, X), name="m").methods["forward"].forgotten == ()
    assert next(module.value) == 0


def cached(m: Any, x: Tensor) -> Tensor:
    """Makes a mask once for each size, and counts the calls."""
    global CALLS
    CALLS += 1
    if x.shape[0] not in MASKS:
        MASKS[x.shape[0]] = torch.arange(x.shape[0]) > 0
    m.value[0] += 1
    return torch.where(MASKS[x.shape[0]], x, 0.0)


def test_variables_that_only_save_work_are_not_named() -> None:
    module, sentences = Body(cached, np.zeros(1)).eval(), list[str]()
    for _ in range(2):  # a cache with tensors of the first export would break the second
        model = export_source(ModelSource.of(module, X), name="m", say=sentences.append)
        assert model.methods["forward"].forgotten == () and sentences == []
    assert CALLS == 0 and MASKS == {} and module.value == [0]


def test_of_several_variables_only_state_is_named_after_a_warm_up() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return warm(m, cached(m.cache, x))

    module = Body(body, 0).eval()
    module.cache = SimpleNamespace(value=np.zeros(1))
    assert export_source(ModelSource.of(module, X), name="m").methods["forward"].forgotten == ("self.value",)
    assert module.value == 0 and CALLS == 0


@pytest.mark.parametrize(("body", "names"), [(number, ["NUM"]), (warm, [])])
def test_after_a_limit_there_is_one_further_call(body: Callable[[Any, Tensor], Tensor], names: list[str]) -> None:
    module = Body(body, 0).eval()
    with attributes_kept(module, is_called=False) as attributes:
        assert attributes.forgotten(X, {}, limit_s=0.0) == names
    assert NUM == 0 and module.value == 0


def test_variables_of_another_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counters_of_a_model.py").write_text("n = 0\n")
    (tmp_path / "model_with_counters.py").write_text(
        "import counters_of_a_model as counters\n"
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    @torch.no_grad()\n"
        "    def forward(self, x):\n"
        "        return self.step(x)\n"
        "    def step(self, x):\n"
        "        counters.n += 1\n"
        "        return x * counters.n\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    file = importlib.import_module("model_with_counters")
    model = export_source(ModelSource.of(file.Model().eval(), X), name="m")
    assert model.methods["forward"].forgotten == ("counters.n",)
    assert file.counters.n == 0


class Log:
    """Counts its lines, as the logger of a package does."""

    lines = 0


LOG = Log()


def test_objects_of_installed_packages_in_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        LOG.lines += 1
        return x * 1

    assert export_source(ModelSource.of(Body(body).eval(), X), name="m").methods["forward"].forgotten == ()
    assert LOG.lines == 0
    monkeypatch.setattr(Log, "__module__", "pytest")
    assert export_source(ModelSource.of(Body(body).eval(), X), name="m").methods["forward"].forgotten == ()
    assert LOG.lines > 0
