"""The server's checks of `etfarm doctor`: the jail of compile processes, and the prebuilt runner."""

from __future__ import annotations

import asyncio
import platform
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from etfarm.server import preflight
from etfarm.server.config import Config
from etfarm.server.devices.bundles import find_difference, read_manifest, run_bundle_build
from etfarm.server.workers.jail.measures import NETWORK
from etfarm.wire.channel import Address
from etfarm.wire.doctor import Check, Finding, Status
from etfarm.wire.errors import EtfarmError
from etfarm.wire.names import data_folder, prebuilt_runner


def check_jail() -> Iterable[Finding]:
    """Yield the measures that isolate compile processes on this machine, as a real one reports them."""
    name = "compile jail"
    report = asyncio.run(preflight.find_jail(Config(Address("unix:doctor"), data_folder() / "farm" / "server")))
    if not report.missing:
        yield Finding(name, Status.OK, ", ".join(measure.name for measure in report.measures))
    for measure in report.missing:
        status = Status.MISSING if measure.name == NETWORK else Status.WARNING
        cost = "models are not compiled." if measure.name == NETWORK else "a hostile model is less confined."
        yield Finding(name, status, f"{measure.name}: {measure.detail}", cost, "Allow user namespaces, or run as root.")


def check_prebuilt() -> Iterable[Finding]:
    """Yield whether the distribution etfarm-runner is installed, and has the bundle that a build would yield."""
    name, path = "prebuilt runner", prebuilt_runner()
    if path is None:
        yield Finding(name, Status.OPTIONAL, "etfarm-runner is not installed", "building the runner takes a compiler.")
        return
    try:
        with tempfile.TemporaryDirectory(prefix="etfarm-doctor-") as folder:
            sources = asyncio.run(run_bundle_build(Path(folder), "--source-digest"))
        executorch = version("executorch").partition("+")[0]
        difference = find_difference(read_manifest(path), platform.machine(), executorch, sources)
    except EtfarmError as error:
        difference = error.message
    if difference is None:
        yield Finding(name, Status.OK, str(path))
    else:
        remedy = "Install the etfarm-runner of this etfarm, or g++."
        yield Finding(name, Status.WARNING, f"It is not used: {difference}", "the runner is built.", remedy)


CHECKS: Final[Mapping[str, Check]] = {"compile jail": check_jail, "prebuilt runner": check_prebuilt}
