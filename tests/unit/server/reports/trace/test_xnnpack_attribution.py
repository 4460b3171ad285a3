"""Kernels inside XNNPACK's delegates: each names the line of the user's code that it runs, or none at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from etfarm.server.graphs.sources import Source
from etfarm.server.reports.trace import attribution, graph, xnnpack
from etfarm.server.reports.trace.attribution import Attribution, attribute
from etfarm.server.reports.trace.etdump import Kernel
from etfarm.server.reports.trace.graph import Node, Origin, Record
from etfarm.server.reports.trace.join import join
from etfarm.server.reports.trace.kernels import align, family
from etfarm.v1 import report_pb2
from tests.support.analyses import analyzed, read, traced_request
from tests.support.traces import line_of, traced

KERNEL = report_pb2.OPERATOR_KIND_KERNEL
PROGRAMS = ["residual", "residual_int8", "gated_dynamic", "gated_int4", "xnnpack", "int8", "renamed"]


def rows(name: str, result: Attribution | None = None) -> list[report_pb2.OperatorRow]:
    trace, program, record = read(name)
    result = result or attribute(trace, program, record)
    return list(join(trace, record, program, traced(name).method, result.kernels).operators)


def kernels_of(name: str) -> list[tuple[str, str, str]]:
    """Return each kernel's family, its operators without quantization, and the user's variable."""
    result = []
    for row in rows(name):
        if row.kind == KERNEL:
            ops = [graph.base_name(op) for op in row.op_types if not op.startswith("quantized_decomposed.")]
            result.append((family(row.name), " ".join(ops), row.source.code.partition(" = ")[0]))
            assert not row.HasField("source") or (row.source.file, row.source.line) == (
                traced(name).source,
                line_of(row.source.code),
            )
    return result


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_kernels_of_real_programs_are_aligned(name: str) -> None:
    trace, program, record = read(name)
    result = attribute(trace, program, record)
    assert result.delegates >= 1
    assert result.unaligned == {}
    kernels = [row for row in rows(name, result) if row.kind == KERNEL]
    assert kernels
    for row in kernels:
        assert row.aligned
        assert bool(row.op_types) == bool(row.debug_handles)
        assert row.op_types or row.HasField("source_reason")


def test_a_fused_kernel_names_all_that_it_does_and_the_line_of_the_first() -> None:
    assert kernels_of("residual") == [
        ("Transpose", "", "stemmed"),
        ("Convolution", "convolution _native_batch_norm_legit_no_training relu", "stemmed"),
        ("Convolution", "constant_pad_nd convolution", "branched"),
        ("Add", "add", "joined"),
        ("Clamp", "relu", "clipped"),
        ("Max Pooling", "max_pool2d hardtanh", "small"),
        ("Square", "mul", "doubled"),
        ("Copy", "cat", "doubled"),
        ("GELU", "gelu", "smooth"),
        ("Fully Connected", "convolution", "mixed"),
        ("Transpose", "", "tokens"),
        ("Static Reshape", "view_copy", "tokens"),
        ("Batch Matrix Multiply", "permute_copy bmm", "similar"),
        ("Softmax", "_softmax", "return similar.softmax(-1)"),
    ]


def test_lines_come_through_quantization() -> None:
    result = [kernel for kernel in kernels_of("residual_int8") if kernel[0] not in ("Convert", "Transpose")]
    assert result == [
        ("Convolution", "convolution relu", "stemmed"),
        ("Constant Pad", "constant_pad_nd", "padded"),
        ("Convolution", "convolution", "branched"),
        ("Add", "add", "joined"),
        ("Clamp", "relu", "clipped"),
        ("Max Pooling", "max_pool2d hardtanh", "small"),
        ("Square", "mul", "doubled"),
        ("Copy", "cat", "doubled"),
        ("Invalid Unary Op", "gelu", "smooth"),
        ("Fully Connected", "convolution", "mixed"),
        ("Static Reshape", "view_copy", "tokens"),
        ("Batch Matrix Multiply", "bmm", "similar"),
        ("Softmax", "_softmax", "return similar.softmax(-1)"),
    ]
    converts = [row for row in rows("residual_int8") if family(row.name) == "Convert"]
    assert all(op.startswith("quantized_decomposed.") for row in converts for op in row.op_types)


def test_a_linear_that_quantizes_its_own_input_says_so() -> None:
    linear = ["quantized_decomposed.quantize_per_tensor.tensor", "quantized_decomposed.dequantize_per_tensor.tensor"]
    kernels = [row for row in rows("gated_dynamic") if row.kind == KERNEL]
    assert [(row.op_types[-1], row.module, row.source.code) for row in kernels] == [
        ("aten.linear.default", "up", "hidden = self.up(x)"),
        ("aten.tanh.default", "", "gate = hidden.tanh()"),
        ("aten.linear.default", "down", "return self.down(gate)"),
    ]
    assert list(kernels[0].op_types) == [*linear, "aten.linear.default"]


def test_an_inserted_kernel_names_the_operator_that_it_is_there_for() -> None:
    reasons = {row.name: row.source_reason for row in rows("residual") if row.kind == KERNEL and row.HasField("source_reason")}
    assert [(family(name), reason) for name, reason in reasons.items()] == [
        ("Transpose", "It changes the layout of a value for aten.convolution.default."),
        ("Transpose", "It changes the layout of a value for aten.view_copy.default."),
    ]
    converts = [row for row in rows("residual_int8") if row.kind == KERNEL and family(row.name) == "Convert"]
    assert all(row.HasField("source") for row in converts)
    assert {row.source_reason for row in converts} >= {
        "It changes the type of a value for aten.constant_pad_nd.default.",
        "It changes the type of a value for aten.bmm.default.",
    }


def test_a_kernel_that_may_be_one_of_several_operators_has_what_they_share() -> None:
    """Of three reshapes in a row two ran: the first kernel is the first or the second, and the other kernels are certain."""

    def reshapes(*lines: int) -> dict[str, Origin]:
        kinds = ("Tanh", "StaticReshape", "StaticReshape", "StaticReshape")
        nodes = tuple(xnnpack.XNode(kind, at + 1, False, (at,), (at + 1,)) for at, kind in enumerate(kinds))
        graph_ = xnnpack.XGraph(nodes, {at: xnnpack.Value(output=at == 4) for at in range(5)})
        names = ("aten.tanh.default", *["aten.view_copy.default"] * 3)
        operators = {
            at + 1: (Node(name, f"block.{at}", Source("net.py", lines[at], "")),) for at, name in enumerate(names)
        }  # fmt: skip
        events = ["TanH (NC) #1", "Static Reshape (ND) #1", "Static Reshape (ND) #2"]
        delegate = attribution._Delegate(graph_, Record(nodes=operators), frozenset(operators))
        return {event: delegate.origin(match) for event, match in zip(events, align(graph_, events), strict=True)}

    tanh, first, second = reshapes(1, 2, 2, 4).values()
    assert (tanh.source, tanh.debug_handles) == (Source("net.py", 1, ""), (1,))
    assert (first.source, first.debug_handles, first.module) == (Source("net.py", 2, ""), (2, 3), "block")
    assert (second.source, second.debug_handles, second.reason) == (Source("net.py", 4, ""), (4,), None)
    _, first, second = reshapes(1, 2, 3, 4).values()
    assert (first.source, first.op_types, second.source) == (None, ("aten.view_copy.default",), Source("net.py", 4, ""))
    assert first.reason is not None and first.reason.endswith("net.py:2 or net.py:3.")


def test_a_buffer_that_is_written_back_has_the_line_of_its_new_value() -> None:
    source = Source("net.py", 7, "self.count.add_(1)")
    record = Record(
        handles={0: (5,)},
        nodes={5: (Node("aten.add.Tensor", "counter", source),)},
        mutations=(("counter.count", Node("aten.add.Tensor", "counter", source)),),
    )
    program = {(0, 0): graph.Instruction("aten.add.out", False), (0, 1): graph.Instruction("aten.copy_", False)}
    ((place, origin),) = attribution.write_backs(program, record).items()
    assert (place, origin.source, origin.module) == ((0, 1), source, "counter")
    assert origin.reason == "It writes the new value of 'counter.count' back, which aten.add.Tensor computes."
    in_place = replace(record, mutations=(*record.mutations, ("keys", Node("aten.index_put.default", None, None))))
    changed = {**program, (0, 2): graph.Instruction("aten.index_put_", False)}
    assert set(attribution.write_backs(changed, in_place)) == {(0, 1)}
    assert attribution.write_backs(program, in_place) == {}, "it is unknown which of two buffers the copy is of"


@pytest.mark.parametrize("name", PROGRAMS)
def test_times_and_shares_do_not_depend_on_it(name: str) -> None:
    measured = []
    for result in (None, Attribution({}, 0, {})):
        plain = rows(name, result)
        for row in plain:
            row.ClearField("unaligned_reason")
            for field in ("op_types", "debug_handles", "module", "source", "sources", "aligned", "source_reason"):
                if row.kind == KERNEL:
                    row.ClearField(field)
        measured.append(plain)
    assert measured[0] == measured[1]


def test_a_delegate_that_does_not_come_out_has_no_lines_at_all() -> None:
    trace, program, record = read("residual")
    (call,) = [call for call in trace.calls if call.delegate]
    for kernels in (call.kernels[:-1], (*call.kernels, Kernel("Sigmoid (NC) #9", call.times_ns)), call.kernels[::-1]):
        changed = replace(trace, calls=tuple(replace(one, kernels=kernels) if one is call else one for one in trace.calls))
        result = attribute(changed, program, record)
        assert (result.kernels, result.delegates, len(result.unaligned)) == ({}, 1, 1)
        assert f"{len(kernels)} kernels ran for 16 nodes" in result.unaligned[call.chain, call.instruction]
        unaligned = [row for row in join(changed, record, program, "forward", result.kernels).operators if row.kind == KERNEL]
        assert not any(row.aligned or row.op_types or row.HasField("source") or row.HasField("module") for row in unaligned)


@pytest.mark.parametrize("name", PROGRAMS)
def test_nodes_that_lost_their_handle_are_attributed_as_if_they_had_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lowering in separate stages drops the handle of each linear, which no backend inserts."""
    whole = attribute(*read(name))
    dropped = dropping_handles(monkeypatch, "FullyConnected", "Conv2d", "DepthwiseConv2d")
    assert attribute(*read(name)) == whole
    assert dropped


def test_nodes_that_cannot_be_told_are_not_called_inserted(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, program, record = read("gated_dynamic")
    whole = attribute(trace, program, record)
    dropping_handles(monkeypatch, "FullyConnected")
    result = attribute(trace, program, replace(record, operators=()))
    ((place, kernels),) = result.kernels.items()
    assert kernels == {name: origin for name, origin in whole.kernels[place].items() if name.startswith("TanH")}
    assert result.unaligned == {}
    (reason,) = result.partial.values()
    assert "which operators 2 of its 5 nodes come from (FullyConnected)" in reason
    joined = join(trace, record, program, "forward", result.kernels, {**result.unaligned, **result.partial}).operators
    assert [row.unaligned_reason for row in joined if row.kind == report_pb2.OPERATOR_KIND_DELEGATE] == [reason]
    assert [(row.aligned, bool(row.op_types)) for row in joined if row.kind == KERNEL] == [
        (False, False),
        (True, True),
        (False, False),
    ]


def test_a_delegate_of_nothing_else_is_not_aligned_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, program, record = read("gated_dynamic")
    dropping_handles(monkeypatch, "FullyConnected", "Tanh", "Convert")
    # An unnamed change of type is one that lowering inserted.
    result = attribute(trace, program, replace(record, operators=()))
    assert (result.kernels, result.partial, len(result.unaligned)) == ({}, {}, 1)


def dropping_handles(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> list[str]:
    """Take them from all nodes of these kinds that are read from now on; return the kinds of those as they are read."""
    real, dropped = xnnpack.read, []

    def read_without(data: bytes | memoryview) -> xnnpack.XGraph:
        graph = real(data)
        dropped.extend(node.kind for node in graph.nodes if node.kind in kinds)
        return replace(
            graph, nodes=tuple(replace(node, debug_handle=None) if node.kind in kinds else node for node in graph.nodes)
        )

    monkeypatch.setattr(xnnpack, "read", read_without)
    return dropped


def test_nothing_is_claimed_without_a_record_or_a_graph() -> None:
    trace, program, record = read("residual")
    assert attribute(trace, program, Record()) == Attribution({}, 0, {})
    assert attribute(trace, {}, record) == Attribution({}, 0, {})
    without = {place: replace(known, data=None) for place, known in program.items()}
    (reason,) = attribute(trace, without, record).unaligned.values()
    assert reason == "The delegate's graph is not in the program's own file."


def test_kernels_that_do_not_come_out_are_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = traced_request(traced("xnnpack"), traced_ns=())
    report = analyzed(request, tmp_path)
    assert not report.compile.warnings
    assert [row.source.code for row in report.operators if family(row.name) == "Convolution"] == ["convolved = self.conv(x)"]

    real = xnnpack.read
    monkeypatch.setattr(xnnpack, "read", lambda data: replace(real(data), nodes=real(data).nodes[1:]))
    report = analyzed(request, tmp_path)
    (warning,) = report.compile.warnings
    assert warning.code == "ANALYSIS_KERNELS_UNALIGNED"
    assert warning.message.startswith("The kernels of 2 of 2 XNNPACK delegates have no source lines. Instruction 0: ")
    assert warning.message.endswith("None of them fits, so the trace may be of another program.")
    reasons = [row.unaligned_reason for row in report.operators if row.kind == report_pb2.OPERATOR_KIND_DELEGATE]
    assert len(reasons) == 2 and all("kernels ran for" in reason for reason in reasons)
