"""`etfarm completion`: a script with which a shell completes commands, subcommands and options."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from enum import StrEnum
from typing import Annotated, Final

import typer

from etfarm.client.cli.app import execute
from etfarm.client.cli.terminal.capabilities import put
from etfarm.wire import command as top

Words = Mapping[tuple[str, ...], Sequence[str]]
"""The words that may follow a command, by its words."""

_ZSH_START: Final = """(( $+functions[compdef] )) || { autoload -U +X compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""
"""What zsh needs for a bash script: its completion, unless the user's ~/.zshrc has started it, and its emulation of bash's."""

_OPTION: Final = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


class Shell(StrEnum):
    """A shell that `etfarm completion` writes a script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def main(argv: list[str]) -> int:
    """Run `etfarm completion`."""
    return execute(completion, argv, "completion")


def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print a script that completes etfarm's commands and options in a shell.

    Write it to a file once: ~/.local/share/bash-completion/completions/etfarm for bash,
    ~/.config/fish/completions/etfarm.fish for fish, or a file that ~/.zshrc sources.
    """
    put(format_script(shell, collect_words()))


def format_script(shell: Shell, words: Words) -> str:
    """Return the script that completes these words in a shell."""
    return _fish(words) if shell is Shell.FISH else _bash(words, zsh=shell is Shell.ZSH)


def collect_words() -> Words:
    """Return the words of all installed commands, from their help."""
    words: dict[tuple[str, ...], list[str]] = {(): [name for name in top.SUMMARIES if "." not in name]}
    for name in words[()]:
        _collect((name,), words)
    return words


def _collect(command: tuple[str, ...], words: dict[tuple[str, ...], list[str]]) -> None:
    text = _help(command)
    inner = [name.partition(".")[2] for name in top.SUMMARIES if command[1:] == () and name.startswith(f"{command[0]}.")]
    inner += re.findall(r"^  (\w[\w-]*)  ", text.partition("Commands:")[2], re.MULTILINE)
    options = [option for line in re.findall(r"^ {1,8}(-.*?)(?:  |$)", text, re.MULTILINE) for option in _OPTION.findall(line)]
    words[command] = [*dict.fromkeys(inner), *dict.fromkeys(options)]
    for name in dict.fromkeys(inner):
        _collect((*command, name), words)


def _help(command: Sequence[str]) -> str:
    """Return a command's help; empty if its extra is not installed."""
    text = io.StringIO()
    # SystemExit is argparse's end, and that of a command whose extra is missing.
    with redirect_stdout(text), redirect_stderr(io.StringIO()), suppress(SystemExit):
        top.main([*command, "--help"])
    return text.getvalue()


def _bash(words: Words, *, zsh: bool) -> str:
    cases = "\n".join(
        f"    {_quoted(' '.join(command))}) words={_quoted(' '.join(following))} ;;" for command, following in words.items()
    )
    commands = "|".join(_quoted(" ".join(command)) for command in words if command)
    start = _ZSH_START if zsh else ""
    return f"""{start}_etfarm() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} command= word words=
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD - 1))}}"; do
    case "${{command:+$command }}$word" in
    {commands}) command="${{command:+$command }}$word" ;;
    esac
  done
  case "$command" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _etfarm etfarm
"""


def _fish(words: Words) -> str:
    lines = ["complete -c etfarm -n __fish_use_subcommand -f -a " + _quoted(" ".join(words[()]))]
    for command, following in words.items():
        if not command:
            continue
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command)
        inner = [word for word in following if not word.startswith("-")]
        if inner:
            first = f"{seen}; and not __fish_seen_subcommand_from {' '.join(inner)}"
            lines.append(f"complete -c etfarm -n {_quoted(first)} -f -a {_quoted(' '.join(inner))}")
        for option in following:
            if option.startswith("--"):
                lines.append(f"complete -c etfarm -n {_quoted(seen)} -l {option[2:]}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return f"'{text}'"
