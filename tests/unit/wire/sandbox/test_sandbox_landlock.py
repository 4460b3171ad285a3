"""Landlock by a process of its own, since it is for good: what a rule grants, and what everything else is refused."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from etfarm.wire.sandbox import landlock

pytestmark = pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock")

CONFINED = """
import json, os, socket, sys
from etfarm.wire.sandbox import landlock, syscalls
work, read, other, port = sys.argv[1:]
rules = landlock.Ruleset()
for path, rights in ((work, landlock.WORK), (read, landlock.READ), ("/dev/null", landlock.USE)):
    descriptor = os.open(path, os.O_PATH)
    rules.allow(descriptor, rights, is_folder=os.path.isdir(path))
    os.close(descriptor)
syscalls.forbid_new_privileges()
rules.restrict()
def attempt(step):
    try:
        step()
        return True
    except OSError:
        return False
print(json.dumps({
    "work": attempt(lambda: open(f"{work}/made", "w").write("x")),
    "delete": attempt(lambda: os.unlink(f"{work}/made")),
    "null": attempt(lambda: open("/dev/null", "w").write("x")),
    "read": attempt(lambda: open(f"{read}/file").read()),
    "list": attempt(lambda: os.listdir(read)),
    "write": attempt(lambda: open(f"{read}/file", "r+")),
    "make": attempt(lambda: open(f"{read}/made", "w")),
    "folder": attempt(lambda: os.mkdir(f"{work}/folder")),
    "link": attempt(lambda: os.symlink("/", f"{work}/link")),
    "run": attempt(lambda: os.execv(f"{read}/file", ["file"])),
    "other": attempt(lambda: open(f"{other}/file").read()),
    "parent": attempt(lambda: os.listdir(os.path.dirname(work))),
    "tcp": attempt(lambda: socket.create_connection(("127.0.0.1", int(port)), 5).close()),
}))
"""


def test_a_ruleset_refuses_what_no_rule_allows(tmp_path: Path) -> None:
    for name in ("work", "read", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("#!/bin/true\n")
        (tmp_path / name / "file").chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        arguments = [str(tmp_path / name) for name in ("work", "read", "other")] + [str(listening.getsockname()[1])]
        done = subprocess.run([sys.executable, "-c", CONFINED, *arguments], capture_output=True, text=True, check=True)
    reported = json.loads(done.stdout)
    granted = {"work", "delete", "null", "read", "list"} | ({"tcp"} if landlock.abi() < 4 else set())
    assert {name for name, works in reported.items() if works} == granted
