"""The shell line that asks a device for its facts, in the shells that devices have, and what is made of its output."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etfarm.device_agents.device import android, inventory, readings, shell_facts

Shell = Callable[[str], bytes]
_APPLETS = ("cat", "getconf", "getprop", "grep", "head", "uname")


def _run(argv: list[str], line: str, path: str) -> bytes:
    done = subprocess.run(
        [*argv, "-c", line], capture_output=True, env={"PATH": path}, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    assert done.stderr == b""
    return done.stdout


def _tools(folder: Path, provider: str, applets: tuple[str, ...]) -> str:
    """Return a folder for PATH in which one program is all that there is."""
    folder.mkdir()
    for applet in applets:
        (folder / applet).symlink_to(provider)
    return str(folder)


@pytest.fixture(params=["dash", "bash", "busybox", "mksh with toybox"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    """Runs a line; mksh with toybox is what Android has."""
    names = {"busybox": ("busybox",), "mksh with toybox": ("mksh", "toybox")}.get(request.param, (request.param,))
    result = [shutil.which(name) for name in names]
    programs = [path for path in result if path is not None]
    if len(programs) < len(names):
        pytest.skip(f"needs {request.param}: apt-get install busybox mksh toybox")
    if request.param == "busybox":
        path = _tools(tmp_path / "bin", programs[0], _APPLETS)
        return lambda line: _run([programs[0], "sh"], line, path)
    if len(programs) == 2:
        path = _tools(tmp_path / "bin", programs[1], _APPLETS)
        return lambda line: _run([programs[0]], line, path)
    return lambda line: _run(programs, line, os.environ["PATH"])


def ask(shell: Shell, paths: list[str], commands: Mapping[str, str] | None = None, **limits: int) -> dict[str, str]:
    return shell_facts.split(shell(shell_facts.script(paths, commands, **limits)))


def test_texts_come_as_they_are(shell: Shell, tmp_path: Path) -> None:
    other = shell_facts.split(shell(shell_facts.script([])))
    stale = shell_facts.script([])
    token = stale.partition("t=")[2][:32]
    texts = {
        "plain": b"performance\n",
        "no-newline": b"performance",
        "empty": b"",
        "blank-lines": b"\n\n\n",
        "nul": b"raspberrypi,5-model-b\0brcm,bcm2712\0",
        "marker": f"etfarm-facts {token}\n{token} + /proc/cpuinfo\nx\n\n{token} - 0\n".encode(),
        "crlf": b"one\r\ntwo\r\n",
        "backslash": b"\\n %s $HOME `id` 'x' \"\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    output = ask(shell, [f"{tmp_path}/{name}" for name in texts])
    assert other == {}
    assert output == {f"{tmp_path}/{name}": text.decode() for name, text in texts.items()}


def test_what_is_no_text_is_marked(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"a\xff\xfeb\n")
    assert ask(shell, [f"{tmp_path}/bytes"]) == {f"{tmp_path}/bytes": "a\ufffd\ufffdb\n"}


def test_patterns_are_expanded_on_the_device(shell: Shell, tmp_path: Path) -> None:
    for name in ("cpu0", "cpu1", "cpu10", "cpufreq"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "online").write_text(f"{name}\n")
    text = ask(shell, [f"{tmp_path}/cpu[0-9]*/online", f"{tmp_path}/nothing*/here", f"{tmp_path}/cpufreq/online"])
    assert text == {f"{tmp_path}/{name}/online": f"{name}\n" for name in ("cpu0", "cpu1", "cpu10", "cpufreq")}


def test_what_cannot_be_read_is_left_out(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "after").write_text("here\n")
    # May be opened, and fails where it is read, as sensors that sleep do.
    unreadable = ["/proc/self/mem", str(tmp_path), f"{tmp_path}/dangling", f"{tmp_path}/none"]
    assert ask(shell, [*unreadable, f"{tmp_path}/after"]) == {f"{tmp_path}/after": "here\n"}


def test_commands_are_facts_under_their_names(shell: Shell) -> None:
    text = ask(
        shell,
        [],
        {
            "uname -m": "uname -m",
            'it\'s "all" $HOME': "echo yes; echo noise >&2",
            "piped": "echo one; echo two | grep -E 'two|three' | head -n 1",
            "silent": "true",
            "failed": "echo half; false",
            "left the shell": "exit 3",
            "absent": "etfarm-has-no-such-command",
            "reads its input": "head -n 1",
            "after": "echo still here",
        },
    )
    assert text == {
        "uname -m": f"{os.uname().machine}\n",
        'it\'s "all" $HOME': "yes\n",
        "piped": "one\ntwo\n",
        "silent": "",
        "reads its input": "",
        "after": "still here\n",
    }


def test_the_output_is_bounded_and_what_was_cut_off_is_no_fact(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "first").write_text("kept\n")
    (tmp_path / "second").write_text("x" * 100_000)
    line = shell_facts.script([f"{tmp_path}/first", f"{tmp_path}/second"], {"third": "echo lost"}, max_bytes=10_000)
    output = shell(line)
    assert len(output) == 10_000
    assert shell_facts.split(output) == {f"{tmp_path}/first": "kept\n"}


def test_lines_are_bounded_where_head_counts_no_bytes(tmp_path: Path) -> None:
    head = shutil.which("head")
    (tmp_path / "head").write_text(f'#!/bin/sh\ncase "$1" in -c) exit 1 ;; esac\nexec {head} "$@"\n')
    (tmp_path / "head").chmod(0o755)
    (tmp_path / "first").write_text("kept\n")
    (tmp_path / "second").write_text("\n" * 50_000)
    line = shell_facts.script([f"{tmp_path}/first", f"{tmp_path}/second"])
    output = _run(["sh"], line, f"{tmp_path}:{os.environ['PATH']}")
    assert output.count(b"\n") == 20_000
    assert shell_facts.split(output) == {f"{tmp_path}/first": "kept\n"}


def test_a_terminal_and_a_greeting_before_it_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    output = _run(["sh"], shell_facts.script([f"{tmp_path}/a"], {"b": "echo three"}), os.environ["PATH"])
    assert shell_facts.split(b"WARNING: linker: something\n" + output) == {f"{tmp_path}/a": "one\ntwo\n", "b": "three\n"}
    assert shell_facts.split(output.replace(b"\n", b"\r\n")) == shell_facts.split(output)
    assert shell_facts.split(output.decode()) == shell_facts.split(output)


def test_each_line_frames_with_a_word_of_its_own() -> None:
    assert shell_facts.script(["/proc/stat"]) != shell_facts.script(["/proc/stat"])


@pytest.mark.parametrize("path", ["relative", "/a b", "/a;id", "/$(id)", "/`id`", "/a\nb", "/a'b", "/~", "/é", ""])
def test_what_is_no_path_of_a_fact_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a path of a fact"):
        shell_facts.script([path])


@pytest.mark.parametrize("name", ["", "two\nlines", "a\rb"])
def test_what_is_no_name_of_a_fact_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a name of a fact"):
        shell_facts.script([], {name: "true"})


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(st.lists(st.text("\0\r\n \\'\"$`%+-0aé\ufffd", max_size=60), min_size=1, max_size=3))
def test_any_text_comes_through_a_shell(tmp_path: Path, texts: list[str]) -> None:
    output = {}
    for number, text in enumerate(texts):
        (tmp_path / str(number)).write_bytes(text.encode())
        output[f"{tmp_path}/{number}"] = text
    assert shell_facts.split(_run(["sh"], shell_facts.script(output), os.environ["PATH"])) == output


@given(st.binary(max_size=300) | st.text(max_size=300))
def test_output_of_something_else_has_no_facts(output: bytes | str) -> None:
    assert shell_facts.split(output) == {}


def test_this_machine_is_the_same_through_a_shell(shell: Shell) -> None:
    through = inventory.parse(ask(shell, [*inventory.PHONE_FILES], android.INVENTORY_COMMANDS))
    here = inventory.parse(inventory.collect())
    assert (through.arch, through.os) == (here.arch, here.os)
    assert (through.soc, through.memory_bytes, through.page_size_bytes) == (here.soc, here.memory_bytes, here.page_size_bytes)
    assert list(through.clusters) == list(here.clusters)
    assert list(through.thermal_zones) == list(here.thermal_zones)


def test_the_state_of_this_machine_comes_through_a_shell(shell: Shell) -> None:
    text = readings.parse(ask(shell, [*readings.PHONE_FILES], android.READING_COMMANDS))
    assert text.cpu_busy_ns > 0 and text.memory_available_bytes > 0
    assert text.HasField("load_1m") and text.HasField("runnable")
