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
