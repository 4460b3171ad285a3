"""Hostile runner bundles: what a server offers, what an agent unpacks, and what a runner says."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import re
import resource
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from etfarm.client import EtfarmError
from etfarm.device_agents.runners.bundle import open_folder, unpack
from etfarm.wire import bundles
from etfarm.wire.bundles import MANIFEST_NAME, NotABundle, check_archive
from tests.support.farm import FarmProcess, descendants
from tests.support.refusals import refuses

LOADER = b"\x7fELF" + bytes(14) + b"\x3e\x00" + bytes(44)
Entry = tuple[tarfile.TarInfo, bytes]
MIB = 1 << 20


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(data)
    return info, data


def manifest(**changed: object) -> bytes:
    listed = {name: {"digest": hashlib.sha256(LOADER).hexdigest(), "size": len(LOADER)} for name in ("ld.so", "runner")}
    document = {
        "schema": "etfarm.bundle/1", "arch": "x86_64", "executorch": "1.5.1", "source_digest": "s",
        "backends": ["XnnpackBackend"], "operators": ["aten::add.out"],
        "files": listed, "loader": "ld.so", "entry": "runner", **changed,
    }  # fmt: skip
    return json.dumps(document).encode()


def tar(*entries: Entry) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def bundle(*more: Entry, first: bytes | None = None) -> bytes:
    """Return a good bundle, with further entries behind it."""
    good = (entry(MANIFEST_NAME, manifest() if first is None else first), entry("ld.so", LOADER), entry("runner", LOADER))
    return tar(*good, *more)


def listing(**names: int) -> dict[str, object]:
    return {name: {"digest": "0" * 64, "size": size} for name, size in names.items()}


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


WINDOW = {"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 3 << 29}
ATTACKS: dict[str, Callable[[], bytes]] = {
    "a path above": lambda: bundle(entry("../above", b"x")),
    "an absolute path": lambda: bundle(entry("/tmp/absolute", b"x")),
    "a folder": lambda: bundle(entry("folder", kind=tarfile.DIRTYPE)),
    "a symbolic link": lambda: bundle(entry("link", kind=tarfile.SYMTYPE, link="/etc/passwd")),
    "a link to a later file": lambda: bundle(entry("link", kind=tarfile.SYMTYPE, link="later"), entry("later", b"x")),
    "a hard link": lambda: bundle(entry("link", kind=tarfile.LNKTYPE, link="ld.so")),
    "a device": lambda: bundle(entry("null", kind=tarfile.CHRTYPE)),
    "a pipe": lambda: bundle(entry("pipe", kind=tarfile.FIFOTYPE)),
    "a sparse file": lambda: bundle(entry("sparse", kind=tarfile.GNUTYPE_SPARSE)),
    "a long name in an entry of its own": lambda: bundle(entry("n" * 300, b"x")),
    "two manifests": lambda: bundle(entry(MANIFEST_NAME, manifest(arch="aarch64"))),
    "a file twice": lambda: bundle(entry("runner", LOADER[:-1] + b"x")),
    "a file that is not listed": lambda: bundle(entry("more", b"x")),
    "a file with control characters": lambda: bundle(entry("\x1b[2J\nx", b"x")),
    "a file that looks like an option": lambda: bundle(entry("-rf", b"x")),
    "a file for a shell": lambda: bundle(entry("$(reboot)", b"x")),
    "a file with a comma": lambda: bundle(entry("a,0777", b"x")),
    "letters of two scripts": lambda: bundle(entry("ru\u0301nner", b"x")),
    "a listed file that is missing": lambda: tar(entry(MANIFEST_NAME, manifest()), entry("ld.so", LOADER)),
    "a program of another architecture": lambda: tar(
        entry(MANIFEST_NAME, manifest(arch="aarch64")), entry("ld.so", LOADER), entry("runner", LOADER)
    ),
    "another digest": lambda: bundle(first=manifest(files=listing(**{"ld.so": 64, "runner": 64}))),
    "a manifest in its own list": lambda: bundle(first=manifest(files=listing(**{MANIFEST_NAME: 1, "ld.so": 64, "runner": 64}))),
    "a huge size in the list": lambda: bundle(first=manifest(files=listing(**{"ld.so": 10**30, "runner": 64}))),
    "a number with 5,000 digits": lambda: bundle(first=manifest().replace(b'"size": 64', b'"size": ' + b"9" * 5_000)),
    "an infinite number": lambda: bundle(first=manifest().replace(b'"size": 64', b'"size": 1e999')),
    "deep JSON": lambda: bundle(first=b'{"schema":' + b"[" * 500_000),
    "control characters for people": lambda: bundle(first=manifest(backends=["\x1b]0;owned\x07"])),
    "a hundred thousand operators": lambda: bundle(first=manifest(operators=["a"] * 100_000)),
    "a manifest of 5 MiB": lambda: bundle(first=manifest() + b" " * (5 * MIB)),
    "sixty thousand files": lambda: gzip.compress(header(tarfile.REGTYPE, 0) * 60_000, 1),
    "a size of a terabyte": lambda: header(tarfile.REGTYPE, 1 << 40),
    "a negative size": lambda: header(tarfile.REGTYPE, 0)[:124] + b"\xff" * 12 + header(tarfile.REGTYPE, 0)[136:],
    "a header of 100 MiB": lambda: gzip.compress(header(tarfile.XHDTYPE, 100 * MIB) + bytes(100 * MIB), 1),
    "a window of 1.5 GiB": lambda: lzma.compress(
        bundle(), filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 3 << 29}]
    ),
    "bytes in front": lambda: b"MZ" + bundle(),
    "cut off": lambda: gzip.compress(bundle())[:-30],
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("name", list(ATTACKS))
def test_a_hostile_archive_is_refused_alike_by_servers_and_agents_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(ATTACKS[name]())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (check_archive, lambda path: unpack(path, tmp_path / "unpacked" / "bundle")):
        with pytest.raises(NotABundle) as refused:
            read(archive)
        assert refused.value.message.isprintable() and len(refused.value.message) < 1_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"
    assert not list((tmp_path / "unpacked").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"archive", "unpacked"}


def test_bits_of_the_mode_are_not_taken_over(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    modes = {"ld.so": 0o6777, "runner": 0o7755}
    files = [entry(name, LOADER, mode=mode) for name, mode in modes.items()]
    archive.write_bytes(tar(entry(MANIFEST_NAME, manifest()), *files))
    folder = unpack(archive, tmp_path / "bundle").folder
    assert {(folder / name).stat().st_mode & 0o7777 for name in modes} == {0o755}


def test_bytes_behind_the_end_are_seen_by_no_reader(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(bundle() + tar(entry("second", b"x")))
    assert check_archive(archive).files.keys() == {"ld.so", "runner"}
    assert {path.name for path in unpack(archive, tmp_path / "bundle").folder.iterdir()} == {MANIFEST_NAME, "ld.so", "runner"}


@pytest.mark.parametrize("swap", ["a link", "a pipe", "a huge sparse file", "another program"])
def test_a_file_that_was_swapped_in_the_cache_is_never_run(swap: str, tmp_path: Path) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "bundle"
    archive.write_bytes(bundle())
    path = unpack(archive, folder).folder / "runner"
    path.unlink()
    if swap == "a link":
        (tmp_path / "elsewhere").write_bytes(LOADER)
        path.symlink_to(tmp_path / "elsewhere")
    elif swap == "a pipe":
        os.mkfifo(path)
    elif swap == "a huge sparse file":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.write_bytes(LOADER[:-1] + b"x")
    began = time.process_time()
    with pytest.raises(NotABundle, match="'runner' is damaged"):
        open_folder(folder)
    assert unpack(archive, folder).folder == folder and path.read_bytes() == LOADER
    assert time.process_time() - began < 10.0


def test_a_bundle_that_only_claims_things_costs_linear_time(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(bundle(first=manifest(operators=[f"aten::op_{number}.out" for number in range(bundles._MAX_NAMES)])))
    assert len(check_archive(archive).operators) == bundles._MAX_NAMES


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    with FarmProcess(tmp_path_factory.mktemp("bundles"), bundle=False, executes=True) as farm:
        farm.restart()
        yield farm


@pytest.mark.slow(reason="a server's child expands 2 GiB")
def test_the_server_expands_an_archive_in_a_child_only(served: FarmProcess, tmp_path: Path) -> None:
    assert served.server is not None
    bomb = tmp_path / "bomb.tar.gz"
    part = gzip.compress(bytes(64 * MIB), 9)
    bomb.write_bytes(gzip.compress(header(tarfile.REGTYPE, (2 << 30) - MIB), 9) + part * 33)
    ticks = Path(f"/proc/{served.server.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    children = descendants(served.server.pid)
    with served.client() as farm, refuses("NOT_A_BUNDLE"):
        farm.add_bundle(bomb)
    after = Path(f"/proc/{served.server.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    used_s = (sum(map(int, after)) - sum(map(int, ticks))) / 100
    # Expanding and hashing it takes several seconds.
    assert used_s < 2.0
    assert descendants(served.server.pid) != children, "a forkserver is there now"


@pytest.mark.slow(reason="starts a server")
def test_the_server_reads_a_wheel_in_a_child_only(served: FarmProcess, tmp_path: Path) -> None:
    assert served.server is not None
    process, path = psutil.Process(served.server.pid), tmp_path / "etfarm-0.3.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"")
    data = path.read_bytes()
    begin, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    directory = data[begin:end] * 800_000
    with path.open("wb") as file:
        file.write(data[:begin] + directory + data[end:-10] + struct.pack("<2IH", len(directory), begin, 0))
    before, high = process.memory_info().rss, Path(f"/proc/{process.pid}/clear_refs")
    high.write_text("5")  # the highest use is counted from now on
    with served.client() as farm:
        digest = farm.upload_wheel(path)
        with pytest.raises(EtfarmError) as refused:
            list(farm.upgrade_agent("any", digest))
    assert refused.value.reason == "NOT_A_WHEEL" and "at most 20,000 files" in refused.value.message
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[0]) << 10
    assert peak - before < 100 * MIB, "the directory takes 300 MiB of whoever reads it"
    good = tmp_path / "good.whl"
    with zipfile.ZipFile(good, "w") as archive:
        archive.writestr("etfarm/device_agents/main.py", "")
        archive.writestr("etfarm-0.3.0.dist-info/METADATA", "Name: etfarm\nVersion: 0.3.0\n")
    with served.client() as farm, pytest.raises(EtfarmError) as unknown:
        list(farm.upgrade_agent("any", farm.upload_wheel(good)))
    assert unknown.value.reason != "NOT_A_WHEEL", "only the agent is missing"


@pytest.mark.slow(reason="starts a server")
def test_the_server_offers_no_hostile_archive_and_goes_on(served: FarmProcess, tmp_path: Path) -> None:
    with served.client() as farm:
        for number, name in enumerate(
            ("two manifests", "a symbolic link", "control characters for people", "deep JSON", "cut off")
        ):
            path = tmp_path / f"{number}.tar"
            path.write_bytes(ATTACKS[name]())
            with pytest.raises(EtfarmError) as refused:
                farm.add_bundle(path)
            assert (refused.value.reason, refused.value.fault) == ("NOT_A_BUNDLE", "USER")
        assert farm.bundles() == []
        (tmp_path / "good.tar").write_bytes(bundle())
        assert farm.add_bundle(tmp_path / "good.tar").backends == ("XnnpackBackend",)
