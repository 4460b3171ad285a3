"""The phone's root disk: Debian's adbd, mksh and toybox where Android has its own, and texts of real phones behind its commands.

There is neither /lib nor /usr, as on a phone: Debian's C library is in /rtl, where no other loader looks for libraries.

Where the texts are from:
    getprop: a Pixel 8 (Android 14), properties of github.com/pytorch/cpuinfo, test/mock/pixel-8.h (BSD-2-Clause), without its
        serial number, which each machine gets of its own.
    dumpsys battery: the example in github.com/google/skia-buildbot, machine/go/machine/processor/impl.go (BSD-3-Clause).
    dumpsys thermalservice: a Pixel with Tensor, part of that in impl_test.go beside it (TestProcess_HandleTempsInMilliCentgrade).
    dumpsys power: the lines that AOSP's PowerManagerService prints for a phone that is awake; no phone's own.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.support.debian import unpack_packages
from tests.support.emulation import need_emulator
from tests.support.images.disks import make_disk
from tests.support.images.kept import SOURCES, Say, made_once
from tests.support.images.kernel import Image, image_of

_GUEST: Final = SOURCES / "guest"
_PACKAGES: Final = (
    "adbd", "android-libbase", "android-libboringssl", "android-libcutils", "android-liblog", "libbrotli1", "libcap2", "libc6",
    "libcrypt1", "libgcc-s1", "liblz4-1", "libprotobuf32t64", "libstdc++6", "libsystemd0", "libxxhash0", "libzstd1", "zlib1g",
    "mksh", "toybox", "busybox-static",
)  # fmt: skip
_TEXTS: Final = {"getprop": "getprop.txt", "battery": "battery.txt", "thermalservice": "thermalservice.txt", "power": "power.txt"}
_OF_BUSYBOX: Final = ("awk", "dd", "diff", "expr", "gzip", "tr")
"""What Android's toybox has and Debian's lacks."""
_LOADER: Final = "ld-linux-aarch64.so.1"


def phone_image() -> Image:
    """The phone's files; what is on them comes from Debian."""
    need_emulator()
    sources = (Path(__file__), SOURCES / "disks.py", *sorted(path for path in _GUEST.iterdir() if path.name != "board.sh"))
    return image_of(made_once("phone", sources, _make) / "root.ext4")


def _make(folder: Path, say: Say) -> None:
    say(f"fetching {len(_PACKAGES)} packages")
    debian, root = folder.parent / "debian", folder.parent / "root"
    unpack_packages(_PACKAGES, debian, suite="trixie", alone=True)
    for name in ("apex/init", "apex/adbd", "data", "dev", "etc", "proc", "sys", "sbin", "system/bin", "system/etc/shims"):
        (root / name).mkdir(parents=True)
    shutil.copytree(debian / "usr/lib/aarch64-linux-gnu", root / "rtl/aarch64-linux-gnu", symlinks=True)
    (root / "rtl" / _LOADER).write_bytes(_moved((debian / "usr/lib/aarch64-linux-gnu" / _LOADER).read_bytes()))
    programs = {
        "usr/lib/android-sdk/platform-tools/adbd": "apex/adbd/adbd", "usr/bin/busybox": "apex/init/busybox",
        "usr/bin/mksh": "system/bin/sh", "usr/bin/toybox": "system/bin/toybox",
    }  # fmt: skip
    for source, target in programs.items():
        (root / target).write_bytes(_moved((debian / source).read_bytes()))
    for source, target in {
        "phone.sh": "sbin/init",
        "getprop.sh": "system/bin/getprop",
        "dumpsys.sh": "system/bin/dumpsys",
    }.items():
        shutil.copy(_GUEST / source, root / target)
    for program in [root / "rtl" / _LOADER, *(root / name for name in programs.values()), root / "sbin/init"]:
        program.chmod(0o755)
    for name in ("getprop", "dumpsys"):
        (root / "system/bin" / name).chmod(0o755)
    for name in _toys(debian):
        if not (root / "system/bin" / name).exists():
            (root / "system/bin" / name).symlink_to("toybox")
    for name in _OF_BUSYBOX:
        (root / "system/bin" / name).symlink_to("/apex/init/busybox")
    # As Android has it; adbd starts /bin/sh.
    (root / "bin").symlink_to("system/bin")
    for name, text in _TEXTS.items():
        shutil.copy(_GUEST / text, root / "system/etc/shims" / name)
    (root / "etc/passwd").write_text("root:x:0:0::/:/system/bin/sh\nshell:x:2000:2000::/:/system/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nshell:x:2000:\n")
    say("making the disk")
    make_disk(folder / "root.ext4", 128, root, journal=False)


def _moved(program: bytes) -> bytes:
    """The program with /rtl for /lib where the loader is named, and where the loader names its own folders."""
    moved = program.replace(f"/lib/{_LOADER}\0".encode(), f"/rtl/{_LOADER}\0".encode())
    moved = moved.replace(b"\0/usr/lib/", b"\0/usr/rtl/").replace(b"\0/lib/", b"\0/rtl/")
    assert len(moved) == len(program)
    return moved


def _toys(debian: Path) -> list[str]:
    """The commands that toybox is."""
    libraries = debian / "usr/lib/aarch64-linux-gnu"
    command = ["qemu-aarch64-static", f"{libraries / _LOADER}", "--library-path", f"{libraries}", f"{debian / 'usr/bin/toybox'}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
