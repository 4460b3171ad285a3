"""Prometheus metrics of a server as one of several: who leads, and which calls it forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from http import HTTPStatus

from prometheus_client import CollectorRegistry, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from etfarm.server.cluster.member import Member
from etfarm.server.operation.metrics_page import Answer, MetricsPage, probe
from etfarm.server.rpc.door.auditing import rpc_of


class ClusterMetrics(Collector):
    """The metrics of one server among several. They go on when it takes the lead."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._forwarded: Counter[tuple[str, str]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def forwarded(self, method: str, code: str) -> None:
        """Count a call that ended."""
        self._forwarded[rpc_of(method), code] += 1

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names are known without values."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the state of the server among the others."""
        yield GaugeMetricFamily("etfarm_leader", "Whether this server leads the farm.", value=float(self._member.is_leading))
        yield CounterMetricFamily(
            "etfarm_leaderless_seconds", "Time for which this server saw no leader.", value=self._member.measure_leaderless_s()
        )
        calls = CounterMetricFamily("etfarm_forwarded_calls", "Calls forwarded to the leader.", labels=["rpc", "code"])
        for labels, number in self._forwarded.items():
            calls.add_metric(labels, number)
        yield calls

    def page(self, hosts: Collection[str]) -> MetricsPage:
        """Return the page of metrics and probes while this server forwards calls.

        Args:
            hosts: as of `MetricsPage`.
        """

        async def metrics(accept: str) -> Answer:
            encode, content_type = exposition.choose_encoder(accept)
            return HTTPStatus.OK, content_type, encode(self._registry)

        def why_not_ready() -> str:
            return "" if self._member.leadership.leader is not None else "no server leads the farm"

        return MetricsPage({"/metrics": metrics, "/healthz": probe(lambda: ""), "/readyz": probe(why_not_ready)}, hosts=hosts)
