"""Explanations of errors that torch and ExecuTorch raise: what to change, and where in the user's source. Stdlib only.

Callers raise the explanation from the original error, whose traceback is in the job's log.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from etfarm.server.compile.alternatives import use_instead
from etfarm.server.compile.errors import (
    StageFailed,
    data_dependent_branch,
    dim_specialized,
    inner_size,
    missing_out_variants,
    operator_not_core_aten,
    operator_with_effects,
    recipe_unavailable,
    training_mode,
    unbounded_size,
    unsupported_dtypes,
    unsupported_quantized_op,
)
from etfarm.server.compile.program.descriptions import (
    CONTROL_FLOW,
    MAX_CHARACTERS,
    NAMED,
    Programs,
    describe,
    describe_control_flow,
    describe_node,
    describe_operators,
    describe_place,
    find_cause,
    find_line,
    first_line,
    list_first,
    name_as_called,
    schema_name,
)
from etfarm.server.compile.program.lowering_faults import find_fault, find_node_in_hand
from etfarm.server.compile.program.places import all_nodes, places
from etfarm.server.compile.program.suspects import SYMBOL, find_channels_last, find_inner_size, owned_names
from etfarm.server.graphs.sources import source_of
from etfarm.wire.dim_guards import name_dims
from etfarm.wire.errors import EtfarmError, error_for

_TRAINING = re.compile(r"batch_norm|dropout|rrelu_with_noise")
_EFFECTS = re.compile(r"with_effects|_assert_|_print|linalg_")
"""Operators with side effects. Those of torch.linalg check their results' values, a side effect after decomposition."""
_QUANTIZED = ("quantized_decomposed::", "torchao::")
_DEQUANTIZE = "torchao.dequantize_affine.default"


def stage_failed(stage: str, error: BaseException, programs: Programs | None = None) -> EtfarmError:
    """Return the user-facing error for an exception that a stage of the pipeline raised.

    Args:
        programs: the stage's input by method: exported programs, or preferably the edge programs at TO_EXECUTORCH.
            They provide the source lines of operators.
    """
    cause = find_cause(error)
    text = str(cause)
    for fault, node in find_fault(text, programs or {}):
        why = fault.why.format(describe(name_as_called(node), places([node])))
        return StageFailed(stage, type(cause).__name__, why, fault.remedy)
    for pattern, explained in _EXPLAINED:
        match = pattern.search(text)
        if match is not None:
            return explained(stage, match, text, programs or {})
    if isinstance(cause, ImportError):
        return recipe_unavailable("", first_line(cause), stage)
    return StageFailed(stage, type(error).__name__, first_line(error) + _describe_culprit(cause))


def _describe_culprit(error: BaseException) -> str:
    """Return the operator that the toolchain had in hand when it failed, like `, near aten::bmm at models/net.py:31 (x @ y)`."""
    # A node that a pass has made has no line; the operators beside it may have one.
    if (node := find_node_in_hand(error)) is None:
        return ""
    near = next((each for each in (node, *node.all_input_nodes, *node.users) if describe_place(places([each]))), None)
    return "" if near is None else f", near {describe_node(near)}"


def _missing_out_variants(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    names = sorted(set(re.findall(r"'([\w.]+::[\w.]+)'", match[1])))
    training = [name for name in names if _TRAINING.search(name)]
    if training:
        return _training_mode(stage, training[0], programs)
    quantized = [name for name in names if name.startswith(_QUANTIZED)]
    shown, listed = describe_operators(names, programs), ", ".join(names)
    if len(quantized) < len(names):
        return missing_out_variants(stage, shown, listed)
    is_in_branch = any(
        node.graph is not program.graph for program in programs.values() for node in all_nodes(program)
        if schema_name(node) in names
    )  # fmt: skip
    return unsupported_quantized_op(stage, shown, listed, is_in_branch=is_in_branch)


def _not_core_aten(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    # torch._ops.aten._linalg_svd.default -> aten::_linalg_svd
    name = re.sub(r"^(\w+)\.(\w+)(?:\.\w+)?$", r"\1::\2", match[1])
    if _TRAINING.search(name):
        return _training_mode(stage, name, programs)
    return operator_not_core_aten(stage, describe_operators([name], programs), name, has_kernel=_has_kernel(name))


def _has_kernel(name: str) -> bool:
    """Return whether ExecuTorch's runtime here has a kernel of an operator, such as `aten::bincount`."""
    # Imported late: only errors need the runtime, which a compiling child otherwise leaves to its fork.
    from executorch.runtime import Runtime

    kernels = Runtime.get().operator_registry.operator_names
    return any(known.partition(".")[0] == name and known.endswith("out") for known in kernels)


def _not_described(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    """Explain an operator that cannot be lowered since torch does not know the shape of its output without executing it."""
    name, line = f"{match[1]}::{match[2]}", find_line(text)
    why = f"{f'{name} at {line}' if line else name} has no implementation that a program can have."
    return StageFailed(stage, "UnsupportedOperatorException", why, f"{use_instead(name)}.")


def _mismatched_dtypes(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    rows = []
    for block in text.split("\nOperator: ")[1:]:
        name = re.search(r"schema = (\w+::\w+)", block)
        source = source_of(block.replace("stack trace: File", "File"))
        shown = name[1] if name else "an operator"
        rows.append((shown, f"{shown} at {source.file}:{source.line} ({source.code})" if source else shown))
    dtypes = ", ".join(sorted(set(re.findall(r"torch\.((?:complex|float|bfloat|u?int|bool)\w*)", text))))
    return unsupported_dtypes(stage, "; ".join(row[1] for row in rows[:NAMED]), ", ".join(row[0] for row in rows), dtypes)


def _complex(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    """Explain complex numbers of Python: ExecuTorch makes tensors of them in passes, which take real ones."""
    by_name: dict[str, list[Any]] = defaultdict(list)
    for program in programs.values():
        for node in all_nodes(program):
            if node.op == "call_function" and any(isinstance(each, complex) for each in (*node.args, *node.kwargs.values())):
                by_name[name_as_called(node)].append(node)
    shown = [describe(name, places(nodes)) for name, nodes in sorted(by_name.items())]
    return unsupported_dtypes(stage, "; ".join(shown[:NAMED]) or "an operator", ", ".join(sorted(by_name)), "complex")


def _nested_control_flow(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    nodes = [
        node for program in programs.values() for node in all_nodes(program)
        if node.op == "call_function" and node.graph is not program.graph and str(node.target) in CONTROL_FLOW
    ]  # fmt: skip
    shown = describe_control_flow(nodes[:1]) or "torch.cond"
    why = f"quantization does not work with control flow inside of a branch or loop of another: {shown}."
    return StageFailed(stage, "RuntimeError", why, "Use a recipe in fp32, such as xnnpack_fp32.")


def _branch(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    expression = re.search(r"data-dependent expression (.+?) \(unhinted", text)
    condition = expression[1] if expression else ""
    if source_of(text) is None and (operator := next(filter(None, map(find_inner_size, programs.values())), "")):
        return inner_size(stage, condition, operator)
    return data_dependent_branch(stage, condition, find_line(text))


def _specialized(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    why = re.search(r"^\s*- (.+?)(?:\. If you're using|$)", text, re.MULTILINE)
    named = re.search(r"violated \((.+?)\)!", name_dims(text))
    dims = (named or match)[1].replace("dim ", "")
    return dim_specialized(stage, dims, (why[1] if why else "its constraints are violated").rstrip("."), find_line(text))


def _unbounded(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    producers = []
    for program in programs.values():
        # By range, since each lowering numbers its symbols anew.
        bounded = {str(size) for size, limits in program.range_constraints.items() if limits.upper.is_Integer}
        for node in all_nodes(program):
            shape = getattr(node.meta.get("val"), "shape", ())
            symbols = {symbol for size in shape for symbol in SYMBOL.findall(str(size))}
            if node.op == "call_function" and symbols - bounded:
                producers.append((schema_name(node) or node.name, [node]))
                break
    return unbounded_size(stage, match[1], "; ".join(describe(name, places(nodes)) for name, nodes in producers[:NAMED]))


def _effects(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    nodes = [
        node for program in programs.values() for node in all_nodes(program)
        if node.op == "call_function" and _EFFECTS.search(str(node.target))
    ]  # fmt: skip
    by_name: dict[str, list[Any]] = defaultdict(list)
    for node in nodes:
        inner = node.args[1] if "with_effects" in str(node.target) and len(node.args) > 1 else node.target
        by_name[str(inner)].append(node)
    shown = [describe(name, places(nodes_of_name)) for name, nodes_of_name in sorted(by_name.items())]
    return operator_with_effects(stage, "; ".join(shown[:NAMED]), ", ".join(sorted(by_name)))


def _combine(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    remedy = "Combine recipes with equal strict, stages and edge settings, or write them into one recipe file."
    return error_for(
        "BAD_RECIPE_COMBINATION",
        f"These recipes cannot be combined: {match[1].strip()[:MAX_CHARACTERS]}",
        remedy,
        stage=stage,
        why=match[1].strip(),
    )


def _no_output(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    empty = [name for name, program in programs.items() if all(value is None for value in returned_values(program))]
    if empty or not programs:
        method = f"{', '.join(empty)} returns" if empty else "a method returns"
        return StageFailed(stage, "InternalError", f"{method} nothing, but a program needs an output.", "Return a tensor.")
    numbers = [name for name, program in programs.items() if not any(map(_is_tensor, returned_values(program)))]
    method = f"{', '.join(numbers)} returns" if numbers else "a method returns"
    why = f"{method} numbers only, and ExecuTorch plans no memory for a program without a tensor among its outputs."
    remedy = "Return a tensor beside the numbers; or compute them from the inputs' shapes where the program is called."
    return StageFailed(stage, "InternalError", why, remedy)


def _numbers_without_inputs(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    nodes: dict[str, list[Any]] = {}
    for method, program in programs.items():
        if not program.graph_signature.user_inputs:
            nodes[method] = [node for node in all_nodes(program) if any(isinstance(each, int | float) for each in node.args)]
    shown = "; ".join(dict.fromkeys(describe_node(node) for each in nodes.values() for node in each[:NAMED])) or "operators"
    method = ", ".join(nodes) or "A method"
    why = f"{method} has no inputs, and ExecuTorch mixes up the numbers of several operators in such a method: {shown}."
    remedy = "Return a buffer as self.h.clone(), not self.h + 0; or give the method an input, which it need not use."
    return StageFailed(stage, "SpecViolationError", why, remedy)


_OF_SIZES: Final = {
    "pow": "n * n for n ** 2",
    "lshift": "n * 4 for n << 2",
    "rshift": "n // 4 for n >> 2",
}
"""Operators on sizes that ExecuTorch does not emit, with what gives the same."""


def _unknown_control_flow(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    name = (match[1] or match[2]).rpartition(".")[2]
    shown = CONTROL_FLOW.get(name, name)
    nodes = [
        node for program in programs.values() for node in all_nodes(program)
        if node.op == "call_function" and name in (str(node.target), getattr(node.target, "__name__", ""))
    ]  # fmt: skip
    if name == "while_loop":
        remedy = (
            "Write a loop with a fixed number of steps in Python, which the export unrolls; where the number depends on values, "
            "take its maximum and keep finished values with torch.where. Or call the body as a program from outside."
        )
    elif name in _OF_SIZES:
        shown, remedy = f"{name} of a size", f"Write {_OF_SIZES[name]}, where n is a size, such as x.shape[0]."
    else:
        remedy = "Write it with operators, which ExecuTorch lowers, or compute both branches and choose with torch.where."
    return StageFailed(stage, "InternalError", f"ExecuTorch cannot emit {describe(shown, places(nodes))}.", remedy)


def _expanded(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    names = []
    for program in programs.values():
        owned = owned_names(program)
        for node in program.graph.nodes:
            strides: tuple[int, ...] = getattr(node.meta.get("val"), "stride", tuple)() if node.op == "placeholder" else ()
            if 0 in strides:
                names.append(owned.get(node.name, node.name))
    shown = ", ".join(dict.fromkeys(names)) or "a tensor"
    why = f"ExecuTorch does not support expanded tensors, whose elements repeat in memory: {shown}."
    return StageFailed(stage, "RuntimeError", why, "Call .contiguous() on the result of expand, before the export.")


def _shared_weight(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    name, user = match.groups()
    nodes = [node for program in programs.values() for node in all_nodes(program) if node.name == user]
    weight = next((owned[name] for owned in map(owned_names, programs.values()) if name in owned), name)
    why = f"ExecuTorch cannot give the weight {weight} to a delegate and to {describe(user, places(nodes))} too."
    if user == "output":
        why = f"ExecuTorch cannot give the weight {weight} to a delegate and return it too."
        return StageFailed(stage, "RuntimeError", why, f"Return a copy of it: self.{weight} * 1.")
    remedy = "Give the branch or loop a layer of its own, as by copy.deepcopy(self.layer), or compile with the recipe portable."
    return StageFailed(stage, "RuntimeError", why, remedy)


def _groups_of_other_bits(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    layers = []
    for layer in (node for program in programs.values() for node in all_nodes(program) if schema_name(node) == "aten::linear"):
        weight = layer.args[1]
        is_grouped = str(weight.target) == _DEQUANTIZE and weight.args[1][-1] != weight.meta["val"].shape[-1]
        if is_grouped and (bits := (weight.args[6] - weight.args[5]).bit_length()) != 4:
            layers.append(f"{bits} bits in {describe_node(layer)}")
    why = f"XNNPACK takes weights in groups only in 4 bits, but they have {list_first(layers) or 'others'}."
    remedy = "Quantize to int4, or to int8 with a range per channel (PerAxis(0) in torchao)."
    return StageFailed(stage, "AssertionError", why, remedy)


def returned_values(program: Any) -> list[Any]:
    """Return what a program returns: nodes, numbers and None; without the new values of buffers and inputs."""
    specs = program.graph_signature.output_specs
    returned = next((node.args[0] for node in program.graph.nodes if node.op == "output"), ())
    return [value for spec, value in zip(specs, returned, strict=False) if spec.kind.name == "USER_OUTPUT"]


def _is_tensor(value: Any) -> bool:
    return hasattr(getattr(value, "meta", {}).get("val"), "shape")


def _training_mode(stage: str, name: str, programs: Programs) -> EtfarmError:
    mark = _TRAINING.search(name)
    operator = mark[0] if mark else name
    for method, program in programs.items():
        nodes = [node for node in all_nodes(program) if operator in (schema_name(node) or "")]
        if nodes:
            return training_mode(method, operator, stage, describe_place(places(nodes)))
    return training_mode("The model", operator, stage)


def _channels_last_weight(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
    owned = {placeholder: name for program in programs.values() for placeholder, name in owned_names(program).items()}
    if match[1] is None and not any(map(find_channels_last, programs.values())):
        return StageFailed(stage, "AssertionError", text.rstrip("."))
    which = f"{owned.get(match[1], match[1])} is" if match[1] else "the model has some that are"
    why = f"XNNPACK takes weights in the usual memory format, but {which} channels last."
    remedy = "Leave out model.to(memory_format=torch.channels_last): XNNPACK chooses its own formats."
    return StageFailed(stage, "AssertionError", why, remedy)


_Explained = Callable[[str, "re.Match[str]", str, Programs], EtfarmError]


def _fails(exception: str, why: str, remedy: str) -> _Explained:
    """Return an explanation that does not depend on the programs; `{}` in `why` stands for the first group of the match."""

    def explain(stage: str, match: re.Match[str], text: str, programs: Programs) -> EtfarmError:
        return StageFailed(stage, exception, f"{why.format(*match.groups())}.", remedy)

    return explain


_EXPLAINED: Final[tuple[tuple[re.Pattern[str], _Explained], ...]] = (
    (re.compile(r"Missing out variants: (\{.*\})", re.DOTALL), _missing_out_variants),
    (re.compile(r"Operator (?:torch\._ops\.)?(\S+) is not in Core ATen opset"), _not_core_aten),
    (re.compile(r"\A\s*(aten|prims|torchao|torchvision)\.(\w+)\.\w+\s*(?:\n\s*While executing|\Z)"), _not_described),
    (re.compile(r"taking Tensor inputs with mismatched dtypes"), _mismatched_dtypes),
    (re.compile(r"'complex' object has no attribute|real number, not 'complex'|Unsupported constant type: complex"), _complex),
    (re.compile(r"Node \w+ target \w*graph_\d+ references nonexistent attribute"), _nested_control_flow),
    (re.compile(r"Could not guard on data-dependent|Data-dependent branching"), _branch),
    (re.compile(r"Constraints violated \(([^)]+)\)"), _specialized),
    (re.compile(r"finite upper bound for symbolic expression (.+?) \(int_oo\)"), _unbounded),
    (re.compile(r"'WithEffects' object has no attribute"), _effects),
    (re.compile(r"Cannot combine recipes:? (.+)", re.DOTALL), _combine),
    (
        re.compile(r"Output node '(\w+)' is already in the inputs"),
        _fails(
            "RuntimeError",
            "XNNPACK returns a value once, but {} is returned twice or unchanged (a buffer's new value that is an output)",
            "Return a copy (self.count * 1; lowering removes clone()), or give the method no partitioners in a recipe file.",
        ),
    ),
    (
        re.compile(r"t\(\) expects a tensor with <= 2 dimensions"),
        _fails(
            "RuntimeError",
            "XNNPACK does not support a linear with an input of more than two dims once TO_EDGE has decomposed it",
            "Use TO_EDGE_TRANSFORM_AND_LOWER, which keeps such operators whole.",
        ),
    ),
    (re.compile(r"graph_output_allocated not set"), _no_output),
    (re.compile(r"Input spec name _lifted_tensor_constant\d+ does not match node name"), _numbers_without_inputs),
    (
        re.compile(
            r"Unsupported control flow operator: (\w+)|invalid target for call_function (?:<(?:built-in )?function )?([\w.]*\w)"
        ),
        _unknown_control_flow,
    ),
    (re.compile(r"0 in strides is not supported"), _expanded),
    (
        re.compile(r"Expected (\w+) to be NCHW in channels last|same constant data tensor can't be used in N.*"),
        _channels_last_weight,
    ),
    (re.compile(r"constant data node \((\w+)\) is tagged with \(\w+\) but has user \((\w+)\)"), _shared_weight),
    (
        re.compile(r"expected compiled_fn to be GraphModule"),
        _fails(
            "AssertionError",
            "the model changes a buffer that shares memory with another, which ExecuTorch cannot lower",
            "Register the memory as one buffer, and take parts of it in forward, such as self.cache[0].",
        ),
    ),
    (
        re.compile(r"requires group_size to be a multiple of 32, but got (\d+)"),
        _fails(
            "AssertionError",
            "XNNPACK takes 4-bit weights in groups of a multiple of 32, but a linear of the model has groups of {}",
            "Make each nn.Linear's in_features a multiple of 32 and group_size 32 or more; or use a pt2e recipe.",
        ),
    ),
    (
        re.compile(r"\A'val'\Z"),
        _fails(
            "KeyError",
            "a pass of ExecuTorch refuses what another one made of the quantized model (KeyError: 'val')",
            "Use a recipe in fp32, such as xnnpack_fp32.",
        ),
    ),
    (re.compile(r"Only 4b group quantization is supported"), _groups_of_other_bits),
    (
        re.compile(r"Command '\['[^']*flatc'.* returned non-zero exit status"),
        _fails(
            "CalledProcessError",
            "a number of the program does not fit its file format, which has 32 bits for sizes of a delegate's tensors",
            "Lower the maxima of dynamic dims to sizes that inputs really have.",
        ),
    ),
    (
        re.compile(r"Each instruction should have corresponding stacktrace|Failed with error: 'stack_trace'"),
        _fails(
            "InternalError",
            "ExecuTorch writes stack traces only where every instruction is one operator of the model",
            "Leave emit_stacktrace out; the ETRecord has every operator's line.",
        ),
    ),
)
"""Messages of torch 2.13 and ExecuTorch 1.5 with their explanations. test_compile_explain.py provokes each."""
