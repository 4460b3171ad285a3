"""State in attributes that are no buffers is lost from call to call, and named; caches that only save work are not."""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from etfarm.client.export import ModelSource, export_source
from tests.support.exports import Body, read_program

X = (torch.tensor([1.0, 2.0, 3.0]),)


class Helper:
    """An object that is no module."""

    def __init__(self) -> None:
        self.h = torch.zeros(3)
        self.n = 0


class Slots:
    """An object without a dict."""

    __slots__ = ("h",)

    def __init__(self) -> None:
        self.h = torch.zeros(3)


def attribute(m: Any, x: Tensor) -> Tensor:
    m.value = m.value + x
    return m.value * 1


def late(m: Any, x: Tensor) -> Tensor:
    m.value = x * 1 if m.value is None else m.value + x
    return m.value * 1


def slot(m: Any, x: Tensor) -> Tensor:
    m.value["k"] = m.value["k"] + x
    return m.value["k"] * 1


def element(m: Any, x: Tensor) -> Tensor:
    m.value[0] = m.value[0] + x
    return m.value[0] * 1


def append(m: Any, x: Tensor) -> Tensor:
    m.value.append(x * 1)
    return torch.stack(list(m.value)).sum(0)


def helped(m: Any, x: Tensor) -> Tensor:
    m.value.h = m.value.h + x
    return m.value.h * 1


def parsed(m: Any, x: Tensor) -> Tensor:
    m.value.n += 1
    return x * m.value.n


def counted(m: Any, x: Tensor) -> Tensor:
    m.value += 1
    return x * m.value


def flagged(m: Any, x: Tensor) -> Tensor:
    y = x * 2 if m.value else x * 1
    m.value = True
    return y


def reference(m: Any, x: Tensor) -> Tensor:
    """Keeps its first input, so that equal inputs give equal outputs."""
    if m.value is None:
        m.value = x
    return x - m.value


def third(m: Any, x: Tensor) -> Tensor:
    m.value += 1
    return x * 5 if m.value == 3 else x * 1


def is_unchanged(value: Any) -> bool:
    """Return whether a value of the cases below is as it was before the export, with no tensors of an export in it."""
    if isinstance(value, Helper | Slots):
        return is_unchanged(value.h)
    if isinstance(value, Namespace):
        return is_unchanged(value.n)
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.tolist() == [0, 0, 0]
    if isinstance(value, dict | list | deque):
        return len(value) <= 1 and all(map(is_unchanged, value.values() if isinstance(value, dict) else value))
    return value in (None, 0, False)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("make", "body", "name"),
    [
        (lambda: torch.zeros(3), attribute, "self.value"),
        (lambda: None, late, "self.value"),
        (lambda: {"k": torch.zeros(3)}, slot, 'self.value["k"]'),
        (lambda: [torch.zeros(3)], element, "self.value[0]"),
        (list, append, "self.value"),
        (lambda: deque([torch.zeros(3)], maxlen=2), append, "self.value"),
        (Helper, helped, "self.value.h"),
        (Slots, helped, "self.value.h"),
        (lambda: Namespace(n=0), parsed, "self.value.n"),
        (lambda: 0, counted, "self.value"),
        (lambda: False, flagged, "self.value"),
        (lambda: None, reference, "self.value"),
        (lambda: 0, third, "self.value"),
    ],
)
def test_state_in_attributes_is_named(
    make: Callable[[], Any], body: Callable[[Any, Tensor], Tensor], name: str, strict: bool
) -> None:
    module, sentences = Body(body, make()).eval(), list[str]()
    value = module.value
    model = export_source(ModelSource.of(module, X), name="m", strict=strict, say=sentences.append)
    assert model.methods["forward"].forgotten == (name,)
    assert sentences == [f"The program forgets what the model keeps in {name}: make that a buffer, and write to it with copy_()."]
    assert module.value is value and is_unchanged(value)


def test_a_buffer_that_is_none_at_first_is_named() -> None:
    module = Body(lambda m, x: late(m, x), None).eval()
    del module.value
    module.register_buffer("value", None)
    assert export_source(ModelSource.of(module, X), name="m").methods["forward"].forgotten == ("self.value",)
    assert module.value is None and "value" in module._buffers


def masked(m: Any, x: Tensor) -> Tensor:
    """Makes a mask of its size once, and counts the calls."""
    if m.value is None or m.value[0] != x.shape:
        m.value = (x.shape, torch.arange(x.shape[0]) > 0)
    m.calls = getattr(m, "calls", 0) + 1
    return torch.where(m.value[1], x, 0.0)


def test_a_cache_that_only_saves_work_is_not_named() -> None:
    module, sentences = Body(masked, None).eval(), list[str]()
    for _ in range(2):  # a cache with tensors of the first export would break the second
        model = export_source(ModelSource.of(module, X), name="m", say=sentences.append)
        assert model.methods["forward"].forgotten == () and sentences == []
    assert module.value is None and not hasattr(module, "calls")


def test_of_several_attributes_only_state_is_named() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return masked(m, x) + attribute(m.inner, x)

    module = Body(body, None).eval()
    module.inner = Body(attribute, torch.zeros(3)).eval()
    assert export_source(ModelSource.of(module, X), name="m").methods["forward"].forgotten == ("self.inner.value",)


def test_what_another_method_reads_is_named() -> None:
    state, sentences = Helper(), list[str]()

    def write(m: Any, x: Tensor) -> Tensor:
        m.value.h = x
        return x * 1

    methods: dict[str, nn.Module] = {"set": Body(write, state).eval(), "get": Body(lambda m, x: x + m.value.h, state).eval()}
    model = export_source(ModelSource(methods=methods, example_inputs={"set": X, "get": X}), name="m", say=sentences.append)
    assert {name: method.forgotten for name, method in model.methods.items()} == {"set": ("self.value.h",), "get": ()}


def test_a_buffer_instead_is_kept() -> None:
    """Checks the remedy for an attribute and a counter."""

    def body(m: Any, x: Tensor) -> Tensor:
        m.h.copy_(m.h + x)
        m.n.add_(1)
        return m.h * m.n

    module = Body(body, None).eval()
    module.register_buffer("h", torch.zeros(3))
    module.register_buffer("n", torch.zeros(1))
    model = export_source(ModelSource.of(module, X), name="m")
    assert model.methods["forward"].forgotten == () and module.n.item() == 0
    program = read_program(model.methods["forward"].pt2).module()
    for _ in range(3):
        torch.testing.assert_close(program(*X), module(*X))


class Counted(nn.Module):
    """Has a counter that changes its outputs, or none."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.n, self.counts = 0, counts

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * self.n if self.counts else x * 1


def test_the_calls_of_another_method_leave_it_as_it_was() -> None:
    methods = {"plain": Counted(counts=False).eval(), "counted": Counted(counts=True).eval()}
    exported = export_source(ModelSource(methods=methods, example_inputs=dict.fromkeys(methods, (torch.ones(3),))), name="m")
    assert [methods[name].n for name in methods] == [0, 0]
    assert (exported.methods["plain"].forgotten, exported.methods["counted"].forgotten) == ((), ("self.n",))


def test_a_large_table_does_not_hide_state_behind_it() -> None:
    class Vocabulary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = {str(number): number for number in range(60_000)}
            self.cache = [torch.zeros(3)]

        def forward(self, x: Tensor) -> Tensor:
            self.cache[0] = self.cache[0] + x
            return self.cache[0] * 1

    exported = export_source(ModelSource.of(Vocabulary().eval(), (torch.ones(3),)), name="m")
    assert exported.methods["forward"].forgotten == ("self.cache[0]",)


def test_modules_that_know_their_parent_are_looked_at_once() -> None:
    class Block(nn.Module):
        def __init__(self, root: nn.Module) -> None:
            super().__init__()
            object.__setattr__(self, "root", root)

        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0
            self.blocks = nn.ModuleList(Block(self) for _ in range(300))

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            return self.blocks[0](x) * self.n

    exported = export_source(ModelSource.of(Chain().eval(), (torch.ones(3),)), name="m")
    assert exported.methods["forward"].forgotten == ("self.n",)


class Shared(nn.Module):
    """State in attributes of the class."""

    cache: ClassVar[dict[str, Tensor]] = {}
    total: ClassVar[int] = 0

    def __init__(self, *, is_counter: bool) -> None:
        super().__init__()
        self.is_counter = is_counter

    def forward(self, x: Tensor) -> Tensor:
        if self.is_counter:
            type(self).total += 1
            return x * self.total
        self.cache["h"] = self.cache.get("h", torch.zeros(3)) + x
        return self.cache["h"] * 1


@pytest.mark.parametrize(("is_counter", "name"), [(True, "Shared.total"), (False, 'Shared.cache["h"]')])
def test_state_in_attributes_of_a_class_is_named(is_counter: bool, name: str) -> None:
    model = export_source(ModelSource.of(Shared(is_counter=is_counter).eval(), X), name="m", say=lambda _: None)
    assert model.methods["forward"].forgotten == (name,)
    assert Shared.total == 0 and Shared.cache == {}
