"""Device selectors: `etfarm.wire.selectors`."""

from __future__ import annotations

from etfarm.v1 import device_pb2
from etfarm.wire import selectors
from etfarm.wire.errors import EtfarmError

TOKENS = (
    b"arch=",
    b"memory>=2GiB",
    b"label.rack=",
    b"!=",
    b">=",
    b"<=",
    b",",
    b"feature=",
    b"emulated=true",
    b"os=Android 14",
    b"cores",
    "²".encode(),
    "٣".encode(),
)
MOST_BYTES = 2048

_DEVICE = device_pb2.Device(
    id="d1",
    name="pi5-a",
    arch="aarch64",
    soc="cortex-a76",
    os="Android 14 (API 34), Linux 6.1",
    memory_bytes=4 << 30,
    cores=4,
    features=["i8mm"],
    backends=["XnnpackBackend"],
    labels={"rack": "3"},
)


def seeds() -> list[bytes]:
    """Return selectors of every key and operator."""
    return [
        b"",
        b"arch=aarch64,memory>=2GiB,feature=i8mm,label.rack=3",
        b"os=Android 14,soc!=cortex-a76",
        b"cores<=4 , emulated=false",
        b"memory>=1.5GB,backend=XnnpackBackend",
        b"id=d1",
        b"model=Pixel 8,name=pi5-a",
    ]


def fuzz(data: bytes) -> None:
    """A selector is refused, or says of a device whether it matches."""
    try:
        selector = selectors.parse(data.decode(errors="replace"))
    except EtfarmError as error:
        assert str(error)
        return
    assert selector.matches(_DEVICE) in (True, False)
