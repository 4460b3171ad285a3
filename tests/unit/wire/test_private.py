"""Folders that are closed to other users, and files with secrets that others may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from etfarm.server.arguments import parser
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.notices.settings import NoticeSettings
from etfarm.server.operation import settings
from etfarm.server.rpc.door import token_file
from etfarm.wire.errors import UserError
from etfarm.wire.private import FolderNotPrivate, close_umask, find_openness, make_private, read_secret
from etfarm.wire.tls import read_identity
from tests.support.refusals import refuses

OTHER = 4712


def read_tokens(folder: Path) -> Path:
    (folder / "secret").write_text(f"ann admin {'a' * 24}\n")
    return folder / "secret"


def read_key(folder: Path) -> Path:
    identity = trustme.CA().issue_cert("farm.example")
    identity.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    identity.private_key_pem.write_to_path(folder / "secret")
    return folder / "secret"


def read_credentials(folder: Path) -> Path:
    (folder / "secret").write_text("access secret\n")
    return folder / "secret"


def read_webhook_secret(folder: Path) -> Path:
    (folder / "secret").write_text("s" * 40 + "\nnot read\n")
    return folder / "secret"


def read_configuration(folder: Path) -> Path:
    (folder / "secret").write_text('database = "postgresql://farm:hidden@db/farm"\n')
    return folder / "secret"


READERS: dict[Callable[[Path], Path], tuple[str, Callable[[Path], object]]] = {
    read_tokens: ("BAD_TOKEN_FILE", token_file.read_tokens),
    read_key: ("BAD_TLS_FILE", lambda path: read_identity(path.with_name("cert.pem"), path)),
    read_credentials: ("BAD_BLOBS", lambda path: BucketLocation.of("s3://bucket/farm", {}, credentials=path)),
    read_webhook_secret: (
        "BAD_WEBHOOK",
        lambda path: NoticeSettings.of(
            ["https://hooks.example/x"], [path], [], only_listed=False, authorities=None, offline_after_s=1.0
        ),
    ),
    read_configuration: ("BAD_SETTING", lambda path: settings.parse(parser(), ["--config", str(path)], {})),
}  # fmt: skip


@pytest.mark.parametrize("create", READERS)
def test_every_file_with_a_secret_follows_one_rule(
    tmp_path: Path, create: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, read = READERS[create]
    path = create(tmp_path)
    path.chmod(0o600)
    read(path)
    link = tmp_path / "link"  # as a container's secrets have them
    link.symlink_to(path)
    read(link)
    for mode in (0o604, 0o640, 0o620, 0o602):
        path.chmod(mode)
        for each in (path, link):
            with refuses(reason, match=f"The file {each} has a secret, and other users may .* `chmod 600 {each}`"):
                read(each)
    path.chmod(0o600)
    os.chown(path, OTHER, OTHER)
    if create is read_configuration:
        read(path)  # root may prepare a unit, or a check, for the server's user
        monkeypatch.setattr(os, "geteuid", lambda: OTHER + 1)
    with refuses(reason, match=f"belongs to user {OTHER}.*chown {os.geteuid()} {path}"):
        read(path)


def test_a_configuration_without_secrets_may_be_open(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    path.write_text('listen = "127.0.0.1:0"\ndatabase = "postgresql://farm@db/farm?passfile=/etc/farm.pass"\nworkers = 2\n')
    path.chmod(0o644)
    settings.parse(parser(), ["--config", str(path)], {})


def test_a_group_may_read_what_root_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text("secret")
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)  # the file is root's
    path.chmod(0o640)
    assert read_secret(path, UserError) == b"secret"
    path.chmod(0o644)
    with pytest.raises(UserError, match=f"chown {OTHER} {path} && chmod 600 {path}"):
        read_secret(path, UserError)


@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_command_that_a_test_calls_changes_no_other_tests_umask(tmp_path: Path, own_umask: int, turn: str) -> None:
    (tmp_path / turn).touch(0o666)
    assert (tmp_path / turn).stat().st_mode & 0o777 == 0o666 & ~own_umask
    close_umask()


def test_a_folder_is_created_closed_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert find_openness(tmp_path / "a" / "b") is None and find_openness(tmp_path / "none") is None


def test_an_interrupted_repair_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, inner = tmp_path / "data", tmp_path / "data" / "a" / "b"
    inner.mkdir(parents=True)
    for path in (folder, inner.parent, inner):
        path.chmod(0o755)
    change = os.fchmod

    def interrupted(descriptor: int, mode: int) -> None:
        change(descriptor, mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fchmod", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_private(folder)
    assert find_openness(folder) is not None  # so that the next start looks inside again
    monkeypatch.undo()
    make_private(folder)
    assert not any(path.stat().st_mode & 0o077 for path in (folder, inner.parent, inner))


def test_what_root_has_left_in_the_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    (folder / "lost+found").mkdir(parents=True)
    os.chown(folder, OTHER, OTHER)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    make_private(folder)
    os.chown(folder / "lost+found", OTHER + 1, OTHER + 1)
    with pytest.raises(FolderNotPrivate, match="lost"):
        make_private(folder)


@pytest.mark.remedy("FOLDER_NOT_PRIVATE")
def test_an_open_folder_of_other_things_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    (folder / "ssl").mkdir(parents=True)
    (folder / "hosts").write_text("")
    for path in (folder, folder / "ssl", folder / "hosts"):
        path.chmod(0o755)
    (tmp_path / "link").symlink_to(folder)
    for each in (folder, tmp_path / "link"):
        with pytest.raises(FolderNotPrivate, match=f"such as 'hosts'.*chmod 700 {each}"):
            make_private(each, ("farm.sqlite",))
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / "ssl", folder / "hosts")} == {0o755}
    folder.chmod(0o700)  # the remedy
    make_private(folder, ("farm.sqlite",))
