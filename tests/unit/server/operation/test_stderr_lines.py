"""The lines of others than the log on stderr, as JSON: they arrive, and a stderr that fails stops nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os
from etfarm.server.operation import stderr_lines

before = len(os.listdir("/proc/self/fd"))
with stderr_lines.as_json() as stream:
    for number in range(4_000):  # more than a pipe takes
        os.write(2, b"line %d of a library that prints much more than it should\\n" % number)
    stream.close()
assert len(os.listdir("/proc/self/fd")) == before
stderr_lines.restore()
print("ended", flush=True)
os.write(2, b"as it is\\n")
"""


def run(stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=stderr)


def test_lines_are_json_until_the_end_of_the_block() -> None:
    out, err = run(subprocess.PIPE).communicate(timeout=60)
    assert out == b"ended\n"
    *lines, last = err.decode().splitlines()
    assert [json.loads(line)["message"].split()[1] for line in lines] == [str(number) for number in range(4_000)]
    assert last == "as it is"


def test_a_stderr_on_a_full_disk_stops_no_thread() -> None:
    with Path("/dev/full").open("wb") as full, run(full.fileno()) as process:
        try:
            assert process.communicate(timeout=60)[0] == b"ended\n"
        finally:
            process.kill()


def test_a_stderr_that_is_busy_gets_all_lines_later() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = run(write)
    os.close(write)
    with os.fdopen(read, "rb") as lines:
        numbers = [json.loads(line)["message"].split()[1] for line in lines if line.startswith(b"{")]
    assert numbers == [str(number) for number in range(4_000)]
    assert process.communicate(timeout=60)[0] == b"ended\n"
