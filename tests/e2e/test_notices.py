"""Notices of a real farm: the commands for webhooks, `bench --notify` with a gate, and a server that is killed while it sends."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.farm import FarmProcess, etfarm
from tests.support.programs import program
from tests.support.receivers import Received, receiver, status

pytestmark = pytest.mark.slow(reason="a farm measures jobs and sends notices of them")

QUICK: dict[str, Any] = {"threads": [1], "iterations": 20, "warmup": 2, "min_time_s": 0.01}


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    with FarmProcess(tmp_path_factory.mktemp("telling"), serve=["--webhook-allow", "127.0.0.1"]) as farm:
        yield farm.start()


def is_signed(request: Received, secret: str) -> bool:
    """Return whether a request is signed with a secret, as docs/farm.md verifies it."""
    parts = dict(part.split("=", 1) for part in request.headers["X-Etfarm-Signature"].split(","))
    expected = hmac.new(secret.encode(), parts["t"].encode() + b"." + request.body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(parts["v1"], expected)


def test_a_webhook_is_added_tested_listed_and_removed(telling: FarmProcess, tmp_path: Path) -> None:
    def webhooks(*arguments: str) -> Any:
        return etfarm("webhooks", *arguments, "--server", telling.address, cwd=tmp_path)

    assert webhooks("add", "http://10.0.0.1/").returncode == 2
    with receiver() as there:
        added = webhooks("add", there.url(), "--event", "device.offline")
        assert added.returncode == 0, added.stderr
        (listed,) = json.loads(webhooks("list", "--json", "-").stdout)["webhooks"]
        assert (listed["url"], listed["events"], listed["waiting"]) == (there.url(), ["device.offline"], 0)
        tested = webhooks("test", listed["id"])
        assert (tested.returncode, tested.stdout) == (0, f"{there.url()} answered with 200.\n"), tested.stderr
        request = there.requests.get(timeout=20)
    assert is_signed(request, added.stdout.strip()) and json.loads(request.body)["event"] == "webhook.test"
    refused = webhooks("test", listed["id"])  # nothing listens there any more
    assert refused.returncode == 1 and "It is tried again at" in refused.stderr
    assert webhooks("remove", listed["id"]).returncode == 0
    assert "The farm has no webhook" in webhooks("list").stdout
    assert webhooks("remove", listed["id"]).returncode == 2


def test_a_job_tells_its_end_and_its_gate_and_ci_gets_its_files(telling: FarmProcess, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    actions = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_WORKSPACE": str(tmp_path)}
    with receiver() as there:
        done = etfarm(
            *("bench", str(program("conv").path), "--threads", "1", "--iterations", "200", "--warmup", "2", "--min-time", "0.1"),
            *("--notify", there.url(), "--max-p50", "1ns", "--junit", "junit.xml", "--server", telling.address),
            cwd=tmp_path, environment=actions,
        )  # fmt: skip
        requests = [there.requests.get(timeout=30)]
        if done.returncode == 3:  # else a busy machine made the measurement INVALID, which decides nothing
            requests.append(there.requests.get(timeout=30))
    assert done.returncode in (3, 5), done.stderr
    secret = etfarm("webhooks", "secret", "--server", telling.address, cwd=tmp_path).stdout.strip()
    assert all(is_signed(request, secret) for request in requests)
    documents = {document["event"]: document for document in (json.loads(request.body) for request in requests)}
    assert documents["job.ended"]["job"]["state"] == "SUCCEEDED"
    if done.returncode == 3:
        assert documents["gate.failed"]["gate"]["required"] == "--max-p50 1.00 ns"
        assert documents["gate.failed"]["job"]["id"] == documents["job.ended"]["job"]["id"]
    listed = etfarm("webhooks", "deliveries", "--job", "latest", "--json", "-", "--server", telling.address, cwd=tmp_path)
    assert {row["state"] for row in json.loads(listed.stdout)["deliveries"]} == {"DELIVERED"}
    # What a CI server gets.
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) in (("2", "1", "0"), ("2", "0", "1"))
    assert "etfarm --max-p50" in done.stderr and ("::error " if done.returncode == 3 else "::warning ") in done.stderr
    assert summary.read_text().startswith("|  | p50 | verdict |")


def test_an_address_that_is_not_listed_is_refused_at_submission(telling: FarmProcess, tmp_path: Path) -> None:
    done = etfarm(
        *("bench", str(program("add").path), "--notify", "http://169.254.169.254/latest", "--server", telling.address),
        cwd=tmp_path, environment={},
    )  # fmt: skip
    assert done.returncode == 2 and "not public" in done.stderr and "--webhook-allow" in done.stderr
    many = [argument for number in range(6) for argument in ("--notify", f"http://127.0.0.1/{number}")]
    done = etfarm("bench", str(program("add").path), *many, "--server", telling.address, cwd=tmp_path, environment={})
    assert done.returncode == 2 and "at most 5" in done.stderr


def test_a_server_that_is_killed_while_it_sends_sends_again(telling: FarmProcess) -> None:
    arrived, end = threading.Event(), threading.Event()

    def hang_once(request: BaseHTTPRequestHandler) -> None:
        if not arrived.is_set():
            arrived.set()
            end.wait(60)
        status(200)(request)

    with receiver(hang_once) as there:
        with telling.client() as client:
            client.bench(program("add").path, notify=there.url(), **QUICK).result()
        assert arrived.wait(30)
        telling.kill9()
        telling.restart()
        first, second = there.requests.get(timeout=30), there.requests.get(timeout=60)
        end.set()
    assert first.body == second.body and first.headers["X-Etfarm-Delivery"] == second.headers["X-Etfarm-Delivery"]
