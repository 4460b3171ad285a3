"""Files of arrays, the client's `--inputs`: `etfarm.client.submit.npz`."""

from __future__ import annotations

import io
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from etfarm.client.submit import npz
from etfarm.wire.errors import UserError

TOKENS = (
    b"'descr': '<f4'",
    b"'shape': (",
    b"'fortran_order': True",
    b"|O",
    b"<U9",
    b"\x93NUMPY\x01\x00",
    b"PK\x03\x04",
    b"PK\x01\x02",
    b"99999999999",
    b"{'descr': [('a', '<f8', (1000000,))],",
)
MEMORY_FACTOR = 4000
"""Of compressed zeros."""


def seeds() -> list[bytes]:
    """Return archives of plain arrays, compressed ones, and ones with what numpy has no dtype for."""
    plain, packed, other = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(plain, x=np.ones((2, 3), np.float32), y=np.int64(3))
    np.savez_compressed(packed, **{"forward/x": np.zeros((64, 64), np.float32)})
    np.savez(
        other,
        **{"x": np.ones(4, np.uint16), "x.dtype": np.asarray("bfloat16"), "z": np.empty(0), "z.dtype": np.asarray("scalar")},
    )
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 28,)})
        archive.writestr("x.npy", header.getvalue() + bytes(64))
    return [file.getvalue() for file in (plain, packed, other, bomb)]


def fuzz(data: bytes) -> None:
    """A file is refused as the user's, or its arrays are values."""
    with tempfile.TemporaryDirectory(prefix="etfarm-fuzz-") as folder:
        path = Path(folder) / "in.npz"
        path.write_bytes(data)
        try:
            named = npz.read_named(path)
        except UserError as error:
            assert str(error)
            return
        assert all(isinstance(key, str) for key in named)
