"""One clear sentence out of what torch and ExecuTorch raise: what to change, and where in the user's source. Stdlib only.

The original text is not lost: whoever raises the sentence raises it from the original, whose traceback is in the job's log.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from etfarm.server.compile.errors import (
    DataDependentBranch,
    DimSpecialized,
    MissingOutVariants,
    OperatorNotCoreAten,
    OperatorWithEffects,
    StageFailed,
    ToolchainIncomplete,
    TrainingMode,
    UnboundedSize,
    UnsupportedDtypes,
    UnsupportedQuantizedOp,
)
from etfarm.server.compile.program.places import places
from etfarm.server.compile.result import OperatorDelegation, Place
from etfarm.server.graphs.sources import source_of
from etfarm.wire.errors import EtfarmError
from etfarm.wire.recipes import BadCombination

_MAX = 400
_NAMED: Final = 3
"""Operators that a sentence names; the error's metadata has more."""

_NOISE = re.compile(
    r"^(\s*|An error occurred when running .*|Exception:?|Traceback .*|={3,}.*|-{3,}.*|The following .*:|.*Original exception.*"
    r"|While executing .*|GraphModule: .*|Original traceback:|Use tlparse .*|For more information .*|\s*File \".*)$"
)
_PATH = re.compile(r"(/[\w.\-+@]+){2,}/?")
_TRAINING = re.compile(r"batch_norm|dropout|rrelu_with_noise")
_EFFECTS = re.compile(r"with_effects|_assert_|_print|linalg_")
"""torch.linalg's operators check their results' values, which is a side effect once they are decomposed."""
_QUANTIZED = ("quantized_decomposed::", "torchao::")

_NO_KERNEL = re.compile(r"kernel '(\w+)::(\w+)(?:\.\w+)?' not found")

_SYMBOL = re.compile(r"\bu\d+\b")
"""A size that depends on values."""

Programs = Mapping[str, Any]
"""Exported or edge programs by method."""


def first_line(error: BaseException) -> str:
    """The line of an exception's message that says what is wrong, at most 400 characters, without the server's paths.

    A wrapper ("An error occurred when running pass ...") is looked through to its cause.
    """
    error = _cause(error)
    for line in str(error).splitlines():
        if not _NOISE.match(line):
            return _PATH.sub(lambda m: m[0].rstrip("/").rpartition("/")[2], line.strip())[:_MAX]
    return type(error).__name__


def stage_failed(stage: str, error: BaseException, programs: Programs | None = None) -> EtfarmError:
    """The error that a user is shown for what a stage of the pipeline raised.

    Args:
        programs: what the stage worked on, by method: exported programs, and at TO_EXECUTORCH better the edge programs.
            Operators are looked up in them for their lines of the user's source.
    """
    cause = _cause(error)
    text = str(cause)
    for pattern, explained in _EXPLAINED:
        found = pattern.search(text)
        if found is not None:
            return explained(stage, found, text, programs or {})
    if isinstance(cause, ImportError):
        return ToolchainIncomplete("", first_line(cause), stage)
    return StageFailed(stage, type(error).__name__, first_line(error))


def missing_kernel(why: str, program: Any, operators: Iterable[OperatorDelegation]) -> str:
    """The operator whose kernel the runtime did not find, with its line of the user's source; empty where `why` names none.

    Args:
        why: the runtime's reason, "... kernel 'aten::histc.out' not found".
        program: the method as it was exported, for an operator that kept its name.
        operators: the delegation table of the method, which has the operators that others were decomposed into.
    """
    found = _NO_KERNEL.search(why)
    if found is None:
        return ""
    name, start = f"{found[1]}::{found[2]}", f"{found[1]}_{found[2]}_"
    # The table's names have the overload behind them: aten_max_default, of which aten_max_pool2d_default is the longer one.
    rows = sorted((row for row in operators if row["op"].startswith(start) and row["places"]), key=lambda row: len(row["op"]))
    shown = _shown(name, rows[0]["places"]) if rows else name
    return _named([name], {"": program}) if shown == name else shown


def _cause(error: BaseException) -> BaseException:
    for _ in range(8):
        if error.__cause__ is None or not str(error).lstrip().startswith("An error occurred when running"):
            break
        error = error.__cause__
    return error


def _missing_out_variants(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    names = sorted(set(re.findall(r"'([\w.]+::[\w.]+)'", found[1])))
    training = [name for name in names if _TRAINING.search(name)]
    if training:
        return _training_mode(stage, training[0], programs)
    quantized = [name for name in names if name.startswith(_QUANTIZED)]
    kind = UnsupportedQuantizedOp if len(quantized) == len(names) else MissingOutVariants
    return kind(stage, _named(names, programs), ", ".join(names))


def _not_core_aten(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    # torch._ops.aten._linalg_svd.default -> aten::_linalg_svd
    name = re.sub(r"^(\w+)\.(\w+)(?:\.\w+)?$", r"\1::\2", found[1])
    if _TRAINING.search(name):
        return _training_mode(stage, name, programs)
    return OperatorNotCoreAten(stage, _named([name], programs), name)


def _mismatched_dtypes(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    rows = []
    for block in text.split("\nOperator: ")[1:]:
        name = re.search(r"schema = (\w+::\w+)", block)
        source = source_of(block.replace("stack trace: File", "File"))
        shown = name[1] if name else "an operator"
        rows.append((shown, f"{shown} at {source.file}:{source.line} ({source.code})" if source else shown))
    dtypes = ", ".join(sorted(set(re.findall(r"torch\.((?:complex|float|bfloat|u?int|bool)\w*)", text))))
    return UnsupportedDtypes(stage, "; ".join(row[1] for row in rows[:_NAMED]), ", ".join(row[0] for row in rows), dtypes)


def _branch(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    expression = re.search(r"data-dependent expression (.+?) \(unhinted", text)
    return DataDependentBranch(stage, expression[1] if expression else "", _line_in(text))


def _specialized(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    why = re.search(r"^\s*- (.+?)(?:\. If you're using|$)", text, re.MULTILINE)
    return DimSpecialized(stage, found[1], (why[1] if why else "its constraints are violated").rstrip("."), _line_in(text))


def _unbounded(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    makers = []
    for program in programs.values():
        # By range, since each lowering has its own numbers of symbols.
        bounded = {str(size) for size, limits in program.range_constraints.items() if limits.upper.is_Integer}
        for node in program.graph.nodes:
            shape = getattr(node.meta.get("val"), "shape", ())
            symbols = {symbol for size in shape for symbol in _SYMBOL.findall(str(size))}
            if node.op == "call_function" and symbols - bounded:
                makers.append((_schema_name(node) or node.name, [node]))
                break
    return UnboundedSize(stage, found[1], "; ".join(_shown(name, places(nodes)) for name, nodes in makers[:_NAMED]))


def _effects(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    nodes = [
        node for program in programs.values() for node in program.graph.nodes
        if node.op == "call_function" and _EFFECTS.search(str(node.target))
    ]  # fmt: skip
    by_name: dict[str, list[Any]] = defaultdict(list)
    for node in nodes:
        inner = node.args[1] if "with_effects" in str(node.target) and len(node.args) > 1 else node.target
        by_name[str(inner)].append(node)
    shown = [_shown(name, places(found_)) for name, found_ in sorted(by_name.items())]
    return OperatorWithEffects(stage, "; ".join(shown[:_NAMED]), ", ".join(sorted(by_name)))


def _combine(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    remedy = "Combine recipes with equal strict, stages and edge settings, or write them into one recipe file."
    return BadCombination(
        f"These recipes cannot be combined: {found[1].strip()[:_MAX]}", remedy, stage=stage, why=found[1].strip()
    )


def _passed_through(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    why = f"XNNPACK gives a value out once, and {found[1]} leaves it twice or unchanged (a buffer's new value that is an output)"
    remedy = "Return a value of its own (self.count * 1), or give the method no partitioners in a recipe file."
    return StageFailed(stage, "RuntimeError", f"{why}.", remedy)


def _decomposed_linear(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    why = "XNNPACK cannot take a linear with an input of more than two dims once TO_EDGE has decomposed it"
    return StageFailed(stage, "RuntimeError", f"{why}.", "Use TO_EDGE_TRANSFORM_AND_LOWER, which keeps such operators whole.")


def _stack_traces(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    why = "ExecuTorch writes stack traces only where every instruction is one operator of the model"
    remedy = "Leave emit_stacktrace out; the ETRecord has every operator's line."
    return StageFailed(stage, "InternalError", f"{why}.", remedy)


def _no_output(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    empty = [name for name, program in programs.items() if not any(_values_out(program))]
    method = f"{', '.join(empty)} gives" if empty else "a method gives"
    return StageFailed(stage, "InternalError", f"{method} nothing out, and a program needs an output.", "Return a tensor.")


def _values_out(program: Any) -> Iterable[bool]:
    outputs = next((node.args[0] for node in program.graph.nodes if node.op == "output"), ())
    return (value is not None for value in outputs)


def _small_groups(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    why = f"XNNPACK takes 4-bit weights in groups of 32 or a multiple, and a linear of the model has groups of {found[1]}"
    remedy = "Give each nn.Linear inputs that 32 divides, and group_size 32 or more; or use a pt2e recipe."
    return StageFailed(stage, "AssertionError", f"{why}.", remedy)


def _number_too_large(stage: str, found: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    why = "a number of the program does not fit its file format, which has 32 bits for sizes of a delegate's tensors"
    return StageFailed(stage, "CalledProcessError", f"{why}.", "Give dynamic dims maximums that inputs will really have.")


def _training_mode(stage: str, name: str, programs: Programs) -> EtfarmError:
    mark = _TRAINING.search(name)
    operator = mark[0] if mark else name
    for method, program in programs.items():
        if any(operator in (_schema_name(node) or "") for node in program.graph.nodes):
            return TrainingMode(method, operator, stage)
    return TrainingMode("The model", operator, stage)


def _named(names: Sequence[str], programs: Programs) -> str:
    nodes: dict[str, list[Any]] = defaultdict(list)
    for program in programs.values():
        for node in program.graph.nodes:
            name = _schema_name(node)
            if name in names:
                nodes[name or ""].append(node)
    shown = [_shown(name, places(nodes[name])) for name in names[:_NAMED]]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(shown) + more


def _shown(name: str, where: Iterable[Place]) -> str:
    """`aten::bincount at models/net.py:31 (torch.bincount(x)), in module head`, of the most frequent place that has a line."""
    for place in where:
        if place["source"] is not None:
            source = place["source"]
            module = f", in module {place['module']}" if place["module"] else ""
            return f"{name} at {source['file']}:{source['line']} ({source['code'][:80]}){module}"
    return name


def _schema_name(node: Any) -> str | None:
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return None if schema is None else str(schema.name)


def _line_in(text: str) -> str:
    source = source_of(text)
    if source is not None:
        return f"{source.file}:{source.line} ({source.code[:80]})"
    # torch cuts the beginning of this path.
    caused = re.search(r"Caused by: \((?:[^()]*/)?([^/()]+\.py:\d+) in \w+\)", text)
    return caused[1] if caused and not caused[1].startswith("non_strict_utils") else ""


_Explained = Callable[[str, "re.Match[str]", str, Programs], EtfarmError]

_EXPLAINED: Final[tuple[tuple[re.Pattern[str], _Explained], ...]] = (
    (re.compile(r"Missing out variants: (\{.*\})", re.DOTALL), _missing_out_variants),
    (re.compile(r"Operator (?:torch\._ops\.)?(\S+) is not in Core ATen opset"), _not_core_aten),
    (re.compile(r"taking Tensor inputs with mismatched dtypes"), _mismatched_dtypes),
    (re.compile(r"Could not guard on data-dependent|Data-dependent branching"), _branch),
    (re.compile(r"Constraints violated \(([^)]+)\)"), _specialized),
    (re.compile(r"finite upper bound for symbolic expression (.+?) \(int_oo\)"), _unbounded),
    (re.compile(r"'WithEffects' object has no attribute"), _effects),
    (re.compile(r"Cannot combine recipes:? (.+)", re.DOTALL), _combine),
    (re.compile(r"Output node '(\w+)' is already in the inputs"), _passed_through),
    (re.compile(r"t\(\) expects a tensor with <= 2 dimensions"), _decomposed_linear),
    (re.compile(r"graph_output_allocated not set"), _no_output),
    (re.compile(r"requires group_size to be a multiple of 32, but got (\d+)"), _small_groups),
    (re.compile(r"Command '\['[^']*flatc'.* returned non-zero exit status"), _number_too_large),
    (re.compile(r"Each instruction should have corresponding stacktrace|Failed with error: 'stack_trace'"), _stack_traces),
)
"""What torch 2.13 and ExecuTorch 1.5 say, and what it means. tests/unit/test_compile_explain.py provokes each."""
