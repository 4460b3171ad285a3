"""A program's instructions from its bytes: as ExecuTorch reads them, and refused where they are damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from etfarm.server.reports.trace.graph import BadProgram, Instruction, read_program
from tests.support.traces import traced

NAMES = ["residual_int8", "xnnpack", "portable", "methods", "renamed"]


@pytest.mark.parametrize("name", NAMES)
def test_instructions_and_delegates_are_those_that_executorch_reads(name: str) -> None:
    from executorch.exir._serialize._program import deserialize_pte_binary

    run = traced(name)
    program = deserialize_pte_binary(run.pte.read_bytes()).program
    (plan,) = [plan for plan in program.execution_plan if plan.name == run.method]
    wanted = {}
    for at, instruction in enumerate(plan.chains[0].instructions):
        call = instruction.instr_args
        if type(call).__name__ == "KernelCall":
            operator = plan.operators[call.op_index]
            wanted[0, at] = Instruction(f"{operator.name.replace('::', '.')}.{operator.overload}", False)
        elif type(call).__name__ == "DelegateCall":
            delegate = plan.delegates[call.delegate_index]
            data = memoryview(program.backend_delegate_data[delegate.processed.index].data)
            wanted[0, at] = Instruction(delegate.id, True, data)
    assert wanted
    assert read_program(run.pte, run.method) == wanted


@pytest.mark.remedy("BAD_PROGRAM")
def test_a_program_without_the_method_is_refused() -> None:
    with pytest.raises(BadProgram, match="has no method 'backward'"):
        read_program(traced("xnnpack").pte, "backward")
    assert read_program(traced("xnnpack").pte, "forward")


@pytest.mark.parametrize("name", ["xnnpack", "methods"])
def test_damaged_bytes_are_read_or_refused_and_nothing_else(name: str, tmp_path: Path) -> None:
    run = traced(name)
    whole, damaged = run.pte.read_bytes(), tmp_path / "damaged.pte"
    size = min(len(whole), 3000)
    outcomes = set()
    for seed in range(500):
        dice = random.Random(seed)
        data = bytearray(whole)
        for _ in range(dice.choice([1, 5, 50])):
            at = dice.randrange(8, size - 4)
            data[at : at + 4] = dice.choice([bytes(4), b"\xff" * 4, dice.randbytes(4), dice.randbytes(1) + data[at + 1 : at + 4]])
        damaged.write_bytes(data[: dice.choice([len(data), dice.randrange(len(data))])])
        try:
            read_program(damaged, run.method)
            outcomes.add("read")
        except BadProgram:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
