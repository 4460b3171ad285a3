"""The web page of `etfarm serve --web` as an attacker meets it: hostile uploads, and what its process could do for one."""

from __future__ import annotations

import http.client
import io
import json
import os
import ssl
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil
import pytest
import trustme

from tests.support.farm import private_file, serve, wait_until
from tests.support.programs import program
from tests.support.web import Visit, csrf_of

pytestmark = pytest.mark.slow(reason="starts servers with pages")

SECRETS: Final = {
    "ETFARM_TOKEN": "etf_secret-of-the-operator", "PGPASSWORD": "secret", "AWS_SECRET_ACCESS_KEY": "secret",
    "RAY_AUTH_TOKEN": "secret", "HTTPS_PROXY": "http://127.0.0.1:9",
}  # fmt: skip
SECURITY_HEADERS: Final = {"Content-Type": "application/octet-stream"}


UNPRIVILEGED: Final = [
    sys.executable, "-c",
    "import os, sys; from tests.support.unprivileged import become_unprivileged; become_unprivileged(); "
    "os.execv(sys.argv[1], sys.argv[1:])",
]  # fmt: skip


class Served:
    """A server with tokens and its page.

    Args:
        options: further options of the server.
        within: what stands before the server's command and becomes it.
    """

    def __init__(
        self, folder: Path, *options: str, listen: str = "127.0.0.1:0", web: str = "127.0.0.1:0", within: Sequence[str] = ()
    ) -> None:
        self.token = "etf_" + "u" * 32
        tokens = private_file(folder / "tokens", f"ann user {self.token}\n")
        arguments = ["--listen", listen, "--tokens", str(tokens), "--web", web, *options]
        self.daemon = serve(folder, *arguments, environment=SECRETS, within=within, executes=True)

    def __enter__(self) -> Served:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.daemon.stop()

    def start(self) -> Served:
        self.daemon.start()
        self.url = self.daemon.expect("web page at").rpartition(" ")[2].rstrip("/")
        return self

    def page(self) -> psutil.Process:
        """Return the page's process."""
        (reported,) = [each for each in psutil.Process(self.daemon.pid).children() if "web" in each.cmdline()]
        return reported

    def visit(self) -> Visit:
        """Return a visitor who has signed in."""
        visit = Visit(self.url)
        assert visit.sign_in(self.token).status == 303
        return visit


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path) as created:
        yield created


def send_file(visit: Visit, csrf: str, name: str, content: bytes) -> tuple[int, dict[str, str]]:
    """Send a file as the form's script does, and return the status and the answer."""
    connection = http.client.HTTPConnection(urlsplit(visit.url).netloc, timeout=120)
    cookies = "; ".join(f"{key}={value}" for key, value in visit.cookies.items())
    headers = {**SECURITY_HEADERS, "X-CSRF-Token": csrf, "Cookie": cookies, "Origin": visit.url}
    try:
        connection.request("POST", f"/uploads?name={name}", content, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def bomb(size_bytes: int) -> bytes:
    """Return a .pt2 of a thousandth of the size that its graph expands to, of which Python makes ten times as much."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/archive_format", b"pt2")
        archive.writestr("archive/models/model.json", b'{"graph_module": [' + b'{"a":[]},' * (size_bytes // 9) + b"0]}")
    return file.getvalue()


def test_a_bomb_neither_grows_the_page_nor_keeps_others_waiting(served: Served) -> None:
    attacker, other = served.visit(), served.visit()
    csrf = csrf_of(attacker.get("/submit").text)
    page = served.page()
    before = page.memory_info().rss
    answers: list[tuple[int, dict[str, str]]] = []
    content = bomb(100 << 20)
    assert len(content) < 400 << 10
    senders = [threading.Thread(target=lambda: answers.append(send_file(attacker, csrf, "x.pt2", content))) for _ in range(6)]
    for sender in senders:
        sender.start()
    longest_s = 0.0
    largest = before
    while any(sender.is_alive() for sender in senders):
        asked_s = time.monotonic()
        assert other.get("/devices").status == 200
        longest_s = max(longest_s, time.monotonic() - asked_s)
        largest = max(largest, page.memory_info().rss)
    assert [status for status, _ in answers] == [403] * 6
    assert {answer["reason"] for _, answer in answers} == {"UNSAFE_MODEL"}
    assert "is compressed, which torch never does" in answers[0][1]["message"]
    assert largest - before < 64 << 20, largest
    assert longest_s < 10, "bench and issue measure the wait; this is far below the 15 s of a page that parses"


def test_a_file_of_each_format_is_described_and_a_wrong_one_refused(served: Served) -> None:
    visit = served.visit()
    csrf = csrf_of(visit.get("/submit").text)
    assert send_file(visit, csrf, "add.pte", program("add").bytes)[0] == 200
    status, answer = send_file(visit, csrf, "add.pt2", program("add").bytes)
    assert (status, answer["reason"]) == (400, "NOT_A_PT2")
    status, answer = send_file(visit, csrf, "add.pte", b"x" * 100)
    assert (status, answer["reason"]) == (400, "NOT_A_PTE")


def test_the_page_has_nothing_of_the_servers(served: Served) -> None:
    page = served.page()
    environment = dict(line.split("=", 1) for line in Path(f"/proc/{page.pid}/environ").read_text().split("\0") if "=" in line)
    assert not set(environment) & set(SECRETS) and not any("secret" in value for value in environment.values())
    assert set(environment) <= {
        "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "ATEN_CPU_CAPABILITY",
        "HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED",
    }  # fmt: skip
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{page.pid}/status").read_text().splitlines() if ":\t" in line)
    own = set(map(int, status["Uid"].split())) | set(map(int, status["Gid"].split()))
    assert len(own) == 1 and own.isdisjoint({0, os.getuid()}), "a user and a group of its own"
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    allowed_to_read_as_root = 1 << 2  # where others cannot read the installed code; Landlock confines it
    assert int(status["CapEff"], 16) & ~allowed_to_read_as_root == 0
    limits = Path(f"/proc/{page.pid}/limits").read_text()
    assert "Max data size             2147483648           2147483648" in limits
    descriptors = {str(each.readlink()) for each in Path(f"/proc/{page.pid}/fd").iterdir()}
    assert not any("farm.sqlite" in each or "tokens" in each for each in descriptors)


REFUSED: Final = {
    "data", "list data", "tokens", "key", "shadow", "write elsewhere", "write code", "server's environment", "server's memory",
    "trace", "signal", "memory beside its limit", "a port of another program", "a port of its choice",
    "a unix socket of another program", "a datagram to a unix socket",
}  # fmt: skip


@pytest.mark.parametrize("runner", [[], ["tests.support.unprivileged"]], ids=["root", "user"])
def test_a_program_in_the_pages_confinement_reaches_no_secret(tmp_path: Path, runner: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *runner, "tests.support.page_probe", str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **SECRETS},
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported["measures"] == {"user": not runner, "files": True, "privileges": True, "seccomp": True, "memory": True}
    steps: Mapping[str, object] = reported["steps"]
    assert {name for name in REFUSED if steps[name]} == set()
    assert all(steps[name] is True for name in ("own folder", "the farm", "a pair of sockets"))
    assert not set(steps["environment"]) & set(SECRETS)  # type: ignore[call-overload]
    assert (steps["user"] == os.getuid()) is False


def test_a_killed_page_comes_back_at_its_address_and_leaves_no_file(served: Served) -> None:
    visit = served.visit()
    csrf = csrf_of(visit.get("/submit").text)
    assert send_file(visit, csrf, "add.pte", program("add").bytes)[0] == 200
    first = served.page()
    folder = Path(f"/proc/{first.pid}/cwd").resolve()
    assert any(folder.rglob("*.pte"))
    first.kill()
    assert wait_until(lambda: not first.is_running())
    assert Visit(served.url).get("/healthz").status == 200, "connections wait until the page is back"
    assert served.page().pid != first.pid
    assert not folder.exists()
    log = served.daemon.log.read_text()
    assert log.count("the web page ended and starts again") == 1 and "exit_code=-9" in log


def test_a_killed_server_leaves_no_page_and_the_next_one_removes_its_files(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        page = served.page()
        folder = Path(f"/proc/{page.pid}/cwd").resolve()
        served.daemon.kill9()
        page.wait(timeout=60)
        assert folder.exists()
        served.start()
        assert not folder.exists()
        assert served.visit().get("/devices").status == 200


@pytest.mark.parametrize("within", [[], UNPRIVILEGED], ids=["root", "user"])
def test_a_page_by_https_serves_a_renewed_certificate_without_a_key_it_could_open(tmp_path: Path, within: list[str]) -> None:
    authority = trustme.CA()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue() -> bytes:
        identity = authority.issue_cert("127.0.0.1")
        identity.private_key_pem.write_to_path(tmp_path / "new")
        (tmp_path / "new").replace(key)
        identity.cert_chain_pems[0].write_to_path(cert)
        key.chmod(0o600)
        return ssl.PEM_cert_to_DER_cert(cert.read_text())

    def shown(port: int) -> bytes:
        try:
            return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=60))
        except (OSError, ssl.SSLError):
            return b""

    first = issue()
    # An address that etfarm does not know to be this machine's own, so that the page serves TLS.
    with Served(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key), web="127.1:0", within=within) as served:
        port = urlsplit(served.url).port
        assert port is not None and served.url.startswith("https://")
        assert shown(port) == first
        arguments = served.page().cmdline()
        assert not any(str(tmp_path) in each for each in arguments), "neither the key's path nor another one of the server's"
        context = ssl.create_default_context()
        authority.configure_trust(context)
        visit = Visit(f"https://127.0.0.1:{port}", context=context)
        assert visit.sign_in(served.token).status == 303, "the page reaches the server by its certificate"
        second = issue()
        assert wait_until(lambda: shown(port) == second)
        visit = Visit(f"https://127.0.0.1:{port}", context=context)
        assert visit.sign_in(served.token).status == 303


def test_a_page_reaches_a_server_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Served(tmp_path, listen=f"unix:{path}") as served:
        assert served.visit().get("/devices").status == 200
        assert path.stat().st_mode & 0o007 == 0, "still closed to all other users"


def test_the_check_names_what_the_host_does_not_allow(tmp_path: Path) -> None:
    command = ["serve", "--check", "--json", "--data", str(tmp_path / "data"), "--web", "127.0.0.1:0"]
    for prefix, active in (([], True), (["tests.support.unprivileged"], False)):
        done = subprocess.run(
            [sys.executable, "-m", *prefix, "etfarm.wire.command", *command], capture_output=True, text=True, check=False,
            timeout=120, cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        rows = {row["name"]: row for row in json.loads(done.stdout)["web_page"]}
        assert set(rows) == {"user", "files", "privileges", "seccomp", "memory"}, done.stderr
        assert rows["user"]["active"] is active
        assert active or rows["user"]["detail"] == "the server is not root"
