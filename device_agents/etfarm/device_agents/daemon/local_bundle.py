"""The runner of this machine for sessions without a farm: found in the user's caches, or built once."""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from etfarm.device_agents.native.build import source_digest
from etfarm.device_agents.native.toolchain import LOADERS, Compiler, CompilerFailed, CompilerMissing
from etfarm.device_agents.runners.bundle import Bundle, unpack
from etfarm.wire import digest
from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.bundles import MANIFEST_NAME, BundleManifest, NotABundle, read_manifest
from etfarm.wire.errors import FarmError
from etfarm.wire.names import data_folder, embedded_farm_folder, prebuilt_runner


class RunnerUnbuilt(FarmError):
    """A missing runner for this machine that cannot be built."""

    reason = "BUNDLE_BUILD_FAILED"


async def local_bundle(on_build: Callable[[], None]) -> Bundle:
    """Return this machine's runner, which is built unless there is one of these sources and this ExecuTorch.

    The runner of the user's embedded farm serves as well, and so does that of the distribution etfarm-runner.

    Args:
        on_build: called before a build, which takes a minute.

    Raises:
        RunnerUnbuilt: it cannot be built.
    """
    try:
        executorch = version("executorch")
    except PackageNotFoundError:
        raise RunnerUnbuilt("There is no ExecuTorch to build the runner with.", "Install etfarm[export].") from None
    sources = await asyncio.to_thread(source_digest)
    cache = data_folder() / "local"
    archive = cache / f"runner-{platform.machine()}-{executorch}-{sources[:16]}.tar.gz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        if (of_farm := await asyncio.to_thread(find_farm_runner, embedded_farm_folder(), executorch, sources)) is not None:
            await asyncio.to_thread(lambda: write_atomically(archive, of_farm.read_bytes()))
        elif (prebuilt := await asyncio.to_thread(find_prebuilt_runner, executorch, sources)) is not None:
            return await asyncio.to_thread(unpack, prebuilt, cache / f"prebuilt-{digest.of_file(prebuilt)[:16]}")
        else:
            await asyncio.to_thread(_require_compiler)
            on_build()
            await _build(archive)
    return await asyncio.to_thread(unpack, archive, archive.with_name(archive.name.removesuffix(".tar.gz")))


def find_farm_runner(farm: Path, executorch: str, sources: str) -> Path | None:
    """Return the archive of this machine's runner that the embedded farm's agent has in its cache; None without one.

    Args:
        farm: the embedded farm's data folder.
        executorch: the version that the runner must have.
        sources: the digest of the sources that it must be built from.
    """
    cache = farm / "agent" / "cache"
    for file in sorted((cache / "bundles").glob(f"*/{MANIFEST_NAME}")):
        try:
            manifest = BundleManifest.parse(file.read_bytes())
        except (OSError, NotABundle):
            continue  # the agent is replacing it
        archive = cache / "blobs" / file.parent.name
        if _is_wanted(manifest, executorch, sources) and archive.exists():
            return archive
    return None


def find_prebuilt_runner(executorch: str, sources: str) -> Path | None:
    """Return the archive of the runner in the distribution etfarm-runner; None without one that a build would yield.

    Args:
        executorch, sources: as in `find_farm_runner`.
    """
    archive = prebuilt_runner()
    if archive is None or not archive.exists():
        return None
    try:
        manifest = read_manifest(archive)
    except NotABundle:
        return None  # `etfarm doctor` says why
    return archive if _is_wanted(manifest, executorch, sources) else None


def _is_wanted(manifest: BundleManifest, executorch: str, sources: str) -> bool:
    wanted = platform.machine(), executorch.partition("+")[0], sources
    return (manifest.arch, manifest.executorch, manifest.source_digest) == wanted


def _require_compiler() -> None:
    """Check that this machine has a compiler for its own runner.

    Raises:
        RunnerUnbuilt: it has none that works, or there is no runner for its architecture.
    """
    arch = platform.machine()
    if arch not in LOADERS:
        raise RunnerUnbuilt(f"There is no runner for {arch!r}.", f"Runners exist for {', '.join(LOADERS)}.", arch=arch)
    try:
        Compiler.find(arch)
    except (CompilerMissing, CompilerFailed) as error:
        raise RunnerUnbuilt(error.message, error.remedy, **error.metadata) from None


async def _build(archive: Path) -> None:
    """Build in a separate process, which ends with this one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "etfarm.wire.command", "bundle", "build", "--exit-with-stdin", "-o", str(archive),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    # Its stdin stays open as long as this process lives.
    assert process.stderr is not None
    stderr, _ = await asyncio.gather(process.stderr.read(), process.wait())
    if process.returncode != 0:
        lines = stderr.decode(errors="replace").strip().splitlines()
        raise RunnerUnbuilt((lines[-1] if lines else f"It ended with {process.returncode}.").removeprefix("etfarm: "))
