"""The options of `etfarm serve`, and those of commands that work on a server's data, which share its sources."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from etfarm.server.artifacts.s3.bucket import PATIENCE_S
from etfarm.server.artifacts.s3.location import read_endpoint
from etfarm.server.compile.screening import operators
from etfarm.server.config import LOCAL, Config
from etfarm.server.devices.health.file import read_settings
from etfarm.server.devices.health.standing import HealthPolicy
from etfarm.server.devices.reservations import MAX_DURATION_S
from etfarm.server.jobs.records.quotas import Quotas
from etfarm.server.notices.settings import NoticeSettings
from etfarm.server.operation import logs, settings
from etfarm.server.operation.blob_options import add_blob_options, location_of
from etfarm.server.operation.settings import Setting
from etfarm.server.reports.latency import thresholds
from etfarm.server.reports.latency.thresholds import Thresholds
from etfarm.server.retention.limits import Limits
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import WAIT_S
from etfarm.server.workers.cluster.pool import PREFIX
from etfarm.wire.channel import parse_address
from etfarm.wire.names import SETTING_PREFIX, data_folder


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
    serve.add_argument("--config", type=Path, metavar="FILE",
                       help="TOML of these options without their dashes, as tls-cert = \"ca.pem\". Options on the command line "
                       f"win, then variables such as {SETTING_PREFIX}TLS_CERT, then this file")  # fmt: skip
    serve.add_argument("--listen", default="127.0.0.1:7433", metavar="ADDRESS",
                       help="HOST:PORT, [IPV6]:PORT or unix:PATH; port 0: the system chooses (default %(default)s)")  # fmt: skip
    serve.add_argument("--data", type=Path, metavar="DIR", help=f"its files (default: {default_folder()})".replace("%", "%%"))
    serve.add_argument("--database", type=DatabaseUrl.parse, metavar="URL",
                       help="PostgreSQL database for jobs and devices, as postgresql://etfarm@host/etfarm; needs etfarm[scale]. "
                       f"Keep a password out of the arguments: use --config, {SETTING_PREFIX}DATABASE, or passfile=FILE in the "
                       "URL (default: a SQLite file in --data)")  # fmt: skip
    serve.add_argument("--database-wait", type=_seconds, default=WAIT_S, metavar="S",
                       help="how long work waits while the PostgreSQL server is unavailable (default %(default)g s)")  # fmt: skip
    blobs = add_blob_options(serve)
    blobs.add_argument("--blobs-cache-gib", type=_positive, default=50, metavar="N",
                       help="size up to which copies are kept in --data; those in use stay (default %(default)s)")  # fmt: skip
    blobs.add_argument("--blobs-presign", metavar="URL",
                       help="let agents read artifacts from the S3 server, which they reach at this URL, by links that are "
                       "valid for 5 minutes; what they cannot read there comes through this server (default: "
                       "everything does)")  # fmt: skip
    blobs.add_argument("--blobs-wait", type=_seconds, default=PATIENCE_S, metavar="S",
                       help="how long a request is repeated while the S3 server fails (default %(default)g s)")  # fmt: skip
    serve.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="lines of NAME ROLE TOKEN; ROLE is admin, user, agent or viewer",
    )
    serve.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain")
    serve.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM key of the certificate")
    serve.add_argument("--tls-client-ca", type=Path, metavar="FILE", help="PEM certificates that clients' must be signed by")
    serve.add_argument("--advertise", type=parse_address, metavar="HOST:PORT",
                       help="with --database: address at which the farm's other servers reach this one "
                       "(default: --listen)")  # fmt: skip
    serve.add_argument("--insecure", action="store_true", help="listen for other machines without TLS and tokens")
    serve.add_argument("--workers", type=_positive, default=1, metavar="N", help="compilations at a time (default %(default)s)")
    serve.add_argument("--compile-pool", type=_pool, default=LOCAL, metavar="POOL",
                       help="where compilations and analyses run: local, or ray://HOST:PORT of a Ray cluster's client server, "
                       "whose nodes run as many at a time as they have cpus. Needs etfarm[scale] here, and "
                       "etfarm[server,scale] in the same versions on each node (default %(default)s)")  # fmt: skip
    serve.add_argument("--compile-python", type=_absolute, metavar="PATH",
                       help="Python of the virtual environment that compiles on each node of the Ray cluster, such as "
                       "/opt/etfarm/bin/python (default: the Python that started Ray there)")  # fmt: skip
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
    serve.add_argument("--max-reservation", type=_seconds, default=MAX_DURATION_S, metavar="S",
                       help="maximum time of a reservation until it must be renewed (default %(default)g s)")  # fmt: skip
    serve.add_argument("--project-storage-gib", type=_storage, default=None, metavar="N",
                       help="storage limit of a project that has none of its own; 0: unlimited (default: 20 on a server with "
                       "tokens, else unlimited)")  # fmt: skip
    serve.add_argument("--max-artifact-gib", type=_positive, default=16, metavar="N",
                       help="largest artifact that can be uploaded (default %(default)s)")  # fmt: skip
    serve.add_argument("--keep-free-mib", type=_positive, default=256, metavar="N",
                       help="disk space that uploads leave free (default %(default)s)")  # fmt: skip
    serve.add_argument("--work-free-mib", type=_positive, default=None, metavar="N",
                       help="free disk space below which new jobs are refused and compilations wait (default: one and a half "
                       "times --keep-free-mib)")  # fmt: skip
    serve.add_argument("--begin-empty", action="store_true",
                       help="begin with an empty database although there are artifacts of a farm, whose database is lost: they "
                       "stay, and nothing refers to them")  # fmt: skip
    serve.add_argument("--drain-timeout", type=_drain_seconds, default=30.0, metavar="S",
                       help="how long running attempts and compilations may go on when the server is stopped; a second signal "
                       "stops at once (default %(default)g s)")  # fmt: skip
    serve.add_argument("--metrics", type=parse_address, metavar="HOST:PORT",
                       help="serve Prometheus metrics, /healthz and /readyz there, as 127.0.0.1:9464 (default: off)")  # fmt: skip
    serve.add_argument("--metrics-host", action="append", default=[], metavar="NAME",
                       help="a further host name by which the metrics may be requested: browsers are led to them by names, so "
                       "only IP addresses, localhost, and this machine's own name are taken otherwise; repeatable")  # fmt: skip
    serve.add_argument("--web", type=parse_address, metavar="HOST:PORT",
                       help="serve the farm's web page there, as 127.0.0.1:8080; needs etfarm[web]; other machines "
                       "reach it by https with --tls-cert (default: off)")  # fmt: skip
    serve.add_argument("--web-public-url", default="", metavar="URL",
                       help="the page's address behind a reverse proxy, as https://farm.example/etfarm")  # fmt: skip
    serve.add_argument("--web-trusted-proxy", action="append", default=[], metavar="ADDRESS",
                       help="address or network of a reverse proxy of the page whose X-Forwarded-For names each visitor's "
                       "address; repeatable")  # fmt: skip
    serve.add_argument("--web-server", default="", metavar="ADDRESS",
                       help="this server's address for the page, if its certificate has another host than --listen")  # fmt: skip
    serve.add_argument("--otlp", type=_url, metavar="URL",
                       help="send the traces of jobs to this OpenTelemetry collector, as http://127.0.0.1:4318/v1/traces "
                       "(default: off)")  # fmt: skip
    serve.add_argument("--log-format", choices=logs.FORMATS, default="text", help="of stderr (default %(default)s)")
    serve.add_argument("--thresholds", type=Path, metavar="FILE",
                       help="TOML of what makes a measurement INVALID, as max_drift = 0.2 (default: built in)")  # fmt: skip
    serve.add_argument("--health-interval", type=_pause, default=None, metavar="S",
                       help="interval of the health runs of idle devices; 0 disables them, the first one of a new device, and "
                       f"those after faults (default {HealthPolicy.interval_s:g} s)")  # fmt: skip
    serve.add_argument("--health", type=Path, metavar="FILE",
                       help="TOML of when a device is suspect or quarantined, as quarantine_at = 4.0, and of commands that "
                       "power-cycle hung devices, [[power]] (default: built in)")  # fmt: skip
    serve.add_argument("--agent-wheel", type=Path, metavar="FILE",
                       help="wheel of etfarm to which `etfarm agents upgrade` without --wheel upgrades agents (default: "
                       "none)")  # fmt: skip
    serve.add_argument("--quota", action="append", default=[], metavar="NAME=N",
                       help="limit on the live work of one user or project; repeatable. Names and defaults: "
                       f"{_quotas()}")  # fmt: skip
    serve.add_argument("--keep", action="append", default=[], metavar="NAME=LIMIT",
                       help="how long, or up to which size, something is kept: LIMIT is an age (90d), a size (200GiB), both "
                       f"(90d,200GiB) or forever; repeatable. Names and defaults: {_kept()}")  # fmt: skip
    _add_notices(serve)
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
                       help="print the configuration with its sources, the measures of the jail and every problem, and exit: "
                       "with 1 if the server would not start")  # fmt: skip
    serve.add_argument("--json", action="store_true", help="with --check: as JSON, etfarm.serve_check/1")
    serve.add_argument("--print-unit", action="store_true", help="print a systemd unit that runs this command from the machine's "
                       "start on, and end; its first lines say how to install it")  # fmt: skip
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


def _add_notices(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument_group(
        "notices", "POSTs of JSON when jobs end, gates fail, or devices are quarantined or offline for long."
    ).add_argument  # fmt: skip
    add("--webhook", action="append", default=[], metavar="URL",
        help="send every notice there; repeatable. `etfarm webhooks add` does the same while the server runs")  # fmt: skip
    add("--webhook-secret", type=Path, action="append", default=[], metavar="FILE",
        help="file whose first line signs the notices of --webhook; once, or once for each")  # fmt: skip
    add("--webhook-allow", action="append", default=[], metavar="HOST",
        help="host that notices may go to though its address is not public: a name, *.NAME, an address, or a network as "
        "10.0.0.0/8; repeatable")  # fmt: skip
    add("--webhook-only-allowed", action="store_true", help="send notices to hosts of --webhook-allow only")
    add("--webhook-ca", type=Path, metavar="FILE",
        help="PEM certificates that receivers' may be signed by, besides the system's")  # fmt: skip
    add("--offline-after", type=_seconds, default=900.0, metavar="S",
        help="how long a device must be offline before that is reported (default %(default)g s)")  # fmt: skip


def _quotas() -> str:
    return ", ".join(f"{field.name} ({field.default:,})" for field in fields(Quotas))


def _kept() -> str:
    return ", ".join(f"{field.name}={field.default}" for field in fields(Limits))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _storage(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _pool(text: str) -> str:
    host, _, port = text.removeprefix(PREFIX).rpartition(":")
    if text != LOCAL and not (text.startswith(PREFIX) and host and port.isdigit() and 0 < int(port) < 65536):
        raise argparse.ArgumentTypeError(f"must be {LOCAL} or {PREFIX}HOST:PORT")
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError("must be an absolute path")
    return text


def _pause(text: str) -> float:
    return 0.0 if float(text) == 0 else _seconds(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 604_800:
        raise argparse.ArgumentTypeError("must be above 0 s and at most a week")
    return value


def _drain_seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError("must be 0 s to a day")
    return value


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError("must begin with http:// or https://")
    return text


def config_of(arguments: argparse.Namespace) -> Config:
    """Return the configuration that the command line specifies, not yet checked."""
    # Absolute, since child processes have other working folders.
    folder = (arguments.data or default_folder()).absolute()
    health = read_settings(arguments.health, arguments.health_interval)
    return Config(
        listen=parse_address(arguments.listen), data=folder, database=arguments.database,
        database_wait_s=arguments.database_wait, blobs=location_of(arguments),
        blobs_cache_bytes=arguments.blobs_cache_gib << 30, blobs_wait_s=arguments.blobs_wait,
        blobs_presign=read_endpoint(arguments.blobs_presign or "", "--blobs-presign"), tokens=arguments.tokens,
        tls_cert=arguments.tls_cert, tls_key=arguments.tls_key, tls_client_ca=arguments.tls_client_ca,
        insecure=arguments.insecure, workers=arguments.workers, compile_pool=arguments.compile_pool,
        compile_python=arguments.compile_python, threads=arguments.threads,
        memory_bytes=arguments.memory_gib << 30, cpu_s=arguments.cpu_limit, compile_deadline_s=arguments.compile_timeout,
        stage_deadline_s=arguments.stage_timeout, analysis_deadline_s=arguments.analysis_timeout,
        patience_s=arguments.patience, address_file=arguments.address_file, advertise=arguments.advertise,
        exit_with_stdin=arguments.exit_with_stdin, build_bundle=not arguments.no_bundle, prewarm=not arguments.no_prewarm,
        project_storage_bytes=None if arguments.project_storage_gib is None else arguments.project_storage_gib << 30,
        max_artifact_bytes=arguments.max_artifact_gib << 30,
        quotas=Quotas.of(arguments.quota), max_reservation_s=arguments.max_reservation, retention=Limits.of(arguments.keep),
        notices=NoticeSettings.of(
            arguments.webhook, arguments.webhook_secret, arguments.webhook_allow, only_listed=arguments.webhook_only_allowed,
            authorities=arguments.webhook_ca, offline_after_s=arguments.offline_after,
        ),
        require_jail=arguments.require_jail, jail_readable=tuple(arguments.jail_readable), jail_user=arguments.jail_user,
        operators=operators.read(arguments.allow_operators),
        keep_free_bytes=arguments.keep_free_mib << 20,
        work_free_bytes=None if arguments.work_free_mib is None else arguments.work_free_mib << 20,
        begin_empty=arguments.begin_empty,
        drain_timeout_s=arguments.drain_timeout, metrics=arguments.metrics, otlp=arguments.otlp, log_format=arguments.log_format,
        metrics_hosts=tuple(arguments.metrics_host), web=arguments.web, web_public_url=arguments.web_public_url,
        web_trusted_proxies=tuple(arguments.web_trusted_proxy), web_server=arguments.web_server,
        health=health.policy, power=health.power, agent_wheel=arguments.agent_wheel,
        thresholds=thresholds.read(arguments.thresholds) if arguments.thresholds else Thresholds(),
    )  # fmt: skip


def read_configuration(path: Path) -> argparse.Namespace:
    """Return the options of `etfarm serve` with a configuration file alone.

    Raises:
        BadSetting: the file is not valid.
    """
    return settings.parse(parser(), ["--config", str(path)], {})[0]


def parse_command(command: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[Setting]]:
    """Return the options of a command that has some of the server's, and each one's value with its source.

    Raises:
        BadSetting: the configuration file or a variable is not valid for `etfarm serve`.
    """
    return settings.parse(command, argv, os.environ, parser())
