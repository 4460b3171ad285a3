"""Errors of devices name the operator, its source line and a remedy, as far as the runtime's log and the compilation say it."""

from __future__ import annotations

import pytest

from etfarm.v1.compile_pb2 import LocatedOperators
from etfarm.wire.errors import EtfarmError, Fault, error_of
from etfarm.wire.located_failures import find_operator, locate

DIV = "aten::div at net.py:7 (torch.div(a, b, rounding_mode='floor'))"
TABLE = "aten::embedding at net.py:8 (self.table(t)), in module table"
LINEAR = "aten::linear at net.py:9 (self.head(x)), in module head"
DELEGATE = "XnnpackBackend from aten::linear at net.py:9 (self.head(x)), in module head"
OPERATORS = LocatedOperators(by_instruction={0: DIV, 1: TABLE, 2: DELEGATE}, by_handle={12: LINEAR})

ZERO = (
    "E [op_div.cpp:150] Div mode operation encountered integer division by zero\n"
    "E [method.cpp:1391] KernelCall failed at instruction 0:0 in operator aten::div.out_mode: 0x12"
)
FAR = (
    "E [op_embedding.cpp:58] indices_ptr[i] 2000000 >= num_embeddings 10\n"
    "E [method.cpp:1391] KernelCall failed at instruction 0:1 in operator aten::embedding.out: 0x12"
)
CRASH = "F [op_embedding.cpp:61] In function embedding_kernel(), assert failed (ix < weight.size(0)): index out of range"


def failed(log: str, reason: str = "PROGRAM_FAILED", **metadata: str) -> EtfarmError:
    return error_of(Fault.USER, reason, "execute: ExecuTorch says InvalidArgument.", "", metadata={"log": log, **metadata})


@pytest.mark.parametrize(
    ("log", "operator"),
    [
        (ZERO, DIV),
        (FAR, TABLE),
        (f"{ZERO}\n{FAR}", TABLE),
        (f"{FAR}\n{ZERO}", DIV),
        (CRASH, TABLE),
        ("E [XNNCompiler.cpp:812] Failed to create FullyConnected node 12 with code: xnn_status_invalid_parameter", LINEAR),
        ("E [XNNCompiler.cpp:812] Failed to create FullyConnected node 13 with code: xnn_status_invalid_parameter", ""),
        ("E [method.cpp:1391] KernelCall failed at instruction 0:9 in operator aten::mul.out: 0x12", "aten::mul.out"),
        ("E [op_unknown.cpp:3] Check failed", ""),
        (f"{ZERO}\nE [method.cpp:1428] CALL_DELEGATE execute failed at instruction 2: 0x1", DELEGATE),
        ("E [method.cpp:1428] CALL_DELEGATE execute failed at instruction 3: 0x1", ""),
        ("", ""),
    ],
)
def test_the_last_failure_of_a_log_names_its_operator(log: str, operator: str) -> None:
    assert find_operator(log, OPERATORS) == operator


@pytest.mark.parametrize(
    ("log", "words"), [(ZERO, "divisor is 0"), (FAR, "outside of its table"), (CRASH, "outside of its table")]
)
def test_an_error_gets_the_line_and_a_remedy(log: str, words: str) -> None:
    located = locate(failed(log), OPERATORS)
    assert located.message.endswith(f", in {find_operator(log, OPERATORS)}.")
    assert words in located.remedy and located.metadata["places"] == find_operator(log, OPERATORS)
    assert (located.reason, located.fault) == ("PROGRAM_FAILED", Fault.USER)
    assert locate(located, OPERATORS) is located, "once"


def test_a_reason_that_only_the_message_has_gets_its_remedy() -> None:
    log = "KernelCall failed at instruction 0:1 in operator aten::embedding.out: 0x12\n" + "arg 0 with type id 1\n" * 20
    message = "method 'forward' failed: ExecuTorch says InvalidArgument: indices_ptr[1] -1 < 0."
    error = error_of(Fault.USER, "PROGRAM_FAILED", message, "", metadata={"log": log})
    assert "outside of its table" in locate(error, OPERATORS).remedy


def test_a_crash_is_located_by_its_abort_message() -> None:
    assert TABLE in locate(failed("", "PROGRAM_CRASHED", abort_message=CRASH), OPERATORS).message


@pytest.mark.parametrize("error", [failed(ZERO, "PROGRAM_TIMED_OUT"), failed("nothing known")])
def test_other_errors_stay_as_they_are(error: EtfarmError) -> None:
    assert locate(error, OPERATORS) is error


def test_a_reason_that_nothing_is_known_about_gets_the_example_inputs_as_its_remedy() -> None:
    log = "KernelCall failed at instruction 0:1 in operator aten::embedding.out: 0x12\n"
    assert locate(failed(log), OPERATORS).remedy.startswith("Give inputs like the example inputs")


def test_a_crash_keeps_its_own_remedy() -> None:
    log = "E [method.cpp:1428] CALL_DELEGATE execute failed at instruction 2: 0x1"
    crash = error_of(Fault.USER, "PROGRAM_CRASHED", "The program ended.", "Try the recipe portable.", metadata={"log": log})
    remedy = locate(crash, OPERATORS).remedy
    assert remedy.startswith("Give inputs like the example inputs") and remedy.endswith("Try the recipe portable.")
