"""A farm whose agents read artifacts from the S3 server by presigned URLs, and through the server where that fails."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.farm import Daemon, FarmProcess, etfarm, wait_until
from tests.support.programs import program
from tests.support.s3 import S3Server, environment_of
from tests.support.s3_proxy import S3Proxy, proxy_to

pytestmark = pytest.mark.slow(reason="starts an S3 server, and a farm measures jobs on several agents")

_SECRET = b"X-Amz-Signature"
_BUNDLE_BYTES = 1_000_000
"""A runner's bundle has more, and is what an agent fetches first."""


@dataclass
class Presigned:
    """A farm, and a proxy by which its agents reach the S3 server, which the server itself does not use."""

    farm: FarmProcess
    proxy: S3Proxy

    def measure(self, agent: int) -> dict[str, int]:
        """Measure a program on an agent; return the bytes that were downloaded for it, by how they came."""
        before = self.downloaded()
        with self.farm.client() as client:
            job = client.bench(
                program("add").path, devices=[f"name=board-{agent}"], threads=[1], iterations=20, warmup=2, min_time_s=0.01
            )
            for _ in job.watch():  # unlike `result`, it downloads nothing itself
                pass
            after = self.downloaded()
            (report,) = job.result().reports
            assert report.error is None
        return {via: after.get(via, 0) - before.get(via, 0) for via in ("server", "s3")}

    def metrics(self) -> str:
        assert self.farm.server is not None
        line = next(line for line in self.farm.server.lines if "metrics on" in line)
        with urllib.request.urlopen(f"http://{line.rpartition(' ')[2]}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def downloaded(self) -> dict[str, int]:
        # Scrapes within a second share a snapshot.
        expected = sum(self._sizes().values())
        wait_until(lambda: sum(self._sizes().values()) != expected, timeout_s=1.2)
        return self._sizes()

    def _sizes(self) -> dict[str, int]:
        rows = re.findall(r'etfarm_download_bytes_total\{via="(\w+)"\} (\S+)', self.metrics())
        return {via: int(float(number)) for via, number in rows}


@pytest.fixture(scope="module")
def presigned(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[Presigned]:
    folder, location = tmp_path_factory.mktemp("presigned"), s3_server.new_location()
    with pytest.MonkeyPatch.context() as environment, proxy_to(s3_server.address) as proxy:
        for name, value in environment_of(location).items():
            environment.setenv(name, value)
        options = ["--blobs", location.url, "--blobs-presign", f"http://{proxy.address}", "--metrics", "127.0.0.1:0"]
        with FarmProcess(folder, serve=options) as farm:
            farm.start(agents=0)
            yield Presigned(farm, proxy)


@pytest.fixture
def agent(presigned: Presigned) -> Daemon:
    """An agent with an empty cache."""
    presigned.proxy.heal()
    # Without its own runner, it fetches the farm's.
    return presigned.farm.add_agent(bare=True)


def number_of(presigned: Presigned) -> int:
    return len(presigned.farm.agents) - 1


def test_the_bytes_do_not_pass_through_the_server(presigned: Presigned, agent: Daemon) -> None:
    downloaded = presigned.measure(number_of(presigned))
    assert downloaded["server"] == 0
    assert downloaded["s3"] > _BUNDLE_BYTES
    assert presigned.proxy.count("GET") >= 2
    assert not presigned.proxy.count("PUT") + presigned.proxy.count("HEAD") + presigned.proxy.count("DELETE")
    text = presigned.metrics()
    assert int(float(re.findall(r"(?m)^etfarm_s3_signed_links_total (\S+)", text)[0])) >= 2
    assert re.search(r'etfarm_s3_requests_total\{operation="put",outcome="ok"\} \d', text)
    assert re.search(r'etfarm_s3_request_seconds_bucket\{le="\+Inf",operation="put"\} \d', text)


FAULTS: dict[str, Callable[[S3Proxy], None]] = {
    "503": lambda proxy: proxy.answer_503("GET"),
    "cut in the middle": lambda proxy: proxy.cut("GET"),
    "other bytes": lambda proxy: proxy.corrupt(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_agent_falls_back_to_the_server(presigned: Presigned, agent: Daemon, fault: str) -> None:
    FAULTS[fault](presigned.proxy)
    gets = presigned.proxy.count("GET")
    downloaded = presigned.measure(number_of(presigned))
    assert downloaded["server"] > _BUNDLE_BYTES / 2
    assert presigned.proxy.count("GET") == gets + 1  # no link is followed for a while after one failed
    assert agent.log.read_text().count("could not be read from the farm's S3 server") == 1


def test_the_urls_are_in_no_file_report_or_audit_entry(presigned: Presigned, agent: Daemon, tmp_path: Path) -> None:
    presigned.measure(number_of(presigned))
    assert sum(_SECRET.decode() in request for request in presigned.proxy.requests) >= 2
    environment = {"ETFARM_SERVER": presigned.farm.address}
    with presigned.farm.client() as client:
        job = client.jobs()[0]
    texts = [
        etfarm(*command, cwd=tmp_path, environment=environment).stdout
        for command in (("report", "show", job.id), ("report", "export", job.id, "--format", "json"), ("audit",))
    ]
    assert all(texts)
    assert not any(_SECRET.decode() in text for text in texts)
    files = [path for path in presigned.farm.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 10
    assert not [path for path in files if _SECRET in path.read_bytes()]
