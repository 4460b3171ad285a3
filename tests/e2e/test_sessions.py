"""Sessions through a whole farm, and the same ones on this machine's own runner."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from etfarm.client import AsyncFarm, LocalSession
from etfarm.client.models import DeviceState
from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError
from etfarm.wire.sessions import INLINE_BYTES
from tests.support import models
from tests.support.exports import Function
from tests.support.farm import PROMPTLY_S, FarmProcess, runners, wait_until
from tests.support.local_sessions import Open, local_data  # noqa: F401 - a fixture
from tests.support.programs import Program, program
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="sessions of two farms call programs on real runners")

FREE_S = 1.0
"""Within which a device is free again, where nothing holds the machine up."""
TRIES = 10
"""Of a time that a busy machine may exceed."""

ZERO = np.zeros(1, np.float32)


def arrays(created: Program) -> list[np.ndarray]:
    """Return the program's own inputs."""
    return [tensors.to_array(value) for value in created.inputs if isinstance(value, tensors.Tensor)]


def expected(created: Program) -> list[np.ndarray]:
    """torch's outputs for them."""
    return [tensors.to_array(value) for value in created.expected if isinstance(value, tensors.Tensor)]


@pytest.mark.parametrize("name", ["add", "conv", "channels_last", "batch", "scalars"])
def test_a_call_returns_torchs_outputs(open_session: Open, name: str) -> None:
    created = program(name)
    values = [tensors.to_array(value) if isinstance(value, tensors.Tensor) else value.value for value in created.inputs]
    with open_session(created.path) as session:
        outputs = session.run("forward", *values)
    for output, reference in zip(outputs, expected(created), strict=True):
        assert np.allclose(output, reference, rtol=1e-5, atol=1e-6)


def test_state_persists_between_calls_and_ends_with_the_session(open_session: Open) -> None:
    for _ in range(2):
        with open_session(program("counter").path) as session:
            assert [session.run("forward", ZERO)[0].item() for _ in range(3)] == [1.0, 2.0, 3.0]


def test_each_method_has_separate_state(open_session: Open) -> None:
    with open_session(program("counters").path) as session:
        assert session.methods == ("ones", "tens")
        got = [session.run(method, ZERO)[0].item() for method in ("ones", "tens", "ones", "tens", "ones")]
    assert got == [1.0, 10.0, 2.0, 20.0, 3.0]


def test_a_call_without_a_method_uses_the_only_one(open_session: Open) -> None:
    x = np.ones((2, 3), np.float32)
    with open_session(program("batch").path) as session:
        assert np.allclose(session.run(x)[0], session.run("forward", x)[0])
    with open_session(program("counters").path) as session:
        with refuses("METHOD_MISSING", match=r"has 2 methods.*run\('ones', x\).*ones, tens"):
            session.run(ZERO)
        assert session.run("tens", ZERO)[0].item() == 10.0, "the session stays usable"


def test_dynamic_shapes_may_change_from_call_to_call(open_session: Open) -> None:
    with open_session(program("batch").path) as session:
        for rows in (4, 1, 8, 3):
            x = np.random.default_rng(rows).random((rows, 3), np.float32)
            assert np.allclose(session.run("forward", x)[0], x * 2)


def test_tensors_above_the_inline_limit_are_sent_as_artifacts(open_session: Open) -> None:
    created = program("wide")
    (x,) = arrays(created)
    assert x.nbytes > INLINE_BYTES
    with open_session(created.path) as session:
        np.testing.assert_array_equal(session.run("forward", x), x + 1)
        np.testing.assert_array_equal(session.run("forward", x * 2), x * 2 + 1)


def test_a_sessions_artifacts_are_deleted_at_its_end_unless_a_job_holds_them(farm: FarmProcess) -> None:
    blobs = farm.folder / "server" / "artifacts" / "blobs"

    def stored() -> set[str]:
        return {path.name for path in blobs.glob("*/*")}

    created = program("wide")
    (x,) = arrays(created)
    with farm.client() as client:
        client.run(created.path, inputs={"0": x - 2}).result()
        before = stored()
        with client.session(created.path) as session:
            session.run("forward", x * 3)
            session.run("forward", x * 7)
            session.run("forward", x - 2)
            assert len(stored() - before) == 4
            # It waits for the device, and names what the session brought.
            job = client.run(created.path, inputs={"0": x * 3})
        assert job.result().report["state"] == "SUCCEEDED"
        np.testing.assert_array_equal(tensors.to_array(job.outputs()[0]), x * 3 + 1)  # type: ignore[arg-type]
        assert wait_until(lambda: len(stored() - before) == 2), "what the job was given, and what it gave"
        assert before <= stored()


def test_tensors_lists_and_other_layouts_are_accepted_as_inputs(open_session: Open) -> None:
    (x,) = arrays(program("channels_last"))
    contiguous = np.ascontiguousarray(x)
    with open_session(program("channels_last").path) as session:
        for values in (
            contiguous,
            torch.from_numpy(contiguous),
            torch.from_numpy(contiguous).to(memory_format=torch.channels_last),
        ):
            assert np.array_equal(session.run("forward", values)[0], -contiguous)


def test_outputs_are_writable(open_session: Open) -> None:
    with open_session(program("add").path) as session:
        outputs = session.run("forward", *arrays(program("add")))
        outputs[0] += 1.0
        assert outputs.as_dict().keys() == set(outputs.names)


@pytest.mark.parametrize(
    ("inputs", "reason", "words"),
    [
        ((np.zeros(2, np.float32),), "INPUT_MISMATCH", "shape [1]"),
        ((np.zeros(1, np.int64),), "INPUT_MISMATCH", "float32"),
        ((), "INPUT_MISMATCH", "takes 1"),
        ((ZERO, ZERO), "INPUT_MISMATCH", "takes 1"),
        (("text",), "UNSUPPORTED_INPUT", "str"),
    ],
    ids=["shape", "dtype", "none", "too many", "no array"],
)
def test_wrong_inputs_are_refused_and_leave_the_state_unchanged(
    open_session: Open, inputs: tuple[object, ...], reason: str, words: str
) -> None:
    with open_session(program("counter").path) as session:
        assert session.run("forward", ZERO)[0].item() == 1.0
        with pytest.raises(EtfarmError, match=words.replace("[", r"\[")) as refused:
            session.run("forward", *inputs)
        assert refused.value.reason == reason
        assert session.run("forward", ZERO)[0].item() == 2.0


def test_inputs_that_do_not_fit_are_named_and_a_constant_has_its_value(open_session: Open) -> None:
    x, factor, times, bias = np.zeros(3, np.float32), 2.5, 3, None
    refusals = {
        "forward takes 4 inputs, got 1": (x,),
        "Input '0' of forward is float64 [": (x.astype(np.float64), factor, times, bias),
        "Input '0' of forward is bfloat16 [": (torch.from_numpy(x).to(torch.bfloat16), factor, times, bias),
        f"input 1 must be {factor:g}, a constant of the exported program": (x, factor + 1, times, bias),
    }
    with open_session(program("scalars").path) as session:
        for sentence, inputs in refusals.items():
            with pytest.raises(EtfarmError) as refused:
                session.run(*inputs)
            assert sentence in refused.value.message and refused.value.reason == "INPUT_MISMATCH"
        session.run(x, factor, times, bias)


def test_an_unknown_method_is_refused_with_the_available_ones(open_session: Open) -> None:
    with open_session(program("counters").path) as session:
        with refuses("METHOD_MISSING", match="ones, tens"):
            session.run("forward", ZERO)
        assert session.run("ones", ZERO)[0].item() == 1.0
    with pytest.raises(EtfarmError, match="ones, tens"), open_session(program("counters").path, methods=["forward"]):
        pass


def test_a_loop_measures_on_the_device(open_session: Open) -> None:
    with open_session(program("counter").path) as session:
        session.run("forward", ZERO)
        loop = session.loop(200, warmup=5)
        assert (loop.iterations, loop.samples_ns.size, loop.warmup, loop.stop_reason) == (200, 200, 5, "ENOUGH")
        assert 0 < loop.min_ns <= loop.p50_ns <= (loop.p99_ns or 0)
        assert loop.duration_ns >= loop.samples_ns.sum()
        assert loop.outputs[0].item() == 206.0, "it runs as often as it says, on the inputs of the call before"
        assert session.run("forward", ZERO)[0].item() == 207.0


def test_a_loop_without_inputs_generates_them(open_session: Open) -> None:
    with open_session(program("add").path) as session:
        assert session.loop(3, warmup=0).iterations == 3
        x, y = arrays(program("add"))
        np.testing.assert_allclose(session.loop(1, "forward", [x, y]).outputs, x + y)


@pytest.mark.parametrize("iterations", [0, -1, 10_000_000])
def test_a_loop_of_no_or_too_many_iterations_is_refused(open_session: Open, iterations: int) -> None:
    with open_session(program("add").path) as session, refuses("BAD_CALL", match="1 to 1,000,000"):
        session.loop(iterations)


@pytest.mark.remedy("SESSION_CLOSED")
def test_a_call_of_a_closed_session_is_refused(open_session: Open) -> None:
    session = open_session(program("counter").path)
    with session as opened:
        assert opened.run("forward", ZERO)
    with refuses("SESSION_CLOSED"):
        opened.run("forward", ZERO)


def test_an_invalid_program_is_refused(open_session: Open, tmp_path: Path) -> None:
    path = tmp_path / "no.pte"
    path.write_bytes(b"\0\0\0\0ET12" + b"nonsense" * 100)
    with pytest.raises(EtfarmError), open_session(path):
        pass


def test_an_open_session_names_its_device(open_session: Open) -> None:
    with open_session(program("conv").path) as session:
        device = session.device
    assert (device.state, device.arch, device.runner) == (DeviceState.BUSY, platform.machine(), "native")
    assert device.backends == ("XnnpackBackend",)
    assert device.operator_count is not None and device.operator_count > 200
    assert device.last_seen_at is not None


def test_a_local_session_ends_without_output_on_stderr() -> None:
    code = (
        "import sys\n"
        "from etfarm.client import LocalSession\n"
        "for _ in range(8):\n"
        "    with LocalSession(sys.argv[1]) as session:\n"
        "        session.loop(1)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(program("counter").path)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.remedy("LOCAL_NEEDS_PROGRAM", "LOCAL_RUNNER_FAILED")
def test_a_local_session_needs_a_compiled_program_and_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.save(models.conv, tmp_path / "conv.pt2")
    with refuses("LOCAL_NEEDS_PROGRAM", match="is not compiled"), LocalSession(path):
        pass
    with monkeypatch.context() as without_agent:
        without_agent.setattr(sys, "executable", "/bin/false")
        with refuses("LOCAL_RUNNER_FAILED"), LocalSession(program("counter").path):
            pass
    with LocalSession(program("counter").path) as session:
        assert session.run("forward", ZERO)[0].item() == 1.0


def test_without_a_compiler_the_python_binding_serves_a_local_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETFARM_DATA", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    lines: list[str] = []
    with LocalSession(program("counters").path, on_log=lines.append) as session:
        got = [session.run(method, ZERO)[0].item() for method in ("ones", "tens", "ones")]
        assert session.loop(20, "tens", [ZERO], warmup=0).outputs[0].item() == 210.0
    assert got == [1.0, 10.0, 2.0]
    assert any("Python binding" in line for line in lines)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("etfarm: using ExecuTorch's Python binding instead of a runner: ") and "needs the compiler" in line


def test_a_model_is_compiled_first_and_has_named_inputs(farm: FarmProcess) -> None:
    class Subtract(torch.nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left - right

    a, b = torch.rand(3), torch.rand(3)
    slow: list[str] = []
    options = {"recipe": "portable", "example_inputs": (a, b), "on_status": slow.append}
    with farm.client() as client, client.session(Subtract().eval(), **options) as session:
        assert slow == ["Exporting Subtract.", "Compiling Subtract.", "Waiting for a device."]
        for outputs in (session.run("forward", right=b, left=a), session.run("forward", a, right=b)):
            np.testing.assert_allclose(outputs, (a - b).numpy())
        with pytest.raises(EtfarmError, match="left, right"):
            session.run("forward", a, rite=b)


def test_outputs_of_a_local_session_have_the_names_of_the_models_keys(farm: FarmProcess, tmp_path: Path) -> None:
    x, model = torch.rand(3), Function(lambda x: {"logits": x + 1, "sum": x.sum(), "hidden": [x * 2]}).eval()
    with farm.client() as client:
        compiled = client.compile(model, recipe="portable", example_inputs=(x,))
        compiled.result()
        compiled.save_program(tmp_path / "x.pte")
    with LocalSession(tmp_path / "x.pte") as session:
        outputs = session.run(x)
        assert outputs.names == tuple(outputs.as_dict()) == session.loop(3).outputs.names == ("logits", "sum", "hidden_0")
        np.testing.assert_allclose(outputs.array("hidden_0"), x * 2)


def test_a_device_with_a_session_is_busy_for_jobs_until_it_ends(farm: FarmProcess) -> None:
    with farm.client() as client:
        with client.session(program("counter").path) as session:
            (device,) = client.devices()
            assert device.state is DeviceState.BUSY
            job = client.run(program("add").path)
            waited = next(event for event in job.watch() if "is busy" in getattr(event, "message", ""))
            assert device.name in waited.message  # type: ignore[union-attr]
            session.run("forward", ZERO)
        assert job.result().report.state == "SUCCEEDED"
    assert wait_until(farm.is_idle, PROMPTLY_S)


def test_a_device_is_free_within_a_second_after_a_session(farm: FarmProcess) -> None:
    took_s: list[float] = []
    with farm.client() as client:
        while not took_s or (took_s[-1] >= FREE_S and len(took_s) < TRIES):  # the machine may hold up some of them
            with client.session(program("counter").path) as session:
                session.run("forward", ZERO)
                session.close()
                ended_s = time.monotonic()
                assert wait_until(farm.is_idle)
                took_s.append(time.monotonic() - ended_s)
    assert min(took_s) < FREE_S, took_s


def test_two_callers_queue_for_one_device(farm: FarmProcess) -> None:
    reasons: list[str] = []
    got: list[float] = []

    def second() -> None:
        with farm.client() as client, client.session(program("counter").path, on_wait=reasons.append) as session:
            got.append(session.run("forward", ZERO)[0].item())

    thread = threading.Thread(target=second)
    with farm.client() as client, client.session(program("counter").path) as session:
        session.run("forward", ZERO)
        thread.start()
        assert wait_until(lambda: any("is busy" in reason for reason in reasons))
        assert session.run("forward", ZERO)[0].item() == 2.0
        assert not got
    thread.join()
    assert got == [1.0], "its state is its own"


@pytest.mark.remedy("SESSION_IDLE")
def test_an_idle_session_ends_and_frees_its_device(farm: FarmProcess) -> None:
    with farm.client() as client, client.session(program("counter").path, idle_timeout_s=2.5) as session:
        assert session.run("forward", ZERO)[0].item() == 1.0
        assert wait_until(farm.is_idle)
        with refuses("SESSION_IDLE", match=r"2\.5 s"):
            session.run("forward", ZERO)
        with client.session(program("counter").path, idle_timeout_s=60.0) as again:
            assert again.run("forward", ZERO)[0].item() == 1.0


@pytest.mark.parametrize("arguments", [{"threads": 0}, {"threads": 5000}, {"idle_timeout_s": -1.0}], ids=str)
def test_an_impossible_session_is_refused_and_holds_no_device(farm: FarmProcess, arguments: dict[str, float]) -> None:
    with farm.client() as client, refuses("BAD_SESSION"), client.session(program("add").path, **arguments):  # type: ignore[arg-type]
        pass
    assert wait_until(farm.is_idle, PROMPTLY_S)


async def test_a_caller_that_stops_waiting_leaves_the_queue(farm: FarmProcess) -> None:
    busy = asyncio.Event()

    def on_wait(why: str) -> None:
        if "is busy" in why:
            busy.set()

    async with AsyncFarm(farm.address) as client:
        async with client.session(program("counter").path) as first:
            waiting = asyncio.create_task(client.session(program("counter").path, on_wait=on_wait).__aenter__())
            await busy.wait()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await first.run("forward", ZERO))[0].item() == 1.0
        assert await asyncio.to_thread(wait_until, farm.is_idle, PROMPTLY_S)


def test_an_exception_of_a_listener_is_raised_by_open() -> None:
    def listener(why: str) -> None:
        raise ValueError(why)

    with pytest.raises(ValueError), LocalSession(program("counter").path, on_wait=listener):
        pass


async def test_a_session_can_be_reopened(farm: FarmProcess) -> None:
    async with AsyncFarm(farm.address) as client:
        session = client.session(program("counter").path)
        for _ in range(2):
            async with session:
                assert (await session.run("forward", ZERO))[0].item() == 1.0


async def test_concurrent_calls_are_served_in_order(farm: FarmProcess) -> None:
    async with AsyncFarm(farm.address) as client, client.session(program("counter").path) as session:
        outputs = await asyncio.gather(*(session.run("forward", ZERO) for _ in range(20)))
    assert [output[0].item() for output in outputs] == [float(n) for n in range(1, 21)]


async def test_a_cancelled_call_keeps_the_session_in_order(farm: FarmProcess) -> None:
    async with AsyncFarm(farm.address) as client, client.session(program("counter").path) as session:
        (runner,) = runners(farm.agents[0].pid)
        os.kill(runner, signal.SIGSTOP)  # the loop lasts until it goes on
        looping = asyncio.create_task(session.loop(1000, "forward", [ZERO], warmup=0))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(session.run("forward", ZERO))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.devices()  # answered after the server has received the cancellation
        os.kill(runner, signal.SIGCONT)
        count = (await looping).outputs[0].item()
        # What was taken back before its turn never ran.
        assert (await session.run("forward", ZERO))[0].item() == count + 1.0
