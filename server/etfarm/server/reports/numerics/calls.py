"""The comparison of a device's calls, which keep their state, with eager PyTorch."""

from __future__ import annotations

from itertools import islice

from etfarm.server.graphs.call_sequence import find_wrong_call, run_calls
from etfarm.server.reports.numerics import reference
from etfarm.server.reports.request import Calls
from etfarm.wire import tensors
from etfarm.wire.tensors import Value


def find_difference(calls: Calls, screen: reference.Screen | None = None) -> str:
    """Return which call differs from eager PyTorch, and what to do about it; empty if none does.

    Raises:
        ReferenceNotRunnable: as `reference.load`.
        Exception: torch refuses the inputs.
    """
    programs = {method.name: reference.load(method.model, screen) for method in calls.methods}
    names = {method.name: method.output_names for method in calls.methods}
    inputs = [(method, tensors.decode(path.read_bytes())) for method, path in calls.inputs]
    methods = [method for method, _ in inputs]

    def run() -> list[list[Value]]:
        leaves = [(method, [reference.to_torch(value) for value in values]) for method, values in inputs]
        results = zip(methods, run_calls(programs, leaves, calls.shared), strict=True)
        return [
            [reference.from_torch(name, leaf) for name, leaf in zip(names[method], outputs, strict=True)]
            for method, outputs in results
        ]

    expected = run()
    values = iter(tensors.decode(calls.outputs.read_bytes()))
    actual = [list(islice(values, len(wanted))) for wanted in expected]
    actual[-1] += values
    wrong = find_wrong_call(methods, expected, actual, quantized=calls.is_quantized)
    # A model that does not repeat its outputs cannot be compared.
    if wrong is None or find_wrong_call(methods, expected, run(), quantized=calls.is_quantized) is not None:
        return ""
    return (
        f"On the device, {wrong[1]} If the compilation does not warn of the same calls, the device's runner or a backend keeps "
        "state in another way than the server: update the device's agent, or compile with the recipe portable."
    )
