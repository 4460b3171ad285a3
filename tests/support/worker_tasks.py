"""Tasks that the tests of the workers run in children. Each says what it does to its host."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from etfarm.server.reports.analyze import analyze
from etfarm.server.reports.request import CUT_SHORT, AnalyzeRequest
from etfarm.server.reports.trace import etdump
from etfarm.server.workers import limits
from etfarm.v1 import report_pb2
from etfarm.wire.errors import UserError

Emit = Callable[[bytes], None]


class TooTall(UserError):
    """A refusal of this module, which the daemon does not know."""

    reason = "TOO_TALL"


def echo(request: object, folder: Path, emit: Emit) -> bytes:
    emit(b'{"stage": "ONE", "phase": "START"}')
    (folder / "file.txt").write_text("kept")
    return repr(request).encode()


def analyze_in_too_little_time(request: AnalyzeRequest, folder: Path, emit: Emit) -> bytes:
    """Analyze, and say that there was no time for a part."""
    report = report_pb2.Report.FromString(analyze(request, folder, emit))
    report.compile.warnings.add(code=CUT_SHORT, message="It ended after 1 s.")
    return report.SerializeToString()


def refuse(request: object, folder: Path, emit: Emit) -> bytes:
    raise TooTall(f"It is 3 m tall, says {folder}/x.", "Cut it.", stage="MEASURE", height_m=3)


def fill(request: object, folder: Path, emit: Emit) -> bytes:
    Path("/dev/full").write_bytes(b"x")
    return b""


def refuse_at_length(request: object, folder: Path, emit: Emit) -> bytes:
    raise UserError("No." * 10_000, **{f"{number}{'key' * 100}": "v" * 10_000 for number in range(1000)})


def stumble(request: object, folder: Path, emit: Emit) -> bytes:
    raise KeyError("an unforeseen key")


def crash(request: object, folder: Path, emit: Emit) -> bytes:
    emit(b'{"stage": "TO_EXECUTORCH", "phase": "START"}')
    print("last words", flush=True)
    os.kill(os.getpid(), int(str(request)))
    time.sleep(60)
    return b""


def eat(request: object, folder: Path, emit: Emit) -> bytes:
    emit(b'{"stage": "QUANTIZE", "phase": "START"}')
    hoard = [bytearray(64 << 20) for _ in range(64)]
    return str(len(hoard)).encode()


def talk(request: object, folder: Path, emit: Emit) -> bytes:
    print("from Python")
    sys.stderr.write("from stderr\n")
    libc = ctypes.CDLL(None)
    libc.puts(b"from C")
    libc.fflush(None)
    os.write(1, b"from a raw write\n")
    subprocess.run(["sh", "-c", "echo from a subprocess"], check=True)
    return b""


def look_around(request: object, folder: Path, emit: Emit) -> bytes:
    """Report where the child is, and the environments that it can read."""
    outcome = {"environment": json.dumps(dict(os.environ)), "cwd": str(Path.cwd()), "folder": str(folder)}
    outcome["forkserver_environment"] = Path("/proc/self/environ").read_bytes().decode()
    return json.dumps(outcome).encode()


def linger(request: object, folder: Path, emit: Emit) -> bytes:
    """Start a grandchild in a session of its own, emit an event, and wait forever."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    emit(b'{"event": "lingers"}')
    signal.pause()
    return b""


def leave_behind(request: object, folder: Path, emit: Emit) -> bytes:
    """End well, but leave a process in a session of its own: a sleep of `request` seconds."""
    left = subprocess.Popen(["sleep", str(request)], start_new_session=True)
    return b"running" if left.poll() is None else b"ended"


def spin(request: object, folder: Path, emit: Emit) -> bytes:
    while True:
        pass


def load_for_ever(request: Path, folder: Path, emit: Emit) -> bytes:
    """Compute a number in native code, which holds the interpreter, while loading a model."""
    limits.LOADING_S = 0.5  # type: ignore[misc]
    with limits.limit_loading(request):
        pow(3, 1 << 40)
    return b""


def parse_for_ever(request: Path, folder: Path, emit: Emit) -> bytes:
    """Compute a number in native code, which holds the interpreter, while parsing a file."""
    limits.PARSING_S = 0.5  # type: ignore[misc]
    with limits.limit_parsing(request):
        pow(3, 1 << 40)
    return b""


def parse_trace(request: Path, folder: Path, emit: Emit) -> bytes:
    """Parse a trace within the time of `parse_for_ever`, and return the number of its calls."""
    limits.PARSING_S = 0.5  # type: ignore[misc]
    with limits.limit_parsing(request):
        return str(len(etdump.read(request.read_bytes()).calls)).encode()


def analyze_within_a_second(request: AnalyzeRequest, folder: Path, emit: Emit) -> bytes:
    """Analyze; parsing a trace may take one second of CPU time, and no more for a large file."""
    limits.PARSING_S, limits.PARSING_S_PER_GIB = 1.0, 0.0  # type: ignore[misc]
    return analyze(request, folder, emit)


def load_in_time(request: Path, folder: Path, emit: Emit) -> bytes:
    """Load a model within its time, and take longer afterwards."""
    limits.LOADING_S = 1.0  # type: ignore[misc]
    with limits.limit_loading(request):
        pass
    while time.process_time() < 2:
        pass
    return b"done"


def flood(request: object, folder: Path, emit: Emit) -> bytes:
    """Report more than a megabyte on one line, and bytes that are no UTF-8."""
    os.write(1, b"x" * 1_000_000 + b"\n")
    os.write(2, b"\xff\xfe\n")
    return b"done"


def hang_in_the_second_stage(request: object, folder: Path, emit: Emit) -> bytes:
    emit(b'{"stage": "FIRST", "phase": "START"}')
    emit(b'{"stage": "FIRST", "phase": "END"}')
    emit(b'{"stage": "SECOND", "phase": "START"}')
    signal.pause()
    return b""


def many_stages(request: object, folder: Path, emit: Emit) -> bytes:
    """So many stages, each of 0.05 s of CPU time."""
    for number in range(int(str(request))):
        emit(json.dumps({"stage": f"S{number}", "phase": "START"}).encode())
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
    return b""


def read_files(request: dict[str, Path], folder: Path, emit: Emit) -> bytes:
    """Return the texts of the request's files, None for those that do not exist, and leave a file."""
    emit(b'{"stage": "ONE", "phase": "START"}')
    (folder / "file.txt").write_text("kept")
    return json.dumps({name: path.read_text() if path.exists() else None for name, path in request.items()}).encode()


def copy_file(request: Path, folder: Path, emit: Emit) -> bytes:
    (folder / "copy").write_bytes(request.read_bytes())
    return b""


def print_and_wait(request: object, folder: Path, emit: Emit) -> bytes:
    """Print a line, and wait forever."""
    print("while it runs", flush=True)
    signal.pause()
    return b""


def prefix(request: object, folder: Path, emit: Emit) -> bytes:
    return sys.prefix.encode()


def environment(request: object, folder: Path, emit: Emit) -> bytes:
    return json.dumps(dict(os.environ)).encode()
