"""Export of an eager model to .pt2 archives and calibration samples that any server can lower.

The bytes are the cache's key, so that equal models must give equal bytes in every process: one archive name, paths of
source files relative to the working folder, and nothing of the client's disk.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from etfarm.client.export.calls import without_nested_tensors
from etfarm.client.export.construction import add_lines
from etfarm.client.export.differences import difference_for_examples, differing_sizes
from etfarm.client.export.errors import (
    STAGE,
    DimSpecialized,
    UnsupportedInput,
    data_dependent_branch,
    export_failed,
    training_mode,
    unsupported_output,
)
from etfarm.client.export.exportable import must_be_exportable
from etfarm.client.export.fixed_sizes import (
    find_example,
    find_fixing,
    find_limit,
    find_steps,
    must_not_be_fixed,
    only_reshapes_exclude,
)
from etfarm.client.export.forgetting import EagerCall, attributes_kept
from etfarm.client.export.mutation import (
    assignments_written,
    changes_constants,
    find_overlapping_write,
    find_shared_buffers,
    keep_mutations,
    show_views,
    written_parameters,
)
from etfarm.client.export.noise import quiet
from etfarm.client.export.operators import allow_dynamic_pools, find_reshaping, must_be_savable, plain_operators
from etfarm.client.export.remedies import PADDING, PT2E_INSTEAD, lacks_operator, remedy_of
from etfarm.client.export.samples import (
    dense,
    find_mismatch,
    flat_values,
    leaf_names,
    must_match,
    ordered_like,
    unshared,
    wire_value,
)
from etfarm.client.export.shapes import keywords_named, must_be_bounded, normal_shapes, specialized
from etfarm.client.export.shared_state import mark_shared
from etfarm.client.export.size_arithmetic import must_be_whole
from etfarm.client.export.source import ModelSource, must_be_tuple
from etfarm.client.export.splits import find_padding, find_split, must_fit_all_sizes
from etfarm.client.export.structures import plain_module_paths, plain_structures
from etfarm.client.export.subclasses import is_unwrapping, make_plain
from etfarm.client.export.traces import Place, library_place_of, make_relative, place_in, place_of, traced_graph
from etfarm.client.export.transform import Transform
from etfarm.wire import differences, digest
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.pt2 import InputType, read_archive
from etfarm.wire.regions import inline_regions
from etfarm.wire.samples import AccuracySamples
from etfarm.wire.shared_state import keep_constants
from etfarm.wire.tensors import encode

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram
    from torch.fx import Graph

    from etfarm.wire.recipes import Recipe

_LINE_LIMIT = 400
_FOREIGN_OUTPUT = re.compile(
    r"Found <class '([\w.<>]+)'> in output, which is not a known type"
    r"|Encountered unrecognized type UserDefinedObjectVariable\((\w+)\) at output"
)
"""torch.export 2.13 on an object in the output, in its strict and in its other mode."""
_NO_LEAVES = "not enough values to unpack (expected 2, got 0)"
"""torch.export 2.13 on a forward that returns an empty tuple, list or dict."""
_FORBIDDEN_WRITE = re.compile(r"view .*is being modified inplace|functions with out=\.\.\. arguments don't support")
"""Autograd on writes that it does not support: to views, and to an `out`."""
_INTS = 1 << 63
"""ExecuTorch's ints have 64 bits, with this limit."""


_Exported = TypeVar("_Exported")
Call: TypeAlias = "tuple[str, bytes | Path | None]"
"""A method with a tensor file of its inputs; None for the example inputs."""


@dataclass(frozen=True)
class ExportedMethod:
    """One method of an exported model."""

    pt2: bytes | Path = field(repr=False)
    """The archive of torch.export.save in the ATen dialect, with the example inputs."""
    calibration: tuple[bytes | Path, ...] = field(repr=False)
    """Tensor files (etfarm.wire.tensors), one per sample, with values in flattened order. The example inputs are not among
    them: the archive contains those.
    """
    input_names: tuple[str, ...]
    """The inputs' names in flattened order: `x`, `state_0`, `options_mask`."""
    output_names: tuple[str, ...]
    """The outputs' names in flattened order, see `ArchiveFacts.output_names`."""
    duration_ms: int
    """Duration of exporting and saving in ms, on the monotonic clock."""
    input_types: tuple[InputType | None, ...] = ()
    """Types parallel to `input_names`."""
    transform_ms: float | None = None
    """Duration of SOURCE_TRANSFORM in ms; None if there was none."""
    quantized: bool = False
    """Whether the module was quantized before, like a GraphModule of convert_pt2e."""
    relations: tuple[str, ...] = ()
    """Relations between the sizes of the inputs, see `ArchiveFacts`."""
    forgotten: tuple[str, ...] = ()
    """Names of buffers and attributes, such as `state.n` and `self.h`, whose new values the program forgets."""
    small_sizes: tuple[str, ...] = ()
    """Sizes of 1 and 0 at which the program differs from the model, see `etfarm.wire.differences`."""
    differs: str = ""
    """How outputs on the example inputs differ from those of the model in eager mode; empty if they do not."""


@dataclass(frozen=True)
class ExportedModel:
    """An exported eager model, in the form that is sent to the server."""

    name: str
    methods: Mapping[str, ExportedMethod]
    constant_methods: Mapping[str, bytes] = field(default_factory=dict)
    """A tensor file per constant method, with its leaves in flattened order."""
    calls: tuple[Call, ...] = ()
    """Calls by which the program is compared with the model; each method once if the methods share state."""
    is_quantized: bool = False
    """Whether the source's own transforms have quantized weights."""


def export_source(
    source: ModelSource,
    *,
    name: str,
    folder_base: Path | None = None,
    strict: bool = False,
    recipe: Recipe | None = None,
    calibrate: bool = True,
    folder: Path | None = None,
    say: Callable[[str], None] | None = None,
    shares: bool = True,
) -> ExportedModel:
    """Export each method of `source` separately.

    Args:
        source: the model; its modules are not changed.
        name: the model's name in reports.
        folder_base: folder that names of source files are relative to; the working folder when None.
        strict: passed to torch.export. If False, the module runs as plain Python, which supports more models.
        recipe: its source transform, if any, is applied first.
        calibrate: whether to include all calibration samples. If False, those of a list are included as far as accuracy is
            computed on them.
        folder: folder for archives and samples as files instead of in memory; the caller removes it.
        say: called with a sentence if a method is exported in another mode than `strict` says, or with a copy of an input.
        shares: whether a buffer that several methods have is one in the program.

    Raises:
        STATE_NOT_SHARED: `shares`, and two methods have different views of one memory, to which one writes.
        TRAINING_MODE: `.eval()` was not called.
        MODEL_NOT_ON_CPU: a weight or input is elsewhere.
        UnsupportedInput: an input's dtype or type cannot be sent, or it is a dynamic number.
        CALIBRATION_MISMATCH: a calibration sample does not match the example inputs.
        DYNAMIC_SHAPES_FORM, DIM_WITHOUT_MAXIMUM: dynamic shapes that would fail only on the device.
        NOTHING_TO_TRANSFORM, SOURCE_TRANSFORM_FAILED, CLIENT_TOOLS_MISSING: see etfarm.client.export.transform.
        DATA_DEPENDENT_BRANCH: forward branches on a tensor's value.
        DimSpecialized: a dynamic dim can only have one size, or other sizes.
        UNSUPPORTED_OUTPUT: forward returns an object of a class that torch.export does not know.
        EXPORT_FAILED: any other refusal of torch.export.
    """
    base = folder_base if folder_base is not None else Path.cwd()
    tell = say or (lambda _: None)
    export = _Export(source, base, strict, Transform(source, recipe, base, tell), calibrate, folder, tell)
    with source.scope or nullcontext():
        return _exported(export, name, shares)


def _exported(export: _Export, name: str, shares: bool) -> ExportedModel:
    source = export.source
    export.transform.must_find_something(name)
    programs = {method: export.program(method) for method in source.methods}
    say = None if shares else export.say
    is_shared = mark_shared({method: exported.program for method, exported in programs.items()}, source.methods, say)
    methods = {method: export.archived(exported) for method, exported in programs.items()}
    calls = export.calls(methods) or (tuple((method, None) for method in methods) if is_shared else ())
    return ExportedModel(name, methods, _constants(source), calls, bool(export.transform.quantized))


@dataclass(frozen=True)
class _Program:
    """One exported method that is not archived yet."""

    method: str
    program: ExportedProgram
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    early_names: list[str]
    transform_ms: float | None
    export_s: float
    forgotten: tuple[str, ...]
    small_sizes: tuple[str, ...]
    differs: str


@dataclass(frozen=True)
class _Export:
    """One export of a source, method by method.

    The arguments are those of `export_source`.
    """

    source: ModelSource
    base: Path
    strict: bool
    transform: Transform
    calibrate: bool
    folder: Path | None
    say: Callable[[str], None]

    def program(self, method: str) -> _Program:
        """Export one method."""
        import torch

        module = self.source.methods[method]
        args, kwargs = self.source.example_inputs[method], dict(self.source.example_kwargs.get(method, {}))
        _must_be_eval(method, module)
        must_be_exportable(method, module, args, kwargs)
        early_names = leaf_names(args, kwargs)
        flat_values(method, early_names, args, kwargs)
        samples = self.source.calibration_inputs.get(method, ())
        for index, sample in enumerate(() if callable(samples) else samples):
            must_match(method, index, args, ordered_like(args, sample), early_names)
        shapes = normal_shapes(method, module, args, kwargs, self.source.dynamic_shapes.get(method))
        args, kwargs = unshared(*dense(early_names, args, kwargs, self.say))

        module, transform_ms = self.transform.apply(method)
        _must_be_eval(method, module)
        allow_dynamic_pools()
        started = time.monotonic()
        forgotten = dict[str, None]()

        def forget(name: str, value: str) -> None:
            if name not in forgotten:
                self.say(f"The program forgets what the model assigns to its buffer {name}: {value}.")
            forgotten[name] = None

        def exported() -> tuple[ExportedProgram, set[str], Any]:
            writes = nullcontext(set[str]()) if self.strict else assignments_written(module, forget)
            named = keywords_named(module, kwargs if shapes else {})
            with quiet(), attributes_kept(module, is_called=not self.strict) as kept, named, writes as assigned:
                return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=self.strict), assigned, kept

        with _refusals(method, self.base, is_quantized_here=self.transform.quantizes):
            try:
                program, assigned, kept = _with_gradients_if_they_allow(exported)
            except Exception as error:
                is_known = self.transform.quantizes and lacks_operator(error)
                if not is_known or not (used := self.transform.used_otherwise(method, args, kwargs)):
                    raise
                module, transform_ms = self.transform.apply(method, used)
                program, assigned, kept = _with_gradients_if_they_allow(exported)
        why = ""
        if not self.strict and (shared := find_shared_buffers(program)):
            why = f"it changes {shared}, which are one buffer"
        elif not self.strict and changes_constants(program):
            why = "it changes tensors that it does not reach as buffers of its own"
        if why:
            self.say(f"Exporting {method} again with strict = true, since {why}.")
            if assigned:
                forgotten |= dict.fromkeys(sorted(assigned))
                names = ", ".join(sorted(assigned))
                self.say(f"That program forgets what the model assigns to {names}: write to it with copy_().")
            with (
                _refusals(method, self.base, f"the strict export that it needs, since {why},"),
                quiet(),
                attributes_kept(module, is_called=False),
                keywords_named(module, kwargs if shapes else {}),
            ):
                program = _with_gradients_if_they_allow(
                    lambda: torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=True)
                )
        others = self._calls_of_others(method)
        for name in kept.forgotten(args, kwargs, written_parameters(program), others) if kept.is_changed else ():
            forgotten[name] = None
            self.say(f"The program forgets what the model keeps in {name}: make that a buffer, and write to it with copy_().")
        if inline_regions(program):
            raise export_failed(
                method, "SpecViolationError", "torch.export cannot save a region of torch.autocast that returns nothing.", "",
                remedy="Compute within the region, and write to buffers after it.",
            )  # fmt: skip
        show_views(program)
        if (node := find_overlapping_write(program)) is not None:
            raise export_failed(
                method, "RuntimeError", "the model writes to a tensor whose elements share memory.",
                str(place_in(node.meta.get("stack_trace") or "", self.base) or ""),
                remedy="Clone what expand or torch.meshgrid returns before you write to it: y = y.clone().",
            )  # fmt: skip
        must_be_savable(method, program, self.base)
        must_be_whole(method, program, self.base)
        keep_constants(program)
        must_be_bounded(method, program)
        must_fit_all_sizes(method, program, self.base)
        must_not_be_fixed(method, program, self.base)
        with _refusals(method, self.base), quiet():
            program = plain_operators(program)
        if small := differing_sizes(module, program):
            self.say(differences.describe_sizes(method, small))
        inputs = self.source.example_inputs[method], dict(self.source.example_kwargs.get(method, {}))
        # What is forgotten, and may differ in the first call, is named already.
        differs = "" if forgotten else difference_for_examples(module, program, *inputs)
        if differs:
            self.say(differences.describe_examples(method, differs))
        add_lines(program, module, self.base)
        make_relative(program, self.base)
        make_plain(program)
        if self.source.keep_mutations:
            keep_mutations(program)
        export_s = time.monotonic() - started
        return _Program(
            method, program, args, kwargs, early_names, transform_ms, export_s, tuple(forgotten), tuple(small), differs
        )

    def _calls_of_others(self, method: str) -> list[EagerCall]:
        source = self.source
        modules = {name: module for name, module in source.methods.items() if name != method}
        return [
            EagerCall(module, source.example_inputs[name], dict(source.example_kwargs.get(name, {})))
            for name, module in modules.items()
        ]

    def archived(self, exported: _Program) -> ExportedMethod:
        """Return an exported method as an archive and calibration samples."""
        method, program = exported.method, exported.program
        started = time.monotonic()
        with _refusals(method, self.base, graph=program.graph), quiet():
            archive = archive_of(program)
        duration_ms = round((exported.export_s + time.monotonic() - started) * 1000)
        names = tuple(spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT")
        facts = read_archive(archive)
        return ExportedMethod(
            pt2=self._kept(archive),
            calibration=tuple(self._samples(method, names, exported.args, exported.kwargs, exported.early_names)),
            input_names=names,
            output_names=facts.output_names,
            duration_ms=duration_ms,
            input_types=facts.input_types,
            transform_ms=exported.transform_ms,
            quantized=facts.quantized,
            relations=facts.relations,
            forgotten=exported.forgotten,
            small_sizes=exported.small_sizes,
            differs=exported.differs,
        )

    def calls(self, methods: Mapping[str, ExportedMethod]) -> tuple[Call, ...]:
        """Return the source's calls with their inputs as tensor files.

        Raises:
            BAD_MODEL_SOURCE: the inputs of one are not like the example inputs of its method.
        """
        calls: list[Call] = []
        for index, (method, inputs) in enumerate(self.source.calls):
            kwargs = dict(self.source.example_kwargs.get(method, {}))
            inputs = ordered_like(self.source.example_inputs[method], inputs)
            if difference := find_mismatch(self.source.example_inputs[method], inputs, leaf_names(inputs, kwargs)):
                raise error_for(
                    "BAD_MODEL_SOURCE",
                    f"calls[{index}] differs from the example inputs of {method}: {difference}.",
                    "Give each call the same arguments as the example inputs of its method.",
                    part="calls",
                    method=method,
                )
            calls.append((method, self._kept(encode(flat_values(method, methods[method].input_names, inputs, kwargs)))))
        return tuple(calls)

    def _samples(
        self, method: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], early_names: list[str]
    ) -> Iterator[bytes | Path]:
        """Yield the calibration samples as tensor files, without those that equal the example inputs."""
        samples = self.source.calibration_inputs.get(method, ())
        if not samples or (callable(samples) and not self.calibrate):  # for accuracy alone, a function may take too long
            return
        # The archive contains the example inputs, which the server also calibrates with.
        example = encode(flat_values(method, names, args, kwargs))
        of_accuracy = AccuracySamples()
        of_accuracy.take(digest.of_bytes(example), len(example))
        for index, sample in enumerate(_called(method, samples, self.base)):
            if of_accuracy.is_full and not self.calibrate:
                return
            must_be_tuple(method, sample)
            sample = ordered_like(args, sample)
            must_match(method, index, args, sample, early_names)
            file = encode(flat_values(method, names, sample, kwargs))
            is_used = file != example if self.calibrate else of_accuracy.take(digest.of_bytes(file), len(file))
            if is_used:
                yield self._kept(file)

    def _kept(self, data: bytes) -> bytes | Path:
        """Return the bytes, or the file in the folder that they were written to."""
        if self.folder is None:
            return data
        path = self.folder / digest.of_bytes(data)
        path.write_bytes(data)
        return path


def _called(method: str, source: Any, base: Path) -> Iterator[tuple[Any, ...]]:
    """Yield the samples one by one; an exception of the user's own generator is reported with its line."""
    with _users_samples(method, base):
        samples = iter(source() if callable(source) else source)
    while True:
        with _users_samples(method, base):
            try:
                sample = next(samples)
            except StopIteration:
                return
        yield sample


@contextmanager
def _users_samples(method: str, base: Path) -> Iterator[None]:
    try:
        yield
    except EtfarmError:
        raise
    except Exception as error:
        place = place_of(error, base)
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"{method}: the calibration inputs raised {type(error).__name__}: {error}{f', at {place}' if place else ''}.",
            "Give tuples, or a function that gives an iterator of them.",
            part="calibration_inputs",
            method=method,
        ) from error


def _with_gradients_if_they_allow(export: Callable[[], _Exported]) -> _Exported:
    """Return the result of an export, which is repeated without gradients where only these forbid to write to a tensor.

    Gradients forbid to write to an `out`, to one of several views, which chunk, split and unbind return, and to one of
    torch.no_grad().
    """
    import torch

    try:
        return export()
    except RuntimeError as error:
        if _FORBIDDEN_WRITE.search(str(error)) is None:
            raise
    with torch.no_grad(), without_nested_tensors():
        return export()


def archive_of(program: ExportedProgram) -> bytes:
    """Return the bytes of torch.export.save, leaving the program unchanged.

    Inputs and outputs are in tuples, lists and dicts, since a server has no other classes; see `structures`.
    Example inputs are saved without extra attributes: torch.export and mark_dynamic set one on a tensor with a
    Dim.DYNAMIC, and an archive of such tensors is a pickle of objects that servers refuse to load.
    """
    import torch
    from torch.utils import _pytree as pytree

    def bare(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, torch.Tensor) and vars(leaf) else leaf

    # A buffer has no file stem, so every archive has the same prefix; the stem of a path would be part of the bytes.
    buffer = io.BytesIO()
    with plain_structures(program), plain_module_paths(program):
        program.example_inputs = pytree.tree_map(bare, program.example_inputs)
        torch.export.save(program, buffer)
    return buffer.getvalue()


def _must_be_eval(method: str, module: nn.Module) -> None:
    import torch

    for name, part in module.named_modules():
        # A captured graph has a fixed mode; its `training` flag is True in any case.
        captured = isinstance(part, torch.fx.GraphModule) or type(part).__module__.startswith("torch.export")
        if part.training and not captured and type(part) is not torch.nn.Module and not is_unwrapping(part):
            raise training_mode(method, name)


def _constants(source: ModelSource) -> dict[str, bytes]:
    from torch.utils import _pytree as pytree

    files = {}
    for method, value in source.constant_methods.items():
        leaves = pytree.tree_leaves(value, is_leaf=lambda part: not isinstance(part, list | tuple))
        try:
            for leaf in leaves:
                _must_be_constant(method, leaf)
            files[method] = encode(wire_value(method, str(i), leaf) for i, leaf in enumerate(leaves))
        except UnsupportedInput as error:
            raise error_for(
                "BAD_MODEL_SOURCE",
                f"The constant method {method!r} holds a value that is {error.metadata['got']}.",
                "Constants are bools, ints of 64 bits, floats, tensors, and lists and tuples of these.",
                stage=STAGE,
                method=method,
            ) from None
    return files


def _must_be_constant(method: str, leaf: Any) -> None:
    if leaf is None:
        raise UnsupportedInput(method, "", "None", "")
    if isinstance(leaf, int) and not -_INTS <= leaf < _INTS:
        raise UnsupportedInput(method, "", f"{leaf}", "")


@contextmanager
def _refusals(
    method: str, base: Path, what: str = "torch.export", graph: Graph | None = None, *, is_quantized_here: bool = False
) -> Iterator[None]:
    """Convert exceptions of torch.export to etfarm's errors, with the user's own line.

    Args:
        what: the subject of the sentence that says that it failed.
        graph: the graph that is being saved, which has the lines of its operators.
        is_quantized_here: whether the recipe has quantized weights.
    """
    try:
        yield
    except EtfarmError:
        raise
    except Exception as error:
        text = str(error)
        place = place_in(text, base) or place_of(error, base)
        if (match := _FOREIGN_OUTPUT.search(text)) is not None:
            raise unsupported_output(method, (match[1] or match[2]).rpartition(".")[2], str(place or "")) from error
        branch = "Could not guard on data-dependent expression" in text or text.startswith("Data-dependent branching")
        if branch:
            raise data_dependent_branch(method, place, library_place_of(error, base)) from error
        dim = specialized(
            method, text, str(place or ""), partial(find_split, error, base), partial(find_fixing, error, base),
            partial(find_steps, error, base), partial(find_limit, error, base), partial(find_example, error),
            partial(only_reshapes_exclude, error),
        )  # fmt: skip
        name = type(error).__name__
        if (dim or name == "AssertionError") and (padding := find_padding(error, base)) is not None:
            why = "torch.cat gets a tensor that is empty for some of its sizes"
            dim = DimSpecialized(method, dim.metadata["dims"] if dim else "a dim", why, PADDING, padding)
        if dim is not None:
            raise dim from error
        if name == "SerializeError":
            what = "torch.export.save"
            place = place or _place_of_node(text, graph, base)
        remedy = PT2E_INSTEAD if is_quantized_here and lacks_operator(error) else remedy_of(name, text)
        if text == _NO_LEAVES and place is None:
            text, remedy = "forward returns no value, but a program needs an output.", "Return a tensor."
        # torch.export compares the inputs' dims with those of before.
        graph = traced_graph(error) if isinstance(error, IndexError) else graph
        if isinstance(error, IndexError) and graph is not None and (reshaping := find_reshaping(graph)) is not None:
            text = f"{reshaping[0]} changes the number of dims of an input in place."
            place, remedy = place_in(reshaping[2].meta.get("stack_trace") or "", base) or place, reshaping[1]
        raise export_failed(method, name, _first_line(text), str(place or ""), what, remedy) from error


def _place_of_node(text: str, graph: Graph | None, base: Path) -> Place | None:
    """Return the line of the node that torch.export.save cannot write."""
    failed = re.search(r"Failed serializing node (\w+)", text)
    node = next((each for each in graph.nodes if failed and each.name == failed[1]), None) if graph else None
    return place_in(str(node.meta.get("stack_trace")), base) if node else None


def _first_line(text: str) -> str:
    """Return the first line of torch's message that is not empty."""
    lines = iter([line.strip() for line in text.splitlines() if line.strip()] or ["no message."])
    line = next(lines)
    while line.endswith(":") and (following := next(lines, "")):
        line = f"{line} {following}"
    line = re.sub(r" For more information.*| in graph: %.*", "", line)
    return line if len(line) <= _LINE_LIMIT else line[:_LINE_LIMIT] + "..."
