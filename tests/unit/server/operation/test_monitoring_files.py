"""The dashboard and the alerts of docs/monitoring use metrics that a server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from etfarm.server.artifacts.room import DiskSpace
from etfarm.server.artifacts.s3.blobs import BucketBlobs
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.location import BucketLocation, Credentials
from etfarm.server.artifacts.store import Store
from etfarm.server.operation.metrics import Metrics
from etfarm.server.operation.s3_metrics import S3Metrics
from etfarm.server.operation.snapshot import Snapshot
from tests.support.databases import new_database

FOLDER = Path(__file__).parents[4] / "docs" / "monitoring"


def alerts() -> list[str]:
    return re.findall(r"^ +expr: (.+)$", (FOLDER / "alerts.yml").read_text(), re.MULTILINE)


def panels() -> list[str]:
    document = json.loads((FOLDER / "dashboard.json").read_text())
    return [target["expr"] for panel in document["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expressions", [alerts(), panels()], ids=["alerts", "dashboard"])
def test_expressions_use_metrics_that_exist(tmp_path: Path, expressions: list[str]) -> None:
    metrics = Metrics("1", lambda _: "")
    metrics.snapshot = Snapshot(disk=DiskSpace(1, 1, False), stored=(1, 1))
    location = BucketLocation("etfarm", "", "http://127.0.0.1:1", "us-east-1", Credentials("key", "secret"))
    blobs = Store(tmp_path, new_database(tmp_path / "farm.sqlite"), bucket=Bucket(location)).blobs
    assert isinstance(blobs, BucketBlobs)
    metrics.registry.register(S3Metrics(blobs))
    known = set()
    for family in metrics.registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        known |= {f"{family.name}{suffix}" for suffix in suffixes}
    used = {name for text in expressions for name in re.findall(r"\b(?:etfarm|process)_\w+", re.sub(r"job=\"etfarm\"", "", text))}
    assert len(used) > 5
    assert used <= known
