"""Boards that are added, copied, moved and retired: real agents at a real server, each on a machine that the test makes up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest

from etfarm.client import Farm
from etfarm.client.models import Agent
from etfarm.v1 import audit_pb2, audit_pb2_grpc, common_pb2, token_pb2, token_pb2_grpc
from tests.support.farm import START_S, WAIT_FOR_NOTHING, Daemon, private_file, serve
from tests.support.runner import know_own_runners

pytestmark = pytest.mark.slow(reason="starts a server, and agents on machines with ids of their own")

ADMIN: Final = "token-of-root-0123456789"
AS_ADMIN: Final = [("authorization", f"Bearer {ADMIN}")]
SHARED: Final = "token-of-rack-0123456789"
SCRIPT: Final = """
mount --bind "$1" /etc/machine-id
mount --bind "$2" /proc/sys/kernel/random/boot_id
shift 2
exec "$@"
"""


class Machine:
    """A machine with an id, a boot and a home folder, which a copy of its disk shares except for the boot."""

    def __init__(self, folder: Path, machine_id: str = "") -> None:
        folder.mkdir()
        self.home, self.machine_id, self.boot = folder / "home", folder / "machine-id", folder / "boot"
        self.machine_id.write_text(f"{machine_id or uuid.uuid4().hex}\n")
        self.boot.write_text(f"{uuid.uuid4()}\n")

    @property
    def data(self) -> Path:
        """The default data folder of its agent."""
        return self.home / "etfarm" / "agent"

    def copy(self, folder: Path) -> Machine:
        """Return a machine with a copy of the disk."""
        twin = Machine(folder, self.machine_id.read_text().strip())
        if self.home.exists():
            shutil.copytree(self.home, twin.home)
        return twin


class Yard:
    """A server, and what an admin and machines do with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tokens = private_file(folder / "tokens", f"root admin {ADMIN}\nrack agent {SHARED}\n")
        self.daemon = serve(folder, "--tokens", str(tokens))
        self.daemon.start()
        self.address = self.daemon.expect("listening on").rpartition(" ")[2]
        self.admin = Farm(self.address, token=ADMIN).__enter__()
        self.agents: list[Daemon] = []

    def etfarm(self, *arguments: str, code: int = 0) -> str:
        """Run a command as the admin; return what it printed."""
        environment = dict(os.environ) | {"ETFARM_TOKEN": ADMIN, "ETFARM_SERVER": self.address, "COLUMNS": "140"}
        assert Daemon.template is not None
        done = Daemon.template.run(arguments, self.folder, environment, START_S)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def one_time_token(self, name: str) -> str:
        """Return what `etfarm tokens create NAME --agent` prints."""
        with grpc.insecure_channel(self.address) as channel:
            request = token_pb2.CreateTokenRequest(principal=name, role=common_pb2.ROLE_AGENT, enrolment=True)
            return token_pb2_grpc.TokenServiceStub(channel).Create(request, metadata=AS_ADMIN).secret

    def tokens(self, name: str) -> list[token_pb2.Token]:
        """Return the tokens of a name."""
        with grpc.insecure_channel(self.address) as channel:
            listed = token_pb2_grpc.TokenServiceStub(channel).List(token_pb2.ListTokensRequest(), metadata=AS_ADMIN)
        return [token for token in listed.tokens if token.principal == name]

    def identity(self, agent_id: str) -> Agent:
        """Return an agent of the farm's list."""
        return next(agent for agent in self.admin.agents() if agent.agent_id == agent_id)

    def devices(self) -> set[str]:
        return {device.id for device in self.admin.devices()}

    def agent(self, machine: Machine, token: str = "") -> Daemon:
        """Start an agent of the machine; without a token it uses the one that it keeps."""
        know_own_runners(machine.data)
        within = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", SCRIPT, "sh"]
        agent = Daemon(
            ["agent", "--server", self.address, "--name", machine.home.parent.name, "--exit-with-stdin", *WAIT_FOR_NOTHING],
            self.folder / f"agent-{len(self.agents)}.log",
            {"XDG_DATA_HOME": str(machine.home), "ETFARM_DATA": "", "ETFARM_TOKEN": token},
            [*within, str(machine.machine_id), str(machine.boot)],
        )  # fmt: skip
        self.agents.append(agent)
        agent.start()
        return agent

    def connect(self, machine: Machine, token: str = "") -> tuple[Daemon, str]:
        """Return a connected agent of the machine, and the id of its device."""
        agent = self.agent(machine, token)
        line = agent.expect("connected to")
        matched = re.search(r"\(([0-9a-f]{16})\)$", line)
        assert matched is not None, line
        return agent, matched[1]

    def refused(self, machine: Machine, token: str = "") -> str:
        """Return why the server refuses an agent of the machine, which ends then."""
        agent = self.agent(machine, token)
        assert ends(agent) != 0
        return agent.log.read_text()


def ends(agent: Daemon) -> int:
    """Wait until an agent ends by itself; return its exit code."""
    assert agent.process is not None
    return agent.process.wait(START_S)


def runs(agent: Daemon) -> bool:
    assert agent.process is not None
    return agent.process.poll() is None


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    probe = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("needs user namespaces")
    created = Yard(tmp_path_factory.mktemp("yard"))
    try:
        yield created
    finally:
        created.admin.close()
        assert created.daemon.stop() == 0
        assert "Traceback" not in created.daemon.log.read_text()


@pytest.fixture
def farm(yard: Yard) -> Iterator[Yard]:
    """The server with the agents of one test."""
    yield yard
    for agent in yard.agents:
        if runs(agent):
            agent.stop()


@pytest.fixture
def board(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "board")


def test_a_copied_disk_with_a_new_agent_becomes_a_device_of_its_own(farm: Yard, board: Machine, tmp_path: Path) -> None:
    first, machines_id = farm.connect(board, farm.one_time_token("one"))
    copy = Machine(tmp_path / "copy", board.machine_id.read_text().strip())
    second, own = farm.connect(copy, farm.one_time_token("two"))
    assert own != machines_id
    assert "serves its machine as device" in second.log.read_text()
    assert {machines_id, own} <= farm.devices()
    # Each keeps its id, whichever comes first.
    assert (first.stop(), second.stop()) == (0, 0)
    assert farm.connect(copy)[1] == own
    assert farm.connect(board)[1] == machines_id


def test_a_reinstalled_agent_serves_the_former_device(farm: Yard, board: Machine) -> None:
    agent, former = farm.connect(board, farm.one_time_token("board"))
    assert agent.stop() == 0
    shutil.rmtree(board.home)
    assert farm.connect(board, farm.one_time_token("board"))[1] == former


def test_an_agent_from_before_ids_were_kept_has_its_former_device(farm: Yard, board: Machine) -> None:
    agent, former = farm.connect(board, farm.one_time_token("board"))
    assert agent.stop() == 0
    (board.data / "device_id").unlink()
    assert farm.connect(board)[1] == former


def test_a_device_of_another_token_that_left_is_handed_over_by_an_admin_and_the_one_time_token_stays_usable(
    farm: Yard, board: Machine
) -> None:
    agent, former = farm.connect(board, farm.one_time_token("old-name"))
    assert agent.stop() == 0
    shutil.rmtree(board.home)
    token = farm.one_time_token("new-name")
    why = farm.refused(board, token)
    assert "which is not connected" in why
    remedy = re.search(r"`etfarm (agents bind \S+ new-name)`", why)
    assert remedy is not None, why
    assert [token.agent_id for token in farm.tokens("new-name")] == [""]
    farm.etfarm(*remedy[1].split())
    assert farm.connect(board, token)[1] == former


def test_a_copy_of_a_data_folder_is_refused_and_its_remedy_serves_both(farm: Yard, board: Machine, tmp_path: Path) -> None:
    first, machines_id = farm.connect(board, farm.one_time_token("board"))
    copy = board.copy(tmp_path / "copy")
    (copy.data / "lock").unlink()
    assert "is connected from another machine" in farm.refused(copy)
    # A one-time token does not take the original's place, either.
    token = farm.one_time_token("board")
    assert "is connected from another machine" in farm.refused(copy, token)
    for name in ("agent_id", "device_id", "token"):
        (copy.data / name).unlink()
    assert farm.connect(copy, token)[1] != machines_id
    assert runs(first)


def test_a_copy_of_a_data_folder_on_the_same_machine_is_refused_and_its_remedy_serves_both(
    farm: Yard, board: Machine, tmp_path: Path
) -> None:
    first, machines_id = farm.connect(board, farm.one_time_token("board"))
    copy = board.copy(tmp_path / "copy")
    copy.boot.write_text(board.boot.read_text())
    (copy.data / "lock").unlink()
    why = farm.refused(copy)
    assert "is this one or a copy of it" in why
    for name in re.findall(r"`(\w+)`", why):
        (copy.data / name).unlink()
    assert farm.connect(copy, farm.one_time_token("copy"))[1] != machines_id
    assert runs(first)


def test_a_disk_in_another_machine_serves_the_same_device(farm: Yard, board: Machine, tmp_path: Path) -> None:
    agent, former = farm.connect(board, farm.one_time_token("board"))
    agent.kill9()
    assert farm.connect(board.copy(tmp_path / "new"))[1] == former


def test_a_data_folder_on_another_machine_serves_another_device(farm: Yard, board: Machine, tmp_path: Path) -> None:
    agent, former = farm.connect(board, farm.one_time_token("board"))
    assert agent.stop() == 0
    other = Machine(tmp_path / "other")
    shutil.copytree(board.home, other.home)
    moved, now = farm.connect(other)
    assert now != former and "has moved here" in moved.log.read_text()


def test_an_agent_whose_device_another_one_serves_is_refused_and_its_remedy_serves_both(
    farm: Yard, board: Machine, tmp_path: Path
) -> None:
    agent, machines_id = farm.connect(board, farm.one_time_token("rack"))
    assert agent.stop() == 0
    copy = Machine(tmp_path / "copy", board.machine_id.read_text().strip())
    assert farm.connect(copy, farm.one_time_token("rack"))[1] == machines_id, "the device had left"
    why = farm.refused(board)
    assert f"Device {machines_id} is served by agent" in why and "delete `device_id`" in why
    (board.data / "device_id").unlink()
    assert farm.connect(board)[1] != machines_id


def test_a_retired_board_stays_away_until_it_enrols_again(farm: Yard, board: Machine) -> None:
    agent, device = farm.connect(board, farm.one_time_token("leaver"))
    agent_id = farm.admin.device(device).agent_id
    printed = farm.etfarm("devices", "retire", device)
    own = next(token for token in farm.tokens("leaver") if not token.enrolment)
    assert printed == (
        f"Device board ({device}) is retired; its reports stay.\nToken {own.id} revoked. Agent {agent_id} is refused.\n"
    )
    assert own.HasField("revoke_time") and ends(agent) != 0
    assert device not in farm.devices()
    identity = farm.identity(agent_id)
    assert (identity.retired, identity.connected, identity.device_ids) == (True, False, ())
    for logged in (agent.log.read_text(), farm.refused(board)):
        assert "an admin has retired the board, or revoked the token. To let it serve again, enrol the agent again" in logged
    with grpc.insecure_channel(farm.address) as channel:
        request = audit_pb2.ListAuditEntriesRequest(action="DeviceService.Retire")
        entry = audit_pb2_grpc.AuditServiceStub(channel).List(request, metadata=AS_ADMIN).entries[0]
    assert (entry.outcome, entry.principal, entry.subject) == ("OK", "root", f"{device} {agent_id}")
    assert farm.connect(board, farm.one_time_token("anew"))[1] == device
    identity = farm.identity(agent_id)
    assert (identity.retired, identity.principal) == (False, "anew")


def test_a_retired_board_with_a_shared_token_is_refused_while_the_token_serves_others(
    farm: Yard, board: Machine, tmp_path: Path
) -> None:
    agent, device = farm.connect(board, SHARED)
    other, _ = farm.connect(Machine(tmp_path / "other"), SHARED)
    assert "stays valid for others" in farm.etfarm("devices", "retire", device)
    assert ends(agent) != 0 and runs(other)
    why = farm.refused(board, SHARED)
    remedy = re.search(r"`etfarm (agents bind \S+ rack)`", why)
    assert remedy is not None, why
    farm.etfarm(*remedy[1].split())
    assert farm.connect(board, SHARED)[1] == device


def test_an_offline_board_is_retired_and_its_agent_removed(farm: Yard, board: Machine) -> None:
    agent, device = farm.connect(board, farm.one_time_token("attic"))
    agent_id = farm.admin.device(device).agent_id
    why = farm.etfarm("agents", "remove", "attic", code=2)
    assert agent.stop() == 0
    remedy = re.search(r"Retire it first: `etfarm (devices retire \S+)`", why)
    assert remedy is not None, why
    farm.etfarm(*remedy[1].split())
    assert farm.etfarm("agents", "remove", "attic").startswith(f"Agent {agent_id} is removed.")
    assert agent_id not in {each.agent_id for each in farm.admin.agents()}
    assert "There is no agent 'attic'." in farm.etfarm("agents", "remove", "attic", code=2)
