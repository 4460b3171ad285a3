"""Compilations as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.rendering import render_text, report_document


def _place(file: str = "net.py", line: int = 7, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"source": {"file": file, "line": line, "code": f"y = line_{line}(x)"}, "count": count, **more}


def _operator(op: str, outside: int, *places: dict[str, Any]) -> dict[str, Any]:
    return {"op": op, "delegated": 0, "non_delegated": outside, "places": places}


def _compiled(**changes: Any) -> dict[str, Any]:
    operators = [
        _operator("aten_cumsum_default", 2, _place(line=9), _place(line=12)),
        _operator("aten_sin_default", 1, {"module": "head", "count": 1}),
        _operator("getitem", 3),
    ]
    return {
        "stages": [
            {"stage": "TORCH_EXPORT", "duration_ms": 30.0, "where": "CLIENT", "methods": {"encode": 10.0, "decode": 20.0}},
            {"stage": "QUANTIZE", "duration_ms": 1500.0, "where": "SERVER", "cached": True},
            {"stage": "TO_EXECUTORCH", "duration_ms": 195.0, "where": "SERVER"},
        ],
        "program": {"digest": "1" * 64, "size_bytes": 320_512},
        "sizes": {
            "program_bytes": 4096, "constant_bytes": 0, "delegate_bytes": 300_000,
            "methods": {"encode": {"delegate_bytes": 100_000, "planned_bytes": [1024, 1024]},
                        "decode": {"delegate_bytes": 200_000, "planned_bytes": [4096]}},
        },
        "data": {"weights": {"digest": "2" * 64, "size_bytes": 3 << 20}},
        "delegation": {
            "encode": {"subgraphs": 1, "delegated_nodes": 36, "non_delegated_nodes": 1},
            "decode": {"subgraphs": 2, "delegated_nodes": 6, "non_delegated_nodes": 6, "operators": operators},
        },
        "stayed_fp32": {"decode": {"operators": [{"op": "aten_softmax", "count": 4, "places": [_place(line=21)]}]}},
        "checks": [
            {"method": "encode", "inputs": "EXAMPLE", "shapes": ["1x3x8x8"], "ran": True,
             "outputs": [{"output": "a", "sqnr_db": 50.0, "max_abs_error": 0.01},
                         {"output": "b", "sqnr_db": 38.25, "max_abs_error": 0.2}]},
            {"method": "decode", "inputs": "MAX", "ran": False, "why": "the kernel is missing."},
            {"method": "decode", "inputs": "MIN", "ran": True, "outputs": [{"output": "a", "equal": True}]},
        ],
        "warnings": [{"code": "ONE_SAMPLE", "message": "decode was calibrated with one input."}],
        **changes,
    }  # fmt: skip


def _compilation(width: int = 120, **changes: Any) -> list[str]:
    nothing = dict.fromkeys(("latency", "profile", "verdict", "operators", "accuracy", "memory", "device", "threads"))
    values = {key: value for key, value in nothing.items() if value is not None}
    document = report_document(compile=_compiled(**changes), **values)
    return render_text({**document, **nothing, "operators": []}, width).splitlines()


def test_a_compilation_answers_a_persons_questions() -> None:
    lines = [" ".join(line.split()) for line in _compilation(140)]
    assert lines[0] == "resnet8 · xnnpack_fp32 compiled"
    assert lines[1:] == [
        "stages TORCH_EXPORT 30.0 ms client decode 20.0 ms · encode 10.0 ms",
        "QUANTIZE 1.50 s server, cached",
        "TO_EXECUTORCH 195 ms server",
        "size 313 KiB: program 4.00 KiB · delegates 293 KiB (decode 195 KiB, encode 97.7 KiB); data weights 3.00 MiB",
        "memory planned decode 4.00 KiB, encode 2.00 KiB",
        "delegated decode: 6 of 9 nodes delegated in 2 subgraphs",
        "encode: 36 of 37 nodes delegated in 1 subgraph",
        "undelegated 2 x decode: aten_cumsum_default net.py:9 (+1) y = line_9(x)",
        "1 x decode: aten_sin_default head",
        "stayed fp32 4 x aten_softmax net.py:21 y = line_21(x)",
        "host check encode, example inputs [1x3x8x8]: SQNR 38.2 dB, max abs error 0.2 against eager PyTorch, the "
        "worst of 2 outputs",
        "decode, max inputs: did not run: the kernel is missing.",
        "decode, min inputs: equal to eager PyTorch",
        "warning decode was calibrated with one input.",
    ]


@pytest.mark.parametrize("width", [80, 100, 130])
def test_a_compilation_fits_the_terminal(width: int) -> None:
    lines = _compilation(width)
    assert max(map(len, lines)) <= width
    assert sum("aten_cumsum" in line for line in lines) == 1


def test_only_the_most_frequent_operators_are_named() -> None:
    many = [_operator(f"aten_{index}", index, _place(line=index)) for index in range(1, 10)]
    delegation = {"forward": {"subgraphs": 1, "delegated_nodes": 5, "non_delegated_nodes": 45, "operators": many}}
    text = "\n".join(_compilation(delegation=delegation))
    assert "aten_9" in text and "aten_5" in text and "aten_4" not in text
    assert "and 10 nodes of 4 more" in text


@pytest.mark.parametrize(("count", "rest"), [(1, "and 1 node more"), (3, "and 3 nodes more")])
def test_one_operator_that_is_not_named_is_not_counted(count: int, rest: str) -> None:
    many = [_operator(f"aten_{index}", 9, _place(line=index)) for index in range(1, 6)]
    delegation = {"forward": {"subgraphs": 1, "delegated_nodes": 5, "operators": [*many, _operator("aten_last", count)]}}
    lines = [line.strip() for line in _compilation(delegation=delegation)]
    assert rest in lines


def test_a_method_without_a_delegate_names_its_operators() -> None:
    delegation = {
        "embed": {"subgraphs": 0, "non_delegated_nodes": 2, "operators": [
            _operator("aten_embedding_default", 1, _place(line=36)), _operator("getitem", 1)]},
        "decode": {"subgraphs": 1, "delegated_nodes": 7},
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in _compilation(delegation=delegation, stayed_fp32={})]
    assert "embed: nothing delegated" in lines and "delegated decode: 7 of 7 nodes delegated in 1 subgraph" in lines
    assert "undelegated 1 x embed: aten_embedding_default net.py:36 y = line_36(x)" in lines


def test_a_recipe_without_delegates_names_no_operators() -> None:
    delegation = {"forward": {"subgraphs": 0, "non_delegated_nodes": 1, "operators": [_operator("aten_add_tensor", 1)]}}
    text = render_text(report_document(recipe="portable", compile=_compiled(delegation=delegation)))
    assert "nothing delegated" in text and "aten_add_tensor" not in text


def test_beside_a_measurement_a_compilation_shows_only_its_main_facts() -> None:
    text = render_text(report_document(compile=_compiled()))
    assert "host check" not in text and "QUANTIZE 1.50 s" in text
    assert "aten_cumsum_default" in text and "aten_softmax" in text and "calibrated with one input" in text


def test_a_stage_says_what_it_gave() -> None:
    files = {"forward.pt2": {"digest": "3" * 64, "size_bytes": 2048}, "delegation.csv": {"digest": "4" * 64, "size_bytes": 100}}
    document = report_document(compile={"stopped_after": "QUANTIZE", "stage_files": files})
    text = render_text({**document, "device": None, "latency": None, "operators": []})
    assert text.splitlines()[0].endswith("stopped after QUANTIZE")
    assert "after QUANTIZE: delegation.csv 100 B, forward.pt2 2.00 KiB" in text
