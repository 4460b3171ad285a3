"""Digests: one for equal content, another for different content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.wire import digest

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_the_digest_of_bytes_and_of_their_file_is_sha256_in_lower_case_hex(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest.of_bytes(b"abc") == digest.of_bytes(memoryview(b"abc")) == digest.of_file(path) == expected
    assert digest.is_digest(expected)


@pytest.mark.parametrize("text", ["", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 64 + "\n", "../" + "a" * 61, "\u0661" * 64])
def test_other_texts_are_no_digests(text: str) -> None:
    assert not digest.is_digest(text)


@given(json_values)
def test_the_text_of_a_value_is_json_that_does_not_depend_on_the_order_of_keys(value: object) -> None:
    def turned(value: object) -> object:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(item) for item in value] if isinstance(value, list) else value

    assert json.loads(digest.canonical_json(value)) == value
    assert digest.canonical_json(value) == digest.canonical_json(turned(value))


def test_nan_has_no_digest() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        digest.of_value({"x": float("nan")})


def test_a_programs_digest_is_over_the_manifest_that_the_contract_gives() -> None:
    manifest = b'{"data":{"a":"22","b":"33"},"pte":"11","schema":"etfarm.program/1"}'
    assert digest.of_program("11", {"b": "33", "a": "22"}) == hashlib.sha256(manifest).hexdigest()
    assert digest.of_program("11", {}) != digest.of_program("11", {"a": "22"})
