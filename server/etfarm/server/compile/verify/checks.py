"""Checks of a compiled program: methods run on this host at several sizes, compared with eager PyTorch on the same inputs.

    smoke = SmokeRunner(folder / "smoke.log")          # first, before torch is used
    ...
    files = checks.example_files(originals, folder)    # {method: "inputs-0.ett"} for CompileResult.example_inputs
    checked = checks.check_program(
        smoke, originals=originals, pte=folder / "model.pte", data={"weights.ptd": folder / "weights.ptd"},
        backends={method: facts.methods[method].backends for method in originals}, folder=folder, quantized=True,
    )
    checked.checks, checked.warnings                   # for Compilation

`originals` are the programs before quantization. The checks run them, so call this before or after lowering, but not during
it: weights are shared, and buffers that the programs change are restored afterwards.
"""

from __future__ import annotations

import logging
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch

from etfarm.server.compile.errors import program_cannot_run
from etfarm.server.compile.inputs import SizesDoNotFit
from etfarm.server.compile.program import suspects, values
from etfarm.server.compile.program.descriptions import first_line
from etfarm.server.compile.program.suspects import missing_kernels
from etfarm.server.compile.verify import executions, parts, reference, trials
from etfarm.server.compile.verify.reference import ReferenceFailed
from etfarm.server.compile.verify.refusals import Refusal, find_fixed_size, find_refusal
from etfarm.server.compile.verify.smoke import HOST_BACKENDS, MAX_DATA_FILES, Run, SmokeRunner
from etfarm.server.compile.verify.trials import TooLarge, Trial
from etfarm.server.graphs import call_sequence, differences, lost_columns, quantized_outputs, rounding
from etfarm.server.graphs.differences import Difference
from etfarm.server.workers.errors import is_out_of_memory
from etfarm.v1 import compile_pb2
from etfarm.v1.compile_pb2 import Delegation, HostCheck, LocatedOperators, Warning
from etfarm.wire import tensors
from etfarm.wire.located_failures import find_operator
from etfarm.wire.shared_state import written_buffers
from etfarm.wire.sqnr import FAR_FROM_QUANTIZED_GRAPH, PART_LOST
from etfarm.wire.tensors import Value
from etfarm.wire.words import value_of

RUN_S: Final = 120.0
"""Maximum seconds of a run; a slower run causes a warning only, because the program is not at fault."""

_log = logging.getLogger(__name__)


@dataclass
class Checked:
    """The results of the checks."""

    checks: list[HostCheck] = field(default_factory=list)
    warnings: list[Warning] = field(default_factory=list)

    def warn(self, code: str, message: str) -> None:
        """Add a warning."""
        self.warnings.append(Warning(code=code, message=message))


@dataclass(frozen=True)
class _Program:
    """The parameters that all methods of a program share."""

    smoke: SmokeRunner
    pte: Path
    data: Mapping[str, Path]
    folder: Path
    quantized: bool
    backends: Mapping[str, Sequence[str]]
    delegation: Mapping[str, Delegation]
    located: Mapping[str, LocatedOperators]
    lowered: Mapping[str, Any]
    sources: Collection[str]
    """The methods that the user has quantized."""
    shrunk: Collection[str]
    stateful: Collection[str]
    """The methods whose outputs may depend on earlier executions."""

    @property
    def inputs(self) -> Path:
        """The file with the inputs of the last started run."""
        return self.folder / "inputs.ett"

    @property
    def outputs(self) -> Path:
        """The file with the outputs of the last started run."""
        return self.folder / "outputs.ett"

    @property
    def second_outputs(self) -> Path:
        """The file with the outputs of that run's second execution, if it has two."""
        return self.folder / "second-outputs.ett"


def example_files(programs: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Write the example inputs of exported programs to `folder`; return file names by method, if it has example inputs."""
    files = {}
    for index, (method, program) in enumerate(sorted(programs.items())):
        trial = trials.example(program)
        if trial is not None:
            files[method] = f"inputs-{index}.ett"
            (folder / files[method]).write_bytes(tensors.encode(trial.values))
    return files


def check_program(
    smoke: SmokeRunner,
    *,
    originals: Mapping[str, Any],
    pte: Path,
    data: Mapping[str, Path],
    backends: Mapping[str, Sequence[str]],
    folder: Path,
    quantized: bool,
    delegation: Mapping[str, Delegation] | None = None,
    located: Mapping[str, LocatedOperators] | None = None,
    lowered: Mapping[str, Any] | None = None,
    shrunk: Collection[str] = (),
    meanwhile: Callable[[], None] | None = None,
) -> Checked:
    """Run each method at its example inputs, and at its smallest and largest inputs if it has dynamic dims.

    Args:
        smoke: forked before torch was used.
        originals: exported programs before quantization, by method.
        data: the program's named data files.
        backends: backend ids of the delegates by method.
        folder: folder for temporary files, which are removed.
        quantized: whether to accept the errors of a quantized program.
        delegation: delegation by method, which has the places of operators without a kernel.
        located: operators by method, which the runtime's messages refer to by number.
        lowered: exported programs as they were lowered, by method. Those with quantized activations are also compared with
            these at the example inputs, since backends may compute something else than a quantized graph says.
        shrunk: the methods that lost a part of their sizes, whose largest inputs are not tried.
        meanwhile: other work, called while the first method runs, or at the end if no method runs.

    Raises:
        PROGRAM_CANNOT_RUN: the runtime refuses or crashes at inputs that eager PyTorch accepts.
    """
    checked = Checked()
    with tempfile.TemporaryDirectory(dir=folder, prefix="checks-") as temporary:
        tables = (delegation or {}, located or {}, lowered or {})
        sources = {method for method, each in tables[2].items() if originals.get(method) is each}
        stateful = {method for method, each in originals.items() if written_buffers(each)}
        program = _Program(smoke, pte, data, Path(temporary), quantized, backends, *tables, sources, shrunk, stateful)
        for method, original in sorted(originals.items()):
            trial = trials.example(original)
            why = _not_on_host(backends.get(method, ()), data, trial)
            if why or trial is None:
                checked.warn("NOT_RUN_ON_HOST", f"{method} was not tried on the server: {why}.")
                continue
            _check_method(program, method, original, trial, checked, meanwhile)
            meanwhile = None
    if meanwhile is not None:
        meanwhile()
    return checked


def check_calls(
    smoke: SmokeRunner,
    checked: Checked,
    *,
    calls: Sequence[tuple[str, Path | None]],
    originals: Mapping[str, Any],
    shared: Collection[str],
    pte: Path,
    data: Mapping[str, Path],
    folder: Path,
    quantized: bool,
    backends: Mapping[str, Sequence[str]],
    must_run: bool,
) -> None:
    """Compare the outputs of calls, which continue the state of those before, with eager PyTorch's; add a warning if they differ.

    Args:
        checked: the results of `check_program`; nothing is called if a method did not run there.
        calls: methods with tensor files of their inputs; None for the example inputs.
        shared: names of the buffers that methods share.
        must_run: whether to warn if they cannot be run or compared, too.
    """
    ran = {check.method for check in checked.checks if check.ran}
    if not {method for method, _ in calls} <= ran:
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix="calls-") as temporary:
        runs: list[Run] = []
        inputs: list[tuple[str, list[Value]]] = []
        for index, (method, file) in enumerate(calls):
            if file is not None:
                inputs.append((method, tensors.decode(file.read_bytes())))
            else:
                inputs.append((method, values.example_values(originals[method]) or []))
            path = Path(temporary) / f"inputs-{index}.ett"
            path.write_bytes(tensors.encode(inputs[-1][1]))
            runs.append(Run(method, path, Path(temporary) / f"outputs-{index}.ett"))
        try:
            expected = reference.run_calls(originals, inputs, shared)
        except ReferenceFailed as error:
            if must_run:
                checked.warn("NOT_COMPARED", f"The calls were not compared with eager PyTorch: it refuses them ({error.why}).")
            return
        (outcome,) = smoke.run(pte, data, [replace(runs[-1], after=tuple(runs[:-1]))], RUN_S)
        if not outcome.ran:
            if must_run:
                checked.warn("NOT_RUN_ON_HOST", f"The calls were tried on the server, and {outcome.why}.")
            return
        methods = [method for method, _ in calls]
        actual = [tensors.decode(run.outputs.read_bytes()) for run in runs]
        wrong = call_sequence.find_wrong_call(methods, expected, actual, quantized=quantized)
    if wrong is not None:
        repeated = reference.run_calls(originals, inputs, shared)
        if call_sequence.find_wrong_call(methods, expected, repeated, quantized=quantized) is not None:
            if must_run:
                why = "the model does not repeat its outputs"
                checked.warn("NOT_COMPARED", f"The calls were not compared with eager PyTorch: {why}.")
            return
        index, why = wrong
        method = methods[index]
        if quantized:
            cause = "Calibrate with inputs like successive calls, which share their state, or use a recipe that needs none."
        else:
            cause = _find_cause(originals[method], delegates=bool(backends.get(method)))
        checked.warn("LOW_ACCURACY" if quantized else "OUTPUTS_DIFFER", f"On the server, {why} {cause}")


def _not_on_host(backends: Sequence[str], data: Mapping[str, Path], trial: Trial | None) -> str:
    foreign = sorted(set(backends) - HOST_BACKENDS)
    if foreign:
        return f"this host cannot run {', '.join(foreign)}"
    if len(data) > MAX_DATA_FILES:
        return f"its constants are in {len(data)} data files, and the host's runtime takes {MAX_DATA_FILES}"
    return "it carries no example inputs" if trial is None else ""


def _check_method(
    program: _Program, method: str, original: Any, example: Trial, checked: Checked, meanwhile: Callable[[], None] | None
) -> None:
    _start(program, method, example)
    if meanwhile is not None:
        meanwhile()
    # Threads that wait for a CPU spin, so both processes with all threads would take longer than one after the other.
    threads = max(1, torch.get_num_threads() // 2)
    with limit_threads(threads):
        expected = _run_reference(original, example)
    outputs = _finish(program, method, original, example)
    if isinstance(outputs, str):
        checked.warn("NOT_RUN_ON_HOST", f"{method} was tried on the server, and {outputs}.")
        checked.checks.append(_host_check(method, example, ran=False, why=outputs))
        return
    outputs = _judge_executions(program, method, original, example, expected, outputs, checked, threads)
    if isinstance(expected, _Refused):
        checked.checks.append(_host_check(method, example, ran=True, why=expected.why))
        checked.warn("NOT_COMPARED", f"{method} ran on the server, and was not compared with eager PyTorch: {expected.why}.")
    else:
        _compare(program, method, original, example, expected, outputs, checked, threads)
        if program.quantized and len(expected) == len(outputs):
            _compare_parts(program, method, original, example, expected, outputs, checked, threads)
    _compare_with_lowered(program, method, example, outputs, () if isinstance(expected, _Refused) else expected, checked)
    if trials.is_dynamic(original):
        _check_extreme(program, method, original, example, "MIN", checked)
        if method not in program.shrunk:
            _check_extreme(program, method, original, example, "MAX", checked)


@contextmanager
def limit_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_extreme(
    program: _Program, method: str, original: Any, example: Trial, which: Literal["MIN", "MAX"], checked: Checked
) -> None:
    why = ""
    for trial in trials.extremes(original, example, which):
        if isinstance(trial, TooLarge):
            most = trials.MAX_INPUT_BYTES >> 20
            why = f"they have {trial.size_bytes >> 20} MiB, and at most {most} MiB are tried"
            break
        expected = _run_reference(original, trial)
        if isinstance(expected, _Refused):
            why = expected.why
            if expected.is_guard:
                continue
            checked.checks.append(_host_check(method, trial, ran=False, why=why))
            break
        _start(program, method, trial)
        outputs = _finish(program, method, original, trial)
        if isinstance(outputs, str):
            why = outputs
            checked.checks.append(_host_check(method, trial, ran=False, why=why))
        else:
            why, threads = "", torch.get_num_threads()
            outputs = _judge_executions(program, method, original, trial, expected, outputs, checked, threads)
            _compare(program, method, original, trial, expected, outputs, checked, threads)
        break
    if why:
        code, word = ("NOT_RUN_AT_MINIMUM", "smallest") if which == "MIN" else ("NOT_RUN_AT_MAXIMUM", "largest")
        checked.warn(code, f"{method} was not checked at its {word} inputs: {why}.")


@dataclass(frozen=True)
class _Refused:
    """The reason why eager PyTorch did not run the inputs."""

    why: str
    is_guard: bool = False


def _run_reference(original: Any, trial: Trial) -> list[Value] | _Refused:
    try:
        return reference.run_program(original, trial.values)
    except ReferenceFailed as error:
        return _Refused(f"eager PyTorch refuses them ({error.why})", error.is_guard)
    except SizesDoNotFit as error:
        return _Refused(f"the exported program requires other sizes ({error.metadata['got']})", is_guard=True)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _Refused("eager PyTorch has not enough memory for them")


def _start(program: _Program, method: str, trial: Trial) -> None:
    """Start a run, with two executions unless the method writes to state, its inputs are the largest, or it takes long."""
    program.inputs.write_bytes(tensors.encode(trial.values))
    is_repeated = method not in program.stateful and trial.inputs != "MAX"
    run = Run(method, program.inputs, program.outputs, program.second_outputs if is_repeated else None)
    program.smoke.start(program.pte, program.data, run, RUN_S)


def _finish(program: _Program, method: str, original: Any, trial: Trial) -> list[Value] | str:
    """Return the outputs of the started run, or why there are none if the program is not at fault.

    Raises:
        PROGRAM_CANNOT_RUN: the program is at fault.
    """
    outcome = program.smoke.finish()
    if outcome.log:
        _log.info("%s at %s inputs on the host:\n%s", method, trial.inputs, outcome.log.rstrip())
    if outcome.ran:
        return tensors.decode(program.outputs.read_bytes())
    if outcome.timed_out or outcome.out_of_memory:
        return outcome.why if outcome.timed_out else f"there is not enough memory ({outcome.why})"
    table = program.delegation.get(method)
    operator = missing_kernels(outcome.why, original, table.operators if table else ())
    if not operator:
        operator = find_operator(outcome.log, program.located.get(method, LocatedOperators()))
    why = outcome.why
    if not operator and "Failed to define tensor" in why and (operator := suspects.find_many_dims(original)):
        why = f"{why}, as XNNPACK takes at most 6 dims"
    if (refusal := find_fixed_size(original, why) or _find_refusal(program, method, why)) is not None:
        operator = refusal.operator
    crash = suspects.find_only_kernel(original) if outcome.crashed and not operator else ""
    formats = suspects.find_channels_last(original)
    raise program_cannot_run(
        method, why, trial.words, operator or crash, delegates=bool(program.backends.get(method)), formats=formats,
        advice=(refusal.advice if refusal is not None else _advise(program, method, why))
        or suspects.advise_of_bounds(original, why)
        or ("" if formats else suspects.advise_of_columns(original, why) or suspects.advise_of_formats(original, why)),
    )  # fmt: skip


def _judge_executions(
    program: _Program,
    method: str,
    original: Any,
    trial: Trial,
    expected: list[Value] | _Refused,
    first: list[Value],
    checked: Checked,
    threads: int,
) -> list[Value]:
    """Warn of outputs that differ between a run's executions; return each output as of the execution that is further off."""
    if not program.second_outputs.exists():
        return first
    last = tensors.decode(program.second_outputs.read_bytes())
    program.second_outputs.unlink()
    differing = executions.find_differing(first, last)
    reference = [] if isinstance(expected, _Refused) or len(expected) != len(first) else expected
    for index in find_unrepeatable(original, trial, reference, threads) if differing and reference else ():
        differing.pop(index, None)
    if not differing:
        return first
    names = ((reference[index].name if reference else "") or str(index) for index in differing)
    sentence = executions.describe(method, _where(trial), names, original, delegates=bool(program.backends.get(method)))
    checked.warn("EXECUTIONS_DIFFER", sentence)
    return executions.choose_worse(reference, first, last) if reference else first


def _find_refusal(program: _Program, method: str, why: str) -> Refusal | None:
    lowered = program.lowered.get(method)
    return find_refusal(lowered, why) if lowered is not None and "XnnpackBackend" in program.backends.get(method, ()) else None


def _advise(program: _Program, method: str, why: str) -> str:
    """Return what in a quantized graph makes XNNPACK refuse an operator, and what to do about it; empty if nothing does."""
    lowered = program.lowered.get(method)
    if lowered is None or "Failed to create" not in why or not quantized_outputs.is_static(lowered):
        return ""
    return quantized_outputs.advise(lowered.graph)


def _host_check(method: str, trial: Trial, *, ran: bool, why: str = "") -> HostCheck:
    inputs = value_of(compile_pb2.HostCheckInputs, trial.inputs)
    return HostCheck(method=method, inputs=inputs, shapes=trial.shapes, ran=ran, why=why)


def _compare(
    program: _Program,
    method: str,
    original: Any,
    trial: Trial,
    expected: list[Value],
    outputs: list[Value],
    checked: Checked,
    threads: int,
) -> None:
    """Compare a run with the reference, which ran with `threads` threads, and warn of outputs that are far from it."""
    check = _host_check(method, trial, ran=True)
    checked.checks.append(check)
    if len(expected) != len(outputs):
        check.why = f"it returned {len(outputs)} outputs, but the model returns {len(expected)}"
        checked.warn("OUTPUTS_DIFFER", f"{method} on the server{_where(trial)}: {check.why}.")
        return
    pairs = enumerate(zip(expected, outputs, strict=True))
    compared = [differences.difference(first.name or str(index), first, actual) for index, (first, actual) in pairs]
    check.outputs.extend(output.report for output in compared)
    # By index, since several outputs may have the same name.
    problems = {
        index: problem
        for index, output in enumerate(compared)
        if (problem := differences.find_problem(output, quantized=program.quantized))
    }
    if not problems:
        return
    if chance := find_unrepeatable(original, trial, expected, threads):
        names = ", ".join(output.report.output for output in chance.values())
        check.why = f"the model does not repeat {names} when it runs again with the same inputs and threads"
        checked.warn("NOT_COMPARED", f"{method} was not fully compared with eager PyTorch: {check.why}.")
        for index, output in enumerate(compared):
            if differences.is_chance(output, chance.get(index)):
                problems.pop(index, None)
    if not program.quantized:
        choices = _find_choices(original, trial, expected, {index: compared[index] for index in problems})
        if floats := [compared[index].report.output for index in choices if not compared[index].report.HasField("equal_share")]:
            check.why = f"rounding of half precision decides {', '.join(floats)}, as where scores are nearly equal"
            checked.warn(
                "NOT_COMPARED",
                f"{method} was not fully compared with eager PyTorch: {check.why}. To compare all, compile the model in float32.",
            )
        for index in choices:
            del problems[index]
    if not problems:
        return
    listed = "; ".join(problems.values())
    if program.quantized:
        checked.warn(
            "LOW_ACCURACY",
            f"{method} is far from the model{_where(trial)}: {listed}. {_advise_accuracy(program, method)}",
        )
    else:
        checked.warn(
            "OUTPUTS_DIFFER",
            f"{method} gives other results than eager PyTorch{_where(trial)}: {listed}. "
            f"{_find_cause(original, delegates=bool(program.backends.get(method)))}",
        )


def _compare_parts(
    program: _Program,
    method: str,
    original: Any,
    example: Trial,
    expected: list[Value],
    outputs: list[Value],
    checked: Checked,
    threads: int,
) -> None:
    """Warn of parts of outputs that quantization lost, where the outputs as a whole are near the reference."""
    lost: dict[int, list[parts.LostPart]] = {}
    columns: dict[int, list[int]] = {}
    try:
        for index, (wanted, actual) in enumerate(zip(expected, outputs, strict=True)):
            rows = parts.find_lost(original, program.lowered.get(method), index, wanted, actual)
            by_layer = None if rows or method in program.sources else lost_columns.columns_of(original, index)
            narrow = lost_columns.find([(wanted, actual)], by_layer)
            if (rows or narrow) and not differences.find_problem(differences.difference("", wanted, actual), quantized=True):
                lost[index], columns[index] = rows, narrow
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exc()
        why = first_line(error)
        checked.warn("NOT_COMPARED", f"The parts of {method}'s outputs were not compared with eager PyTorch: {why}.")
        return
    for index in find_unrepeatable(original, example, expected, threads) if lost else ():
        lost.pop(index, None)
    if listed := [part for rows in lost.values() for part in rows]:
        checked.warn(PART_LOST, parts.describe(method, listed, _advise_accuracy(program, method)))
    for index in lost:
        if narrow := columns[index]:
            name = expected[index].name or str(index)
            checked.warn(PART_LOST, lost_columns.describe(method, name, narrow, original, index))


def _compare_with_lowered(
    program: _Program, method: str, trial: Trial, outputs: list[Value], model: Sequence[Value], checked: Checked
) -> None:
    """Warn of outputs that are far from the quantized graph that was lowered.

    Args:
        model: the outputs before quantization; empty if unknown.
    """
    lowered = program.lowered.get(method)
    if lowered is None or not (quantized_outputs.is_static(lowered) or quantized_outputs.is_dynamic(lowered)):
        return
    expected = _run_reference(lowered, trial)
    if isinstance(expected, _Refused) or len(expected) != len(outputs):
        return  # as of the comparison with the original program, whose warning says why
    names = [value.name or str(index) for index, value in enumerate(expected)]
    leaves = [values.to_leaf(value) for value in trial.values]
    pairs = list(zip(expected, outputs, strict=True))
    try:
        sentence = quantized_outputs.describe(
            lowered, names, [pairs], lambda _: leaves, program.backends.get(method, ()), model,
            is_source=method in program.sources,
        )  # fmt: skip
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exc()
        checked.warn("NOT_COMPARED", f"{method} was not compared with its quantized graph: {first_line(error)}.")
        return
    if sentence:
        checked.warn(FAR_FROM_QUANTIZED_GRAPH, f"{method} on the server: {sentence}")


def _advise_accuracy(program: _Program, method: str) -> str:
    lowered = program.lowered.get(method)
    if method in program.sources:
        return quantized_outputs.QUANTIZE_OTHERWISE
    if lowered is not None and not quantized_outputs.is_static(lowered):
        return quantized_outputs.KEEP_IN_FP32
    return (
        "Give calibration inputs like the real ones, use an int8 recipe with dynamic scales, or keep what loses most in fp32 "
        "with skip_modules or skip_operators in a recipe file: --numerics shows the operators' loss against eager PyTorch."
    )


def _find_cause(original: Any, *, delegates: bool) -> str:
    """Return what may make a float program differ from eager PyTorch, and what to do about it."""
    advice = differences.advise_floats(delegates=delegates)
    if causes := suspects.find_suspects(original):
        cause = f"ExecuTorch's kernels or its memory plan often compute these wrongly: {causes}"
        return f"{cause} {advice}" if delegates else cause
    return advice


def _where(trial: Trial) -> str:
    return f" {trial.words}" if trial.words else ""


def _find_choices(original: Any, trial: Trial, expected: Sequence[Value], outputs: Mapping[int, Difference]) -> list[int]:
    """Return which of the outputs differ as the model's do where half precision is rounded otherwise."""
    runs = rounding.run_in_half(original, [values.to_leaf(value) for value in trial.values])
    of_values = ([values.to_value("", leaf) for leaf in run] for run in runs)
    return sorted(differences.find_choices(outputs, dict(enumerate(expected)), of_values))


def find_unrepeatable(original: Any, trial: Trial, expected: list[Value], threads: int) -> dict[int, Difference]:
    """Return the outputs that the model itself does not repeat, by index, with the difference of a second run.

    The second run has the same number of threads, which determines the order of sums; what rounding explains does not count.
    """
    with limit_threads(threads):
        repeated = _run_reference(original, trial)
    if isinstance(repeated, _Refused):
        return {}
    return executions.find_differing(expected, repeated)
