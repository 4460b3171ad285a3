"""A program's instructions from its bytes: as ExecuTorch reads them, and refused where they are damaged."""

from __future__ import annotations

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
