"""The server's checks of `etfarm doctor`: the jail of compile processes, and the prebuilt runner."""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from etfarm.server import preflight
from etfarm.server.config import LOCAL, Config
from etfarm.server.devices.bundles import describe, find_difference, run_bundle_build
from etfarm.server.workers.cluster.nodes import NodeState
from etfarm.server.workers.jail.measures import NETWORK
from etfarm.wire.bundles import read_manifest
from etfarm.wire.channel import Address
from etfarm.wire.doctor import Check, Finding, Status
from etfarm.wire.errors import EtfarmError
from etfarm.wire.names import CONFIG_VARIABLE, embedded_farm_folder, prebuilt_runner

_NODES_S: Final = 10.0
"""Time for the nodes of a cluster, less than the doctor's limit for a check."""


def check_jail() -> Iterable[Finding]:
    """Yield the measures that isolate compile processes on this machine, as a real one reports them."""
    name = "compile jail"
    report = asyncio.run(preflight.find_jail(Config(Address("unix:doctor"), embedded_farm_folder() / "server")))
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
        remedy = "Install the compiler; or the wheel of etfarm-runner, which a machine with one builds (docs/quickstart.md)."
        yield Finding(name, Status.OPTIONAL, "etfarm-runner is not installed", "building the runner takes a compiler.", remedy)
        return
    try:
        with tempfile.TemporaryDirectory(prefix="etfarm-doctor-") as folder:
            sources = asyncio.run(run_bundle_build(Path(folder), "--source-digest"))
        executorch = version("executorch").partition("+")[0]
        difference = find_difference(describe(read_manifest(path)), platform.machine(), executorch, sources)
    except EtfarmError as error:
        difference = error.message
    if difference is None:
        yield Finding(name, Status.OK, str(path))
    else:
        remedy = "Install the etfarm-runner of this etfarm, or g++."
        yield Finding(name, Status.WARNING, f"It is not used: {difference}", "the runner is built.", remedy)


def check_configuration(environment: Mapping[str, str] = os.environ) -> Iterable[Finding]:
    """Yield whether the file of ETFARM_SERVE_CONFIG can be used, when its certificate expires, and how full the disk is.

    Yields nothing without such a file.
    """
    name, path = "server configuration", environment.get(CONFIG_VARIABLE)
    if not path:
        return
    # The other checks do without the server's parts, which take a second to import.
    from etfarm.server.arguments import config_of, parser
    from etfarm.server.artifacts.room import Room
    from etfarm.server.artifacts.s3.bucket import Bucket
    from etfarm.server.artifacts.s3.errors import BlobsAway
    from etfarm.server.operation import settings
    from etfarm.server.operation.check import EXPIRES_SOON
    from etfarm.server.rpc.door.certificates import Certificates

    try:
        arguments, _ = settings.parse(parser(), (), environment)
        config = config_of(arguments)
        config.check()
        expires_at = Certificates(config).expires_at
    except EtfarmError as error:
        yield Finding(name, Status.WARNING, error.message, "the server does not start with it.", error.remedy)
        return
    yield Finding(name, Status.OK, path)
    if expires_at is not None:
        text = f"valid until {expires_at:%Y-%m-%d %H:%M} UTC"
        if expires_at - datetime.now(UTC) > EXPIRES_SOON:
            yield Finding("server certificate", Status.OK, text)
        else:
            cost = "afterwards clients and agents refuse the server."
            yield Finding("server certificate", Status.WARNING, text, cost, "Renew it; the server reads the new files by itself.")
    if config.blobs is not None:
        try:
            asyncio.run(Bucket(config.blobs).check())
            yield Finding("server bucket", Status.OK, config.blobs.place)
        except BlobsAway as error:
            yield Finding("server bucket", Status.WARNING, error.message, "uploads, downloads and jobs wait.", error.remedy)
        except EtfarmError as error:
            yield Finding("server bucket", Status.WARNING, error.message, "the server does not start with it.", error.remedy)
    if config.data.is_dir():
        space = Room(config.data, config.keep_free_bytes, config.store_limits.work_bytes).measure()
        text = f"{config.data}, {space.free_bytes / 1e9:.1f} GB free; new work is refused below {space.work_bytes / 1e9:.1f} GB"
        status = Status.WARNING if space.is_full else Status.OK
        cost, remedy = ("new work is refused.", "Free disk space.") if space.is_full else ("", "")
        yield Finding("server disk", status, text, cost, remedy)


def check_compile_nodes(environment: Mapping[str, str] = os.environ) -> Iterable[Finding]:
    """Yield the nodes of the Ray cluster of ETFARM_SERVE_CONFIG's file; nothing without one."""
    path = environment.get(CONFIG_VARIABLE)
    if not path:
        return
    from etfarm.server.arguments import config_of, parser
    from etfarm.server.operation import logs, settings

    try:
        arguments, _ = settings.parse(parser(), (), environment)
        config = config_of(arguments)
    except EtfarmError:
        return  # a finding of check_configuration
    if config.compile_pool == LOCAL:
        return
    logs.configure()  # to stderr: stdout has the findings
    try:
        nodes = asyncio.run(preflight.find_nodes(config, _NODES_S))
    except EtfarmError as error:
        yield Finding("compile nodes", Status.WARNING, error.message, "nothing is compiled.", error.remedy)
        return
    if not nodes:
        yield Finding("compile nodes", Status.WARNING, f"{config.compile_pool} has no node with cpus", "nothing is compiled.")
    for node in nodes:
        is_ready = node.state is NodeState.READY
        cost = "" if is_ready else "nothing is compiled there."
        yield Finding("compile node", Status.OK if is_ready else Status.WARNING, node.text, cost)


CHECKS: Final[Mapping[str, Check]] = {
    "compile jail": check_jail, "prebuilt runner": check_prebuilt, "server configuration": check_configuration,
    "compile nodes": check_compile_nodes,
}  # fmt: skip
