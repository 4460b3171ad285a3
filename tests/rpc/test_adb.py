"""The client of the adb server against a real server and a real adbd, and its errors when either of them goes away."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from etfarm.device_agents import adb
from tests.support.adbd import FOLDER, AdbPhone
from tests.support.refusals import refuses

pytestmark = pytest.mark.boards

MANY = random.Random(7).randbytes(20 << 20)
"""More than all buffers on the way hold."""
SECONDS = 60.0
"""For what takes milliseconds, on a machine that is busy."""


async def once(lists: AsyncIterator[tuple[adb.Phone, ...]], wanted: Callable[[tuple[adb.Phone, ...]], bool]) -> None:
    """Wait until the list of phones satisfies a predicate."""
    async with asyncio.timeout(SECONDS):
        async for phones in lists:
            if wanted(phones):
                return


def states(phones: tuple[adb.Phone, ...]) -> list[tuple[str, adb.State]]:
    return [(phone.serial, phone.state) for phone in phones]


def at_first_progress(act: Callable[[], object]) -> adb.OnProgress:
    """Run an action once, in the middle of a transfer."""
    left = [act]
    return lambda done, total: left.pop()() if left else None


async def test_the_adb_server_reports_its_version_and_phones(adb_phone: AdbPhone) -> None:
    assert await adb_phone.server.version() >= 39
    assert states(await adb_phone.server.phones()) == [(adb_phone.serial, adb.State.DEVICE)]
    assert {"shell_v2", "stat_v2"} <= await adb_phone.server.features(adb_phone.serial)


async def test_connected_and_disconnected_phones_are_reported(adb_phone: AdbPhone) -> None:
    server, serial = adb_phone.server, adb_phone.serial
    async with contextlib.aclosing(server.track(recheck_s=SECONDS)) as lists:
        first = await anext(lists)
        assert states(first) == [(serial, adb.State.DEVICE)]
        assert await server.disconnect(serial)
        # A server may list the phone as offline first.
        await once(lists, lambda phones: not phones)
        assert not await server.disconnect(serial)
        assert await server.connect(serial) == serial
        assert await server.connect(serial) == serial
        await once(lists, lambda phones: states(phones) == [(serial, adb.State.DEVICE)])
        before = (await server.phones())[0].transport_id
        await server.reconnect(serial)
        await once(lists, lambda phones: phones != () and phones[0].transport_id != before)
    assert first[0].transport_id != before


async def test_a_lost_phone_is_reported_even_if_adb_does_not(adb_phone: AdbPhone) -> None:
    server, serial = adb_phone.server, adb_phone.serial
    async with contextlib.aclosing(server.track(recheck_s=0.1)) as lists:
        await once(lists, lambda phones: states(phones) == [(serial, adb.State.DEVICE)])
        adb_phone.kill_adbd()
        await once(lists, lambda phones: states(phones) == [(serial, adb.State.OFFLINE)])
        with pytest.raises(adb.AdbRefused) as refused:
            await server.shell(serial, "true")
        assert refused.value.text == "device offline" and "adb reconnect" in refused.value.remedy
        adb_phone.start_adbd()
        await server.disconnect(serial)  # or adb waits for ten seconds before it tries again
        await adb_phone.connect()
        await once(lists, lambda phones: states(phones) == [(serial, adb.State.DEVICE)])


async def test_a_command_has_separate_streams_and_an_exit_code(adb_phone: AdbPhone) -> None:
    process = await adb_phone.server.shell(adb_phone.serial, "echo ready; cat; echo 'wrong: \"é\"' >&2; exit 42")
    assert await process.stdout.readline() == b"ready\n"
    assert process.returncode is None and not process.ended
    process.stdin.write(b"one\n")
    await process.stdin.drain()
    assert await process.stdout.readline() == b"one\n"
    process.stdin.write(b"two")
    process.stdin.close()
    assert await process.stdout.read() == b"two"
    assert await process.stderr.read() == 'wrong: "é"\n'.encode()
    assert await process.wait() == 42 == process.returncode
    assert process.ended and process.lost is None


async def test_writing_to_an_ended_command_is_an_os_error(adb_phone: AdbPhone) -> None:
    process = await adb_phone.server.shell(adb_phone.serial, "exit 3")
    assert await process.wait() == 3
    process.stdin.write(MANY)
    with pytest.raises(OSError):
        await process.stdin.drain()
    process.stdin.close()
    with pytest.raises(RuntimeError, match="closed"):
        process.stdin.write(b"late")


async def test_a_killed_command_ends_on_the_phone(adb_phone: AdbPhone) -> None:
    process = await adb_phone.server.shell(adb_phone.serial, "echo $$; exec sleep 1000")
    number = int(await process.stdout.readline())
    process.kill()
    assert await process.wait() is None
    assert await process.stdout.read() == await process.stderr.read() == b""
    await adb_phone.server.run(adb_phone.serial, f"while kill -0 {number} 2>&-; do sleep 0.05; done", deadline_s=SECONDS)


async def test_a_command_can_be_killed_before_its_first_output(adb_phone: AdbPhone) -> None:
    process = await adb_phone.server.shell(adb_phone.serial, "exec sleep 1000")
    process.kill()
    process.kill()
    assert await process.stdout.read() == b"" and await process.wait() is None


async def test_a_slow_reader_receives_all_of_twenty_megabytes(adb_phone: AdbPhone) -> None:
    (adb_phone.files / FOLDER[1:] / "many").write_bytes(MANY)
    process = await adb_phone.server.shell(adb_phone.serial, f"cat {FOLDER}/many", limit=1 << 16)
    digest, size = hashlib.sha256(), 0
    while part := await process.stdout.read(10_000):
        digest.update(part)
        size += len(part)
        if size % 100_000 == 0:
            await asyncio.sleep(0.001)
    assert (size, digest.digest()) == (len(MANY), hashlib.sha256(MANY).digest())
    assert await process.wait() == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_unread_output_is_bounded_in_memory(adb_phone: AdbPhone, stream: str) -> None:
    server, serial = adb_phone.server, adb_phone.serial
    tracemalloc.start()
    try:
        process = await server.shell(serial, "exec yes" + (" >&2" if stream == "stderr" else ""), limit=1 << 16)
        await getattr(process, stream).readexactly(1 << 20)
        before, _ = tracemalloc.get_traced_memory()
        # Meanwhile tens of megabytes could have come.
        for _ in range(20):
            await server.run(serial, "true", deadline_s=SECONDS)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not process.ended
    assert after - before < 1 << 20
    process.kill()


async def test_a_line_of_sixteen_megabytes_is_read(adb_phone: AdbPhone) -> None:
    command = "for size in 16777215 16777217; do head -c $size /dev/zero | tr '\\0' x; echo; done"
    process = await adb_phone.server.shell(adb_phone.serial, command)
    assert await process.stdout.readline() == b"x" * 16777215 + b"\n"
    with pytest.raises(ValueError):
        await process.stdout.readline()
    process.kill()


async def test_a_command_runs_with_its_input(adb_phone: AdbPhone) -> None:
    done = await adb_phone.server.run(adb_phone.serial, "sha256sum; echo e >&2; exit 7", input=MANY, deadline_s=SECONDS)
    assert done == adb.Completed(f"{hashlib.sha256(MANY).hexdigest()}  -\n".encode(), b"e\n", 7)


async def test_a_command_need_not_read_its_input(adb_phone: AdbPhone) -> None:
    # adbd drops output that it has not read when writing input to an ended command fails, so the command stays for a moment.
    done = await adb_phone.server.run(adb_phone.serial, "echo enough; sleep 2", input=MANY, deadline_s=SECONDS)
    assert done == adb.Completed(b"enough\n", b"", 0)


async def test_a_signal_becomes_an_exit_code_above_128(adb_phone: AdbPhone) -> None:
    assert (await adb_phone.server.run(adb_phone.serial, "kill -SYS $$", deadline_s=SECONDS)).exit_code == 159


async def test_a_command_with_too_much_output_is_killed(adb_phone: AdbPhone) -> None:
    run = adb_phone.server.run
    assert len((await run(adb_phone.serial, "head -c 1000 /dev/zero", deadline_s=SECONDS, max_bytes=1000)).stdout) == 1000
    with refuses("PHONE_ANSWER_TOO_LONG", match="more than 1000 bytes"):
        await run(adb_phone.serial, "yes", deadline_s=SECONDS, max_bytes=1000)


async def test_a_command_that_does_not_end_times_out(adb_phone: AdbPhone) -> None:
    with pytest.raises(adb.PhoneSilent, match=r"within 0\.5 s"):
        await adb_phone.server.run(adb_phone.serial, "exec sleep 1000", deadline_s=0.5)
    await adb_phone.server.run(adb_phone.serial, "while pgrep -f 'sleep [1]000'; do sleep 0.05; done", deadline_s=SECONDS)


async def test_many_commands_run_concurrently(adb_phone: AdbPhone) -> None:
    runs = [adb_phone.server.run(adb_phone.serial, f"echo {n}", deadline_s=SECONDS) for n in range(30)]
    assert [int(done.stdout) for done in await asyncio.gather(*runs)] == list(range(30))


async def test_an_overlong_command_is_refused_before_it_is_sent(adb_phone: AdbPhone) -> None:
    with pytest.raises(ValueError, match="send it as input"):
        await adb_phone.server.shell(adb_phone.serial, "x" * 70_000)


@pytest.mark.parametrize("kind", ["file", "bytes"])
async def test_twenty_megabytes_are_pushed_and_pulled(adb_phone: AdbPhone, tmp_path: Path, kind: str) -> None:
    server, serial, remote = adb_phone.server, adb_phone.serial, f"{FOLDER}/a folder, new/ä file,0644"
    source = tmp_path / "source"
    source.write_bytes(MANY)
    reported: list[tuple[int, int]] = []
    sent = await server.push(
        serial,
        source if kind == "file" else MANY,
        remote,
        0o751,
        mtime_s=1_700_000_000,
        on_progress=lambda *now: reported.append(now),
    )
    assert sent == len(MANY)
    assert [done for done, _ in reported] == list(range(65536, len(MANY) + 1, 65536)) and {total for _, total in reported} == {
        len(MANY)
    }
    assert hashlib.sha256((adb_phone.files / remote[1:]).read_bytes()).digest() == hashlib.sha256(MANY).digest()
    # adbd gives the owner's permissions to everybody.
    assert await server.stat(serial, remote) == adb.RemoteFile(0o100777, len(MANY), 1_700_000_000)
    reported.clear()
    assert await server.pull(serial, remote, tmp_path / "back", on_progress=lambda *now: reported.append(now)) == len(MANY)
    assert (tmp_path / "back").read_bytes() == MANY
    assert reported[-1] == (len(MANY), len(MANY))


async def test_empty_files_are_pushed_and_pulled(adb_phone: AdbPhone, tmp_path: Path) -> None:
    assert await adb_phone.server.push(adb_phone.serial, b"", f"{FOLDER}/empty") == 0
    (tmp_path / "back").write_bytes(b"old")
    assert await adb_phone.server.pull(adb_phone.serial, f"{FOLDER}/empty", tmp_path / "back") == 0
    assert (tmp_path / "back").read_bytes() == b""


async def test_the_phone_reports_a_files_size_and_mode(adb_phone: AdbPhone) -> None:
    result = await adb_phone.server.stat(adb_phone.serial, FOLDER)
    assert result is not None and result.is_folder
    assert await adb_phone.server.stat(adb_phone.serial, f"{FOLDER}/nothing") is None
    assert await adb_phone.server.stat(adb_phone.serial, "/etc/passwd/nothing") is None


async def test_a_push_to_a_full_phone_fails_and_leaves_no_file(adb_phone: AdbPhone) -> None:
    adb_phone.add_storage("/small", 1 << 20)
    data, reported = bytes(200 << 20), [0]
    with pytest.raises(adb.PhoneFull) as full:
        await adb_phone.server.push(adb_phone.serial, data, "/small/many", on_progress=lambda done, _: reported.append(done))
    assert reported[-1] < len(data), "what the phone throws away was sent to the end"
    assert full.value.reason == "DEVICE_DISK_FULL" and "No space left on device" in full.value.text
    assert full.value.remedy.startswith("Free some storage on the phone")
    await adb_phone.server.run(adb_phone.serial, "while [ -e /small/many ]; do sleep 0.05; done", deadline_s=SECONDS)
    await adb_phone.server.push(adb_phone.serial, b"fits", "/small/few")
    assert (adb_phone.files / "small/few").read_bytes() == b"fits"


@pytest.mark.remedy("PHONE_FILE_REFUSED")
async def test_a_read_only_folder_is_refused_with_an_alternative(adb_phone: AdbPhone) -> None:
    adb_phone.add_storage("/system/vendor", 1 << 20, writable=False)
    with pytest.raises(adb.PhoneFileRefused, match="Read-only file system") as refused:
        await adb_phone.server.push(adb_phone.serial, MANY, "/system/vendor/x")
    assert "/data/local/tmp" in refused.value.remedy
    await adb_phone.server.push(adb_phone.serial, MANY, f"{FOLDER}/x")


@pytest.mark.remedy("PHONE_FILE_MISSING")
async def test_a_failed_pull_leaves_no_file(adb_phone: AdbPhone, tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"old")
    with pytest.raises(adb.PhoneFileMissing, match="No such file"):
        await adb_phone.server.pull(adb_phone.serial, f"{FOLDER}/nothing", tmp_path / "kept")
    with pytest.raises(adb.PhoneFileRefused):
        await adb_phone.server.pull(adb_phone.serial, FOLDER, tmp_path / "kept")
    with refuses("PHONE_ANSWER_TOO_LONG"):
        await adb_phone.server.pull(adb_phone.serial, "/dev/zero", tmp_path / "kept", max_bytes=1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"old"
    await adb_phone.server.push(adb_phone.serial, b"new", f"{FOLDER}/nothing")
    await adb_phone.server.pull(adb_phone.serial, f"{FOLDER}/nothing", tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == b"new"


async def test_losing_a_phone_ends_its_command_at_once(adb_phone: AdbPhone) -> None:
    process = await adb_phone.server.shell(adb_phone.serial, "echo here; exec sleep 1000")
    assert await process.stdout.readline() == b"here\n"
    adb_phone.kill_adbd()
    async with asyncio.timeout(SECONDS):
        with pytest.raises(adb.PhoneGone) as gone:
            await process.wait()
    assert gone.value.serial == adb_phone.serial and process.lost is gone.value
    assert process.returncode is None and await process.stdout.read() == b""


async def test_losing_a_phone_ends_its_transfer_at_once(adb_phone: AdbPhone, tmp_path: Path) -> None:
    server, serial = adb_phone.server, adb_phone.serial
    await server.push(serial, MANY, f"{FOLDER}/many")
    with pytest.raises(adb.PhoneGone):
        await server.pull(serial, f"{FOLDER}/many", tmp_path / "back", on_progress=at_first_progress(adb_phone.kill_adbd))
    assert list(tmp_path.iterdir()) == []
    adb_phone.start_adbd()
    await server.disconnect(serial)
    await adb_phone.connect()
    with pytest.raises(adb.PhoneGone):
        await server.push(serial, MANY, f"{FOLDER}/many", on_progress=at_first_progress(adb_phone.kill_adbd))


async def test_a_disconnected_phone_is_unknown(adb_phone: AdbPhone) -> None:
    await adb_phone.disconnect()
    calls: list[Any] = [
        adb_phone.server.shell(adb_phone.serial, "true"),
        adb_phone.server.features(adb_phone.serial),
        adb_phone.server.push(adb_phone.serial, b"", f"{FOLDER}/x"),
        adb_phone.server.shell("a phone: of nobody's", "true"),
    ]
    for call in calls:
        with pytest.raises(adb.PhoneGone, match="not found"):
            await call


@pytest.mark.slow(reason="waits for the deadline of a silent link")
async def test_a_dead_link_is_detected_by_its_silence(adb_phone: AdbPhone, tmp_path: Path) -> None:
    server, serial = adb.AdbServer(adb_phone.server.address, answer_s=2), adb_phone.serial
    await server.push(serial, MANY, f"{FOLDER}/many")
    for transfer in (
        lambda: server.push(serial, MANY, f"{FOLDER}/x", on_progress=at_first_progress(adb_phone.freeze_adbd), silence_s=0.5),
        lambda: server.pull(
            serial, f"{FOLDER}/many", tmp_path / "x", on_progress=at_first_progress(adb_phone.freeze_adbd), silence_s=0.5
        ),
    ):
        with pytest.raises(adb.PhoneSilent, match=r"within 0\.5 s"):
            async with asyncio.timeout(SECONDS / 2):
                await transfer()
        with pytest.raises(adb.PhoneSilent):
            await server.shell(serial, "true")
        with pytest.raises(adb.PhoneSilent):
            await server.stat(serial, FOLDER)
        assert states(await server.phones()) == [(serial, adb.State.DEVICE)]
        adb_phone.thaw_adbd()
        await adb_phone.server.reconnect(serial)
        assert (await adb_phone.server.run(serial, "true", deadline_s=SECONDS)).exit_code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow(reason="waits for the deadline of a silent link")
async def test_a_slow_link_is_not_considered_dead(adb_phone: AdbPhone, tmp_path: Path) -> None:
    server, serial, remote = adb_phone.server, adb_phone.serial, f"{FOLDER}/many"
    data = MANY[: 6 << 20]
    adb_phone.slow_link(16_000_000)  # three seconds for each way
    assert await server.push(serial, data, remote, silence_s=2) == len(data)
    assert await server.pull(serial, remote, tmp_path / "back", silence_s=2) == len(data)
    assert (tmp_path / "back").read_bytes() == data


async def test_a_cancelled_push_leaves_no_file_on_the_phone(adb_phone: AdbPhone) -> None:
    server, serial = adb_phone.server, adb_phone.serial
    pushing = asyncio.create_task(
        server.push(serial, MANY, f"{FOLDER}/many", on_progress=at_first_progress(lambda: pushing.cancel()))
    )
    with pytest.raises(asyncio.CancelledError):
        await pushing
    await server.run(serial, f"while [ -e {FOLDER}/many ]; do sleep 0.05; done", deadline_s=SECONDS)


async def test_a_cancelled_pull_leaves_no_local_file(adb_phone: AdbPhone, tmp_path: Path) -> None:
    server, serial = adb_phone.server, adb_phone.serial
    await server.push(serial, MANY, f"{FOLDER}/many")
    pulling = asyncio.create_task(
        server.pull(serial, f"{FOLDER}/many", tmp_path / "back", on_progress=at_first_progress(lambda: pulling.cancel()))
    )
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert list(tmp_path.iterdir()) == []
    assert (await server.run(serial, "true", deadline_s=SECONDS)).exit_code == 0


@pytest.mark.remedy("ADB_SERVER_MISSING", "PHONE_GONE")
async def test_a_killed_adb_server_ends_all_calls_and_is_usable_after_a_restart(adb_phone: AdbPhone) -> None:
    server, serial = adb_phone.server, adb_phone.serial
    process = await server.shell(serial, "echo here; exec sleep 1000")
    assert await process.stdout.readline() == b"here\n"
    async with contextlib.aclosing(server.track()) as lists:
        await anext(lists)
        adb_phone.kill_server()
        with pytest.raises(adb.AdbServerMissing, match="ended the connection"):
            await once(lists, lambda phones: False)
    with pytest.raises(adb.PhoneGone):
        await process.wait()
    with pytest.raises(adb.AdbServerMissing, match="Connection refused"):
        await server.version()
    adb_phone.start_server()
    await adb_phone.connect()
    assert (await server.run(serial, "true", deadline_s=SECONDS)).exit_code == 0


@pytest.mark.remedy("ADB_REFUSED")
async def test_a_phone_is_unauthorized_until_its_owner_accepts(adb_phone: AdbPhone) -> None:
    server, serial = adb_phone.server, adb_phone.lock()
    async with contextlib.aclosing(server.track()) as lists:
        with pytest.raises(adb.AdbRefused, match="failed to authenticate") as refused:
            await server.connect(serial)
        assert "allow USB debugging" in refused.value.remedy
        await once(lists, lambda phones: (serial, adb.State.UNAUTHORIZED) in states(phones))
        (phone,) = (phone for phone in await server.phones() if phone.serial == serial)
        assert "allow USB debugging" in phone.remedy
        with pytest.raises(adb.AdbRefused, match="device unauthorized") as refused:
            await server.shell(serial, "true")
        assert refused.value.remedy == phone.remedy
        adb_phone.allow()
        await once(lists, lambda phones: (serial, adb.State.DEVICE) in states(phones))
    assert (await server.run(serial, "echo yes", deadline_s=SECONDS)).stdout == b"yes\n"


async def test_connecting_to_a_closed_port_is_refused_with_a_remedy(adb_phone: AdbPhone) -> None:
    with pytest.raises(adb.AdbRefused, match="Connection refused") as refused:
        await adb_phone.server.connect("127.0.0.1:1")
    assert "adb tcpip 5555" in refused.value.remedy


@pytest.mark.parametrize("address", ["localfilesystem:{}/none.sock", "tcp:127.0.0.1:1"])
async def test_without_an_adb_server_every_call_says_how_to_start_it(tmp_path: Path, address: str) -> None:
    server = adb.AdbServer(address.format(tmp_path))
    calls: list[Any] = [
        server.version(), server.phones(), anext(server.track()), server.connect("p:1"), server.shell("s", "true"),
        server.run("s", "true", deadline_s=1), server.push("s", b"", "/x"), server.pull("s", "/x", tmp_path / "x"),
        server.start_server(),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(adb.AdbServerMissing, match=r"adb start-server.*apt-get install adb") as missing:
            await call
        assert missing.value.metadata["address"] == server.address
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "answers b'HTTP'"),
        (b"OKAYzzzz", "a length of b'zzzz'"),
        (b"OKAY0004no", "ended the connection"),
        (b"OKAY0004none", "its version is 'none'"),
        (b"OK", "ended the connection"),
        (b"", "ended the connection"),
    ],
)
async def test_a_server_that_is_not_adb_is_reported_as_such(answer: bytes, why: str) -> None:
    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(16)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(answering, "127.0.0.1", 0) as listening:
        with pytest.raises(adb.AdbServerMissing, match=why):
            await adb.AdbServer(f"tcp:{listening.sockets[0].getsockname()[1]}").version()


async def test_an_adb_server_that_never_answers_times_out() -> None:
    over = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        server = adb.AdbServer(f"tcp:{listening.sockets[0].getsockname()[1]}", answer_s=0.2)
        with pytest.raises(adb.AdbServerMissing, match=r"within 0\.2 s"):
            await server.version()
        with pytest.raises(adb.AdbServerMissing, match=r"within 0\.2 s"):
            await anext(server.track())
        with pytest.raises(adb.PhoneSilent):
            await server.shell("s", "true")
        over.set()


@contextlib.asynccontextmanager
async def phone_that_sends(answer: bytes) -> AsyncIterator[adb.AdbServer]:
    """A server with a phone that takes every service and then sends these bytes, whatever it is asked."""

    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        service = b""
        while not service.startswith((b"sync:", b"shell,")):
            service = await reader.readexactly(int(await reader.readexactly(4), 16))
            writer.write(b"OKAY")
            if service.startswith(b"host-serial:"):
                writer.write(b"0007stat_v2")
                break
        else:
            writer.write(answer)
            while await reader.read(1 << 16):
                pass
        writer.close()

    async with await asyncio.start_server(answering, "127.0.0.1", 0) as listening:
        yield adb.AdbServer(f"tcp:{listening.sockets[0].getsockname()[1]}", answer_s=2)


STAT_OK = b"STA2" + bytes(20) + struct.pack("<I", 0o100644) + bytes(44)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"NONSENSE", adb.PhoneFileRefused),
        (STAT_OK + b"DATA" + struct.pack("<I", 1 << 31), adb.PhoneFileRefused),
        (STAT_OK + b"FAIL" + struct.pack("<I", 1 << 31) + b"no end", adb.PhoneSilent),
        (STAT_OK + b"FAIL" + struct.pack("<I", 2) + b"\xff\xfe", adb.PhoneFileRefused),
        (STAT_OK + b"DATA" + struct.pack("<I", 3) + b"ab", adb.PhoneSilent),
        (b"STA2" + struct.pack("<I", 13) + bytes(64), adb.PhoneFileRefused),
        (b"STA2" + struct.pack("<I", 2) + bytes(64), adb.PhoneFileMissing),
        (b"", adb.PhoneSilent),
    ],
    ids=["nonsense", "huge chunk", "huge refusal", "no text", "half a chunk", "denied", "missing", "nothing"],
)
async def test_violations_of_the_sync_protocol_are_refused(answer: bytes, error: type[Exception], tmp_path: Path) -> None:
    async with phone_that_sends(answer) as server:
        with pytest.raises(error):
            await server.pull("s", "/x", tmp_path / "x", silence_s=0.5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "code"), [(b"\x07\x01\0\0\0x\x03\x01\0\0\0\x05", 5), (b"\x03\0\0\0\0", None)], ids=["more", "no code"]
)
async def test_unknown_packet_kinds_are_ignored(answer: bytes, code: int | None) -> None:
    async with phone_that_sends(answer) as server:
        process = await server.shell("s", "true")
        if code is None:
            with pytest.raises(adb.PhoneGone):
                await process.wait()
        else:
            assert await process.wait() == code
        assert process.returncode == code


STARTING = """
import asyncio
from etfarm.device_agents.adb import AdbServer
from etfarm.wire.errors import EtfarmError

async def main():
    server = AdbServer()
    try:
        await server.start_server()
        await server.start_server()
        print(await server.version())
    except EtfarmError as error:
        print(error.reason, error)

asyncio.run(main())
"""


@pytest.mark.remedy("ADB_MISSING")
@pytest.mark.parametrize("installed", [True, False])
def test_the_server_is_started_where_adb_is_installed(adb_phone: AdbPhone, installed: bool) -> None:
    # In the phone's network: at the default address of a server that ends with the phone.
    path = os.environ["PATH"] if installed else "/nowhere"
    command = adb_phone.inside("env", f"PATH={path}", sys.executable, "-c", STARTING, userland=False)
    done = subprocess.run(command, env=adb_phone.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if installed:
        assert int(done.stdout) >= 39
    else:
        assert done.stdout.startswith("ADB_MISSING") and "apt-get install adb" in done.stdout
