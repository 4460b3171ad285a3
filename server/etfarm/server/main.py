"""The command `etfarm serve`, the server daemon."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import structlog

from etfarm.server import preflight
from etfarm.server.app import running
from etfarm.server.compile.screening import operators
from etfarm.server.config import Config
from etfarm.server.jobs.records.quotas import Quotas
from etfarm.server.reports.latency import thresholds
from etfarm.server.reports.latency.thresholds import Thresholds
from etfarm.server.workers.pacing import shorten_thread_switches
from etfarm.wire.channel import parse_address
from etfarm.wire.errors import FarmError, UserError
from etfarm.wire.escapes import in_a_line, printable
from etfarm.wire.names import data_folder
from etfarm.wire.owner import at_end_of_stdin


class FolderInUse(UserError):
    """A data folder that another server uses."""

    reason = "DATA_FOLDER_IN_USE"


def default_folder() -> Path:
    """Return the default data folder."""
    return data_folder() / "server"


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `etfarm serve`."""
    serve = argparse.ArgumentParser(
        prog="etfarm serve",
        description="Run the compile server: it lowers models, sends programs to the devices whose agents connect to it, and "
        "keeps what they measured.",
    )
    serve.add_argument("--listen", default="127.0.0.1:7433", metavar="ADDRESS",
                       help="HOST:PORT, [IPV6]:PORT or unix:PATH; port 0: the system chooses (default %(default)s)")  # fmt: skip
    serve.add_argument("--data", type=Path, metavar="DIR", help=f"its files (default: {default_folder()})".replace("%", "%%"))
    serve.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="lines of NAME ROLE TOKEN; ROLE is admin, user, agent or viewer",
    )
    serve.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain")
    serve.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM key of the certificate")
    serve.add_argument("--tls-client-ca", type=Path, metavar="FILE", help="PEM certificates that clients' must be signed by")
    serve.add_argument("--insecure", action="store_true", help="listen for other machines without TLS and tokens")
    serve.add_argument("--workers", type=_positive, default=1, metavar="N", help="compilations at a time (default %(default)s)")
    serve.add_argument(
        "--threads", type=_positive, default=os.cpu_count() or 1, metavar="N", help="threads of a compilation (default: cpus)"
    )
    serve.add_argument(
        "--memory-gib", type=_positive, default=8, metavar="N", help="memory of a compilation (default %(default)s)"
    )
    serve.add_argument("--cpu-limit", type=_positive, default=3600, metavar="S",
                       help="CPU time of a compilation's process over all threads (default %(default)s s)")  # fmt: skip
    serve.add_argument("--compile-timeout", type=_seconds, default=1800.0, metavar="S",
                       help="how long quantizing may take, and lowering (default %(default)g s)")  # fmt: skip
    serve.add_argument("--stage-timeout", type=_seconds, default=900.0, metavar="S",
                       help="how long one stage of a compilation may take (default %(default)g s)")  # fmt: skip
    serve.add_argument("--analysis-timeout", type=_seconds, default=600.0, metavar="S",
                       help="how long the analysis of a run may take (default %(default)g s)")  # fmt: skip
    serve.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="how long a run waits for its agent (default %(default)g s)",
    )
    serve.add_argument("--project-storage-gib", type=_storage, default=None, metavar="N",
                       help="storage limit of a project that has none of its own; 0: unlimited (default: 20 on a server with "
                       "tokens, else unlimited)")  # fmt: skip
    serve.add_argument("--max-artifact-gib", type=_positive, default=16, metavar="N",
                       help="largest artifact that can be uploaded (default %(default)s)")  # fmt: skip
    serve.add_argument("--keep-free-mib", type=_positive, default=256, metavar="N",
                       help="disk space that uploads leave free (default %(default)s)")  # fmt: skip
    serve.add_argument("--thresholds", type=Path, metavar="FILE",
                       help="TOML of what makes a measurement INVALID, as max_drift = 0.2 (default: built in)")  # fmt: skip
    serve.add_argument("--quota", action="append", default=[], metavar="NAME=N",
                       help="limit on the live work of one user or project; repeatable. Names and defaults: "
                       f"{_quotas()}")  # fmt: skip
    serve.add_argument("--require-jail", action=argparse.BooleanOptionalAction,
                       help="do not start unless the host allows every measure of the compile processes' jail (default: required "
                       "where other machines reach the address)")  # fmt: skip
    serve.add_argument("--jail-readable", type=Path, action="append", default=[], metavar="PATH",
                       help="file or folder that compile processes may read besides the system and the installed code; "
                       "repeatable")  # fmt: skip
    serve.add_argument("--jail-user", type=_positive, metavar="UID",
                       help="first of the user ids that compile processes run as, one for each worker and one more, where the "
                       "server is root (default: chosen, from 1900000000 on)")  # fmt: skip
    serve.add_argument("--check", action="store_true",
                       help="print the configuration, the measures of the jail and every problem, and exit: with 1 if the server "
                       "would not start")  # fmt: skip
    serve.add_argument("--allow-operators", type=Path, action="append", default=[], metavar="FILE",
                       help="file of operators that uploaded models may use besides the built-in list: one "
                       "NAMESPACE.NAME.OVERLOAD a line, # starts a comment; repeatable. A plug-in allows its own with an entry "
                       f"point in the group {operators.PLUGINS}, whose name is the operator and whose value is the module that "
                       "registers it")  # fmt: skip
    serve.add_argument("--no-prewarm", action="store_true",
                       help="load the toolchain with the first compilation of a model, which then takes several seconds longer; "
                       "until then the server needs less memory (default: load it at the start)")  # fmt: skip
    serve.add_argument("--no-bundle", action="store_true", help="do not build the runner bundle for this machine")
    serve.add_argument("--address-file", type=Path, metavar="FILE", help="write the address there once listening")
    serve.add_argument("--exit-with-stdin", action="store_true", help="end when stdin ends")
    return serve


def _quotas() -> str:
    return ", ".join(f"{field.name} ({field.default:,})" for field in fields(Quotas))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _storage(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value << 30


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 604_800:
        raise argparse.ArgumentTypeError("must be above 0 s and at most a week")
    return value


def main(argv: list[str]) -> int:
    """Serve until SIGTERM, SIGINT or, with --exit-with-stdin, the end of stdin."""
    arguments = parser().parse_args(argv)
    config = config_of(arguments)
    if arguments.check:
        return preflight.check(config)
    config.check()
    _configure_logging()
    shorten_thread_switches()
    with _locked(config.data):
        asyncio.run(_serve(config))
    return 0


def config_of(arguments: argparse.Namespace) -> Config:
    """Return the configuration that the command line specifies, not yet checked."""
    # Absolute, since child processes have other working folders.
    folder = (arguments.data or default_folder()).absolute()
    return Config(
        listen=parse_address(arguments.listen), data=folder, tokens=arguments.tokens,
        tls_cert=arguments.tls_cert, tls_key=arguments.tls_key, tls_client_ca=arguments.tls_client_ca,
        insecure=arguments.insecure, workers=arguments.workers, threads=arguments.threads,
        memory_bytes=arguments.memory_gib << 30, cpu_s=arguments.cpu_limit, compile_deadline_s=arguments.compile_timeout,
        stage_deadline_s=arguments.stage_timeout, analysis_deadline_s=arguments.analysis_timeout,
        patience_s=arguments.patience, address_file=arguments.address_file,
        exit_with_stdin=arguments.exit_with_stdin, build_bundle=not arguments.no_bundle, prewarm=not arguments.no_prewarm,
        project_storage_bytes=arguments.project_storage_gib, max_artifact_bytes=arguments.max_artifact_gib << 30,
        quotas=Quotas.of(arguments.quota),
        require_jail=arguments.require_jail, jail_readable=tuple(arguments.jail_readable), jail_user=arguments.jail_user,
        operators=operators.read(arguments.allow_operators),
        keep_free_bytes=arguments.keep_free_mib << 20,
        thresholds=thresholds.read(arguments.thresholds) if arguments.thresholds else Thresholds(),
    )  # fmt: skip


async def _serve(config: Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if config.exit_with_stdin:
        at_end_of_stdin(stop.set)
    damage: list[FarmError] = []

    def on_damaged(error: FarmError) -> None:
        damage.append(error)
        stop.set()

    try:
        async with running(config, on_damaged) as address:
            if config.insecure and not config.listen.is_local:
                print(
                    "etfarm serve: INSECURE: anybody who reaches this address can run programs on the farm's devices", flush=True
                )
            print(f"etfarm serve: listening on {address}", flush=True)
            # Loaded modules live as long as the process: a full garbage collection that visits them would delay every call.
            gc.freeze()
            await stop.wait()
    finally:
        if damage:
            # Any other error during shutdown is a consequence of the damage.
            raise damage[0] from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the data folder for this process.

    Raises:
        FolderInUse: another server uses it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "server.lock").open("a+")
    except OSError as error:
        raise UserError(f"The data folder {folder} cannot be used: {error.strerror}.", "Choose another --data.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise FolderInUse(
                f"Another server (pid {lock.read().strip() or 'unknown'}) uses {folder}.", "Stop it, or choose another --data."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _without_steering(_: object, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    """Replace control characters, which would control the terminal that shows the log; a traceback keeps its line breaks."""
    return {
        key: value if not isinstance(value, str) else printable(value) if key == "exception" else in_a_line(value)
        for key, value in event.items()
    }


def _configure_logging() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            # Only the console renderer prints text unescaped.
            *(
                [_without_steering, structlog.dev.ConsoleRenderer()]
                if sys.stderr.isatty()
                else [structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"])]
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
