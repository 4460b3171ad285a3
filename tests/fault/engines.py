"""The engines of a large farm, for random schedules: PostgreSQL, a bucket behind a proxy, and nodes of a Ray cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.postgres import PostgresServer, postgres_server
from tests.support.ray_cluster import RayCluster, running_cluster
from tests.support.s3 import S3Server
from tests.support.s3_proxy import S3Proxy, proxy_to

DATABASE: Final = "farm"
SETTINGS: Final = {"synchronous_commit": "remote_apply", "shared_buffers": "32MB"}
"""Every commit waits for the disk, so that a crash loses none."""


@dataclass(frozen=True)
class Engines:
    """Running engines."""

    postgres: PostgresServer
    bucket: S3Proxy
    arguments: tuple[str, ...]
    """Options of `etfarm serve` for these engines."""
    cluster: RayCluster | None
    """The cluster that compiles; None where the servers do."""

    @property
    def url(self) -> str:
        """The URL of the database."""
        return self.postgres.url(DATABASE)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of `etfarm serve` for these engines."""
        return {} if self.cluster is None else dict(self.cluster.credentials)


@contextmanager
def running_engines(nodes: int = 0) -> Iterator[Engines]:
    """Run engines that nothing else uses, until the end of the block.

    Args:
        nodes: number of the Ray cluster's nodes; 0 for no cluster.
    """
    with ExitStack() as closing:
        # Of its own, since sockets need a short path.
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="etfarm-engines-")))
        postgres = closing.enter_context(postgres_server(SETTINGS))
        postgres.execute("CREATE DATABASE {}", DATABASE)
        server = closing.enter_context(S3Server(folder / "s3").running())
        bucket = closing.enter_context(proxy_to(server.address))
        location = server.new_location(bucket.address)
        credentials = folder / "credentials"
        credentials.touch(0o600)
        credentials.write_text(f"{location.credentials.access_key} {location.credentials.secret_key}\n")
        cluster = closing.enter_context(running_cluster()) if nodes else None
        if cluster is not None:
            cluster.start()
            for _ in range(nodes):
                cluster.add_node()
        yield Engines(
            postgres,
            bucket,
            ("--database", postgres.url(DATABASE), "--blobs", location.url, "--blobs-endpoint", location.endpoint,
             "--blobs-credentials", str(credentials),
             *(("--compile-pool", cluster.address) if cluster is not None else ())),
            cluster,
        )  # fmt: skip
