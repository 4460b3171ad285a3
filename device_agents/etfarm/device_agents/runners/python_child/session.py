"""The child's one program and its loaded methods, executed with ExecuTorch's Python binding.

The binding ends the process if its rules are broken: a debug buffer that is too small, a second run after a debug file was
written. What it does not check is checked here, using the file itself (`pte`).
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from etfarm.device_agents.runners.python_child import counters, generation, passes, score
from etfarm.device_agents.runners.python_child.generation import Generation
from etfarm.device_agents.runners.python_child.passes import UNSET, LoadedMethod, Report
from etfarm.device_agents.runners.python_child.pte import FileMethod, FileValue, ProgramFile, check_identifier, data_keys
from etfarm.device_agents.runners.python_child.refusals import Refusal, called, described
from etfarm.device_agents.runners.python_child.score import Score
from etfarm.device_agents.runners.python_child.values import Mismatch, checked_tensor, default_tensor, described_value, heads_of

_CUSTOM_OPERATORS: Final = "extension/llm/custom_ops/libcustom_ops_aot_lib.so"
"""The operators of language models, below ExecuTorch's package."""
_DEBUG_BYTES: Final = 1 << 20
"""Additional debug buffer, for headers and alignment, beyond the tensors of a method."""


def import_runtime() -> Any:
    """Return ExecuTorch's Python binding.

    Imports the module itself, not `executorch.runtime`, which also imports the compiler: one second instead of four.
    """
    torch = importlib.import_module("torch")  # loads the libraries that the binding needs
    try:
        runtime = importlib.import_module("executorch.extension.pybindings._C")
    except ModuleNotFoundError:
        # Its location in other versions of ExecuTorch.
        runtime = importlib.import_module("executorch.extension.pybindings.portable_lib")
    spec = importlib.util.find_spec("executorch")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (library := Path(folder) / _CUSTOM_OPERATORS).is_file():
            torch.ops.load_library(library)  # registers ExecuTorch's kernels, too
    return runtime


class Session:
    """The implementation of the protocol's commands. Times are CLOCK_MONOTONIC, in nanoseconds."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.thread_count()  # creates the thread pool now, since it logs about the CPU, which must not happen during a command
        self._path: Path | None = None
        self._data: Path | None = None
        self._keys: frozenset[str] = frozenset()
        self._file = ProgramFile(())
        self._methods: dict[str, LoadedMethod] = {}
        self._selected: LoadedMethod | None = None
        self._inputs: dict[str, list[Any]] = {}

    # Facts of the runner.

    def backends(self) -> list[str]:
        """Names of the delegates that are usable here."""
        names: list[str] = self._runtime._get_registered_backend_names()
        return sorted(name for name in set(names) if self._runtime._is_available(name))

    def operators(self) -> list[str]:
        """Names of the available kernels."""
        return sorted(set(self._runtime._get_operator_names()))

    def thread_count(self) -> int:
        """Return the size of ExecuTorch's thread pool."""
        return int(self._runtime._threadpool_get_thread_count())

    def set_threads(self, count: int) -> int:
        """Resize the thread pool and return its new size."""
        if self._path is not None:
            raise Refusal("BAD_STATE", "threads must be set before load: XNNPACK keeps the old pool and can hang")
        # In a process with torch, the attention of language models multiplies with torch's own threads.
        importlib.import_module("torch").set_num_threads(count)
        if self.thread_count() != count:
            self._runtime._unsafe_reset_threadpool(count)
        if self.thread_count() != count:
            raise Refusal("RUNTIME", f"the thread pool has {self.thread_count()} threads where {count} were asked for")
        if (counters.task_count() or count) < count:
            raise Refusal("OUT_OF_MEMORY", f"there is no room for {count} threads", "MemoryAllocationFailed")
        return count

    # The program and its methods.

    def load(self, path: Path, data: Sequence[Path]) -> dict[str, Any]:
        """Load the program."""
        if self._path is not None:
            raise Refusal("BAD_STATE", "a program is loaded already; a runner process serves one")
        if len(data) > 1:
            raise Refusal("UNSUPPORTED", f"ExecuTorch's Python binding takes one data file, and the program has {len(data)}")
        threads = self.thread_count()
        keys: frozenset[str] = frozenset()
        for file in data:
            keys = described(f"cannot read {file}", lambda file=file: data_keys(file))  # type: ignore[misc]
        described("cannot load the program", lambda: check_identifier(path))
        start = time.monotonic_ns()
        program = self._load_program(path, data[0] if data else None)
        load_ns = time.monotonic_ns() - start
        about = described("cannot load the program", lambda: ProgramFile.read(path))
        self._path, self._data, self._keys = path, (data[0] if data else None), keys
        self._file = about
        methods = [program.get_method_name(index) for index in range(program.num_methods())]
        return {"load_ns": load_ns, "methods": methods, "threads": threads}

    def facts(self, name: str) -> FileMethod:
        """Return the file's description of a method."""
        if self._path is None:
            raise Refusal("BAD_STATE", "no program is loaded")
        for method in self._file.methods:
            if method.name == name:
                return method
        raise Refusal("RUNTIME", f"no method '{name}': ExecuTorch says InvalidArgument", "InvalidArgument")

    def describe(self, name: str) -> dict[str, Any]:
        """Return the answer to `method`."""
        facts = self.facts(name)
        inputs = [described_value(index, value) for index, value in enumerate(facts.inputs)]
        loaded = name in self._methods
        for event, value in zip(inputs, facts.inputs, strict=True):
            if value.kind == "tensor":
                event["dynamic"] = value.dynamic if loaded else None
        return {
            "name": name,
            "inputs": inputs,
            "outputs": [described_value(index, value) for index, value in enumerate(facts.outputs)],
            "planned_bytes": list(facts.planned_bytes),
            "backends": list(facts.backends),
        }

    def load_method(self, name: str, trace: bool, debug: bool, keep: bool) -> dict[str, Any]:
        """Load `name` and make it the current method; others stay loaded with `keep`."""
        facts = self.facts(name)
        if debug and not trace:
            raise Refusal("BAD_COMMAND", "debug=1 needs trace=1")
        self._selected = None
        if keep:
            self._methods.pop(name, None)
        else:
            self._methods.clear()
        self._require_resources(facts)
        program = self._program_for(facts, trace, debug)
        start = time.monotonic_ns()
        method = called(f"method '{name}' cannot be loaded", lambda: program.load_method(name))
        load_ns = time.monotonic_ns() - start
        self._selected = self._methods[name] = LoadedMethod(facts, program, method, trace, debug)
        self._inputs.setdefault(name, [UNSET] * len(facts.inputs))
        return {"load_method_ns": load_ns}

    def _program_for(self, facts: FileMethod, trace: bool, debug: bool) -> Any:
        """Return the binding's program to load a method from: a new one, or that of the methods with which it shares state."""
        if self._file.shares_state and not debug:
            for other in self._methods.values():
                if other.trace == trace and not other.debug:
                    return other.program
        assert self._path is not None  # a program is loaded
        return self._load_program(self._path, self._data, trace, 2 * facts.tensor_bytes + _DEBUG_BYTES if debug else 0)

    def select(self, name: str) -> None:
        """Make a loaded method the current one, with its state unchanged."""
        self._selected = self.loaded(name)

    def _load_program(self, path: Path, data: Path | None, trace: bool = False, debug_bytes: int = 0) -> Any:
        return called(
            "cannot load the program",
            lambda: self._runtime._load_program(
                str(path),
                enable_etdump=trace,
                debug_buffer_size=debug_bytes,
                program_verification=self._runtime.Verification.InternalConsistency,
                data_path=None if data is None else str(data),
            ),
        )

    def _require_resources(self, facts: FileMethod) -> None:
        """Refuse a method whose needs are not met: ExecuTorch would report that on stderr only, or crash."""
        if backends := sorted(set(facts.backends) - set(self.backends())):
            raise Refusal("BACKEND_MISSING", f"this runner has no backend {', '.join(backends)}", names=backends)
        if operators := sorted(set(facts.operators) - set(self.operators())):
            what = f"this runner has no kernel for {', '.join(operators)}"
            raise Refusal("OPERATOR_MISSING", what, "OPERATOR_MISSING", operators)
        if keys := sorted(facts.data_keys - self._keys - self._file.own_keys):
            raise Refusal("DATA_MISSING", f"no data file has {', '.join(keys)}", "NotFound", keys)

    # Inputs and outputs.

    def _loaded(self) -> LoadedMethod:
        if self._selected is None:
            raise Refusal("BAD_STATE", "no method is loaded")
        return self._selected

    def expected_input(self, index: int, kind: str) -> FileValue:
        """Return the input at `index`, to be set to a value of `kind`."""
        facts = self._loaded().facts
        if index >= len(facts.inputs):
            takes = f"method '{facts.name}' takes {len(facts.inputs)}"
            raise Refusal("INPUT_MISMATCH", f"there is no input {index}: {takes}")
        expected = facts.inputs[index]
        if expected.kind != kind:
            raise Refusal("INPUT_MISMATCH", f"input {index} must be {expected.kind}, not {kind}")
        if kind == "unsupported":
            raise Refusal("INPUT_MISMATCH", f"input {index} is of a kind that etfarm does not carry")
        return expected

    def set_tensor(self, index: int, dtype: str, shape: list[int], dim_order: list[int], data: bytes) -> None:
        """Set a tensor input."""
        expected = self.expected_input(index, "tensor")
        try:
            self._inputs[self._loaded().facts.name][index] = checked_tensor(index, expected, dtype, shape, dim_order, data)
        except Mismatch as error:
            raise Refusal("INPUT_MISMATCH", str(error)) from None

    def set_scalar(self, index: int, kind: str, value: int | float | bool | None) -> None:
        """Set a scalar input, which must equal the value that the program was exported with."""
        baked = self.expected_input(index, kind).scalar
        if value != baked and not (value != value and baked != baked):
            constant = repr(baked).removesuffix(".0") if isinstance(baked, float) else str(baked).lower()
            raise Refusal("INPUT_MISMATCH", f"input {index} must be {constant}, a constant of the exported program")
        self._inputs[self._loaded().facts.name][index] = value

    def default_inputs(self, seed: int) -> tuple[list[dict[str, Any]], bytes]:
        """Set all inputs to defaults and return them."""
        facts = self._loaded().facts
        values: list[Any] = []
        for index, expected in enumerate(facts.inputs):
            try:
                values.append(default_tensor(expected, seed, index) if expected.kind == "tensor" else expected.scalar)
            except Mismatch as error:
                raise Refusal("INPUT_MISMATCH", str(error)) from None
        self._inputs[facts.name] = values
        return heads_of(values, facts.inputs)

    def outputs(self) -> tuple[list[dict[str, Any]], bytes]:
        """Return the outputs of the latest execution."""
        loaded = self._loaded()
        if loaded.first_run_ns is None:
            raise Refusal("BAD_STATE", "the method has not run since it was loaded")
        return heads_of(called("outputs", loaded.method.get_outputs), loaded.facts.outputs)

    # Execution.

    def _ready(self) -> tuple[LoadedMethod, list[Any]]:
        loaded = self._loaded()
        inputs = self._inputs[loaded.facts.name]
        for index, value in enumerate(inputs):
            if value is UNSET:
                raise Refusal("INPUT_MISMATCH", f"input {index} of {len(inputs)} is not set")
        if loaded.spent:
            raise Refusal("BAD_STATE", "ExecuTorch's Python binding cannot run a method after its debug file: load it again")
        return loaded, inputs

    def run(self) -> dict[str, Any]:
        """Execute once."""
        loaded, inputs = self._ready()
        if loaded.debug:
            raise Refusal("BAD_STATE", "a method loaded with debug=1 runs by the debug command only")
        start, end = passes.execute(loaded, inputs)
        return {"run_ns": end - start}

    def measure(self, plan: Mapping[str, int], report: Report) -> tuple[dict[str, Any], bytes]:
        """Run the timed pass; `plan` holds the command's arguments."""
        return passes.measure(*self._ready(), plan, report)

    def trace(self, iterations: int, warmup: int, path: Path, report: Report) -> tuple[dict[str, Any], bytes]:
        """Run traced iterations; the file contains only their events."""
        return passes.trace(*self._ready(), iterations, warmup, path, report)

    def generate(self, plan: Generation, report: Report) -> tuple[dict[str, Any], bytes]:
        """Generate text with loaded methods."""
        return generation.generate(self, plan, report)

    def score(self, plan: Score, report: Report) -> tuple[dict[str, Any], bytes]:
        """Return the logits after given tokens, with loaded methods."""
        return score.score(self, plan, report)

    def loaded(self, name: str) -> LoadedMethod:
        """Return a loaded method."""
        if name not in self._methods:
            raise Refusal("BAD_STATE", f"method '{name}' is not loaded")
        return self._methods[name]

    def inputs(self, name: str) -> list[Any]:
        """Return the inputs of a loaded method; those that are not set are UNSET."""
        return self._inputs[name]

    def debug(self, path: Path, dump: Path, max_bytes: int, report: Report) -> dict[str, Any]:
        """Run one iteration that records every intermediate output, which may take at most `max_bytes`."""
        return passes.debug(*self._ready(), path, dump, max_bytes, report)
