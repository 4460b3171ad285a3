"""The help of every command: words that a reader knows."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

import pytest

from etfarm.client.cli.help_texts import words_of_range
from etfarm.wire import command as top


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        assert top.main([*arguments, "--help"]) == 0
    except SystemExit as end:  # argparse
        assert end.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(point.name for point in entry_points(group=top.GROUP)))
def test_help_has_neither_types_nor_ranges_of_python(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = name.split(".")
    texts = [help_of(words, capsys)]
    section = texts[0].partition("Commands:")[2]
    texts += [help_of([*words, inner], capsys) for inner in re.findall(r"^  (\w[\w-]*)  ", section, re.MULTILINE)]
    for text in texts:
        assert not re.search(r"<(str|int|float|path|bool|list\[|uuid|datetime)|[<>]=x|\bx[<>]=|2147483", text), text
        assert not re.search(r"\[[^\]]*\]\s+\[default:", text), text


@pytest.mark.parametrize("name", sorted({point.name.split(".")[0] for point in entry_points(group=top.GROUP)}))
def test_a_group_has_whole_sentences_about_its_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    section = help_of([name], capsys).partition("Commands:")[2]
    assert not re.search(r"\.\.\.$", section, re.MULTILINE), section
    assert max(map(len, section.splitlines()), default=0) <= 120


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x>=1", "at least 1"),
        ("1<=x<=8", "1 to 8"),
        ("x<=8", "at most 8"),
        ("-2147483648<=x<=2147483647", ""),
        ("0<=x<=2147483647", "at least 0"),
        ("x>=0.5", "at least 0.5"),
    ],
)
def test_a_range_is_described_in_words(text: str, words: str) -> None:
    assert words_of_range(text) == words


@pytest.mark.parametrize("name", sorted({point.name.split(".")[0] for point in entry_points(group=top.GROUP)}))
def test_a_command_says_what_it_does_in_the_imperative(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of([name], capsys)
    sentences = re.findall(r"^(?:  )?([A-Z]\w+)\b", text.partition("\n\n")[2])[:1]
    sentences += re.findall(r"^  \w[\w-]*  +(\w+)", text.partition("Commands:")[2], re.MULTILINE)
    assert sentences
    for verb in sentences:
        assert not re.fullmatch(r"\w+[^s]s|All|An?|How|One|The|What", verb), text
