"""The tokenizer of a language model, from its `tokenizer.json`: texts to token ids and back.

It needs the package `tokenizers`, which etfarm does not require: devices process token ids only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from etfarm.wire.errors import error_for
from etfarm.wire.generation import MAX_TEXT

_MAX_BYTES: Final = 256 << 20
"""Maximum size of a file: the largest vocabularies need some 40 MB."""
_MAX_CHARACTERS: Final = 64 * MAX_TEXT
"""Maximum length of a text to tokenize."""


class Tokenizer:
    """A tokenizer that decodes a text token by token."""

    def __init__(self, path: Path) -> None:
        """Read a `tokenizer.json`.

        Raises:
            TOKENIZERS_MISSING: the package `tokenizers` is not installed.
            BAD_TOKENIZER: the file cannot be read, or is not a tokenizer.
        """
        remedy = "Give the `tokenizer.json` of the model, as transformers' `save_pretrained` writes it."
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise error_for(
                "BAD_TOKENIZER", f"{path} cannot be read: {error.strerror or error}.", remedy, path=str(path)
            ) from None
        if len(data) > _MAX_BYTES:
            raise error_for("BAD_TOKENIZER", f"{path} has more than {_MAX_BYTES >> 20} MiB.", remedy, path=str(path))
        try:
            import tokenizers
            from tokenizers import decoders
        except ImportError:
            raise error_for(
                "TOKENIZERS_MISSING",
                "Decoding text needs the package `tokenizers`, which is not installed.",
                "Run pip install tokenizers, or leave --tokenizer out to get token ids.",
            ) from None
        self._path = path
        self._decoders = decoders
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # noqa: BLE001 - the package raises Exception itself
            raise error_for("BAD_TOKENIZER", f"{path} is not a tokenizer: {error}.", remedy, path=str(path)) from None
        self._stream = self._new_stream()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds.

        Raises:
            BAD_TOKENIZER: the text is too long, or the tokenizer cannot process it.
        """
        if len(text) > _MAX_CHARACTERS:
            raise error_for(
                "BAD_TOKENIZER",
                f"The text has {len(text):,} characters; at most {_MAX_CHARACTERS:,} are possible.",
                "Shorten it.",
            )
        try:
            return [int(token) for token in self._tokenizer.encode(text).ids]
        except Exception as error:  # noqa: BLE001 - the package raises Exception itself
            raise error_for(
                "BAD_TOKENIZER", f"{self._path} cannot tokenize the text: {error}.", "Give the model's own tokenizer."
            ) from None

    def decode_next(self, token: int) -> str:
        """Return the text that a further token adds; empty while its bytes are no whole characters, or for an unknown token.

        Raises:
            BAD_TOKENIZER: the tokenizer cannot decode it.
        """
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # noqa: BLE001 - the package raises Exception itself
            # A random model generates tokens that no text has, after which a stream has no valid prefix.
            self._stream = self._new_stream()
            if "prefix" in str(error).lower():
                return "\N{REPLACEMENT CHARACTER}"
            raise error_for(
                "BAD_TOKENIZER", f"{self._path} cannot decode the token {token}: {error}.", "Give the model's own tokenizer."
            ) from None

    def _new_stream(self) -> Any:
        return self._decoders.DecodeStream(skip_special_tokens=False)
