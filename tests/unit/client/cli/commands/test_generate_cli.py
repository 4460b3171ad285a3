"""`etfarm generate`: what it refuses before anything starts, and texts from token ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from etfarm.client.cli.commands import generate
from etfarm.client.cli.commands.generate import prompt_of, stop_tokens_of
from etfarm.client.submit.tokenizer import Tokenizer
from tests.support.refusals import refuses

PROMPT = ["--prompt-ids", "1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "One prompt is required, got none."),
        ([*PROMPT, "--prompt", "x"], "got --prompt-ids and --prompt"),
        (["--prompt", "x"], "--prompt requires --tokenizer"),
        (["--prompt-ids", "1,x"], "--prompt-ids 'x' is not a token id"),
        (["--prompt-ids", ","], "--prompt-ids has no token id"),
        (["--prompt-ids", "9" * 11], "is not a token id"),
        (["--prompt-ids", "4294967295"], "must be 0 to 2,147,483,647"),
        (["--tokens", "1,15,27"], "--tokens takes a file, got the token ids 1,15,27. Give token ids with --prompt-ids."),
        (["--tokens", "missing.npy"], "missing.npy cannot be read"),
        ([*PROMPT, "--stop-tokens", "end"], "--stop-tokens 'end' is not a token id"),
        ([*PROMPT, "--stop-tokens", ",".join(map(str, range(1025)))], "1,024"),
        ([*PROMPT, "-n", "0"], "must be at least 1"),
        ([*PROMPT, "-n", "65537"], "must be at most 65536"),
        ([*PROMPT, "--max-time", "inf"], "must be a finite number, got inf"),
        (PROMPT, "x.pte is not an ExecuTorch program"),
        ([*PROMPT, "--device", "=x"], "selector"),
        ([*PROMPT, "--tokenizer", "missing.json"], "missing.json cannot be read"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pte").write_bytes(b"no program")
    assert generate.main(["x.pte", *argv, "--json", "out.json"]) == 2
    assert message in capsys.readouterr().err
    written = json.loads((tmp_path / "out.json").read_text())
    assert written.get("generation") is None and written["error"]["message"]


def test_a_prompt_has_three_forms(tmp_path: Path) -> None:
    file = tmp_path / "ids.txt"
    file.write_text("[7]")
    assert prompt_of("1, 15 27", None, None, None) == [1, 15, 27]
    assert prompt_of(None, file, None, None) == [7]
    file.write_text("")
    with refuses("BAD_TEXT_FILE", match="has 0 tokens; 1 to"):
        prompt_of(None, file, None, None)
    assert (stop_tokens_of(""), stop_tokens_of("2,3"), stop_tokens_of(" eos ")) == ([], [2, 3], "eos")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, whose characters may take several tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install tokenizers")
    created: Any = tokenizers.ByteLevelBPETokenizer()
    created.train_from_iterator(["to be or not to be, that is the question"] * 4, vocab_size=300, min_frequency=1)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    created.save(str(path))
    return path


def test_a_tokenizer_decodes_what_it_encoded_token_by_token(tokenizer_file: Path) -> None:
    text = "not to be: é, 語"
    tokenizer = Tokenizer(tokenizer_file)
    ids = tokenizer.encode(text)
    pieces = [Tokenizer(tokenizer_file).decode_next(token) if not place else None for place, token in enumerate(ids)]
    assert pieces[0] and prompt_of(None, None, text, tokenizer) == ids
    parts = [tokenizer.decode_next(token) for token in ids]
    assert "".join(parts) == text and "" in parts, "a character of several tokens comes with its last one"
    with refuses("USAGE", match="has no tokens"):
        prompt_of(None, None, "", tokenizer)
    with refuses("BAD_TOKENIZER", match="characters"):
        tokenizer.encode("x" * 2_000_000)


def test_tokens_that_no_text_has_are_shown_and_do_not_stop_the_text(tokenizer_file: Path) -> None:
    tokenizer = Tokenizer(tokenizer_file)
    for token in (*range(128, 260), 1 << 30):
        tokenizer.decode_next(token)
    ids = tokenizer.encode(" to be")
    assert "".join(tokenizer.decode_next(token) for token in ids).endswith("be")


@pytest.mark.remedy("BAD_TOKENIZER")
def test_what_is_no_tokenizer_is_refused(tokenizer_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with refuses("BAD_TOKENIZER", match="is not a tokenizer"):
        Tokenizer(path)
    assert Tokenizer(tokenizer_file).encode("to be")


@pytest.mark.remedy("TOKENIZERS_MISSING")
def test_without_the_package_the_error_names_it(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refuses("TOKENIZERS_MISSING", match="pip install tokenizers"):
        Tokenizer(tokenizer_file)
    monkeypatch.undo()
    assert Tokenizer(tokenizer_file).encode("to be")
