"""One heap for all threads of a process, asked of glibc itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import ctypes, sys, threading
from etfarm.wire.heap import give_memory_back, share_one_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
if sys.argv[1] == "shared":
    share_one_heap()
together = threading.Barrier(4)

def allocate():
    together.wait()
    libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
give_memory_back()
stdout = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, stdout)
libc.fflush(stdout)
"""


@pytest.mark.parametrize("kind", ["shared", "own"])
def test_threads_share_one_heap(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, kind], capture_output=True, text=True, check=True)
    assert (done.stdout.count("<heap ") == 1) == (kind == "shared"), done.stdout


SCATTERED = """
import asyncio, contextlib, ctypes
from pathlib import Path
from etfarm.wire.heap import keep_trimmed, share_one_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
share_one_heap()
parts = [libc.malloc(2000) for _ in range(20_000)]
for part in parts:
    ctypes.memset(part, 1, 2000)
for number, part in enumerate(parts):
    if number % 10:
        libc.free(part)

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

async def main():
    before = resident()
    trimming = asyncio.create_task(keep_trimmed(0.0))
    async with asyncio.timeout(30):
        while before - resident() < 10_000_000:
            await asyncio.sleep(0)
    trimming.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await trimming

asyncio.run(main())
"""


def test_unused_memory_between_used_memory_is_returned() -> None:
    subprocess.run([sys.executable, "-c", SCATTERED], check=True, timeout=60)
