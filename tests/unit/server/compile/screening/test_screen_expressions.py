"""The screen of expressions, guards, operator names and pickles, as texts and bytes without an archive around them."""

from __future__ import annotations

import pickle
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.compile.screening import expressions, pickles
from etfarm.server.compile.screening.errors import UnsafeModel
from tests.support.refusals import refuses


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


def call(name: str, *arguments: str) -> str:
    return f"{name}({', '.join(arguments)})"


def sizes(count: int, first: int = 0) -> list[str]:
    return [f"Symbol('s{number}', positive=True, integer=True)" for number in range(first, first + count)]


SUMS = [call("Add", size, "Integer(1)") for size in sizes(16)]


def tower(form: str) -> str:
    """Return a power of a power of a power of 2."""
    text = "Integer(2)"
    for _ in range(3):
        text = form.format(text)
    return text


COSTLY = {
    "a tower of powers within integers": tower("Integer(Pow({}, Integer(8)))"),
    "a tower of powers within fractions": tower("Rational(Pow({}, Integer(8)), Integer(3))"),
    "a tower of powers within floats": tower("Float(Pow({}, Integer(8)))"),
    "a tower of quotients by negative powers": tower("(1 // Pow({}, Integer(-8)))"),
    "a tower of FloorDivs by negative powers": tower("FloorDiv(Integer(1), Pow({}, Integer(-8)))"),
    "an exact number of ten million digits": "1e9999999",
    "the same in an integer": "Integer(1e999999)",
    "a tiny number that is not 0 to sympy": "1e-9999999",
    "a long literal": "0." + "1" * 50,
    "a literal in groups": "1_000",
    "a hexadecimal literal": "0xff",
    "infinity": "1e999",
    "a power of a power of a sum": call("Pow", call("Pow", call("Add", *sizes(30)), "Integer(8)"), "Integer(8)"),
    "a remainder of a power": call("Mod", call("Pow", call("Add", *sizes(10)), "Integer(8)"), "Integer(7)"),
    "a quotient of powers": call("FloorDiv", *(call("Pow", call("Add", *sizes(n)), "Integer(8)") for n in (9, 10))),
    "a comparison of powers": call("Equality", *(call("Pow", call("Add", *sizes(n)), "Integer(8)") for n in (9, 10))),
    "a product of powers": call("Mul", *(call("Pow", call("Add", *sizes(30, n)), "Integer(8)") for n in range(6))),
    "a product of sums": call("Mul", *SUMS),
    "a quotient of products": call("IntTrueDiv", call("Mul", *SUMS[:12]), call("Mul", *SUMS[4:])),
    "a remainder of products": call("Mod", call("Mul", *SUMS[:8]), call("Mul", *SUMS[8:])),
    "a product of sums in operators": "*".join(f"(s{n} + 1)" for n in range(16)),
    "products behind functions that return them": call("Mul", *(call("Identity", one) for one in SUMS)),
    "products behind divisions by 1": call("Mul", *(call("FloorDiv", one, "Integer(1)") for one in SUMS)),
    "a maximum of many": call("Max", *(call("Add", size, "Integer(1)") for size in sizes(100))),
    "a maximum of minima": call("Max", *(call("Min", *sizes(8, n)) for n in range(0, 64, 8))),
    "a maximum of powers": call("Max", *(call("Pow", call("Add", *sizes(9, n)), "Integer(4)") for n in range(9))),
    "a power of a sum of roots": call(
        "Pow", call("Add", *(f"Pow(Integer({n}), Rational(1, 2))" for n in (2, 3, 5, 7, 11))), "Integer(8)"
    ),
    "roots of large numbers": call("Mul", *(f"Pow(Integer({(1 << 62) - n}), Rational(1, 2))" for n in range(100))),
    "a large power of a large number": call("Mul", *["Pow(Integer(9223372036854775807), Integer(8))"] * 200),
}


@pytest.mark.parametrize("name", COSTLY)
def test_an_expression_that_sympy_would_compute_for_long_is_refused(name: str) -> None:
    with pytest.raises(UnsafeModel):
        expressions.check_symbol(COSTLY[name], "here")


NESTED = "Symbol('s0', positive=True, integer=True)"
for _ in range(8):  # eight convolutions of stride 2
    NESTED = f"Add(FloorDiv(Add({NESTED}, Integer(-1)), Integer(2)), Integer(1))"


@pytest.mark.parametrize(
    "expression",
    [
        call("Mul", "Integer(768)", "Symbol('s77')", NESTED, NESTED.replace("s0", "s1")),
        call("FloorDiv", call("Add", *sizes(100)), call("Add", *sizes(100))),
        call("Max", *sizes(10)),
        call("And", *(call("LessThan", size, "Integer(8)") for size in sizes(100))),
        call("Pow", call("Mul", *sizes(3)), "Integer(8)"),
        call("Add", *(call("Mul", "Integer(3)", *sizes(2, n)) for n in range(100))),
        "1.5e-05",
        "Float('1.0000000000000000e-05', precision=53)",
        "Integer(9223372036854775807)",
    ],
)
def test_sizes_of_deep_networks_pass(expression: str) -> None:
    expressions.check_symbol(expression, "here")


@pytest.mark.parametrize("guard", ["1e9999999 <= 1", "*".join(f"(L['x'].size()[{n}] + 1)" for n in range(16)) + " <= 1"])
def test_a_guard_that_sympy_would_compute_for_long_is_refused(guard: str) -> None:
    with pytest.raises(UnsafeModel):
        expressions.check_guard(guard, "here")


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


@pytest.mark.parametrize("key", ["é", "größe/cm 2", "信号機", "e\u0301tat"])
def test_a_guard_may_name_an_input_by_letters_of_any_script(key: str) -> None:
    expressions.check_guard(f"L[{key!r}].size()[0] <= 8 and 2*L['x'].size()[1] <= 1e2", "here")
    refused = [
        f"L[{key!r}].size()[0] <= {key!r}", f"{key[0]} <= 8", f"L[{key!r}].size()[0] <= 1e9999999",
        *(f"L[{key + end!r}].size()[0] <= 8" for end in ('"', "'", "\\", "{", "\n", "\u2028", "\u201d")),
    ]  # fmt: skip
    for guard in refused:
        with pytest.raises(UnsafeModel):
            expressions.check_guard(guard, "here")


@pytest.mark.parametrize("guard", ["'a' * 99999999999", "L['x'].size()[0] == 'a' * 9999999999"])
def test_a_guard_that_multiplies_a_text_is_refused(guard: str) -> None:
    with pytest.raises(UnsafeModel):
        expressions.check_guard(guard, "here")


@pytest.mark.parametrize(
    ("guard", "size"),
    [
        ("math.trunc(0.5*torch.sym_float(L['x'].size()[0])) == 3", "0 of 'x'"),
        ("math.trunc(torch.sym_float(L['x'].size()[1]) ** 0.5) == 2", "1 of 'x'"),
        ("round(0.5*torch.sym_float(L['batch']['left'].size()[1])) >= 0", "1 of 'batch'"),
        ("(L['x'].size()[0] & 1) == 0", "0 of 'x'"),
    ],
)
def test_conditions_on_floats_of_a_size_are_no_attack(guard: str, size: str) -> None:
    with refuses("DIM_SPECIALIZED", match=f"^Dim {size} cannot be dynamic as requested: the export fixes") as caught:
        expressions.check_guard(guard, "here")
    assert caught.value.remedy.startswith("Compute sizes with whole numbers")


@pytest.mark.parametrize(
    "guard",
    [
        "math.trunc(__import__('os').system('id'), L['x'].size()[0]) == 3", "math.__loader__(L['x'].size()[0])",
        "torch.sym_float.__self__(L['x'].size()[0])", "math.trunc(L['x'].size()[0]).real == 3", "torch.load(L['x'].size()[0])",
        "math.trunc(key=L['x'].size()[0])", "math.trunc(0.5) == 0",
    ],
)  # fmt: skip
def test_other_functions_of_math_and_torch_are_refused_as_code(guard: str) -> None:
    with pytest.raises(UnsafeModel):
        expressions.check_guard(guard, "here")
