"""Configuration of a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import select

from etfarm.server.artifacts.left_behind import require_known
from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.artifacts.s3.bucket import PATIENCE_S
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.compile.screening.operators import Operators
from etfarm.server.devices.health.power import PowerRule
from etfarm.server.devices.health.standing import HealthPolicy
from etfarm.server.devices.reservations import MAX_DURATION_S
from etfarm.server.devices.wheels import AgentWheel
from etfarm.server.jobs.records.quotas import Quotas
from etfarm.server.notices.settings import NoticeSettings
from etfarm.server.reports.verdict import Thresholds
from etfarm.server.retention.limits import Limits
from etfarm.server.state import schema
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.databases import WAIT_S, first_of
from etfarm.server.workers.cluster.pool import require_ray
from etfarm.wire.channel import Address
from etfarm.wire.errors import UserError, error_for
from etfarm.wire.tls import read_certificates, read_identity

LOCAL = "local"
"""The pool of children of the server's own machine."""

DATABASE = "farm.sqlite"
"""File name of the database within the data folder."""


@dataclass(frozen=True)
class Config:
    """The configuration of one server."""

    listen: Address
    """Address to listen on; port 0 lets the system choose."""
    data: Path
    """Data folder: database, artifacts, and the child processes' folders. Only one server at a time uses it."""
    database: DatabaseUrl | None = None
    """The PostgreSQL database that is used instead of the SQLite file in the data folder; None for that."""
    database_wait_s: float = WAIT_S
    """Time for which work waits for the PostgreSQL server if that is unavailable."""
    blobs: BucketLocation | None = None
    """Bucket of the artifacts; None to keep them as files in the data folder."""
    blobs_cache_bytes: int = 50 << 30
    """Size up to which copies of the bucket's artifacts are kept in the data folder."""
    blobs_presign: str = ""
    """URL at which agents reach the bucket's server, to read artifacts from there; empty to read them through this server."""
    blobs_wait_s: float = PATIENCE_S
    """Time for which a request is repeated while the bucket's server fails."""
    tokens: Path | None = None
    """Token file. Without tokens, everyone who reaches the server is an admin."""
    tls_cert: Path | None = None
    """PEM certificate chain; None disables TLS."""
    tls_key: Path | None = None
    """PEM key of the certificate."""
    tls_client_ca: Path | None = None
    """PEM certificates of the CAs that must have signed client certificates; None to require no client certificate."""
    insecure: bool = False
    """Allow an address that others can reach without TLS and tokens."""
    advertise: Address | None = None
    """Address at which the farm's other servers reach this one; None for `listen`."""
    workers: int = 1
    """Maximum number of concurrent compilations and analyses."""
    compile_pool: str = LOCAL
    """Where compilations and analyses run: `local`, or `ray://HOST:PORT` of a Ray cluster's client server."""
    compile_python: str | None = None
    """Path of the Python that compiles on each node of the cluster; None for the one that started Ray there."""
    threads: int = 2
    """Number of threads of each compilation."""
    memory_bytes: int = 8 << 30
    """Memory that one compilation may allocate in addition to the prewarmed worker."""
    cpu_s: int = 3600
    """CPU time, over all threads, of one process of a compilation; ends processes that spin."""
    compile_deadline_s: float = 1800.0
    """Time limit of one process of a compilation: quantization is one, lowering another. The largest measured take minutes."""
    stage_deadline_s: float = 900.0
    """Time limit of one stage of a compilation, so that a stage that hangs ends before the compilation's time limit."""
    analysis_deadline_s: float = 600.0
    """Time limit of one analysis."""
    patience_s: float = 60.0
    """Time for which a run waits for its agent to reconnect before the cell is placed again."""
    address_file: Path | None = None
    """File to write the address to once the server listens, mode 0600."""
    exit_with_stdin: bool = False
    """End when stdin closes: the process that started the server holds the other end."""
    prewarm: bool = True
    """Load the toolchain into the compile workers at the start, not with the first task that needs it."""
    build_bundle: bool = True
    """Build the runner bundle for this machine's architecture if it is missing."""
    project_storage_bytes: int | None = None
    """Storage limit of a project without a limit of its own; 0 for no limit. None selects 20 GiB on a server that requires
    tokens, else no limit."""
    max_artifact_bytes: int = 16 << 30
    """Maximum size of one artifact."""
    require_jail: bool | None = None
    """Whether a missing jail measure prevents the start; None requires the jail only if other machines can reach the server."""
    jail_readable: tuple[Path, ...] = ()
    """Files and folders that child processes may read, in addition to the system and the installed code."""
    jail_user: int | None = None
    """First of the user ids that child processes run as, one for each concurrent process, if the server is root; None to choose
    one."""
    operators: Operators = field(default_factory=Operators)
    """Operators that uploaded programs may use."""
    keep_free_bytes: int = 256 << 20
    """Disk space that uploads leave free, so that the journal can always be written."""
    work_free_bytes: int | None = None
    """Free disk space below which new jobs, users' uploads and compilations are refused, so that the results of running work
    still fit; None for one and a half times `keep_free_bytes`."""
    begin_empty: bool = False
    """Begin with an empty database, even if there are artifacts of a farm."""
    drain_timeout_s: float = 30.0
    """Time for which a server that stops lets running attempts and compilations go on; 0 stops at once."""
    metrics: Address | None = None
    """Address of the metrics and of the probes; None for none."""
    metrics_hosts: tuple[str, ...] = ()
    """Host names by which they may be requested, beside addresses and the names of this machine."""
    web: Address | None = None
    """Address of the farm's web page, a child process; None for none."""
    web_public_url: str = ""
    """The page's address behind a reverse proxy; empty without one."""
    web_trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of the page's reverse proxies that name their visitors' addresses."""
    web_server: str = ""
    """The server's address for the page, if its certificate names another host; `listen` if empty."""
    log_format: str = "text"
    """Format of the log: `text` or `json`."""
    otlp: str | None = None
    """URL of the OpenTelemetry collector that receives the traces of jobs; None for no traces."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    """Thresholds beyond which a measurement is invalid."""

    max_reservation_s: float = MAX_DURATION_S
    """Maximum time until a reservation of devices ends without a renewal."""

    health: HealthPolicy = field(default_factory=HealthPolicy)
    """Rules by which devices become suspect or are quarantined, and how often their health is checked."""
    power: tuple[PowerRule, ...] = ()
    """Commands that switch hung devices off and on."""
    agent_wheel: Path | None = None
    """The wheel of etfarm to which agents are upgraded by default; None for none."""
    quotas: Quotas = field(default_factory=Quotas)
    """Limits on the live work of one user or project."""
    retention: Limits = field(default_factory=Limits)
    """What the server keeps."""
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    """Webhooks of the options, and where notices may go."""

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
