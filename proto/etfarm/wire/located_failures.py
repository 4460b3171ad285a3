"""The operators behind the numbers and files in the runtime's log, and errors of devices that name them with their source lines.

The log names an instruction of a method, a node of XNNPACK's graph, or the file of a kernel. A compilation knows the operator of
each with the line of the user's model: `aten::bmm at models/net.py:31 (x @ y)`.
"""

from __future__ import annotations

import re
from typing import Final

from etfarm.v1 import compile_pb2
from etfarm.wire.errors import EtfarmError, error_of

MAX_OPERATORS: Final = 5_000
"""Maximum number of located operators of a method, of each kind: a large network on portable kernels has some thousand."""

MAX_PROGRAM_OPERATORS: Final = 4 * MAX_OPERATORS
"""Maximum number of those of all methods, which share it equally."""

_NODE: Final = re.compile(r"Failed to (?:create|define) .*?\bnode (\d{1,9})\b")
"""XNNPACK's refusal of a node, with the debug handle. Source: executorch/backends/xnnpack/runtime/XNNCompiler.cpp 1.5.1."""
_KERNEL: Final = re.compile(r"KernelCall failed at instruction \d{1,9}:(\d{1,9}) in operator ([\w:.]{1,200}?)[.:]? ")
"""A kernel's refusal of its arguments. Source: executorch/runtime/executor/method.cpp 1.5.1."""
_DELEGATE: Final = re.compile(r"CALL_DELEGATE execute failed at instruction (\d{1,9})\b")
"""The failure of a delegate as a whole, such as of its shapes. Source: as of a kernel's."""
_FILE: Final = re.compile(r"\bop_(\w{1,100})\.cpp:\d")
"""The file of a kernel that checks its arguments, such as `[op_embedding.cpp:57]`."""

_ARGUMENT: Final = re.compile(r"\barg \d{1,4} with type id \d")
"""Lines at the end of a log that say nothing of the reason."""

_REMEDIES: Final = (
    (
        re.compile(r"division (?:of|by)|divide by zero|[Dd]ivision.* zero", re.IGNORECASE),
        "An integer divisor is 0, or -1 of the smallest integer: give other inputs, or guard the division, as in "
        "x // y.clamp(min=1) or torch.where.",
    ),
    (
        re.compile(r"resize a static tensor.*op_(?:slice|narrow)\w*\.cpp", re.DOTALL),
        "A slice of a fixed length starts outside of its dim: give positions at which it still fits, or clamp them in the model.",
    ),
    (
        re.compile(
            r"op_(?:embedding|index|gather|scatter|select|slice)\w*\.cpp|index.*(?:out of|range|bound)|ix [<>]|indices",
            re.IGNORECASE,
        ),
        "An index is outside of its table or dim: give indices from 0 to its size - 1, or clamp them in the model.",
    ),
    (
        re.compile(r"resize|Size must be non-negative", re.IGNORECASE),
        "A size is outside of what was planned: keep sizes within the ranges of dynamic dims, and values within the bounds of "
        "torch._check, or export larger ones.",
    ),
)
"""Remedies for inputs that an operator does not take, by the runtime's log."""

_REMEDY: Final = "Give inputs like the example inputs, or write that line in another form."

_STATE_REMEDY: Final = (
    "Each execution of a benchmark, warm-up included, advances the program's state: if that runs out of room, let its position "
    "wrap, as in position % length, or execute less often, as with --warmup 1 --iterations 4 --min-time 0 --no-profile."
)

CRASHED: Final = "PROGRAM_CRASHED"
"""Reason of the error of a program that ended its process."""

LOCATED_REASONS: Final = frozenset({"PROGRAM_FAILED", CRASHED})
"""Reasons of errors that an operator of the program may have caused."""


def find_operator(log: str, operators: compile_pb2.LocatedOperators) -> str:
    """Return the operator that the runtime's log blames, with its source line if it is known; empty if it blames none.

    A log of several executions blames the operator of the last failure.
    """
    matches = (match for pattern in (_NODE, _KERNEL, _DELEGATE) for match in pattern.finditer(log))
    last = max(matches, key=lambda match: match.start(), default=None)
    if last is not None:
        if last.re is _NODE:
            return operators.by_handle.get(int(last[1]), "")
        return operators.by_instruction.get(int(last[1]), last[2] if last.re is _KERNEL else "")
    files = _FILE.findall(log)
    if not files:
        return ""
    # The kernel of a file `op_embedding.cpp` is aten::embedding, that of `op_div.cpp` also aten::div.out_mode.
    named = [each for each in operators.by_instruction.values() if re.match(rf"\w+::_?{re.escape(files[-1])}(?:\W|$)", each)]
    return " or ".join(list(dict.fromkeys(named))[:2])


def locate(error: EtfarmError, operators: compile_pb2.LocatedOperators, *, advances_state: bool = False) -> EtfarmError:
    """Return an error of a program on a device with the operator, its source line and a remedy; the same if it blames none.

    Args:
        advances_state: whether a benchmark has executed the program one time after the other, and it keeps state.
    """
    if error.reason not in LOCATED_REASONS or "places" in error.metadata:
        return error
    log = f"{error.metadata.get('log', '')}\n{error.metadata.get('abort_message', '')}"
    operator = find_operator(log, operators)
    if not operator:
        return error
    # The message has the reason of this failure; the log may begin with earlier ones, and ends in the operator's arguments.
    lines = [line for line in log.strip().splitlines() if not _ARGUMENT.search(line)]
    reason = "\n".join([error.message, *lines[-8:]])
    remedy = next((remedy for pattern, remedy in _REMEDIES if pattern.search(reason)), "")
    if not remedy:  # that of a crash, such as to try another recipe, still helps
        remedy = f"{_REMEDY} {error.remedy}".rstrip() if error.reason == "PROGRAM_CRASHED" else _REMEDY
    if advances_state:
        remedy = f"{remedy} {_STATE_REMEDY}"
    located = error_of(
        error.fault, error.reason, f"{error.message.rstrip('.')}, in {operator}.", remedy, kind=error.kind, stage=error.stage,
        metadata={**error.metadata, "places": operator},
    )  # fmt: skip
    located.__cause__ = error.__cause__
    return located
