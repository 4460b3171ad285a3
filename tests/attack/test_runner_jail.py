"""A hostile program on a device: native attack code in the runner of a real agent."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from etfarm.client import Farm
from etfarm.device_agents.daemon.systemd import unit
from etfarm.device_agents.jail.confine import Jail, JailIncomplete, Measures, python_programs
from etfarm.device_agents.jail.options import JailOptions
from etfarm.device_agents.runners.bundle import CONFINE, unpack
from etfarm.device_agents.runners.child import LocalChild, spawn_here
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.wire import tensors
from etfarm.wire.sandbox import landlock, launch, seccomp
from tests.support.emulation import need_compiler, need_emulator
from tests.support.farm import Daemon, FarmProcess, wait_until
from tests.support.faults import faulty_archive, faulty_program
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="hostile programs run in the jail of real agents")

HOSTILE = Path(__file__).parents[1] / "support" / "hostile.cpp"
BY_LANDLOCK = {
    "command line", "processes", "world-readable file", "world-writable folder", "accounts", "tmp", "var tmp", "shared memory",
    "exec",
}  # fmt: skip
"""What nothing else keeps a runner from that has a user of its own."""
OF_PROCESSES = {
    "ptrace", "process_vm_readv", "link", "symlink", "folder", "fifo", "program mode", "bundle move", "inet", "udp", "unix",
    "netlink", "socketpair", "io_uring", "user namespace", "mount", "chroot", "limits of the agent", "priority of the agent",
    "outliving the agent", "fork", "spawn", "signal of the agent", "signal to all", "exec",
}  # fmt: skip
"""What is left to a runner that can only confine itself: no files are hidden."""
TOKEN = "s3cret-of-the-agent"
AGENT_USER = 61234
"""Without an account, and none of those that runners get."""

needs_seccomp = pytest.mark.skipif(not seccomp.is_available(), reason="this kernel has no seccomp filters")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="runners get users of their own where the agent is root")


@contextmanager
def hostile_farm(folder: Path, *arguments: str, archive: Path, agent: bool = True) -> Iterator[FarmProcess]:
    """A real farm whose runner has the hostile kernels; beside the agent's data folder lie a token and files of others."""
    folder.mkdir(exist_ok=True)
    with FarmProcess(folder, bundle=False, executes=True) as farm:
        farm.start(agents=0)
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        (folder / "open").mkdir(mode=0o777)
        (folder / "open").chmod(0o777)
        (folder / "open" / "readme").write_text("of somebody else")
        if agent:
            values = ("--idle-wait", "0", "--cool-down", "0", "--require-jail", *arguments)
            farm.add_agent(*values, bare=True, environment={"ETFARM_TOKEN": TOKEN})
        with farm.client() as client:
            client.add_bundle(archive)
        yield farm


def hostile_program(folder: Path, kernel: str) -> Path:
    """Return a file of the program `add` with a kernel of hostile.cpp."""
    path = folder / f"{kernel}.pte"
    path.write_bytes(faulty_program(kernel))
    return path


@contextmanager
def listener() -> Iterator[int]:
    """A port on loopback to which no connection may have been made at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening.getsockname()[1]
        with pytest.raises(BlockingIOError):
            listening.accept()


def pry(client: Farm, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the outcome of each attack and of each permitted operation, by name, as the program reports it."""
    with listener() as port:
        first = np.zeros((2, 3), np.float32)
        first[0, 0] = port
        job = client.run(hostile_program(folder, "pry"), inputs={"0": first, "1": np.ones((2, 3), np.float32)})
        (report,) = job.result().reports
        lines = [line.text for line in job.logs()]
    assert report.state == "SUCCEEDED" and any("probes are over" in line for line in lines), (report.failure, lines)
    text = "\n".join(lines)
    reported = {kind: dict(re.findall(rf"{kind} ([^:]+): (.*)", text)) for kind in ("probe", "need")}
    return reported["probe"], reported["need"]


def require_contained(probes: dict[str, str], needs: dict[str, str], *, own_user: bool) -> None:
    """Fail with the names of attacks that got through."""
    assert len(probes) >= 50 and len(needs) >= 10, (probes, needs)
    excused = set[str]() if landlock.abi() else BY_LANDLOCK
    assert own_user or landlock.abi(), "without both nothing is promised"
    reached = {name for name, what in probes.items() if what == "REACHED"} - excused
    assert not reached, sorted(reached)
    assert set(needs.values()) == {"works"}, needs


def of_runners() -> list[int]:
    """Processes of the users that runners get."""
    users = JailOptions().users
    result = []
    for process in psutil.process_iter():
        try:
            if process.uids().real in users and process.status() != psutil.STATUS_ZOMBIE:
                result.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def farm(folder: Path) -> Iterator[FarmProcess]:
    with hostile_farm(folder, archive=faulty_archive(HOSTILE)) as running:
        yield running


@needs_seccomp
@needs_root
def test_a_hostile_program_is_contained_and_the_agent_survives(farm: FarmProcess, tmp_path: Path) -> None:
    agent = psutil.Process(farm.agents[0].pid)
    with farm.client() as client:
        require_contained(*pry(client, tmp_path), own_user=True)
        # The same device runs the next program.
        report = client.run(program("add").path).result().report
    assert report.state == "SUCCEEDED" and agent.is_running()
    assert "runners are confined by" in farm.agents[0].log.read_text()


@needs_seccomp
@needs_root
def test_a_program_that_forks_leaves_no_processes(farm: FarmProcess, tmp_path: Path) -> None:
    with farm.client() as client:
        job = client.run(hostile_program(tmp_path, "hid"), timeout_s=5)
        (report,) = job.result().reports
        assert report.failure is not None and report.failure.reason == "PROGRAM_TIMED_OUT", report.failure
        assert any("probe daemon: refused" in line.text for line in job.logs())
        assert client.run(program("add").path).result().report.state == "SUCCEEDED"
    assert wait_until(lambda: not of_runners()), of_runners()


@needs_seccomp
@needs_root
def test_a_hostile_program_in_the_emulator_is_contained(tmp_path: Path) -> None:
    need_emulator()
    need_compiler()
    archive = faulty_archive(HOSTILE, "aarch64")
    with hostile_farm(tmp_path / "farm", "--emulate", "aarch64", archive=archive) as farm, farm.client() as client:
        require_contained(*pry(client, tmp_path), own_user=True)
        assert client.run(program("add").path).result().report.state == "SUCCEEDED"


needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv: apt-get install util-linux")


def add_agent(farm: FarmProcess, folder: Path, *within: str) -> Path:
    """Return a connected agent behind a command that takes rights from it; its data folder."""
    data = folder / "agent-0"
    agent = Daemon(
        ["agent", "--server", farm.address, "--data", str(data), "--exit-with-stdin", "--idle-wait", "0", "--cool-down", "0"],
        folder / "agent-0.log",
        {"ETFARM_TOKEN": TOKEN},
        within,
    )
    farm.agents.append(agent)
    agent.start()
    agent.expect("connected to")
    return data


@needs_seccomp
@needs_root
@needs_setpriv
@pytest.mark.skipif(not landlock.abi(), reason="without a user of its own a program is kept from files by Landlock")
def test_a_hostile_program_of_an_unprivileged_agent_is_contained(tmp_path: Path) -> None:
    folder = tmp_path / "farm"
    # The capability is for this checkout's Python, which may lie where only root looks. Its runners have none.
    user = [f"--reuid={AGENT_USER}", f"--regid={AGENT_USER}", "--clear-groups"]
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    with hostile_farm(folder, archive=faulty_archive(HOSTILE), agent=False) as farm, farm.client() as client:
        (folder / "agent-0").mkdir()
        for path in (folder / "agent-0", folder / "token"):
            os.chown(path, AGENT_USER, AGENT_USER)
        add_agent(farm, folder, "setpriv", *user, *reading)
        require_contained(*pry(client, tmp_path), own_user=False)
        assert client.run(program("add").path).result().report.state == "SUCCEEDED"


@needs_seccomp
@needs_root
@needs_setpriv
def test_the_systemd_units_rights_suffice_to_confine_and_clean_up(tmp_path: Path) -> None:
    folder = tmp_path / "farm"
    granted = re.findall(r"CapabilityBoundingSet=(.*)", unit(["--server", "h:1"], program=["/bin/true"]))[0].split()
    bounding = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in granted)])
    umask = ["sh", "-c", 'umask 077; exec "$@"', "sh"]
    with hostile_farm(folder, archive=faulty_archive(HOSTILE), agent=False) as farm, farm.client() as client:
        data = add_agent(farm, folder, *umask, "setpriv", f"--bounding-set={bounding}", "--no-new-privs")
        require_contained(*pry(client, tmp_path), own_user=True)
        assert client.bench(program("conv").path, iterations=5, min_time_s=0.0).result().report.state == "SUCCEEDED"
        (report,) = client.run(hostile_program(tmp_path, "hid"), timeout_s=5).result().reports
        assert report.failure is not None and report.failure.reason == "PROGRAM_TIMED_OUT"
        assert wait_until(lambda: not of_runners()) and wait_until(lambda: not list(data.glob("runs/*")))


PROBE = """
import ctypes, errno, json, os, socket, sys
agent, port, data, other = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
def sends():
    with socket.create_connection(("127.0.0.1", port), 5): pass
def forks():
    if os.fork() == 0: os._exit(0)
attacks = {
    "environ": lambda: open(f"/proc/{agent}/environ", "rb").read(),
    "memory": lambda: open(f"/proc/{agent}/mem", "rb"),
    "signal": lambda: os.kill(agent, 0),
    "secret": lambda: open(f"{data}/secret").read(),
    "change": lambda: open(f"{data}/secret", "w"),
    "listing": lambda: os.listdir(data),
    "elsewhere": lambda: open(other, "x"),
    "inet": sends,
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "fork": forks,
    "setuid": lambda: os.setuid(0) or (os.getuid() == 0 and None),
    "own code": lambda: open(json.__file__, "r+"),
}
reached = []
for name, attack in attacks.items():
    try:
        attack()
        reached.append(name)
    except OSError:
        pass
open("mine", "w").write("x")
print(json.dumps(reached))
"""


@needs_seccomp
@needs_root
async def test_code_in_the_python_child_is_contained(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "data" / "run"
    folder.mkdir(parents=True)
    data.chmod(0o700)
    (data / "secret").write_text("s3cret")
    jail = Jail(JailOptions(required=True))
    measures = await jail.measures()
    with listener() as port, jail.box(folder) as box:
        arguments = [str(os.getpid()), str(port), str(data), str(tmp_path / "made")]
        child = await jail.spawn(box, python_programs())([sys.executable, "-P", "-c", PROBE, *arguments], folder)
        text, errors = await child.stdout.read(), await child.stderr.read()
        assert await child.wait() == 0, errors
    excused = set[str]() if "landlock" in measures.active else {"elsewhere"}
    assert set(json.loads(text)) <= excused and (folder / "mine").exists()


@needs_seccomp
@needs_root
async def test_a_self_confined_runner_blocks_processes_and_the_network(tmp_path: Path) -> None:
    """As on a phone: no user of its own, and a kernel without Landlock."""
    bundle = unpack(faulty_archive(HOSTILE), tmp_path / "bundle")
    lines: list[str] = []
    without_landlock = struct.pack(
        "HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, landlock.CREATE_RULESET, 0x06, 0, 0, 0x50000 | errno.ENOSYS, 0x06, 0, 0, 0x7FFF0000
    )

    async def spawn(command: Sequence[str], folder: Path) -> LocalChild:
        child = await spawn_here(launch.command(), folder)
        specification = {
            "argv": list(command), "env": {}, "folder": str(folder), "parent": os.getpid(), "user": None,
            "reads_as_root": False, "rules": None, "filters": [without_landlock], "limits": [], "required": [launch.SECCOMP],
            "probe": False,
        }  # fmt: skip
        child.stdin.write(launch.encode(specification))
        return child

    command = [*bundle.command(), CONFINE, "--readable", str(tmp_path)]
    assert CONFINE in bundle.manifest.options
    with listener() as port:
        async with NativeRunner.start(command, tmp_path, on_log=lambda line: lines.append(line.message), spawn=spawn) as runner:
            assert (await runner.hello()).confined == ("no-new-privileges", "seccomp")
            await runner.threads(2)
            await runner.load(hostile_program(tmp_path, "pry"))
            await runner.load_method("forward")
            first = np.zeros((2, 3), np.float32)
            first[0, 0] = port
            await runner.set_inputs([tensors.from_array("0", first), tensors.from_array("1", np.ones((2, 3), np.float32))])
            await runner.run()
            await runner.memory()
    reported = dict(re.findall(r"probe ([^:]+): (.*)", "\n".join(lines)))
    assert set(reported) >= OF_PROCESSES, OF_PROCESSES - set(reported)
    assert not {name for name in OF_PROCESSES if reported[name] == "REACHED"}


async def test_a_runner_is_not_started_where_it_cannot_be_confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine without a table of its system calls.
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(JailIncomplete, match="seccomp is not available") as refused:
        await Jail(JailOptions(required=True)).measures()
    assert "--require-jail" in refused.value.remedy
    relaxed = await Jail(JailOptions()).measures()
    assert not relaxed.is_complete and relaxed.active, relaxed


@needs_root
async def test_a_confined_runner_never_keeps_the_agents_user(tmp_path: Path) -> None:
    """As on a kernel without Landlock, with an interpreter in somebody's home."""
    home, folder = tmp_path / "home", tmp_path / "run"
    home.mkdir(mode=0o700)
    folder.mkdir()
    measures = Measures(frozenset({launch.USER, launch.SECCOMP, launch.PRIVILEGES, launch.CAPABILITIES}))
    jail = Jail(JailOptions(required=True), measures)
    assert (await jail.measures()).is_complete
    with jail.box(folder) as box, pytest.raises(JailIncomplete, match="agent's user") as refused:
        await jail.spawn(box, [home])([sys.executable, "-c", "print(open('/etc/shadow'))"], folder)
    assert str(home) in refused.value.message


def test_the_agents_token_is_in_no_environment(farm: FarmProcess) -> None:
    agent = farm.agents[0]
    assert TOKEN.encode() not in Path(f"/proc/{agent.pid}/environ").read_bytes()
    for child in psutil.Process(agent.pid).children(recursive=True):
        assert TOKEN.encode() not in Path(f"/proc/{child.pid}/environ").read_bytes()
    data = farm.folder / "agent-0"
    for private in (data, data / "cache"):
        assert private.stat().st_mode & 0o777 == 0o700
