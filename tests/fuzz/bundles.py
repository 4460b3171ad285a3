"""Runner bundles: archives that an agent unpacks and that a server reads the manifest of."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import struct
import tarfile
import tempfile
from pathlib import Path

from etfarm.device_agents.runners import bundle
from etfarm.wire import bundles
from etfarm.wire.errors import EtfarmError

RUNS = 150
MEMORY_FACTOR = 64
TOKENS = (
    b"bundle.json",
    b"../x",
    b"/etc/x",
    b"ustar\x0000",
    b"ustar  \0",
    b"\x1f\x8b\x08",
    b"\xfd7zXZ\x00",
    b"L",
    b"x",
    b"1",
    b"2",
    b"5",
    b"77777777777\0",
    b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"GNU.sparse.map",
)
_LOADER = b"\x7fELF" + bytes(14) + struct.pack("<H", 62) + bytes(44)


def archive(manifest: dict[str, object] | None = None, *more: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return a bundle's plain tar: its two programs, its manifest, and what comes with it."""
    files = {"ld.so": _LOADER, "runner": _LOADER}
    listed = {name: {"digest": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()}
    text = {
        "schema": "etfarm.bundle/1",
        "arch": "x86_64",
        "executorch": "1.5.1",
        "source_digest": "s",
        "backends": ["XnnpackBackend"],
        "operators": ["aten::add.out"],
        "files": listed,
        "loader": "ld.so",
        "entry": "runner",
        **(manifest or {}),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in {"bundle.json": json.dumps(text).encode(), **files}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for member, data in more:
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def seeds() -> list[bytes]:
    """Return bundles in each compression, and ones that reach out."""
    plain = archive()
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    above = tarfile.TarInfo("../above")
    long = tarfile.TarInfo("n" * 300)
    return [
        plain,
        gzip.compress(plain, mtime=0),
        lzma.compress(plain),
        archive(None, (link, b"")),
        archive(None, (above, b"")),
        archive(None, (long, b"")),
    ]


def attacks() -> list[bytes]:
    """Return small archives that unpack to much: headers, names, members, and a window of xz."""

    def header(kind: bytes, size: int) -> bytes:
        member = tarfile.TarInfo("x")
        member.type, member.size = kind, size
        return member.tobuf(tarfile.GNU_FORMAT)

    large = 96 << 20
    text = [header(kind, large) + bytes(large) for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE)]
    text.append((header(tarfile.XHDTYPE, 512) + bytes(512)) * 5_000)
    text.append(header(tarfile.REGTYPE, 0) * 60_000)
    text.append(header(tarfile.REGTYPE, 1 << 40))
    window = lzma.compress(archive(), filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1536 << 20}])
    return [*(gzip.compress(one, 9, mtime=0) for one in text), window]


def fuzz(data: bytes) -> None:
    """An archive is unpacked into its own folder, verified, or is refused."""
    with tempfile.TemporaryDirectory(prefix="etfarm-fuzz-") as name:
        folder = Path(name)
        path = folder / "archive"
        path.write_bytes(data)
        seen: bundles.BundleManifest | None = None
        try:
            seen = bundles.check_archive(path)
        except EtfarmError as error:
            assert str(error)
        try:
            created = bundle.unpack(path, folder / "unpacked" / "bundle")
        except EtfarmError as error:
            assert str(error) and not (folder / "unpacked" / "bundle").exists()
            assert seen is None, "the server offers what agents refuse"
        else:
            assert created.manifest == seen
            assert set(created.manifest.files) == {one.name for one in created.folder.iterdir()} - {"bundle.json"}
        assert {one.name for one in folder.iterdir()} <= {"archive", "unpacked"}
