"""The emulated processor and the aarch64 runner: what a program sees of it, its limits, and bundles that are not for a device."""

from __future__ import annotations

import gzip
import json
import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from etfarm.device_agents import main
from etfarm.device_agents.attempts.fetch import try_out
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.device import inventory
from etfarm.device_agents.native import build
from etfarm.device_agents.native.toolchain import Compiler, ExecutorchMissing
from etfarm.device_agents.runners.bundle import Bundle, open_folder, unpack
from etfarm.device_agents.runners.emulator import Emulator, EmulatorMissing
from etfarm.device_agents.runners.errors import ProgramOutOfMemory
from etfarm.device_agents.runners.generation import GenerateRequest
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.targets.local import Machine
from etfarm.server.artifacts.store import Store
from etfarm.server.devices.bundles import Bundles
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.wire import digest, tensors
from etfarm.wire.bundles import MANIFEST_NAME, BundledFile, NotABundle, WrongArch
from etfarm.wire.channel import Access
from tests.support.emulation import ARCH, aarch64_archive, aarch64_wheel, need_compiler, need_emulator
from tests.support.programs import program
from tests.support.refusals import refuses
from tests.support.runner import close, load_methods, loaded

pytestmark = pytest.mark.slow(reason="builds the runner for Arm")

boards = pytest.mark.boards


@pytest.fixture(scope="module")
def arm_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return unpack(aarch64_archive(), tmp_path_factory.mktemp("arm") / "bundle")


def config(folder: Path, *, cpu: str | None = None, memory_share: float = 0.8, emulated: bool = True) -> AgentConfig:
    emulator = Emulator.find(ARCH, cpu) if emulated else None
    return AgentConfig(Access("127.0.0.1:1"), "board", folder, memory_share=memory_share, emulator=emulator)


def machine(folder: Path, **options: Any) -> Machine:
    settings = config(folder, **options)
    return Machine(settings, settings.emulator.device() if settings.emulator else inventory.parse(inventory.collect()))


@boards
@pytest.mark.parametrize(
    ("cpu", "part", "features"),
    [
        ("cortex-a53", "Cortex-A53", set()),
        ("neoverse-n1", "Neoverse-N1", {"dotprod", "fp16"}),
        ("max,sme=off", "implementer 0x0 part 0x51", {"dotprod", "fp16", "i8mm", "bf16", "sve", "sve2"}),
    ],
)
def test_a_processor_is_what_a_program_sees_of_it(cpu: str, part: str, features: set[str]) -> None:
    need_emulator()
    device = Emulator.find(ARCH, cpu).device(frozenset({0}))
    assert (device.arch, device.soc, device.emulated, device.cores) == (ARCH, f"qemu {cpu}", True, 1)
    assert set(device.features) == features and [cluster.part for cluster in device.clusters] == [part]
    assert device.page_size_bytes == 4096 and device.memory_bytes > 0
    assert not device.clusters[0].HasField("max_frequency_hz")


@boards
@pytest.mark.parametrize("cpu", ["cortex-a53", "cortex-a76", "neoverse-n1", "a64fx", "max,sme=off"])
async def test_a_bundle_alone_in_an_empty_root_gives_the_outputs_of_x86(
    arm_bundle: Bundle,
    runner_bundle: Bundle,
    tmp_path: Path,
    cpu: str,
) -> None:
    root = tmp_path / "root"
    shutil.copytree(arm_bundle.folder, root / "bundle")
    emulator = shutil.copy(Emulator.find(ARCH).path, root)
    inside = Bundle(Path("/bundle"), arm_bundle.manifest).command((f"/{Path(emulator).name}", "-cpu", cpu))
    # The kernel's own folders alone, which XNNPACK asks what the processor is; they are gone with the process.
    mounts = 'PATH=/usr/sbin:/usr/bin:/sbin:/bin; mount -t proc proc "$0/proc" && mount --rbind /sys "$0/sys"'
    alone = [shutil.which("unshare") or "unshare", "--mount", "/bin/sh", "-c", f'{mounts} && exec chroot "$0" "$@"']
    for folder in ("proc", "sys"):
        (root / folder).mkdir()
    for name, most in (("conv", 1e-5), ("conv_int8", 0.0)):
        created = program(name)
        shutil.copy(created.path, root / "program.pte")
        outputs = []
        for command, where in (([*alone, str(root), *inside], Path("/program.pte")),
                               (runner_bundle.command(), created.path)):  # fmt: skip
            async with NativeRunner.start(command, tmp_path) as runner:
                await runner.threads(1)
                await runner.load(where)
                await runner.load_method("forward")
                await runner.set_inputs(created.inputs)
                await runner.run()
                outputs.append(tensors.to_array((await runner.outputs())[0]))
        np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=most)


@boards
@pytest.mark.parametrize("kind", ["custom", "shared"])
async def test_language_models_generate_the_tokens_of_eager_pytorch(arm_bundle: Bundle, tmp_path: Path, kind: str) -> None:
    model = program(f"decoder_{kind}")
    prompt, expected = (tensors.to_array(value).tolist() for value in (*model.inputs, *model.expected))
    prefill, decode = ("prefill", "decode") if kind == "shared" else ("forward", "forward")
    wanted = GenerateRequest(prefill, decode, prompt, 0, len(expected), 1, 0, 10**12)
    async with machine(tmp_path).start_runner(arm_bundle, tmp_path, None) as runner:
        assert {"llama::custom_sdpa.out", "llama::update_cache.out"} <= set(await runner.self_test())
        await load_methods(runner, model, prefill, decode)
        (tokens,) = (await runner.generate(wanted, 120)).tokens
    assert tokens.tolist() == expected


@boards
async def test_a_vision_language_model_generates_the_tokens_of_eager_pytorch(arm_bundle: Bundle, tmp_path: Path) -> None:
    model = program("flow_start")
    prompt, expected = (tensors.to_array(value).tolist() for value in (model.inputs[1], model.expected[0]))
    wanted = GenerateRequest(
        "text_decoder", "text_decoder", prompt, 0, len(expected), 1, 0, 10**12, embedding_method="token_embedding",
        encoders=["vision_encoder"],
    )  # fmt: skip
    async with machine(tmp_path).start_runner(arm_bundle, tmp_path, None) as runner:
        await load_methods(runner, model, *wanted.parts)
        await runner.select("vision_encoder")
        await runner.set_inputs(model.inputs[:1])
        (tokens,) = (await runner.generate(wanted, 120)).tokens
    assert tokens.tolist() == expected


@pytest.mark.remedy("CPU_UNKNOWN", "EMULATOR_FAILED")
@boards
def test_an_unknown_processor_is_refused_with_those_there_are(tmp_path: Path) -> None:
    need_emulator()
    arguments = ["--emulate", ARCH, "--server", "127.0.0.1:1", "--data", str(tmp_path / "data")]
    with refuses("CPU_UNKNOWN", match=r"cannot emulate 'cortex-a99': unable to find CPU model") as refused:
        main.main([*arguments, "--cpu", "cortex-a99"])
    assert "cortex-a76, max" in refused.value.remedy
    assert not (tmp_path / "data").exists()
    with refuses("CPU_UNKNOWN", match="nosuch"):
        main.main([*arguments, "--cpu", "cortex-a76,nosuch=off"])
    emulator = Emulator.find(ARCH, "cortex-a76")
    with refuses("EMULATOR_FAILED"):
        replace(emulator, path="/bin/false").device()  # a damaged installation
    assert emulator.device().soc == "qemu cortex-a76"


@pytest.mark.remedy("EMULATOR_MISSING")
def test_without_an_emulator_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmulatorMissing, match="needs qemu-aarch64-static, which is not on PATH") as refused:
        main.main(["--emulate", ARCH, "--server", "127.0.0.1:1", "--data", str(tmp_path / "data")])
    assert "`apt-get install qemu-user-static`" in str(refused.value)
    monkeypatch.undo()
    need_emulator()
    assert Emulator.find(ARCH)


def test_a_processor_without_emulation_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--cpu", "cortex-a76", "--server", "127.0.0.1:1"])
    assert ended.value.code == 2 and "--cpu requires --emulate" in capsys.readouterr().err


@boards
async def test_the_emulated_runner_computes_and_its_memory_is_limited(arm_bundle: Bundle, tmp_path: Path) -> None:
    created = program("add")
    async with machine(tmp_path).start_runner(arm_bundle, tmp_path, None) as runner:
        assert (await runner.hello()).arch == ARCH
        assert "XnnpackBackend" in await runner.self_test()
        await loaded(runner, created)
        await runner.run()
        assert close(await runner.outputs(), created.expected)
    large, share = program("large"), (100 << 20) / psutil.virtual_memory().available
    async with machine(tmp_path, memory_share=share).start_runner(arm_bundle, tmp_path, None) as runner:
        await runner.load(large.path, large.data)
        with pytest.raises(ProgramOutOfMemory):
            await runner.load_method("forward")


@boards
def test_building_twice_gives_the_same_bundle(tmp_path: Path) -> None:
    first = aarch64_archive()
    manifest = build.build_bundle(ARCH, tmp_path / "again.tar.gz", executorch=aarch64_wheel())
    assert digest.of_file(tmp_path / "again.tar.gz") == digest.of_file(first)
    assert (manifest.arch, manifest.note, manifest.backends) == (ARCH, "", ("XnnpackBackend",))
    assert len(manifest.operators) > 200
    assert 10_000_000 < sum(file.size for file in manifest.files.values()) < 25_000_000


def _with(bundle: Bundle, folder: Path, arch: str, **replaced: bytes) -> Bundle:
    """`bundle` again in `folder`, as one for `arch`, with another loader or entry."""
    shutil.copytree(bundle.folder, folder)
    old = bundle.manifest
    for which, data in replaced.items():
        (folder / getattr(old, which)).write_bytes(data)
    files = {name: BundledFile(digest.of_file(folder / name), (folder / name).stat().st_size) for name in old.files}
    manifest = replace(old, arch=arch, files=files)
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest.to_json()))
    return Bundle(folder, manifest)


def _compiled(source: str, folder: Path) -> bytes:
    (folder / "made.cpp").write_text(source)
    Compiler.find(platform.machine()).run(["made.cpp", "-o", "made"], "a program", folder)
    return (folder / "made").read_bytes()


@pytest.mark.remedy("DEVICE_RUNNER_UNUSABLE")
async def test_a_runner_that_a_signal_ends_at_its_first_use_is_reported_with_the_signal(
    runner_bundle: Bundle,
    tmp_path: Path,
) -> None:
    killed = _compiled("#include <csignal>\nint main() { std::raise(SIGILL); }", tmp_path)
    bundle = _with(runner_bundle, tmp_path / "bundle", runner_bundle.manifest.arch, entry=killed)
    with refuses(
        "DEVICE_RUNNER_UNUSABLE", match=r"^The runner bundle abc for \w+ does not work on this device: .* by SIGILL"
    ) as reported:
        await try_out(bundle, "abc", machine(tmp_path, emulated=False), tmp_path)
    assert "etfarm bundle build" in reported.value.remedy
    assert "XnnpackBackend" in await try_out(runner_bundle, "def", machine(tmp_path, emulated=False), tmp_path)


async def test_a_runner_that_the_kernel_refuses_is_reported_with_its_errno(
    runner_bundle: Bundle,
    tmp_path: Path,
) -> None:
    bundle = _with(runner_bundle, tmp_path / "bundle", runner_bundle.manifest.arch, loader=b"\x7fELF nonsense")
    with refuses("DEVICE_RUNNER_UNUSABLE", match=r"cannot be started: Exec format error \(ENOEXEC\)"):
        await try_out(bundle, "abc", machine(tmp_path, emulated=False), tmp_path)


async def test_a_runner_that_works_is_tried_without_a_word(runner_bundle: Bundle, tmp_path: Path) -> None:
    assert "XnnpackBackend" in await try_out(runner_bundle, "abc", machine(tmp_path, emulated=False), tmp_path)
    assert list(tmp_path.iterdir()) == []


@boards
@pytest.mark.remedy("BUNDLE_ARCH_MISMATCH")
async def test_a_bundle_that_says_another_architecture_than_its_programs_is_refused_at_both_ends(
    arm_bundle: Bundle, tmp_path: Path
) -> None:
    false = _with(arm_bundle, tmp_path / "false", "x86_64")
    with pytest.raises(NotABundle, match=r"its manifest names x86_64, and its ld-linux-aarch64\.so\.1 is a program for aarch64"):
        open_folder(false.folder)
    database = SqliteDatabase(tmp_path / "farm.sqlite")
    await database.open()
    try:
        store = Store(tmp_path, database)
        artifact = await store.put(gzip.compress(build.pack(false.folder, false.manifest), 1), "ann")
        bundles = Bundles(store, database, tmp_path)
        with pytest.raises(WrongArch, match=r"names x86_64, and its \S+ is a program for aarch64"):
            await bundles.add(artifact.digest)
        assert bundles.list() == []
        built = await store.put(aarch64_archive().read_bytes(), "ann")
        assert (await bundles.add(built.digest)).arch == ARCH
    finally:
        database.close()


@boards
def test_a_wheel_that_cannot_be_fetched_is_one_sentence_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ExecutorchMissing) as refused:
        build.main(["--arch", ARCH, "-o", str(tmp_path / "b.tar.gz")])
    (progress,), refusal = capsys.readouterr().err.splitlines(), str(refused.value)
    assert progress.startswith("fetching executorch 1.5.1 for aarch64 with pip")
    assert "needs ExecuTorch's wheel: pip cannot fetch it (NewConnectionError)" in refusal and "--executorch" in refusal
    assert list((tmp_path / "etfarm" / "wheels").iterdir()) == []
    (tmp_path / "etfarm" / "wheels" / "executorch-1.5.1-cp311-cp311-manylinux_2_28_aarch64.whl").write_bytes(b"PK no")
    with pytest.raises(ExecutorchMissing, match="cannot be read"):
        build.main(["--arch", ARCH, "-o", str(tmp_path / "b.tar.gz")])
    assert not (tmp_path / "b.tar.gz").exists()
