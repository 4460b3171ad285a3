"""The script beside ExecuTorch's files: it gives the Inspector the tensors that ran, whatever numpy has no type for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etfarm.client.formats import executorch
from etfarm.client.submit import npz
from etfarm.wire.tensors import Scalar, from_array
from tests.support.documents import numerics, report

FILES = ["program.etrecord", "traced.etdp", "numerics.etrecord", "numerics.etdp", "numerics.debug", "inputs.npz"]


def inputs_of_script(folder: Path) -> list[Any]:
    """Return what the script's own `inputs` gives in a folder that has nothing but inputs."""
    text = executorch.script(report(**numerics()), FILES)
    compile(text, executorch.SCRIPT, "exec")
    function = text[text.index("def inputs():") : text.index("numerics_record =")]
    space: dict[str, Any] = {"HERE": folder, "np": np, "torch": torch}
    exec(function, space)
    return list(space["inputs"]())


@pytest.mark.parametrize("foreign", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_script_reads_inputs_back_as_they_ran(tmp_path: Path, foreign: str) -> None:
    import ml_dtypes

    image = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    odd = np.array([[1.5, -2.0]]).astype(getattr(ml_dtypes, foreign))
    values = [
        from_array("x", image, (0, 2, 3, 1)), from_array("y", odd), Scalar("n", 3), Scalar("none", None),
        from_array("x.dtype_of", np.array([True])), from_array("0d", np.array(2, np.int64)),
    ]  # fmt: skip
    names = {"forward": [value.name for value in values]}
    npz.write_outputs(tmp_path / "inputs.npz", {"forward": values}, names, with_dim_orders=True)
    x, y, n, none, flag, scalar = inputs_of_script(tmp_path)
    assert torch.equal(x, torch.from_numpy(image)) and x.is_contiguous(memory_format=torch.channels_last)
    assert y.dtype == getattr(torch, foreign) and y.float().tolist() == [[1.5, -2.0]]
    assert (n, none, flag.tolist(), scalar.tolist()) == (3, None, [True], 2)
