"""What a server's metrics look like on its page."""

from __future__ import annotations

from etfarm.client.models import Metric, MetricSample
from etfarm.client.web.server_values import describe_metrics


def metric(name: str, kind: str, *samples: tuple[str, dict[str, str], float]) -> Metric:
    return Metric(name, f"About {name}.", kind, tuple(MetricSample(*sample) for sample in samples))


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
