"""What `etfarm doctor` says of a server's answer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib.metadata import version

from etfarm.v1 import farm_pb2
from etfarm.wire.doctor import Finding, Status
from etfarm.wire.server_findings import Asked, describe

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def findings(skew_s: float | None = 0.0, **fields: object) -> dict[str, Finding]:
    info = farm_pb2.ServerInfo(version=version("etfarm"))
    for name, value in fields.items():
        if isinstance(value, datetime):
            getattr(info, name).FromDatetime(value)
        elif isinstance(value, farm_pb2.DiskSpace):
            info.disk.CopyFrom(value)
        else:
            setattr(info, name, value)
    return {finding.name: finding for finding in describe("server", "farm:1", Asked(info, skew_s, 0.02), NOW)}


def test_a_healthy_server_has_no_warning() -> None:
    later = NOW + timedelta(days=90)
    disk = farm_pb2.DiskSpace(free_bytes=10**10, work_bytes=10**9)
    result = findings(0.3, token_expire_time=later, certificate_expire_time=later, disk=disk)
    assert set(result) == {"server", "server clock", "server token", "server certificate", "server's disk"}
    assert {finding.status for finding in result.values()} == {Status.OK}
    assert "answers in 20 ms" in result["server"].detail


def test_what_is_wrong_is_a_warning_with_a_remedy() -> None:
    soon, past = NOW + timedelta(days=3), NOW - timedelta(days=1)
    disk = farm_pb2.DiskSpace(free_bytes=5, work_bytes=10**9, full=True)
    result = findings(-61.0, version="9.9", token_expire_time=soon, certificate_expire_time=past, stopping=True, disk=disk)
    warnings = {name: finding for name, finding in result.items() if finding.status is Status.WARNING}
    assert set(warnings) == {
        "server version", "server clock", "server token", "server certificate", "server state", "server's disk",
    }  # fmt: skip
    assert all(finding.cost and finding.remedy for finding in warnings.values())
    assert "61 s behind" in warnings["server clock"].detail
    assert "afterwards" in warnings["server token"].cost and "afterwards" not in warnings["server certificate"].cost


def test_a_server_that_does_not_tell_its_time_has_no_clock() -> None:
    assert set(findings(None)) == {"server"}


def test_the_servers_of_a_farm_are_named() -> None:
    def detail(*standbys: str) -> str:
        info = farm_pb2.ServerInfo(version=version("etfarm"), servers=[{"address": "a:1", "version": "1", "leads": True}])
        for address in standbys:
            info.servers.add(address=address, version="2")
        (finding,) = [each for each in describe("server", "farm:1", Asked(info, None, 0.02), NOW) if each.name == "servers"]
        assert finding.status is Status.OK
        return finding.detail

    assert detail() == "a:1 is the farm's only server."
    assert detail("b:1") == "a:1 leads; b:1 (etfarm 2) stands by"
    assert detail("b:1", "c:1") == "a:1 leads; b:1 (etfarm 2), c:1 (etfarm 2) stand by"


def test_a_server_that_is_missing_from_those_that_were_given_is_a_warning() -> None:
    info = farm_pb2.ServerInfo(version=version("etfarm"), servers=[{"address": "a:1", "version": "1", "leads": True}])
    (alone,) = [each for each in describe("server", "a:1,b:1", Asked(info, None, 0.02), NOW) if each.name == "servers"]
    assert alone.status is Status.WARNING and "only server" in alone.detail and "2 servers in 'a:1,b:1'" in alone.remedy
    info.servers.add(address="elsewhere:1", version="1")  # by another name
    (both,) = [each for each in describe("server", "a:1,b:1", Asked(info, None, 0.02), NOW) if each.name == "servers"]
    assert both.status is Status.OK
