"""The tables. Columns hold values that are searched or compared; other data are serialized etfarm.v1 messages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    TypeDecorator,
    UniqueConstraint,
)  # fmt: skip
from sqlalchemy.types import TypeEngine

POSTGRESQL: Final = "postgresql"
"""The name of PostgreSQL's dialect."""
NUL_SYMBOL: Final = "\N{SYMBOL FOR NULL}"
"""What PostgreSQL stores for a NUL character."""


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, which is stored as a naive one in UTC."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class Text(TypeDecorator[str]):
    """A text, which is compared by code points.

    PostgreSQL refuses NUL characters, which only faulty programs print: it has their symbol instead.
    """

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[str]:
        return String(collation="C") if dialect.name == POSTGRESQL else self.impl_instance

    def bind_processor(self, dialect: Dialect) -> Any:
        return _without_nul if dialect.name == POSTGRESQL else self.impl_instance.bind_processor(dialect)


def _without_nul(value: str | None) -> str | None:
    return value if value is None or "\0" not in value else value.replace("\0", NUL_SYMBOL)


Whole = Integer().with_variant(BigInteger(), POSTGRESQL)
"""A whole number of 64 bits, which SQLite's integers always have."""

metadata = MetaData()

jobs = Table(
    "jobs", metadata,
    Column("id", Text, primary_key=True),
    Column("number", Whole, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("priority", Whole, nullable=False),
    Column("spec", LargeBinary, nullable=False),
    Column("submitted_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    Column("last_sequence", Whole, nullable=False),
    Column("project", Text, nullable=False, server_default="default"),
    # Number of servers that died of a fault of their own, or of a lack of memory, while they handled the live job.
    Column("takeups", Whole, nullable=False, server_default="0"),
    # A digest of what was sent with request_id; null for jobs of before 0.3.0.
    Column("request_digest", LargeBinary),
    UniqueConstraint("owner", "request_id"),
    Index("jobs_of_a_project", "project", "number"),
    Index("jobs_of_a_name", "name", "number"),
    Index("jobs_of_a_time", "submitted_at", "number"),
    # Live jobs are those whose finished_at is null.
    Index("jobs_finished_of_an_owner", "finished_at", "owner"),
    Index("jobs_finished_of_a_project", "finished_at", "project"),
)  # fmt: skip

# The names of a job's candidates, each once.
job_models = Table(
    "job_models", metadata,
    Column("job_id", Text, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("model", Text, primary_key=True),
)  # fmt: skip

cells = Table(
    "cells", metadata,
    Column("id", Text, primary_key=True),
    Column("job_id", Text, ForeignKey("jobs.id"), nullable=False, index=True),
    Column("index", Whole, nullable=False),
    Column("state", Text, nullable=False, index=True),
    Column("version", Whole, nullable=False),
    Column("body", LargeBinary, nullable=False),
)  # fmt: skip

attempts = Table(
    "attempts", metadata,
    # Interleaved cells share an attempt.
    Column("id", Text, primary_key=True),
    Column("cell_id", Text, ForeignKey("cells.id"), primary_key=True, index=True),
    Column("device_id", Text, nullable=False),
    Column("started_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
    Column("error", LargeBinary),
    Column("result", LargeBinary),
)  # fmt: skip

events = Table(
    "events", metadata,
    Column("job_id", Text, ForeignKey("jobs.id"), primary_key=True),
    Column("sequence", Whole, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)  # fmt: skip

log_lines = Table(
    "log_lines", metadata,
    Column("job_id", Text, ForeignKey("jobs.id"), primary_key=True),
    Column("number", Whole, primary_key=True),
    Column("at", UtcDateTime, nullable=False),
    Column("cell_id", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("text", Text, nullable=False),
)  # fmt: skip

artifacts = Table(
    "artifacts", metadata,
    Column("digest", Text, primary_key=True),
    Column("size_bytes", Whole, nullable=False),
    Column("owner", Text, nullable=False),
    Column("stored_at", UtcDateTime, nullable=False),
)  # fmt: skip

compilations = Table(
    "compilations", metadata,
    Column("key", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("compiled_at", UtcDateTime, nullable=False),
)  # fmt: skip

stage_results = Table(
    "stage_results", metadata,
    Column("key", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("made_at", UtcDateTime, nullable=False),
)  # fmt: skip

devices = Table(
    "devices", metadata,
    Column("id", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("last_seen_at", UtcDateTime, nullable=False),
)  # fmt: skip

# What admins have set; a device without such settings has no row.
device_settings = Table(
    "device_settings", metadata,
    Column("device_id", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)  # fmt: skip

reservations = Table(
    "reservations", metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("request_id", Text),
    Column("body", LargeBinary, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    # Null while the reservation is current.
    Column("ended_at", UtcDateTime, index=True),
    # A phrase such as "was released by ann".
    Column("how", Text),
    UniqueConstraint("owner", "request_id"),
)  # fmt: skip

# The last reading of each minute, by the number of minutes since 1970.
device_telemetry = Table(
    "device_telemetry", metadata,
    Column("device_id", Text, primary_key=True),
    Column("minute", Whole, primary_key=True, index=True),
    Column("body", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)  # fmt: skip

device_health = Table(
    "device_health", metadata,
    Column("device_id", Text, primary_key=True),
    # The fields of etfarm.server.devices.health.standing.Standing; `state` is a HealthState.
    Column("state", Whole, nullable=False),
    Column("reason", Text, nullable=False),
    Column("since", UtcDateTime, nullable=False),
    Column("score", Float, nullable=False),
    Column("scored_at", UtcDateTime),
    Column("faults", Whole, nullable=False),
    Column("fault", Text, nullable=False),
    Column("slower", Text, nullable=False),
    Column("good_runs", Whole, nullable=False),
    Column("failed_runs", Whole, nullable=False),
    Column("last_run_at", UtcDateTime),
    Column("probe_at", UtcDateTime),
    Column("cleared_at", UtcDateTime),
    Column("scheduled_at", UtcDateTime),
)  # fmt: skip

health_events = Table(
    "health_events", metadata,
    Column("number", Whole, primary_key=True),
    Column("device_id", Text, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("kind", Whole, nullable=False),
    # The project of the attempt; empty for the farm's own.
    Column("project", Text, nullable=False),
    # A digest of what a health run's median depends on, and the median if it is VALID.
    Column("series", Text, nullable=False),
    Column("p50_ns", Float),
    Column("body", LargeBinary, nullable=False),
    Index("health_events_of_a_device", "device_id", "number"),
    Index("health_runs_of_a_series", "device_id", "series", "number"),
)  # fmt: skip

bundles = Table(
    "bundles", metadata,
    Column("digest", Text, primary_key=True),
    Column("arch", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("added_at", UtcDateTime, nullable=False),
)  # fmt: skip

reports = Table(
    "reports", metadata,
    Column("id", Text, primary_key=True),
    Column("job_id", Text, ForeignKey("jobs.id"), nullable=False),
    Column("cell_id", Text, ForeignKey("cells.id"), nullable=False, unique=True),
    Column("model_name", Text, nullable=False),
    Column("recipe_digest", Text, nullable=False),
    Column("device_id", Text, nullable=False),
    Column("p50_ns", Float),
    Column("created_at", UtcDateTime, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("model_digest", Text, nullable=False, server_default=""),
    # Copied from the report; null if the report has no value.
    Column("recipe", Text),
    Column("method", Text),
    Column("threads", Whole),
    # A digest of what determines the latency, and the device's kind; both empty if the report is no evidence for a latency.
    Column("execution", Text, nullable=False, server_default=""),
    Column("device_kind", Text, nullable=False, server_default=""),
    Index("reports_of_an_execution", "execution", "created_at"),
    Index("reports_of_a_device_kind", "device_kind", "created_at"),
    Index("reports_of_a_device", "device_id", "created_at"),
    Index("reports_of_a_job", "job_id"),
    Index("reports_of_a_model", "model_name", "created_at"),
    Index("reports_of_a_model_digest", "model_digest", "created_at"),
    Index("reports_of_a_model_on_a_device", "model_name", "device_id"),
)  # fmt: skip

tags = Table(
    "tags", metadata,
    Column("project", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("job_id", Text, ForeignKey("jobs.id"), nullable=False, index=True),
    Column("tagged_at", UtcDateTime, nullable=False),
)  # fmt: skip

analyses = Table(
    "analyses", metadata,
    Column("key", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("made_at", UtcDateTime, nullable=False),
)  # fmt: skip

projects = Table(
    "projects", metadata,
    Column("name", Text, primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
    Column("created_by", Text, nullable=False),
    # Null selects the server's default.
    Column("storage_limit_bytes", Whole),
)  # fmt: skip

members = Table(
    "members", metadata,
    Column("project", Text, ForeignKey("projects.name"), primary_key=True),
    Column("principal", Text, primary_key=True, index=True),
    Column("added_at", UtcDateTime, nullable=False),
)  # fmt: skip

tokens = Table(
    "tokens", metadata,
    Column("id", Text, primary_key=True),
    Column("principal", Text, nullable=False, index=True),
    # One of "admin", "user", "agent" and "viewer".
    Column("role", Text, nullable=False),
    # The sha256 of a secret of 256 random bits, which needs no slow hash against guessing.
    Column("secret_hash", LargeBinary, nullable=False, unique=True),
    Column("enrolment", Boolean, nullable=False),
    # The only agent identity that the token may use.
    Column("agent_id", Text),
    Column("created_at", UtcDateTime, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("revoked_at", UtcDateTime),
    Column("last_used_at", UtcDateTime),
)  # fmt: skip

agents = Table(
    "agents", metadata,
    Column("id", Text, primary_key=True),
    # The principal whose tokens may use the identity.
    Column("principal", Text, nullable=False),
    Column("bound_at", UtcDateTime, nullable=False),
    Column("bound_by", Text, nullable=False),
    # When the last device of the agent was retired; the identity is refused since.
    Column("retired_at", UtcDateTime),
)  # fmt: skip

device_projects = Table(
    "device_projects", metadata,
    Column("device_id", Text, primary_key=True),
    Column("project", Text, ForeignKey("projects.name"), primary_key=True),
)  # fmt: skip

# Append-only: triggers refuse updates and deletions.
audit = Table(
    "audit", metadata,
    Column("number", Whole, primary_key=True),
    Column("at", UtcDateTime, nullable=False),
    Column("principal", Text, nullable=False, index=True),
    Column("role", Text, nullable=False),
    Column("peer", Text, nullable=False),
    Column("action", Text, nullable=False, index=True),
    Column("subject", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("detail", Text, nullable=False),
)  # fmt: skip

# The holders that may read a stored artifact: a project by name, an agent's principal as "agent:NAME", the server as "farm".
holdings = Table(
    "holdings", metadata,
    Column("holder", Text, primary_key=True),
    Column("digest", Text, primary_key=True, index=True),
    Column("owner", Text, nullable=False),
    Column("held_at", UtcDateTime, nullable=False),
)  # fmt: skip

# The compilations that a project requested; the cache itself is shared.
project_compilations = Table(
    "project_compilations", metadata,
    Column("project", Text, primary_key=True),
    Column("key", Text, primary_key=True),
)  # fmt: skip

# The rows whose references to artifacts are up to date: jobs by id, and cached results by key. Triggers delete a row when what it
# stands for changes.
referrers = Table(
    "referrers", metadata,
    # One of "job", "compilation", "stages" and "analysis".
    Column("kind", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    # Sizes of what is stored and of its log; null while they are being read.
    Column("size_bytes", Whole),
    Column("log_bytes", Whole),
    sqlite_with_rowid=False,
)  # fmt: skip

# The digests in jobs, reports and cached results. A row of a changed referrer stays until the referrer is read again.
artifact_references = Table(
    "artifact_references", metadata,
    Column("digest", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Index("references_of_a_referrer", "kind", "id"),
    sqlite_with_rowid=False,
)  # fmt: skip

# When artifacts (kind "artifact", by digest) and cached results (by kind and key) were last used, to within a few minutes.
uses = Table(
    "uses", metadata,
    Column("kind", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("used_at", UtcDateTime, nullable=False),
    sqlite_with_rowid=False,
)  # fmt: skip

webhooks = Table(
    "webhooks", metadata,
    Column("id", Text, primary_key=True),
    Column("url", Text, nullable=False),
    # Names of events, separated by commas.
    Column("events", Text, nullable=False),
    # Not a hash of it: the server signs with it.
    Column("secret", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("created_by", Text, nullable=False),
    # Whether it comes from the server's options.
    Column("configured", Boolean, nullable=False),
    Column("dropped", Whole, nullable=False),
)  # fmt: skip

# One row for each notice to each receiver: first the outbox, then the log.
deliveries = Table(
    "deliveries", metadata,
    Column("number", Whole, primary_key=True),
    Column("event_id", Text, nullable=False),
    # Empty for an address of a job.
    Column("webhook_id", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("event", Text, nullable=False),
    Column("job_id", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("owner", Text, nullable=False),
    # One of "HELD", "PENDING", "DELIVERED" and "FAILED".
    Column("state", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("due_at", UtcDateTime),
    Column("attempts", Whole, nullable=False),
    Column("status", Whole),
    Column("error", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("ended_at", UtcDateTime),
    UniqueConstraint("event_id", "webhook_id", "url"),
    Index("deliveries_that_are_due", "state", "due_at"),
    Index("deliveries_of_a_job", "job_id"),
)  # fmt: skip

# Sign the notices to the addresses of a project's jobs.
notify_secrets = Table(
    "notify_secrets", metadata,
    Column("project", Text, primary_key=True),
    Column("secret", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)  # fmt: skip

# Times of the system's clock that were found plausible, the last of each name.
trusted_times = Table(
    "trusted_times", metadata,
    Column("name", Text, primary_key=True),
    Column("at", UtcDateTime, nullable=False),
)  # fmt: skip

# The identity of the farm: one row. Agents recognize their farm by it.
farm = Table(
    "farm", metadata,
    Column("id", Text, primary_key=True),
    Column("created_at", UtcDateTime, nullable=False),
)  # fmt: skip
