"""Generates the Python code of etfarm.v1 from the .proto files beside it; `--check` says whether it is up to date.

`--release VERSION` records the contract of a release in releases/VERSION.binpb, which later versions must not break.

Runs protoc of a pinned grpcio-tools in a venv of its own, kept in the user's cache folder: code of 1.76 runs on every
protobuf from 6.31 to 7, and is the same byte for byte wherever it is generated.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("etfarm") / "v1"
RELEASES = ROOT / "releases"
TOOLS = ("grpcio-tools==1.76.0", "mypy-protobuf==5.1.0", "setuptools<81")


def tools() -> Path:
    """The venv's bin folder with protoc and mypy-protobuf, made on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etfarm"
    folder = cache / "-".join(["protoc", *TOOLS[:2]]).replace("==", "-")
    if not (folder / "complete").exists():
        print(f"installing {', '.join(TOOLS[:2])} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *TOOLS], check=True)
        (folder / "complete").touch()
    return folder / "bin"


def generate(out: Path) -> None:
    """Writes the generated modules under `out`/etfarm/v1."""
    protoc(f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}")


def record(version: str) -> Path:
    """Writes the descriptor set of the .proto files, imports included, as that of a release."""
    RELEASES.mkdir(exist_ok=True)
    path = RELEASES / f"{version}.binpb"
    protoc("--include_imports", f"--descriptor_set_out={path}")
    return path


def protoc(*outputs: str) -> None:
    """Runs protoc on all .proto files."""
    binaries = tools()
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).glob("*.proto"))
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(binaries / "python"), "-m", "grpc_tools.protoc", "-I.", *outputs, *protos]
    subprocess.run(command, cwd=ROOT, check=True, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 if the committed code is not what would be generated",
    )
    parser.add_argument("--release", metavar="VERSION", help="only write releases/VERSION.binpb, the contract of a release")
    arguments = parser.parse_args()
    if arguments.release:
        print(record(arguments.release))
        return 0
    committed = ROOT / PACKAGE
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / PACKAGE
        names = {
            path.name for pattern in ("*_pb2*.py", "*_pb2*.pyi") for where in (fresh, committed) for path in where.glob(pattern)
        }
        differing = sorted(
            name
            for name in names
            if not (fresh / name).exists()
            or not (committed / name).exists()
            or not filecmp.cmp(fresh / name, committed / name, shallow=False)
        )
        if arguments.check:
            if differing:
                print(f"not up to date: {', '.join(differing)}. Run `python proto/generate.py`.", file=sys.stderr)
            return 1 if differing else 0
        for name in differing:
            if (fresh / name).exists():
                shutil.copyfile(fresh / name, committed / name)
            else:
                (committed / name).unlink()
        print(f"{len(differing)} of {len(names)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
