"""What a server reports of itself, in rows for people: its facts, and what it measures. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from etfarm.client.formats import units
from etfarm.client.models import FarmServer, Metric, MetricSample, ServerInfo

OWN: Final = "etfarm_"
"""How names of metrics begin that are about the farm; others are about the process."""
CALLS: Final = ("etfarm_rpcs", "etfarm_rpc_seconds", "etfarm_rpcs_open")
"""Metrics with a value for each call of the contract, which are many."""


@dataclass(frozen=True)
class Measure:
    """A metric with its values."""

    name: str
    about: str
    is_own: bool
    """Whether it is about the farm, not about the server's process."""
    rows: tuple[tuple[str, str], ...]
    """Labels as `state=IDLE health=GOOD`, and the value with its unit."""

    @property
    def is_of_calls(self) -> bool:
        """Whether it has a value for each call of the contract."""
        return self.name in CALLS


def describe_server(info: ServerInfo, address: str) -> list[tuple[str, str]]:
    """Return a server's facts as names and values, without missing ones.

    Args:
        address: the address that the client uses.
    """
    facts = (
        ("Version", f"etfarm {info.version}, contract {info.protocol_version}"),
        ("Address", address),
        ("Servers", ", ".join(_describe_member(server) for server in info.servers)),
        ("Forwarded by", info.forwarded_by),
        ("You are", f"{info.principal}, {info.role.lower()}" if info.principal else info.role.lower()),
        ("Your token expires", _instant(info.token_expires_at)),
        ("Certificate expires", _instant(info.certificate_expires_at)),
        ("Clock", _instant(info.server_time)),
    )
    return [(name, value) for name, value in facts if value]


def _describe_member(server: FarmServer) -> str:
    return f"{server.address} ({'leads' if server.leads else 'stands by'}, etfarm {server.version})"


def _instant(time: datetime | None) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC" if time is not None else ""


def describe_metrics(metrics: Sequence[Metric]) -> list[Measure]:
    """Return the metrics that have values, those of the farm first."""
    measures = [Measure(metric.name, metric.help, metric.name.startswith(OWN), tuple(_rows(metric))) for metric in metrics]
    return sorted((each for each in measures if each.rows), key=lambda each: not each.is_own)


def _rows(metric: Metric) -> Iterator[tuple[str, str]]:
    if metric.kind in ("histogram", "summary"):
        yield from _means(metric)
        return
    for sample in metric.samples:
        if metric.kind == "info":
            yield "", _labels(sample)
        else:
            yield _labels(sample), _value(metric.name, sample.value)


def _means(metric: Metric) -> Iterator[tuple[str, str]]:
    """Yield the number and the mean of what a histogram has counted."""
    sums = {_labels(sample): sample.value for sample in metric.samples if sample.suffix == "_sum"}
    for sample in metric.samples:
        if sample.suffix == "_count" and sample.value:
            labels = _labels(sample)
            yield labels, f"{sample.value:,.0f}, mean {_value(metric.name, sums.get(labels, 0.0) / sample.value)}"


def _labels(sample: MetricSample) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))


def _value(name: str, value: float) -> str:
    if name.endswith("start_time_seconds"):
        return f"{value:.0f}"
    if name.endswith("_bytes"):
        return units.size(int(value))
    if name.endswith("_seconds"):
        return units.time(value * 1e9)
    return f"{value:,.0f}" if value == int(value) else units.significant(value)
