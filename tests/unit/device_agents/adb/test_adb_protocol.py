"""What the adb server sends, read: lists of phones, lengths, a shell's packets however the connection cuts them, addresses."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents import adb
from etfarm.device_agents.adb.address import Endpoint, parse
from etfarm.device_agents.adb.errors import file_refusal
from etfarm.device_agents.adb.link import length_of
from etfarm.device_agents.adb.phones import phones_of
from etfarm.device_agents.adb.shell import Output, split
from tests.support.refusals import refuses

SERIAL = st.text("abcXYZ019 .:-_()", min_size=1, max_size=40).map(str.strip).filter(lambda serial: serial != "")
PACKETS = st.lists(st.tuples(st.integers(0, 5).filter(lambda kind: kind != 3), st.binary(max_size=300)), max_size=20)


def line(serial: str, rest: str) -> str:
    """As adb's transport.cpp pads it."""
    return f"{serial:<22} {rest}\n"


@given(SERIAL, st.sampled_from([state for state in adb.State if state is not adb.State.UNKNOWN]), st.integers(1, 2**63 - 1))
def test_a_serial_may_have_spaces_colons_and_words_that_are_states(serial: str, state: adb.State, number: int) -> None:
    text = line(serial, f"{state} product:p model:M_1 device:d transport_id:{number}")
    assert phones_of(text) == (adb.Phone(serial, state, "p", "M_1", "d", transport_id=number),)


def test_a_long_listing_is_read_whole() -> None:
    text = (
        line("8A1X0ABCD", "device usb:1-4 product:oriole model:Pixel_6 device:oriole transport_id:3")
        + line("0123456789", "unauthorized usb:1-2 transport_id:4")
        + line("(no serial number)", "no permissions (user in plugdev group; are your udev rules wrong?);"
               " see [a page] usb:1-7 transport_id:5")
        + line("device offline 7", "sideload transport_id:6")
        + line("192.168.1.7:5555", "dancing transport_id:7")
    )  # fmt: skip
    phones = phones_of(text)
    assert [(phone.serial, phone.state, phone.usb, phone.transport_id) for phone in phones] == [
        ("8A1X0ABCD", adb.State.DEVICE, "1-4", 3),
        ("0123456789", adb.State.UNAUTHORIZED, "1-2", 4),
        ("(no serial number)", adb.State.NO_PERMISSIONS, "1-7", 5),
        ("device offline 7", adb.State.SIDELOAD, "", 6),
        ("192.168.1.7:5555", adb.State.UNKNOWN, "", 7),
    ]
    assert (phones[0].product, phones[0].model, phones[0].device, phones[0].remedy) == ("oriole", "Pixel_6", "oriole", "")
    assert "allow USB debugging" in phones[1].remedy
    assert "udev rules" in phones[2].remedy


@given(st.text())
def test_any_text_is_a_list_of_phones_or_of_none(text: str) -> None:
    assert all(phone.serial for phone in phones_of(text))


def test_a_list_of_no_phones_is_empty() -> None:
    assert phones_of("") == ()


@given(st.integers(0, 0xFFFF))
def test_lengths_are_four_hexadecimal_digits(length: int) -> None:
    assert length_of(b"%04x" % length) == length


@pytest.mark.parametrize("digits", [b"", b"12", b"0x12", b"+123", b" 123", b"1_23", b"12345", b"12g4"])
def test_nothing_else_is_a_length(digits: bytes) -> None:
    with pytest.raises(ValueError, match="a length of"):
        length_of(digits)


async def dealt(parts: Sequence[bytes]) -> tuple[int | None, bytes, bytes]:
    """Return what `split` makes of bytes that come in these parts."""
    source = asyncio.StreamReader()
    outputs = {1: Output(1 << 20), 2: Output(1 << 20)}
    splitting = asyncio.create_task(split(source, outputs))
    for part in parts:
        source.feed_data(part)
        await asyncio.sleep(0)
    source.feed_eof()
    code = await splitting
    for output in outputs.values():
        output.reader.feed_eof()
    return code, await outputs[1].reader.read(), await outputs[2].reader.read()


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """Return the bytes in parts."""
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def packed(packets: Sequence[tuple[int, bytes]]) -> bytes:
    return b"".join(struct.pack("<BI", kind, len(data)) + data for kind, data in packets)


def joined(packets: Sequence[tuple[int, bytes]], wanted: int) -> bytes:
    return b"".join(data for kind, data in packets if kind == wanted)


@given(PACKETS, st.integers(0, 255), st.lists(st.integers(0, 10_000), max_size=40))
def test_packets_are_the_same_wherever_the_connection_cuts_them(
    packets: list[tuple[int, bytes]], code: int, places: list[int]
) -> None:
    data = packed([*packets, (3, bytes([code]))])
    assert asyncio.run(dealt(cut(data, places))) == (code, joined(packets, 1), joined(packets, 2))


@given(PACKETS, st.integers(0, 10_000))
def test_a_connection_that_ends_early_gives_what_came_and_no_exit_code(packets: list[tuple[int, bytes]], place: int) -> None:
    data = packed([*packets, (3, b"\0")])
    code, stdout, stderr = asyncio.run(dealt([data[: place % len(data)]]))
    assert code is None
    assert joined(packets, 1).startswith(stdout) and joined(packets, 2).startswith(stderr)


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "tcp:127.0.0.1:5037"),
        ({"ADB_SERVER_SOCKET": "localfilesystem:/run/a.sock", "ANDROID_ADB_SERVER_PORT": "1"}, "localfilesystem:/run/a.sock"),
        ({"ANDROID_ADB_SERVER_PORT": "5099"}, "tcp:127.0.0.1:5099"),
        ({"ANDROID_ADB_SERVER_ADDRESS": "host", "ANDROID_ADB_SERVER_PORT": "5099"}, "tcp:host:5099"),
    ],
)
def test_the_address_is_the_one_that_adb_itself_uses(environment: dict[str, str], address: str) -> None:
    assert adb.server_address(environment) == address


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("tcp:5037", Endpoint(host="127.0.0.1", port=5037)),
        ("tcp:lab:5037", Endpoint(host="lab", port=5037)),
        ("tcp:[::1]:5037", Endpoint(host="::1", port=5037)),
        ("localfilesystem:/a:b", Endpoint(path="/a:b")),
        ("localabstract:adb", Endpoint(path="\0adb")),
    ],
)
def test_addresses_are_read_as_adb_writes_them(address: str, endpoint: Endpoint) -> None:
    assert parse(address) == endpoint


@pytest.mark.parametrize(
    "address", ["", "5037", "tcp:", "tcp:host:", "tcp:host:0", "tcp:host:65536", "tcp:host:²", "localfilesystem:", "usb:1"]
)
def test_another_address_is_refused_with_what_is_taken(address: str) -> None:
    with refuses("ADB_ADDRESS_MALFORMED", match="localfilesystem:PATH") as refused:
        parse(address)
    assert refused.value.metadata == {"address": address}


@pytest.mark.parametrize(
    ("words", "error", "remedy"),
    [
        ("couldn't write file: No space left on device", adb.PhoneFull, "Free some storage"),
        ("couldn't create file: Read-only file system", adb.PhoneFileRefused, "/data/local/tmp"),
        ("couldn't create file: Permission denied", adb.PhoneFileRefused, "/data/local/tmp"),
        ("failed to stat remote object: No such file or directory", adb.PhoneFileMissing, ""),
    ],
)
def test_what_a_phone_says_of_a_file_becomes_an_error_with_a_remedy(words: str, error: type[Exception], remedy: str) -> None:
    created = file_refusal("s 1", "/x", words)
    assert type(created) is error
    assert words in created.message and remedy in created.remedy
    assert created.metadata == {"serial": "s 1", "remote": "/x", "text": words}


def test_a_phone_that_asks_for_permission_is_refused_with_what_to_do() -> None:
    # As adb 29 and 34 word it, after which come two lines about its environment.
    refused = adb.AdbRefused("s", "device unauthorized.\nThis adb server's $ADB_VENDOR_KEYS is not set\nTry 'adb kill-server'.")
    assert refused.message == "adb refuses the phone s: device unauthorized."
    assert "allow USB debugging" in refused.remedy
