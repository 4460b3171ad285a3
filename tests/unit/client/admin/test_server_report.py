"""What a server's facts and metrics look like, on its page and in a terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from etfarm.client.admin.server_report import describe_metrics, describe_server
from etfarm.client.models import FarmServer, Metric, MetricSample, ServerInfo


def metric(name: str, kind: str, *samples: tuple[str, dict[str, str], float]) -> Metric:
    return Metric(
        name=name,
        help=f"About {name}.",
        kind=kind,
        samples=tuple(MetricSample(suffix=suffix, labels=labels, value=value) for suffix, labels, value in samples),
    )


def test_values_have_units_and_labels() -> None:
    measures = describe_metrics(
        [
            metric("process_resident_memory_bytes", "gauge", ("", {}, 3 * 2.0**20)),
            metric("etfarm_devices", "gauge", ("", {"state": "IDLE", "health": "GOOD"}, 2.0), ("", {"state": "BUSY"}, 1234.0)),
            metric("etfarm_oldest_wait_seconds", "gauge", ("", {}, 0.25)),
            metric("etfarm_build", "info", ("_info", {"version": "1.2"}, 1.0)),
        ]
    )
    assert [(each.name, each.rows) for each in measures] == [
        ("etfarm_devices", (("health=GOOD state=IDLE", "2"), ("state=BUSY", "1,234"))),
        ("etfarm_oldest_wait_seconds", (("", "250 ms"),)),
        ("etfarm_build", (("", "version=1.2"),)),
        ("process_resident_memory_bytes", (("", "3.00 MiB"),)),
    ]


def test_facts_name_the_servers_of_a_farm_and_leave_out_what_is_missing() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    members = (
        FarmServer(address="a:1", version="0.3.0", leads=True, started_at=at),
        FarmServer(address="b:1", version="0.3.1", started_at=at),
    )
    info = ServerInfo(
        version="0.3.0",
        role="ADMIN",
        workers_ready=True,
        devices_online=1,
        devices_known=2,
        protocol_version=4,
        token_expires_at=at,
        servers=members,
        forwarded_by="b:1",
    )
    assert describe_server(info, "b:1,a:1") == [
        ("Version", "etfarm 0.3.0, contract 4"),
        ("Address", "b:1,a:1"),
        ("Servers", "a:1 (leads, etfarm 0.3.0), b:1 (stands by, etfarm 0.3.1)"),
        ("Forwarded by", "b:1"),
        ("You are", "admin"),
        ("Your token expires", "2026-01-02 03:04 UTC"),
    ]


def test_a_histogram_is_a_number_and_a_mean_and_an_empty_one_is_left_out() -> None:
    counted = {"phase": "COMPILE"}
    filled = metric(
        "etfarm_cell_phase_seconds", "histogram",
        ("_count", counted, 4.0), ("_sum", counted, 8.0),
        ("_count", {"phase": "ANALYZE"}, 0.0), ("_sum", {"phase": "ANALYZE"}, 0.0),
    )  # fmt: skip
    empty = metric("etfarm_scrapes", "histogram", ("_count", {}, 0.0), ("_sum", {}, 0.0))
    (measure,) = describe_metrics([filled, empty])
    assert measure.rows == (("phase=COMPILE", "4, mean 2.00 s"),)
