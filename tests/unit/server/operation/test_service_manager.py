"""Messages to a service manager, as a socket of its own receives them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.server.operation.service_manager import ServiceManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(30)
        yield receiver, path


def test_assignments_arrive_in_one_datagram(manager: tuple[socket.socket, str]) -> None:
    receiver, path = manager
    ServiceManager({"NOTIFY_SOCKET": path}).notify(READY=1, STATUS="listening\non x")
    assert receiver.recv(4096) == b"READY=1\nSTATUS=listening on x"


def test_an_abstract_socket_is_used_by_its_name() -> None:
    name = f"etfarm-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}")
        receiver.settimeout(30)
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).notify(STOPPING=1)
        assert receiver.recv(4096) == b"STOPPING=1"


async def test_the_watchdog_is_fed_twice_in_its_time(manager: tuple[socket.socket, str]) -> None:
    receiver, path = manager
    service = ServiceManager({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "40000", "WATCHDOG_PID": str(os.getpid())})
    assert service.watchdog_s == 0.04
    feeding = asyncio.create_task(service.keep_alive())
    try:
        for _ in range(3):
            assert await asyncio.to_thread(receiver.recv, 4096) == b"WATCHDOG=1"
    finally:
        feeding.cancel()


@pytest.mark.parametrize("variables", [{}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
def test_without_a_manager_that_listens_nothing_happens(variables: dict[str, str]) -> None:
    manager = ServiceManager(variables)
    manager.notify(READY=1)
    assert manager.watchdog_s == 0


def test_the_watchdog_of_another_process_is_not_fed(manager: tuple[socket.socket, str]) -> None:
    values = {"NOTIFY_SOCKET": manager[1], "WATCHDOG_USEC": "1000"}
    assert ServiceManager(values | {"WATCHDOG_PID": "1"}).watchdog_s == 0
    assert ServiceManager({"WATCHDOG_USEC": "1000"}).watchdog_s == 0
    assert ServiceManager(values | {"WATCHDOG_USEC": "soon"}).watchdog_s == 0
