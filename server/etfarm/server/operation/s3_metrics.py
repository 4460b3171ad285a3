"""Prometheus metrics of the bucket with the farm's artifacts, and of the copies on this machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from etfarm.server.artifacts.s3.blobs import BucketBlobs
from etfarm.server.artifacts.s3.bucket import BOUNDS_S, BucketUse


class S3Metrics(Collector):
    """What a server asks of its bucket. The labels are names of operations and outcomes, never keys."""

    def __init__(self, blobs: BucketBlobs) -> None:
        self._blobs = blobs

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names are known without values."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the counters since the start of the server."""
        use, cache = self._blobs.bucket.use, self._blobs.cache
        requests = CounterMetricFamily(
            "etfarm_s3_requests",
            "Operations on S3 that have ended, by outcome: ok, missing or failed.",
            labels=["operation", "outcome"],
        )
        for labels, number in sorted(use.requests.items()):
            requests.add_metric(labels, number)
        yield requests
        yield _durations(use)
        yield CounterMetricFamily("etfarm_s3_retries", "Requests to S3 that failed and were repeated.", value=use.retries)
        transferred = CounterMetricFamily("etfarm_s3_bytes", "Bytes of objects, sent to S3 and received.", labels=["direction"])
        transferred.add_metric(["sent"], use.sent_bytes)
        transferred.add_metric(["received"], use.received_bytes)
        yield transferred
        yield CounterMetricFamily("etfarm_s3_signed_links", "Presigned URLs for readers.", value=use.signed)
        yield GaugeMetricFamily(
            "etfarm_s3_cache_bytes", "Size of the copies of artifacts on the server's disk.", value=cache.size_bytes
        )
        reads = CounterMetricFamily(
            "etfarm_s3_cache_reads", "Uses of artifacts, by whether there was a copy: hit or miss.", labels=["outcome"]
        )
        reads.add_metric(["hit"], cache.hits)
        reads.add_metric(["miss"], cache.misses)
        yield reads
        yield CounterMetricFamily("etfarm_s3_cache_evictions", "Copies of artifacts deleted for space.", value=cache.evictions)


def _durations(use: BucketUse) -> HistogramMetricFamily:
    durations = HistogramMetricFamily(
        "etfarm_s3_request_seconds", "Duration of operations on S3, with the pauses between tries.", labels=["operation"]
    )
    for operation, seconds in sorted(use.seconds.items()):
        count, buckets = 0, list[tuple[str, float]]()
        for bound_s in BOUNDS_S:
            count += use.durations[operation, bound_s]
            buckets.append(("+Inf" if bound_s == math.inf else str(bound_s), count))
        durations.add_metric([operation], buckets, seconds)
    return durations
