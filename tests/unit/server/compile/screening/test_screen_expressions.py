"""The screen of expressions, guards, operator names and pickles, as texts and bytes without an archive around them."""

from __future__ import annotations

import pickle
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.compile.screening import expressions, pickles
from etfarm.server.compile.screening.errors import UnsafeModel


@given(st.text(max_size=200))
def test_any_text_in_place_of_an_expression_is_refused_or_harmless(text: str) -> None:
    try:
        expressions.check_symbol(text, "here")
    except UnsafeModel:
        return
    assert not set(text) & set('[]{};:@`$\\"')
    assert "__" not in text


@given(st.binary(max_size=200))
def test_any_bytes_in_place_of_a_pickle_are_refused(data: bytes) -> None:
    try:
        pickles.check(data, "here")
    except UnsafeModel:
        return
    # Whatever passes is harmless to load; a machine of opcodes may lack what they ask for.
    with suppress(pickle.UnpicklingError, TypeError, AttributeError, KeyError, IndexError, ValueError):
        assert pickle.loads(data) is not NotImplemented


@pytest.mark.parametrize("target", ["executorch.exir.dialects.edge", "executorch.exir.dialects.edge.x()", "executorch.exir.os"])
def test_what_only_begins_like_the_edge_dialect_is_still_code(target: str) -> None:
    with pytest.raises(UnsafeModel):
        expressions.check_target(target, "here")


@pytest.mark.parametrize(
    "expression",
    [
        "Pow(Pow(Pow(Integer(9), Integer(8)), Integer(8)), Integer(8))",
        "Pow(Integer(9), Pow(Integer(9), Integer(8)))",
        "Pow(Integer(9))",
        "Float('0.1', precision=1000000000000)",
        "Symbol('s0', integer=9**9)",
    ],
)
def test_an_expression_that_grows_without_end_is_refused(expression: str) -> None:
    with pytest.raises(UnsafeModel):
        expressions.check_symbol(expression, "here")


@pytest.mark.parametrize(
    "expression",
    [
        "Pow(Symbol('s0', positive=True, integer=True), Integer(2))",
        "Mul(Integer(8), Pow(Add(Symbol('s1'), Integer(-1)), Integer(-1)), Pow(Symbol('s1'), Rational(1, 2)))",
        "FloorDiv(Add(Symbol('s77', positive=True, integer=True), Integer(-1)), Integer(2))",
        "Float('0.5', precision=53)",
    ],
)
def test_what_torch_prints_of_sizes_passes(expression: str) -> None:
    expressions.check_symbol(expression, "here")


@pytest.mark.parametrize("guard", ["'a' * 99999999999", "L['x'].size()[0] == 'a' * 9999999999"])
def test_a_guard_that_multiplies_a_text_is_refused(guard: str) -> None:
    with pytest.raises(UnsafeModel):
        expressions.check_guard(guard, "here")
