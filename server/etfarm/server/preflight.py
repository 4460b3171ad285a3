"""Checks before the server starts: the jail measures that this host allows. Also implements `etfarm serve --check`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from etfarm.server.access.tokens import has_tokens
from etfarm.server.config import DATABASE, Config
from etfarm.server.workers.jail.isolation import JailOptions, NetworkNotRemoved
from etfarm.server.workers.jail.measures import NETWORK, JailIncomplete, JailReport
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.wire.errors import EtfarmError


def jail_options(config: Config) -> JailOptions:
    """Return the settings of the child processes' jail."""
    secrets = (config.data, config.tokens, config.tls_key, config.tls_cert, config.tls_client_ca)
    return JailOptions(
        hidden=tuple(path.absolute() for path in secrets if path is not None),
        readable=tuple(path.absolute() for path in config.jail_readable),
        required=config.is_jail_required,
        first_user=config.jail_user,
    )


def limits(config: Config) -> Limits:
    """Return the resource limits of each child process."""
    # A compilation, and the runs that try its program, use several thread pools (OpenMP, ATen, XNNPACK).
    processes = max(512, 16 * config.threads)
    return Limits(memory_bytes=config.memory_bytes, cpu_s=config.cpu_s, threads=config.threads, processes=processes)


async def find_jail(config: Config) -> JailReport:
    """Return the measures that isolate a real child process on this host. Takes less than a second without loading torch."""
    options = jail_options(config)
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="etfarm-jail-")
    workers = Workers(
        preload=(), limits=limits(config), folder=Path(folder), concurrency=1,
        options=JailOptions(options.hidden, options.readable, required=False, first_user=options.first_user),
    )  # fmt: skip
    workers.start()
    try:
        return await workers.describe_jail()
    except EtfarmError as error:
        if error.reason != NetworkNotRemoved.reason:  # the error comes from the child, so its class shows only its fault
            raise
        return JailReport.of_nothing(NETWORK, error.message)
    finally:
        await workers.stop()


async def require_jail(config: Config) -> JailReport:
    """Return `find_jail`'s report if it meets the configuration.

    Raises:
        JailIncomplete: a measure is missing and the configuration requires all of them.
    """
    report = await find_jail(config)
    if config.is_jail_required and report.missing:
        raise JailIncomplete(report.missing)
    return report


def check(config: Config) -> int:
    """Print the effective configuration, the jail's measures and every problem. Return 0 if the server would start, else 1."""
    problems: list[str] = []
    print("configuration")
    for name, value in _shown(config):
        print(f"  {name:<22} {value}")
    try:
        config.check()
    except EtfarmError as error:
        problems.append(str(error))
    print("jail of compile processes")
    report = asyncio.run(find_jail(config))
    for measure in report.measures:
        print(f"  {measure.name:<22} {'active ' if measure.active else 'MISSING'}  {measure.detail}")
    if report.missing:
        missing = JailIncomplete(report.missing)
        if config.is_jail_required or any(measure.name == NETWORK for measure in report.missing):
            problems.append(str(missing))
        else:
            print(f"warning: {missing.message}")
    for problem in problems:
        print(f"problem: {problem}")
    print("the server would not start" if problems else "ok")
    return 1 if problems else 0


def _tokens(config: Config) -> str:
    """Return where the server's tokens are stored."""
    places = [
        *([str(config.tokens)] if config.tokens else []),
        *(["the data folder"] if has_tokens(config.data / DATABASE) else []),
    ]
    return " and ".join(places) or "none"


def _shown(config: Config) -> list[tuple[str, object]]:
    def path(value: Path | None) -> str:
        return "none" if value is None else str(value)

    return [
        ("listen", f"{config.listen.text} ({'this machine only' if config.listen.is_local else 'other machines reach it'})"),
        ("data", config.data), ("tokens", _tokens(config)), ("tls certificate", path(config.tls_cert)),
        ("client certificates", path(config.tls_client_ca)), ("insecure", "yes" if config.insecure else "no"),
        ("jail required", "yes" if config.is_jail_required else "no"), ("workers", config.workers), ("threads", config.threads),
        ("memory of a job", f"{config.memory_bytes >> 20} MiB"), ("cpu time of a process", f"{config.cpu_s} s"),
        ("compile timeout", f"{config.compile_deadline_s:g} s"), ("stage timeout", f"{config.stage_deadline_s:g} s"),
        ("analysis timeout", f"{config.analysis_deadline_s:g} s"),
    ]  # fmt: skip
