"""Shell completion: the script of bash, tried in bash, and the words of every command."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from etfarm.client.cli.commands import completion

WORDS = completion.collect_words()


def test_commands_subcommands_and_options_are_words() -> None:
    assert {"bench", "jobs", "serve", "bundle"} <= set(WORDS[()])
    assert {"list", "show", "logs"} <= set(WORDS[("jobs",)])
    assert {"build", "add", "list"} <= set(WORDS[("bundle",)])
    assert {"--state", "--label", "--json"} <= set(WORDS[("jobs", "list")])
    assert {"--recipe", "--top", "-v"} <= set(WORDS[("bench",)])
    assert "--listen" in WORDS[("serve",)]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["be"], {"bench"}),
        (["jobs", "lo"], {"logs"}),
        (["jobs", "list", "--sta"], {"--state"}),
        (["jobs", "list", "--name", "x", "--ow"], {"--owner"}),
        (["bundle", "bu"], {"build"}),
    ],
)
def test_bash_completes(typed: list[str], offered: set[str], tmp_path: Path) -> None:
    script = tmp_path / "etfarm.bash"
    script.write_text(completion._bash(WORDS, zsh=False))
    words = " ".join(["etfarm", *typed])
    ask = f"source {script}; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _etfarm; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.split()) == offered and done.stderr == ""


def test_fish_and_zsh_scripts_have_the_same_words() -> None:
    fish = completion._fish(WORDS)
    assert "-l state" in fish and "__fish_seen_subcommand_from jobs; and __fish_seen_subcommand_from list" in fish
    assert completion._bash(WORDS, zsh=True).startswith("autoload -U +X compinit bashcompinit")
