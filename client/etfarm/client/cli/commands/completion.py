"""`etfarm completion`: a script with which a shell completes commands, subcommands, options, and the values of some."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import EntryPoint
from typing import Annotated, Final

import typer

from etfarm.client.cli.app import execute
from etfarm.client.cli.terminal.capabilities import put
from etfarm.wire import command as top
from etfarm.wire.recipes import RECIPES

_ZSH_START: Final = """(( $+functions[compdef] )) || { autoload -U +X compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""
"""What zsh needs for a bash script: its completion, unless the user's ~/.zshrc has started it, and its emulation of bash's."""

_OPTION: Final = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")

_CHOICE: Final = re.compile(r"^ {1,8}(-[^|\n]*) ([a-z][a-z-]*(?:\|[a-z-]+)+)(?:  |$)", re.MULTILINE)
"""Options and the values of their help: `  -f, --format json|csv`."""


class Shell(StrEnum):
    """A shell that `etfarm completion` writes a script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@dataclass(frozen=True)
class Vocabulary:
    """What a shell completes."""

    words: Mapping[tuple[str, ...], Sequence[str]]
    """The subcommands and options that may follow a command, by its words."""
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The values of options that have a few, by the option."""


def main(argv: list[str]) -> int:
    """Run `etfarm completion`."""
    return execute(completion, argv, "completion")


def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print a script that completes commands, options, and values such as recipes in a shell.

    Write it to a file once: ~/.local/share/bash-completion/completions/etfarm for bash,
    ~/.config/fish/completions/etfarm.fish for fish, or a file that ~/.zshrc sources.
    """
    put(format_script(shell, collect_vocabulary()))


def format_script(shell: Shell, vocabulary: Vocabulary) -> str:
    """Return the script that completes these words in a shell."""
    return _fish(vocabulary) if shell is Shell.FISH else _bash(vocabulary, zsh=shell is Shell.ZSH)


def collect_vocabulary() -> Vocabulary:
    """Return the words of all installed commands and the values of their options, from their help."""
    from etfarm.client.jobs.summary import STATES

    words: dict[tuple[str, ...], list[str]] = {(): [name for name in top.SUMMARIES if "." not in name]}
    values: dict[str, list[str]] = {"--recipe": list(RECIPES), "--state": list(STATES)}
    commands = top.find_commands()
    for name in words[()]:
        _collect((name,), words, values, commands)
    return Vocabulary(words, values)


def _collect(
    command: tuple[str, ...],
    words: dict[tuple[str, ...], list[str]],
    values: dict[str, list[str]],
    commands: Mapping[str, EntryPoint],
) -> None:
    text = _help(command, commands)
    for names, choices in _CHOICE.findall(text):
        for name in _OPTION.findall(names):
            values[name] = [*dict.fromkeys([*values.get(name, ()), *choices.split("|")])]
    inner = [name.partition(".")[2] for name in top.SUMMARIES if command[1:] == () and name.startswith(f"{command[0]}.")]
    inner += re.findall(r"^  (\w[\w-]*)  ", text.partition("Commands:")[2], re.MULTILINE)
    options = [option for line in re.findall(r"^ {1,8}(-.*?)(?:  |$)", text, re.MULTILINE) for option in _OPTION.findall(line)]
    words[command] = [*dict.fromkeys(inner), *dict.fromkeys(options)]
    for name in dict.fromkeys(inner):
        _collect((*command, name), words, values, commands)


def _help(command: Sequence[str], commands: Mapping[str, EntryPoint]) -> str:
    """Return a command's help; empty if its extra is not installed."""
    text = io.StringIO()
    # SystemExit is argparse's end, and that of a command whose extra is missing.
    with redirect_stdout(text), redirect_stderr(io.StringIO()), suppress(SystemExit):
        top.run([*command, "--help"], commands)
    return text.getvalue()


def _bash(vocabulary: Vocabulary, *, zsh: bool) -> str:
    words = vocabulary.words
    values = "\n".join(f"    {name}) words={_quoted(' '.join(choices))} ;;" for name, choices in vocabulary.values.items())
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
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _etfarm etfarm
"""


def _fish(vocabulary: Vocabulary) -> str:
    words = vocabulary.words
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
                choices = vocabulary.values.get(option)
                values = f" -r -a {_quoted(' '.join(choices))}" if choices else ""
                lines.append(f"complete -c etfarm -n {_quoted(seen)} -l {option[2:]}{values}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return f"'{text}'"
