"""What a server is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from etfarm.server.access.tokens import has_tokens
from etfarm.server.artifacts.limits import StoreLimits
from etfarm.server.compile.screening.operators import Operators
from etfarm.server.jobs.records.quotas import Quotas
from etfarm.server.reports.verdict import Thresholds
from etfarm.wire.channel import Address
from etfarm.wire.errors import UserError
from etfarm.wire.tls import read_certificates, read_identity

DATABASE = "farm.sqlite"
"""The database's file within the data folder."""


class Exposed(UserError):
    """Others could reach the server without TLS and a token."""

    reason = "EXPOSED"


@dataclass(frozen=True)
class Config:
    """One server's configuration."""

    listen: Address
    """Where it listens; port 0 lets the system choose."""
    data: Path
    """Its folder: database, artifacts, children's folders. One server at a time uses it."""
    tokens: Path | None = None
    """Token file; without one everybody who reaches the server is an admin."""
    tls_cert: Path | None = None
    """PEM certificate chain; no TLS when None."""
    tls_key: Path | None = None
    """The certificate's PEM key."""
    tls_client_ca: Path | None = None
    """PEM certificates that clients' must be signed by; clients need none when None."""
    insecure: bool = False
    """Allow an address that others reach without TLS and tokens."""
    workers: int = 1
    """Compilations and analyses at a time."""
    threads: int = 2
    """Threads of each compilation."""
    memory_bytes: int = 8 << 30
    """What one compilation may allocate on top of the prewarmed worker."""
    cpu_s: int = 3600
    """CPU time over all threads that one process of a compilation may use; one that spins ends by it."""
    compile_deadline_s: float = 1800.0
    """How long one process of a compilation may take: quantizing is one, lowering another. The largest that were measured
    take minutes."""
    stage_deadline_s: float = 900.0
    """How long one stage of a compilation may take, so that one that hangs ends before all of the time is gone."""
    analysis_deadline_s: float = 600.0
    """How long one analysis may take."""
    patience_s: float = 60.0
    """How long a run waits for its agent to come back before the cell is placed again."""
    address_file: Path | None = None
    """Where to write the address once the server listens, mode 0600."""
    exit_with_stdin: bool = False
    """End when stdin does: whoever started the server holds the other end."""
    build_bundle: bool = True
    """Build the runner bundle for this machine's architecture where it is missing."""
    project_storage_bytes: int | None = None
    """What the artifacts of a project may take, where it has no limit of its own; 0 for no bound. Where None, 20 GiB on a server
    that asks for tokens, else no bound."""
    max_artifact_bytes: int = 16 << 30
    """Size of one artifact."""
    require_jail: bool | None = None
    """Whether to refuse to start where a measure of the children's jail is missing; None: where other machines reach it."""
    jail_readable: tuple[Path, ...] = ()
    """Files and folders besides the system and the installed code that the children may read."""
    jail_user: int | None = None
    """First of the users that children run as, one for each at a time, where the server is root; None to choose."""
    operators: Operators = field(default_factory=Operators)
    """That uploaded programs may use."""
    keep_free_bytes: int = 256 << 20
    """Disk that uploads leave free, so that the journal can always write."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    """When a measurement is called invalid."""

    quotas: Quotas = field(default_factory=Quotas)
    """How much work one user or project may have under way."""

    @property
    def asks_for_tokens(self) -> bool:
        """Whether callers need a token: there is a token file, or the database has tokens."""
        return self.tokens is not None or has_tokens(self.data / DATABASE)

    @property
    def store_limits(self) -> StoreLimits:
        """The bounds of the artifact store."""
        project_bytes = self.project_storage_bytes
        if project_bytes is None:
            project_bytes = 20 << 30 if self.asks_for_tokens else 0
        return StoreLimits(
            artifact_bytes=self.max_artifact_bytes, project_bytes=project_bytes or None, reserve_bytes=self.keep_free_bytes
        )

    def check(self) -> None:
        """Refuses what would expose the farm.

        Raises:
            Exposed: others reach the address, and TLS or tokens are missing.
            BadTlsFile: a TLS file cannot be read, or holds something else.
            UserError: a certificate without its key, or the other way round.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("TLS needs a certificate and its key.", "Give both --tls-cert and --tls-key.")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise UserError("Client certificates are asked for over TLS only.", "Give --tls-cert and --tls-key too.")
        self.identity(), self.client_ca()
        if self.listen.is_local or self.insecure:
            return
        missing = [
            flag
            for flag, value in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key), ("--tokens", self.tokens))
            if value is None and not (flag == "--tokens" and has_tokens(self.data / DATABASE))
        ]
        if missing:
            raise Exposed(
                f"Other machines can reach {self.listen.text}, and it has no {', no '.join(missing)}.",
                "Give them, listen on 127.0.0.1, or say --insecure if you trust everybody who can reach it.",
                address=self.listen.text,
            )  # fmt: skip

    @property
    def is_jail_required(self) -> bool:
        """Whether a missing measure of the children's jail is fatal."""
        return not self.listen.is_local if self.require_jail is None else self.require_jail

    def identity(self) -> tuple[bytes, bytes] | None:
        """The certificate chain and its key; None without TLS.

        Raises:
            BadTlsFile: they cannot be read, or are something else.
        """
        return read_identity(self.tls_cert, self.tls_key) if self.tls_cert and self.tls_key else None

    def client_ca(self) -> bytes | None:
        """What clients' certificates must be signed by; None where they need none.

        Raises:
            BadTlsFile: it cannot be read, or is something else.
        """
        return read_certificates(self.tls_client_ca, "--tls-client-ca") if self.tls_client_ca else None
