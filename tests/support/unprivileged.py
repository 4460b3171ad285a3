"""Runs Python code as a user without any right on this machine, although the tests run as root.

Another user could not read an interpreter below root's home. So this process takes a user namespace in which it is an ordinary
user, and gives up every capability: from then on the kernel and etfarm treat it as they treat any user.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from etfarm.wire.sandbox import syscalls

USER = 4711


def become_unprivileged() -> None:
    """Become an ordinary user for good."""
    user, group = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{USER} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{USER} {group} 1")
    syscalls.drop_capabilities()
    assert os.geteuid() == USER


if __name__ == "__main__":
    become_unprivileged()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")
