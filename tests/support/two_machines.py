"""A farm of this machine and an Arm board or a phone, and a job that gives the same on both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from etfarm.wire import tensors
from tests.support.emulation import aarch64_archive
from tests.support.farm import FarmProcess
from tests.support.quick_jobs import QUICK_OPTIONS, bench


@contextmanager
def farm_for_aarch64(folder: Path) -> Iterator[FarmProcess]:
    """A farm of this machine that has a runner for aarch64, too."""
    archive = aarch64_archive()
    with FarmProcess(folder) as running:
        running.start(agents=0)
        running.add_agent()
        with running.client() as client:
            client.add_bundle(archive)
        yield running


def measured_on_both(farm: FarmProcess, folder: Path, *choices: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure MLPerf Tiny's ResNet on two devices; require that outputs, operators and lines are equal.

    Returns:
        The reports of the other device, and of this machine.
    """
    document, _ = bench(farm, folder, "demo:resnet8", *choices, *QUICK_OPTIONS)
    with farm.client() as client:
        job = client.job(document["job"]["id"])
        outputs = [[tensors.to_array(value) for value in job.outputs(cell)] for cell in range(2)]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=1e-5)
    there, here = sorted(document["reports"], key=lambda report: report["device"]["name"] == "board-0")
    must_have_equal_operators(there, here)
    return there, here


def must_have_equal_operators(there: dict[str, Any], here: dict[str, Any]) -> None:
    """Require that two reports of the ResNet have the same operators, of the same lines."""
    for key in ("source", "kind", "parent"):
        assert [row[key] for row in there["operators"]] == [row[key] for row in here["operators"]], key
    lines = {row["source"]["code"] for row in there["operators"] if row["source"]}
    assert {"y = self.conv(image)", "y = self.conv2(y)"} <= lines
