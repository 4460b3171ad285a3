"""The x86_64 runner on processors with fewer vector instructions than this one: XNNPACK chooses its kernels by the processor."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import numpy as np
import pytest

from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.native import NativeRunner
from tests.support.programs import program
from tests.support.runner import QUICK, arrays, loaded

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.slow(reason="runs programs in the emulator"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates other x86_64 processors"),
]

EMULATOR = "qemu-x86_64-static"
OLDER, NEWER = "Nehalem", "Haswell"
"""Without AVX; and with AVX2 and FMA, but without AVX512."""


async def outputs(bundle: Bundle, folder: Path, name: str, emulator: tuple[str, ...]) -> list[np.ndarray]:
    """Return what the program gives after the self-test and a measurement."""
    folder.mkdir()
    async with NativeRunner.start(bundle.command(emulator), folder) as runner:
        assert "XnnpackBackend" in await runner.self_test()
        await loaded(runner, program(name))
        assert len((await runner.measure(QUICK)).samples_ns) == QUICK.iterations
        return arrays(await runner.outputs())


@pytest.mark.parametrize("processor", [OLDER, NEWER])
@pytest.mark.parametrize("name", ["conv", "conv_int8"])
async def test_a_program_gives_the_same_on_other_processors(
    runner_bundle: Bundle, tmp_path: Path, name: str, processor: str
) -> None:
    emulator = shutil.which(EMULATOR)
    if emulator is None:
        pytest.skip(f"needs {EMULATOR}: apt-get install qemu-user-static")
    (here,) = await outputs(runner_bundle, tmp_path / "here", name, ())
    (there,) = await outputs(runner_bundle, tmp_path / "there", name, (emulator, "-cpu", processor))
    if name == "conv":
        np.testing.assert_allclose(there, here, rtol=1e-4, atol=1e-5)
        return
    # Kernels round halves differently: a value may be the next one of 256.
    step = np.diff(np.unique(here)).min()
    np.testing.assert_allclose(there, here, rtol=0, atol=1.01 * step)
    assert np.mean(there != here) < 0.05
