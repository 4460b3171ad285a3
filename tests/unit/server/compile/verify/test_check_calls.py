"""Calls in sequence, each of which continues the state of those before, are compared with eager PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from etfarm.server.compile.program import values  # noqa: E402
from etfarm.server.compile.verify import checks  # noqa: E402
from etfarm.server.compile.verify.smoke import Outcome, Run, SmokeRunner  # noqa: E402
from etfarm.v1.compile_pb2 import HOST_CHECK_INPUTS_EXAMPLE, HostCheck  # noqa: E402
from etfarm.wire import tensors  # noqa: E402


class Sum(nn.Module):
    """Adds up what it is called with."""

    total: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        self.total += x
        return self.total * 1


class Answers:
    """A runner whose calls have given outputs."""

    def __init__(self, *outputs: Sequence[float]) -> None:
        self.outputs = outputs

    def run(self, pte: Path, data: Mapping[str, Path] | None, runs: Sequence[Run], timeout_s: float) -> list[Outcome]:
        (last,) = runs
        for run, numbers in zip((*last.after, last), self.outputs, strict=True):
            run.outputs.write_bytes(tensors.encode([values.to_value("0", torch.tensor(numbers))]))
        return [Outcome(True, last.method)]


@pytest.mark.parametrize(
    ("outputs", "quantized", "code", "words"),
    [
        (([1.0, 2.0], [2.0, 4.0]), False, "", ""),
        (
            ([1.0, 2.0], [1.0, 2.0]), False, "OUTPUTS_DIFFER",
            "On the server, in the calls forward, forward, the last one differs from eager PyTorch: 0 has 6.0 dB, where a "
            "float32 output mostly has over 100. No delegate takes part",
        ),
        (([1.0, 2.0], [2.1, 4.0]), True, "", ""),
        (
            ([1.0, 2.0], [1.0, 2.0]), True, "LOW_ACCURACY",
            "the last one is far from the model: 0 has 6.0 dB, less than the 10 dB that quantization should "
            "keep. Calibrate with inputs like successive calls",
        ),
    ],
)  # fmt: skip
def test_a_call_continues_the_state_of_those_before(tmp_path: Path, outputs: Any, quantized: bool, code: str, words: str) -> None:
    program = torch.export.export(Sum().eval(), (torch.tensor([1.0, 2.0]),))
    checked = checks.Checked()
    checked.checks.append(HostCheck(method="forward", inputs=HOST_CHECK_INPUTS_EXAMPLE, shapes=["2"], ran=True))
    checks.check_calls(
        cast(SmokeRunner, Answers(*outputs)), checked, calls=[("forward", None)] * 2, originals={"forward": program},
        shared=(), pte=tmp_path / "model.pte", data={}, folder=tmp_path, quantized=quantized, backends={}, must_run=True,
    )  # fmt: skip
    assert [warning.code for warning in checked.warnings] == [code] * bool(code)
    assert all(words in warning.message for warning in checked.warnings)
    assert program.state_dict["total"].tolist() == [0, 0] and not list(tmp_path.iterdir())
