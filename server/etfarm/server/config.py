"""Configuration of a server."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Final

from sqlalchemy import select

from etfarm.server.artifacts.left_behind import require_known
from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.s3.bucket import PATIENCE_S
from etfarm.server.artifacts.s3.location import BucketLocation, read_endpoint
from etfarm.server.artifacts.s3.options import BLOBS, blob_options, bucket_of
from etfarm.server.compile.screening.operators import PLUGINS, Operators
from etfarm.server.compile.screening.operators import read as read_operators
from etfarm.server.devices.health.file import HealthSettings, read_settings
from etfarm.server.devices.health.power import PowerRule
from etfarm.server.devices.health.standing import HealthPolicy
from etfarm.server.devices.reservations import MAX_DURATION_S
from etfarm.server.devices.wheels import AgentWheel
from etfarm.server.jobs.records.quotas import Quotas
from etfarm.server.notices.settings import NoticeSettings
from etfarm.server.options import (
    absolute,
    gib,
    mib,
    not_negative,
    positive,
    seconds,
    seconds_of_a_day,
    seconds_or_none,
    web_address,
)
from etfarm.server.reports.latency.thresholds import Thresholds
from etfarm.server.reports.latency.thresholds import read as read_thresholds
from etfarm.server.retention.limits import Limits
from etfarm.server.state import schema
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import WAIT_S, first_of
from etfarm.server.workers.cluster.pool import PREFIX, require_ray
from etfarm.wire.channel import Address, parse_address
from etfarm.wire.errors import UserError, error_for
from etfarm.wire.names import SETTING_PREFIX, data_folder
from etfarm.wire.options import Option, option, options
from etfarm.wire.tls import read_certificates, read_identity

LOCAL = "local"
"""The pool of children of the server's own machine."""

DATABASE = "farm.sqlite"
"""File name of the database within the data folder."""


_NOTICES: Final = ("notices", "POSTs of JSON when jobs end, gates fail, or devices are quarantined or offline for long.")


def default_folder() -> Path:
    """Return the default data folder."""
    return data_folder() / "server"


def _pool(text: str) -> str:
    host, _, port = text.removeprefix(PREFIX).rpartition(":")
    if text != LOCAL and not (text.startswith(PREFIX) and host and port.isdigit() and 0 < int(port) < 65536):
        raise ArgumentTypeError(f"must be {LOCAL} or {PREFIX}HOST:PORT")
    return text


def _defaults(kind: type, form: str) -> str:
    return ", ".join(form.format(name=each.name, default=each.default) for each in fields(kind))


@dataclass(frozen=True)
class Config:
    """The configuration of one server. Its attributes are the options of `etfarm serve`, whose help describes them."""

    # fmt: off
    listen: Address = option(
        "--listen", "HOST:PORT, [IPV6]:PORT or unix:PATH; port 0: the system chooses (default %(default)s)",
        default="127.0.0.1:7433", metavar="ADDRESS", build=parse_address)
    # Absolute, since child processes have other working folders. Only one server at a time uses it.
    data: Path = option(
        "--data", lambda: f"its files (default: {default_folder()})".replace("%", "%%"),
        metavar="DIR", read=Path, build=Path.absolute, absent=lambda: default_folder().absolute())
    database: DatabaseUrl | None = option(
        "--database", "PostgreSQL database for jobs and devices, as postgresql://etfarm@host/etfarm; needs etfarm[scale]. "
        f"Keep a password out of the arguments: use --config, {SETTING_PREFIX}DATABASE, or passfile=FILE in the "
        "URL (default: a SQLite file in --data)",
        metavar="URL", read=DatabaseUrl.parse, is_secret=True)
    database_wait_s: float = option(
        "--database-wait", "how long work waits while the PostgreSQL server is unavailable (default %(default)g s)",
        default=WAIT_S, metavar="S", read=seconds)
    blobs: BucketLocation | None = options(*blob_options(), build=bucket_of, default=None)
    blobs_cache_bytes: int = option(
        "--blobs-cache-gib", "size up to which copies are kept in --data; those in use stay (default %(default)s)",
        default=50, metavar="N", read=positive, build=gib, group=BLOBS)
    blobs_presign: str = option(
        "--blobs-presign", "let agents read artifacts from the S3 server, which they reach at this URL, by links that are "
        "valid for 5 minutes; what they cannot read there comes through this server (default: everything does)",
        metavar="URL", build=partial(read_endpoint, option="--blobs-presign"), absent=str, group=BLOBS)
    blobs_wait_s: float = option(
        "--blobs-wait", "how long a request is repeated while the S3 server fails (default %(default)g s)",
        default=PATIENCE_S, metavar="S", read=seconds, group=BLOBS)
    tokens: Path | None = option(
        "--tokens", "lines of NAME ROLE TOKEN; ROLE is admin, user, agent or viewer",
        metavar="FILE", read=Path, is_reread=True)
    tls_cert: Path | None = option("--tls-cert", "PEM certificate chain", metavar="FILE", read=Path, is_reread=True)
    tls_key: Path | None = option("--tls-key", "PEM key of the certificate", metavar="FILE", read=Path, is_reread=True)
    tls_client_ca: Path | None = option(
        "--tls-client-ca", "PEM certificates that clients' must be signed by", metavar="FILE", read=Path)
    advertise: Address | None = option(
        "--advertise", "with --database: address at which the farm's other servers reach this one (default: --listen)",
        metavar="HOST:PORT", read=parse_address)
    insecure: bool = option("--insecure", "listen for other machines without TLS and tokens", default=False)
    workers: int = option("--workers", "compilations at a time (default %(default)s)", default=1, metavar="N", read=positive)
    compile_pool: str = option(
        "--compile-pool", "where compilations and analyses run: local, or ray://HOST:PORT of a Ray cluster's client server, "
        "whose nodes run as many at a time as they have cpus. Needs etfarm[scale] here, and "
        "etfarm[server,scale] in the same versions on each node (default %(default)s)",
        default=LOCAL, metavar="POOL", read=_pool)
    compile_python: str | None = option(
        "--compile-python", "Python of the virtual environment that compiles on each node of the Ray cluster, such as "
        "/opt/etfarm/bin/python (default: the Python that started Ray there)",
        metavar="PATH", read=absolute)
    threads: int = option(
        "--threads", "threads of a compilation (default: cpus)", default=os.cpu_count() or 1, metavar="N", read=positive)
    memory_bytes: int = option(
        "--memory-gib", "memory of a compilation (default %(default)s)", default=8, metavar="N", read=positive, build=gib)
    cpu_s: int = option(
        "--cpu-limit", "CPU time of a compilation's process over all threads (default %(default)s s)",
        default=3600, metavar="S", read=positive)
    compile_deadline_s: float = option(
        "--compile-timeout", "how long quantizing may take, and lowering (default %(default)g s)",
        default=1800.0, metavar="S", read=seconds)
    stage_deadline_s: float = option(
        "--stage-timeout", "how long one stage of a compilation may take (default %(default)g s)",
        default=900.0, metavar="S", read=seconds)
    analysis_deadline_s: float = option(
        "--analysis-timeout", "how long the analysis of a run may take (default %(default)g s)",
        default=600.0, metavar="S", read=seconds)
    patience_s: float = option(
        "--patience", "how long a run waits for its agent (default %(default)g s)", default=60.0, metavar="S", read=float)
    max_reservation_s: float = option(
        "--max-reservation", "maximum time of a reservation until it must be renewed (default %(default)g s)",
        default=MAX_DURATION_S, metavar="S", read=seconds)
    project_storage_bytes: int | None = option(
        "--project-storage-gib",
        "storage limit of a project that has none of its own; 0: unlimited (default: 20 on a server with tokens, else unlimited)",
        metavar="N", read=not_negative, build=gib)
    max_artifact_bytes: int = option(
        "--max-artifact-gib", "largest artifact that can be uploaded (default %(default)s)",
        default=16, metavar="N", read=positive, build=gib)
    keep_free_bytes: int = option(
        "--keep-free-mib", "disk space that uploads leave free (default %(default)s)",
        default=256, metavar="N", read=positive, build=mib)
    work_free_bytes: int | None = option(
        "--work-free-mib",
        "free disk space below which new jobs are refused and compilations wait (default: one and a half times --keep-free-mib)",
        metavar="N", read=positive, build=mib)
    begin_empty: bool = option(
        "--begin-empty", "begin with an empty database although there are artifacts of a farm, whose database is lost: they "
        "stay, and nothing refers to them",
        default=False, only_on_line=True, in_unit=False)
    drain_timeout_s: float = option(
        "--drain-timeout", "how long running attempts and compilations may go on when the server is stopped; a second signal "
        "stops at once (default %(default)g s)",
        default=30.0, metavar="S", read=seconds_of_a_day)
    metrics: Address | None = option(
        "--metrics", "serve Prometheus metrics, /healthz and /readyz there, as 127.0.0.1:9464 (default: off)",
        metavar="HOST:PORT", read=parse_address)
    metrics_hosts: tuple[str, ...] = option(
        "--metrics-host", "a further host name by which the metrics may be requested: browsers are led to them by names, so "
        "only IP addresses, localhost, and this machine's own name are taken otherwise; repeatable",
        default=[], metavar="NAME")
    web: Address | None = option(
        "--web", "serve the farm's web page there, as 127.0.0.1:8080; needs etfarm[web]; other machines "
        "reach it by https with --tls-cert (default: off)",
        metavar="HOST:PORT", read=parse_address)
    web_public_url: str = option(
        "--web-public-url", "the page's address behind a reverse proxy, as https://farm.example/etfarm",
        default="", metavar="URL")
    web_trusted_proxies: tuple[str, ...] = option(
        "--web-trusted-proxy",
        "address or network of a reverse proxy of the page whose X-Forwarded-For names each visitor's address; repeatable",
        default=[], metavar="ADDRESS")
    web_server: str = option(
        "--web-server", "this server's address for the page, if its certificate has another host than --listen",
        default="", metavar="ADDRESS")
    otlp: str | None = option(
        "--otlp", "send the traces of jobs to this OpenTelemetry collector, as http://127.0.0.1:4318/v1/traces (default: off)",
        metavar="URL", read=web_address)
    log_format: str = option("--log-format", "of stderr (default %(default)s)", default="text", choices=("text", "json"))
    thresholds: Thresholds = option(
        "--thresholds", "TOML of what makes a measurement INVALID, as max_drift = 0.2 (default: built in)",
        metavar="FILE", read=Path, build=read_thresholds, absent=Thresholds)
    reliability: HealthSettings = options(
        Option(
            flag="--health", metavar="FILE", read=Path,
            help="TOML of when a device is suspect or quarantined, as quarantine_at = 4.0, and of commands that "
            "power-cycle hung devices, [[power]] (default: built in)"),
        Option(
            flag="--health-interval", metavar="S", read=seconds_or_none,
            help="interval of the health runs of idle devices; 0 disables them, the first one of a new device, and "
            f"those after faults (default {HealthPolicy.interval_s:g} s)"),
        build=read_settings, default_factory=HealthSettings,
    )
    agent_wheel: Path | None = option(
        "--agent-wheel", "wheel of etfarm to which `etfarm agents upgrade` without --wheel upgrades agents (default: none)",
        metavar="FILE", read=Path)
    quotas: Quotas = option(
        "--quota", "limit on the live work of one user or project; repeatable. Names and defaults: "
        f"{_defaults(Quotas, '{name} ({default:,})')}",
        default=[], metavar="NAME=N", build=Quotas.of)
    retention: Limits = option(
        "--keep", "how long, or up to which size, something is kept: LIMIT is an age (90d), a size (200GiB), both "
        f"(90d,200GiB) or forever; repeatable. Names and defaults: {_defaults(Limits, '{name}={default}')}",
        default=[], metavar="NAME=LIMIT", build=Limits.of)
    notices: NoticeSettings = options(
        Option(
            flag="--webhook", default=[], metavar="URL", group=_NOTICES, is_secret=True,
            help="send every notice there; repeatable. `etfarm webhooks add` does the same while the server runs"),
        Option(
            flag="--webhook-secret", default=[], metavar="FILE", read=Path, group=_NOTICES,
            help="file whose first line signs the notices of --webhook; once, or once for each"),
        Option(
            flag="--webhook-allow", default=[], metavar="HOST", group=_NOTICES,
            help="host that notices may go to though its address is not public: a name, *.NAME, an address, or a network as "
            "10.0.0.0/8; repeatable"),
        Option(
            flag="--webhook-only-allowed", default=False, group=_NOTICES, help="send notices to hosts of --webhook-allow only"),
        Option(
            flag="--webhook-ca", metavar="FILE", read=Path, group=_NOTICES,
            help="PEM certificates that receivers' may be signed by, besides the system's"),
        Option(
            flag="--offline-after", default=900.0, metavar="S", read=seconds, group=_NOTICES,
            help="how long a device must be offline before that is reported (default %(default)g s)"),
        build=NoticeSettings.of, default_factory=NoticeSettings,
    )
    require_jail: bool | None = option(
        "--require-jail", "do not start unless the host allows every measure of the compile processes' jail (default: required "
        "where other machines reach the address)",
        has_twin=True)
    jail_readable: tuple[Path, ...] = option(
        "--jail-readable",
        "file or folder that compile processes may read besides the system and the installed code; repeatable",
        default=[], metavar="PATH", read=Path)
    jail_user: int | None = option(
        "--jail-user", "first of the user ids that compile processes run as, one for each worker and one more, where the "
        "server is root (default: chosen, from 1900000000 on)",
        metavar="UID", read=positive)
    operators: Operators = option(
        "--allow-operators", "file of operators that uploaded models may use besides the built-in list: one "
        "NAMESPACE.NAME.OVERLOAD a line, # starts a comment; repeatable. A plug-in allows its own with an entry "
        f"point in the group {PLUGINS}, whose name is the operator and whose value is the module that registers it",
        default=[], metavar="FILE", read=Path, build=read_operators, absent=Operators)
    prewarm: bool = option(
        "--no-prewarm", "load the toolchain with the first compilation of a model, which then takes several seconds longer; "
        "until then the server needs less memory (default: load it at the start)",
        default=False)
    build_bundle: bool = option("--no-bundle", "do not build the runner bundle for this machine", default=False)
    address_file: Path | None = option("--address-file", "write the address there once listening", metavar="FILE", read=Path)
    exit_with_stdin: bool = option("--exit-with-stdin", "end when stdin ends", default=False, only_on_line=True, in_unit=False)
    # fmt: on

    @property
    def health(self) -> HealthPolicy:
        """Rules by which devices become suspect or are quarantined, and how often their health is checked."""
        return self.reliability.policy

    @property
    def power(self) -> tuple[PowerRule, ...]:
        """Commands that switch hung devices off and on."""
        return self.reliability.power

    @property
    def asks_for_tokens(self) -> bool:
        """Whether callers need a token, because there is a token file or the database has tokens."""
        return self.tokens is not None or self.has_tokens

    @property
    def has_tokens(self) -> bool:
        """Whether the database, which need not be open, has tokens."""
        return (
            first_of(select(schema.tokens.c.id).limit(1), self.data / DATABASE, self.database, self.database_wait_s) is not None
        )

    def require_database(self) -> None:
        """Refuse an empty database beside the artifacts of a farm, and a bucket's folder that is another farm's.

        Raises:
            DATABASE_LOST: there are artifacts, which the database does not know.
            EtfarmError: the database or the bucket cannot be used.
        """
        path, wait_s = self.data / DATABASE, self.database_wait_s
        require_known(self.data, path, self.database, wait_s, self.blobs, begin_empty=self.begin_empty)

    @property
    def store_limits(self) -> StoreLimits:
        """The limits of the artifact store."""
        project_bytes = self.project_storage_bytes
        if project_bytes is None:
            project_bytes = 20 << 30 if self.asks_for_tokens else 0
        return StoreLimits(
            artifact_bytes=self.max_artifact_bytes,
            project_bytes=project_bytes or None,
            reserve_bytes=self.keep_free_bytes,
            cache_bytes=self.blobs_cache_bytes,
            work_bytes=self.keep_free_bytes * 3 // 2 if self.work_free_bytes is None else self.work_free_bytes,
        )

    def advertised_at(self, address: str) -> str:
        """Return the address at which the farm's other servers reach this one, which listens on `address`."""
        return address if self.advertise is None else self.advertise.text

    def check(self, *, has_tokens: bool | None = None) -> None:
        """Refuse a configuration that would expose the farm, or whose files cannot be used.

        Args:
            has_tokens: whether the database has tokens; None to look.

        Raises:
            NotAWheel: the agents' wheel is not a wheel of etfarm.
            ExtraMissing: the compile pool is a Ray cluster, and Ray is not installed.
            EXPOSED: others can reach the address, and TLS or tokens are missing.
            BadTlsFile: a TLS file cannot be read, or has other content.
            UserError: a certificate has no key, or a key no certificate.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("TLS needs a certificate and its key.", "Give both --tls-cert and --tls-key.")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise UserError("Client certificates require TLS.", "Give --tls-cert and --tls-key too.")
        if self.database is not None and self.advertise is None and self.listen.is_wildcard:
            raise UserError(
                f"The farm's other servers cannot reach {self.listen.text}.",
                "Give --advertise HOST:PORT, the address at which they reach this one.",
            )
        if self.database is None and self.advertise is not None:
            raise UserError("--advertise is for a farm of several servers.", "Give --database, or leave it out.")
        if self.blobs is None and self.blobs_presign:
            raise UserError("--blobs-presign is for artifacts in a bucket.", "Give --blobs, or leave it out.")
        if self.tls_client_ca is not None and self.web is not None:
            raise UserError("--web has no client certificate for --tls-client-ca.", "Leave one of them out.")
        if self.compile_pool != LOCAL:
            require_ray()
        elif self.compile_python is not None:
            raise UserError("--compile-python is for a Ray cluster.", "Give --compile-pool ray://HOST:PORT, or leave it out.")
        self.identity(), self.client_ca()
        if self.agent_wheel is not None:
            AgentWheel.read(self.agent_wheel)
        if self.listen.is_local or self.insecure:
            return
        missing = [
            flag
            for flag, value in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key), ("--tokens", self.tokens))
            if value is None and not (flag == "--tokens" and (self.has_tokens if has_tokens is None else has_tokens))
        ]
        if missing:
            create = " (tokens in the database will do: `etfarm tokens init`)" if "--tokens" in missing else ""
            raise error_for(
                "EXPOSED",
                f"Other machines can reach {self.listen.text}, and it has no {', no '.join(missing)}.",
                f"Give them{create}, listen on 127.0.0.1, or pass --insecure if you trust everybody who can reach it.",
                address=self.listen.text,
            )  # fmt: skip

    @property
    def is_jail_required(self) -> bool:
        """Whether a missing measure of the child processes' jail is fatal."""
        return not self.listen.is_local if self.require_jail is None else self.require_jail

    def identity(self) -> tuple[bytes, bytes] | None:
        """Return the certificate chain and its key; None without TLS.

        Raises:
            BadTlsFile: a file cannot be read, or has other content.
        """
        return read_identity(self.tls_cert, self.tls_key) if self.tls_cert and self.tls_key else None

    def client_ca(self) -> bytes | None:
        """Return the certificates that must have signed client certificates; None if clients need none.

        Raises:
            BadTlsFile: the file cannot be read, or has other content.
        """
        return read_certificates(self.tls_client_ca, "--tls-client-ca") if self.tls_client_ca else None
