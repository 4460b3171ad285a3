"""Selectors: what they match, and that each refusal says what is allowed."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.v1.device_pb2 import Device
from etfarm.wire import selectors
from etfarm.wire.errors import UserError
from tests.support.golden import Golden
from tests.support.refusals import refuses

GIB = 1 << 30

PI = Device(
    id="pi-1", name="Board-7", arch="aarch64", soc="BCM2712", os="Debian 12", cores=4, memory_bytes=8 * GIB,
    features=["dotprod", "fp16"], backends=["XnnpackBackend"], labels={"rack": "3", "who.a-b_c": "Ann"},
)  # fmt: skip
PHONE = Device(
    id="R5CX1", arch="aarch64", soc="Google Tensor G3", model="Google Pixel 8", os="Android 14 (API 34), Linux 5.15.137",
)  # fmt: skip
EMULATED = Device(id="emu", name="emu", arch="x86_64", cores=2, memory_bytes=2 * GIB, emulated=True)


@pytest.mark.parametrize(
    "text",
    [
        "", "id=pi-1", "name=board-7", "arch=AARCH64", "soc=bcm2712", "os=Debian 12", "memory=8GiB", "memory>=8GiB",
        "memory<=8GiB", "memory>=8589.9MB", "memory>=8589934592", "memory!=2GiB",
        "cores=4", "cores>=4", "cores<=4", "cores!=8", "feature=dotprod", "feature=FP16", "feature!=i8mm",
        "backend=XnnpackBackend", "emulated=false", "emulated=False", "emulated!=true", "label.rack=3", "label.rack!=4",
        "label.who.a-b_c=ann", "label.nothing!=3", " arch = aarch64 , cores >= 2 ", "arch=aarch64,feature=fp16,label.rack=3",
    ],
)  # fmt: skip
def test_a_device_is_matched_by(text: str) -> None:
    assert selectors.parse(text).matches(PI)


@pytest.mark.parametrize(
    "text",
    [
        "id=pi", "name=board", "arch=x86_64", "memory>=8.1GiB", "memory<=7GiB", "memory!=8GiB", "cores>=5", "cores!=4",
        "feature=i8mm", "feature!=dotprod", "backend!=XnnpackBackend", "emulated=true", "label.rack=4", "label.rack!=3",
        "label.nothing=3", "arch=aarch64,cores>=5", "soc!=BCM2712",
    ],
)  # fmt: skip
def test_a_device_is_not_matched_by(text: str) -> None:
    assert not selectors.parse(text).matches(PI)


@pytest.mark.parametrize(
    "text",
    ["os=Android", "os=android 14", "os=Android 14 (API 34)", "os=API 34", "os=Linux", "os!=Android 1", "soc=Tensor G3",
     "soc=Google Tensor G3", "model=pixel 8", "model=Google Pixel 8", "model!=Pixel 8a", "soc!=G", "os!=14 Android", "os!=()"],
)  # fmt: skip
def test_names_are_known_by_some_of_their_words(text: str) -> None:
    assert selectors.parse(text).matches(PHONE)
    key, equal, value = text.replace("!", "").partition("=")
    assert selectors.parse(f"{key}{equal if '!' in text else '!='}{value}").matches(PHONE) is False


def test_the_model_of_a_board_is_what_its_soc_says() -> None:
    board = Device(soc="Raspberry Pi 5 Model B Rev 1.0")
    assert selectors.parse("model=Raspberry Pi 5").matches(board)
    assert not selectors.parse("model=Raspberry Pi 50").matches(board)


def test_emulated_devices_can_be_asked_for() -> None:
    assert selectors.parse("emulated=true").matches(EMULATED)
    assert not selectors.parse("emulated=true").matches(PI)


def test_an_unknown_key_names_the_keys_and_the_nearest(golden: Golden) -> None:
    with golden.refuses("UNKNOWN_SELECTOR_KEY") as refused:
        selectors.parse("core=4")
    assert refused.value.metadata == {"key": "core"}
    assert all(key in refused.value.remedy for key in selectors.KEYS)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("lable.rack", "label.rack"),
        ("labels.rack", "label.rack"),
        ("mem", "memory"),
        ("Arch", ""),
        ("aarch", "arch"),
        ("xyzzy", ""),
    ],
)
def test_a_mistyped_key_is_corrected(key: str, nearest: str) -> None:
    with pytest.raises(UserError) as refused:
        selectors.parse(f"{key}=3")
    assert (f"Did you mean {nearest!r}?" in refused.value.message) == bool(nearest)


def test_a_mistyped_label_is_corrected() -> None:
    devices = [PI, Device(labels={"floor": "4"})]
    assert selectors.hint_label(selectors.parse("label.rakc=3"), devices) == (
        "No device has a label 'rakc'; did you mean 'label.rack'? "
    )
    for text in ("label.rack=4", "label.xyzzy=1", "arch=x"):
        assert selectors.hint_label(selectors.parse(text), devices) == ""


@pytest.mark.parametrize("text", ["frequency>=2", "label.=3", "label=3", "labels.rack=3"])
def test_keys_that_devices_do_not_have_are_refused(text: str) -> None:
    with refuses("UNKNOWN_SELECTOR_KEY"):
        selectors.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("aarch64", "KEY OP VALUE"),
        ("arch=", "has no value"),
        ("memory>2GiB", "KEY OP VALUE"),
        ("memory>=lots", "memory>=2GiB"),
        ("memory>=-1", "memory>=2GiB"),
        ("cores>=2GiB", "cores>=4"),
        ("cores==4", "KEY OP VALUE"),
        ("arch==aarch64", "KEY OP VALUE"),
        ("arch>=aarch64", "compares numbers"),
        ("label.rack<=3", "compares numbers"),
        ("emulated=maybe", "true or false"),
        ("=4", "KEY OP VALUE"),
        ("board-7", "give name=board-7."),
    ],
)
def test_a_bad_term_is_refused_with_a_remedy(text: str, says: str) -> None:
    with refuses("BAD_SELECTOR") as refused:
        selectors.parse(f"arch=aarch64,{text}")
    assert says in str(refused.value)
    assert refused.value.remedy


texts = st.text("abcXYZ019._-", min_size=1, max_size=8)
devices = st.builds(
    Device,
    id=texts, name=texts, arch=st.sampled_from(["aarch64", "x86_64"]), soc=texts, os=texts,
    cores=st.integers(0, 128), memory_bytes=st.integers(0, 1 << 45), emulated=st.booleans(),
    features=st.lists(texts, max_size=3), backends=st.lists(texts, max_size=3), labels=st.dictionaries(texts, texts, max_size=2),
)  # fmt: skip


@given(devices)
def test_every_value_of_a_device_selects_it_and_its_negation_does_not(device: Device) -> None:
    text = [("id", device.id), ("name", device.name), ("arch", device.arch), ("soc", device.soc), ("os", device.os)]
    text += [("memory", str(device.memory_bytes)), ("cores", str(device.cores)), ("emulated", str(device.emulated))]
    text += [("feature", feature) for feature in device.features] + [("backend", backend) for backend in device.backends]
    text += [(f"label.{key}", value) for key, value in device.labels.items()]
    for key, value in text:
        assert selectors.parse(f"{key}={value}").matches(device), key
        assert not selectors.parse(f"{key}!={value}").matches(device), key
    assert selectors.parse(",".join(f"{key}={value}" for key, value in text)).matches(device)


@given(devices, st.integers(0, 1 << 45), st.sampled_from(["memory", "cores"]))
def test_at_least_and_at_most_split_all_devices(device: Device, number: int, key: str) -> None:
    have = device.memory_bytes if key == "memory" else device.cores
    assert selectors.parse(f"{key}>={number}").matches(device) == (have >= number)
    assert selectors.parse(f"{key}<={number}").matches(device) == (have <= number)


@given(st.text(max_size=40), devices)
def test_any_text_is_a_selector_or_a_users_error_with_a_remedy(text: str, device: Device) -> None:
    try:
        selector = selectors.parse(text)
    except UserError as error:
        assert error.reason in ("UNKNOWN_SELECTOR_KEY", "BAD_SELECTOR")
        assert error.remedy
    else:
        assert selector.matches(device) in (True, False)


@pytest.mark.parametrize(
    "text",
    [
        "name=" + " " * 500_000 + "x\ny",
        "name=x" + " " * 500_000 + "y\n",
        "a" * 500_000 + " " * 500_000,
        "memory>=" + "1" * 500_000 + " " * 500_000,
        "memory>=1" + " " * 500_000 + "x",
        " " * 1_000_000,
    ],
    ids=["blanks before a value", "blanks in a value", "key", "digits", "blanks after a number", "blanks"],
)
def test_a_term_is_parsed_in_linear_time(text: str) -> None:
    started = time.perf_counter()
    with contextlib.suppress(UserError):
        selectors._term(text)
    assert time.perf_counter() - started < 10, "where time is quadratic this takes hours"


def test_a_selector_has_a_bounded_length_and_a_bounded_number_of_terms(golden: Golden) -> None:
    selectors.parse(",".join(["id=a"] * 64))
    with golden.refuses("BAD_SELECTOR"):
        selectors.parse(",".join(["id=a"] * 65))
    selectors.parse("name=" + "a" * 4091)
    with golden.refuses("BAD_SELECTOR"):
        selectors.parse("name=" + "a" * 4092)
