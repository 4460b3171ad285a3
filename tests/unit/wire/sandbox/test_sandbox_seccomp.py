"""The system call filter, installed in a real process: every denied call fails, and what libraries need still works."""

from __future__ import annotations

import errno
import json
import platform
import signal
import struct
import subprocess
import sys

import pytest

from etfarm.wire.sandbox import seccomp

PRELUDE = """
import ctypes, errno, json, os, platform, socket, subprocess, sys, threading
from etfarm.wire.sandbox import seccomp, syscalls
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
    return 0 if result >= 0 else ctypes.get_errno()

syscalls.forbid_new_privileges()
"""


def run(body: str, *, expect: int = 0) -> str:
    done = subprocess.run([sys.executable, "-c", PRELUDE + body], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == expect, done.stderr
    return done.stdout


def test_every_denied_call_fails_with_its_errno() -> None:
    outcome = json.loads(
        run("""
policy = seccomp.Policy()
seccomp.install(policy)
column = list(seccomp.ARCHITECTURES).index(platform.machine())
# -1 is no descriptor, no address and no flag that any of them takes, and all-ones asks personality and clone for the refused.
ones = (-1,) * 6
print(json.dumps({
    name: call(number, *((0xFFFFFFFE,) if name == "personality" else ones))
    for name in policy.denied if (number := seccomp.NUMBERS[name][column]) is not None
}))
""")
    )
    column = list(seccomp.ARCHITECTURES).index(platform.machine())
    assert outcome == {name: error for name, error in seccomp.DENIED.items() if seccomp.NUMBERS[name][column] is not None}


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_VSOCK", "AF_PACKET", "AF_ALG"])
def test_a_socket_of_no_family_can_be_made(family: str) -> None:
    assert (
        run(f"""
seccomp.install(seccomp.Policy())
try:
    socket.socket(socket.{family}, socket.SOCK_STREAM)
except PermissionError:
    print("refused")
""")
        == "refused\n"
    )


def test_a_policy_may_allow_unix_socket_pairs_alone() -> None:
    outcome = run("""
seccomp.install(seccomp.Policy(allow_unix_socketpair=True))
one, other = socket.socketpair()
one.send(b"x")
print(other.recv(1))
try:
    socket.socket(socket.AF_UNIX)
except PermissionError:
    print("refused")
""")
    assert outcome.split() == ["b'x'", "refused"]


@pytest.mark.parametrize("flag", ["CLONE_NEWUSER", "CLONE_NEWNS", "CLONE_NEWPID", "CLONE_NEWNET", "CLONE_NEWUTS", "CLONE_NEWIPC"])
def test_clone_makes_no_namespace(flag: str) -> None:
    assert (
        run(f"""
seccomp.install(seccomp.Policy())
number = seccomp.NUMBERS["clone"][list(seccomp.ARCHITECTURES).index(platform.machine())]
error = call(number, syscalls.{flag} | 17, 0, 0, 0, 0)
print(errno.errorcode[error])
""")
        == "EPERM\n"
    )


def test_forks_threads_and_subprocesses_still_work_and_inherit_the_filter() -> None:
    outcome = run("""
seccomp.install(seccomp.Policy())
thread = threading.Thread(target=lambda: print("thread", flush=True))
thread.start()
thread.join()
print(subprocess.run(["sh", "-c", "echo subprocess"], capture_output=True, text=True, check=True).stdout.strip(), flush=True)
child = os.fork()
if child == 0:
    try:
        socket.socket()
    except PermissionError:
        print("refused in a child", flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert outcome.splitlines() == ["thread", "subprocess", "refused in a child", "0"]


def test_a_policy_can_refuse_more() -> None:
    assert (
        run("""
seccomp.install(seccomp.Policy().with_denied("execve", "execveat"))
try:
    os.execv("/bin/true", ["true"])
except PermissionError:
    print("refused")
""")
        == "refused\n"
    )


def test_numbers_above_the_table_and_those_of_x32_do_not_exist() -> None:
    outcome = run("""
seccomp.install(seccomp.Policy())
print(call(seccomp.HIGHEST_KNOWN + 1), call(0x40000000 + 39))
""")
    assert outcome.split() == [str(errno.ENOSYS)] * 2


@pytest.mark.skipif(platform.machine() != "x86_64", reason="int 0x80 is the other ABI of x86_64")
def test_a_call_of_the_32_bit_abi_kills_the_process() -> None:
    run("""
import mmap
seccomp.install(seccomp.Policy())
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, getpid; int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
""", expect=-signal.SIGSYS)  # fmt: skip


@pytest.mark.parametrize("machine", list(seccomp.ARCHITECTURES))
def test_a_filter_jumps_inside_itself_and_ends_in_a_return(machine: str) -> None:
    program = list(struct.iter_unpack("HBBI", seccomp.build(seccomp.Policy(allow_unix_socketpair=True), machine)))
    assert len(program) < 4096  # BPF_MAXINSNS
    assert program[-1][0] == 0x06
    for index, (code, then, otherwise, _) in enumerate(program):
        if code & 0x07 == 0x05:
            assert index + 1 + max(then, otherwise) < len(program)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(seccomp.UnsupportedArchitecture, match="riscv64"):
        seccomp.build(seccomp.Policy(), "riscv64")
