"""Shell completion: the scripts, tried in the shells themselves, and the words of every command."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from etfarm.client.cli.commands import completion
from etfarm.wire import command as top

VOCABULARY = completion.collect_vocabulary()
WORDS = VOCABULARY.words
WAIT_S = 60.0
TYPED = [
    (["be"], {"bench"}),
    (["jobs", "lo"], {"logs"}),
    (["jobs", "list", "--sta"], {"--state"}),
    (["jobs", "list", "--name", "x", "--ow"], {"--owner"}),
    (["bundle", "bu"], {"build"}),
    (["bench", "x.py:net", "--recipe", "xnnpack_fp"], {"xnnpack_fp32"}),
    (["report", "export", "latest", "--format", "j"], {"json", "junit"}),
    (["jobs", "list", "--state", "FA"], {"FAILED"}),
]
"""Words up to the one that is completed, and what is offered."""


def needs(shell: str) -> pytest.MarkDecorator:
    """Skip a test where a shell is not installed."""
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"needs {shell}: apt-get install {shell}")


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The script for the shell that the test names."""
    file = tmp_path / f"etfarm.{request.param}"
    file.write_text(completion.format_script(completion.Shell(request.param), VOCABULARY))
    return file


def press_tab(command: Sequence[str], setup: str, typed: str, expected: str, home: Path) -> str:
    """Type a line and TAB into an interactive shell; return what its terminal shows, up to the expected text."""
    process, terminal = pty.fork()
    if process == 0:
        environment: Mapping[str, str] = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "PS1": "> "}
        os.execvpe(command[0], list(command), environment)
    shown, deadline = b"", time.monotonic() + WAIT_S
    try:
        os.write(terminal, f"{setup}\necho re''ady\n".encode())
        line = f"{typed}\t".encode()
        while expected.encode() not in shown and time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1.0)[0]:
                continue
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # the shell has ended
                break
            if line and b"ready\r\n" in shown:
                os.write(terminal, line)
                line = b""
    finally:
        os.close(terminal)
        os.kill(process, 9)
        os.waitpid(process, 0)
    return shown.decode(errors="replace")


def test_commands_subcommands_and_options_are_words() -> None:
    assert {"bench", "jobs", "serve", "bundle"} <= set(WORDS[()])
    assert {"list", "show", "logs"} <= set(WORDS[("jobs",)])
    assert {"build", "add", "list"} <= set(WORDS[("bundle",)])
    assert {"--state", "--label", "--json"} <= set(WORDS[("jobs", "list")])
    assert {"--recipe", "--top", "-v"} <= set(WORDS[("bench",)])
    assert "--listen" in WORDS[("serve",)]
    assert VOCABULARY.values["--by"] == ["op", "type", "module", "line", "backend"] and "-f" in VOCABULARY.values


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_completes(script: Path) -> None:
    for typed, offered in TYPED:
        words = " ".join(["etfarm", *typed])
        ask = f"source {script}; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _etfarm; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, timeout=60)
        assert set(done.stdout.split()) == offered and done.stderr == ""


@pytest.mark.parametrize(
    ("script", "command"),
    [
        pytest.param("bash", ("bash", "--norc", "--noprofile", "-i"), id="bash"),
        pytest.param("zsh", ("zsh", "-f", "-i"), marks=needs("zsh"), id="zsh"),
    ],
    indirect=["script"],
)
def test_a_shell_completes_what_is_typed_before_the_tab_key(script: Path, command: Sequence[str], tmp_path: Path) -> None:
    shown = press_tab(command, f"source {script}", "etfarm jobs list --name x --ow", "--owner ", tmp_path)
    assert "etfarm jobs list --name x --owner " in shown, shown


@needs("zsh")
@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_accepts_its_script(script: Path) -> None:
    done = subprocess.run(["zsh", "-n", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@needs("fish")
@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes(script: Path, tmp_path: Path) -> None:
    for typed, offered in TYPED:
        ask = f"source {script}; complete -C 'etfarm {' '.join(typed)}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", ask], env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert set(done.stdout.split()) == offered and done.stderr == ""


def test_the_installed_commands_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = top.find_commands()
    reads: list[None] = []

    def count() -> Mapping[str, EntryPoint]:
        reads.append(None)
        return {name: point for name, point in known.items() if name in ("jobs", "bundle.list")}

    monkeypatch.setattr(top, "find_commands", count)
    assert "logs" in completion.collect_vocabulary().words["jobs",] and len(reads) == 1
