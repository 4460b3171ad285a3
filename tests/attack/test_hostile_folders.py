"""Hostile folders of transformers: refused by name; nothing of them runs, waits, or takes the machine's memory."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from etfarm.client.export import ModelSource, huggingface
from etfarm.wire.errors import EtfarmError
from tests.support.huggingface import write_config
from tests.support.refusals import refuses
from tests.support.torchvision import torchvision_models


class Runs:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def header(entries: object, *, announced: int | None = None, data: bytes = b"") -> bytes:
    """Return a safetensors file."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if announced is None else announced) + text + data


def weights(content: bytes, name: str = "model.safetensors") -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def pipe(name: str) -> Callable[[Path], None]:
    """Replace a file by a FIFO, whose readers wait forever."""

    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return replace


def link(name: str, target: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return replace


def index(part: object, *, created: str = "") -> Callable[[Path], None]:
    """Write an index whose weights are all in one file."""

    def write(folder: Path) -> None:
        (folder / "model-1.safetensors").write_bytes(header({}))
        content = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        if created:
            (folder / created).write_bytes(pickle.dumps(Runs(folder / "executed")))

    return write


def checkpoint(parent: Path) -> Path:
    """Return a folder as save_pretrained writes it."""
    folder = write_config(parent, "llama")
    torchvision_models()  # transformers imports torchvision, which fails after a failed import
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


FLOAT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HUGE = 10**12

FOLDERS: dict[str, tuple[str, dict[str, Any], Callable[[Path], None] | None, str]] = {
    # Name: kind, changes of its config.json, changes of the folder, reason of the refusal.
    "a pipe as config.json": ("llama", {}, pipe("config.json"), "MODEL_NOT_FOUND"),
    "an endless config.json": ("llama", {}, link("config.json", "/dev/zero"), "MODEL_NOT_FOUND"),
    "a secret as config.json": ("llama", {}, link("config.json", "../secret"), "BAD_CHECKPOINT"),
    "a pipe as weights": ("llama", {}, pipe("model.safetensors"), "BAD_CHECKPOINT"),
    "endless weights": ("llama", {}, link("model.safetensors", "/dev/zero"), "BAD_CHECKPOINT"),
    "an index outside, by config.json": (
        "llama", {"transformers_weights": "../x.safetensors.index.json"}, None, "BAD_CHECKPOINT",
    ),
    "a pipe as an index": ("llama", {}, pipe("model.safetensors.index.json"), "BAD_CHECKPOINT"),
    "a pipe as generation_config.json": ("llama", {}, pipe("generation_config.json"), "BAD_CHECKPOINT"),
    "an index that names a pickle": ("llama", {}, index("evil.bin", created="evil.bin"), "BAD_CHECKPOINT"),
    "an index outside of the folder": ("llama", {}, index("../outside.safetensors"), "BAD_CHECKPOINT"),
    "an index with an absolute path": ("llama", {}, index("/etc/passwd"), "BAD_CHECKPOINT"),
    "an index that names no text": ("llama", {}, index(["model-1.safetensors"]), "BAD_CHECKPOINT"),
    "an index of another form": ("llama", {}, weights(b"[]", "model.safetensors.index.json"), "BAD_CHECKPOINT"),
    "a deep index": ("llama", {}, weights(b"[" * 1_000_000, "model.safetensors.index.json"), "BAD_CHECKPOINT"),
    "weights that config.json names": (
        "llama", {"transformers_weights": "adapter_model.bin"}, index("x", created="adapter_model.bin"), "BAD_CHECKPOINT",
    ),
    "a header of a terabyte": ("llama", {}, weights(header(b"{}", announced=HUGE)), "UNSUPPORTED_ARCHITECTURE"),
    "offsets that overlap": (
        "llama", {}, weights(header({"a": FLOAT, "b": {**FLOAT, "data_offsets": [4, 12]}}, data=bytes(12))),
        "UNSUPPORTED_ARCHITECTURE",
    ),
    "offsets beyond the file": (
        "llama", {}, weights(header({"a": {**FLOAT, "data_offsets": [HUGE, HUGE + 8]}})), "UNSUPPORTED_ARCHITECTURE",
    ),
    "a shape that overflows": (
        "llama", {}, weights(header({"a": {**FLOAT, "shape": [1 << 32, 1 << 32, 2], "data_offsets": [0, 0]}})),
        "UNSUPPORTED_ARCHITECTURE",
    ),
    "a vocabulary of 1e12": ("llama", {"vocab_size": HUGE}, None, "TOO_MANY_RANDOM_WEIGHTS"),
    "a vocabulary of 1e30": ("llama", {"vocab_size": 10**30}, None, "UNSUPPORTED_ARCHITECTURE"),
    "a negative vocabulary": ("llama", {"vocab_size": -1}, None, "UNSUPPORTED_ARCHITECTURE"),
    "1e12 layers": ("llama", {"num_hidden_layers": HUGE}, None, "BAD_CHECKPOINT"),
    "1e12 layers, listed by the configuration": ("qwen2", {"num_hidden_layers": HUGE}, None, "BAD_CHECKPOINT"),
    "1e12 labels": ("bert", {"num_labels": HUGE}, None, "BAD_CHECKPOINT"),
    "a list of 1e12 layers": (
        "vit", {"model_type": "swin", "architectures": ["SwinForImageClassification"], "depths": [2, HUGE]}, None,
        "BAD_CHECKPOINT",
    ),
    "a type with a terminal's escapes": ("llama", {"model_type": "\x1b[31mllama"}, None, "UNSUPPORTED_ARCHITECTURE"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let no connection succeed, and list those that are tried."""
    tried: list[object] = []

    def refuse(*arguments: object) -> None:
        tried.append(arguments)
        raise OSError("a folder needs no network")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_folder_is_refused_by_name(tmp_path: Path, offline: list[object], name: str) -> None:
    kind, changes, change, reason = FOLDERS[name]
    (tmp_path / "secret").write_text("the secret of another file")
    folder = write_config(tmp_path, kind, **changes)
    if change is not None:
        change(folder)
    with pytest.raises(EtfarmError) as refused:
        ModelSource.huggingface(folder)
    assert refused.value.reason == reason, str(refused.value)
    assert not (folder / "executed").exists() and not offline
    assert "the secret" not in str(refused.value)


def test_modules_are_counted_while_they_are_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "MAX_MODULES", 50)
    with refuses("BAD_CHECKPOINT", match="more than 50 modules"):
        ModelSource.huggingface(write_config(tmp_path, "llama", num_hidden_layers=100))
    assert "forward" in ModelSource.huggingface(write_config(tmp_path, "gpt2", n_layer=1)).methods


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "evil/kernels"},
        {"_attn_implementation": "evil/kernels"},
        {"_attn_implementation_internal": "evil/kernels"},
        {"_experts_implementation": "evil/kernels"},
        {"_name_or_path": "evil/repository"},
        {"auto_map": {"AutoConfig": "evil/repository--code.Config", "AutoModelForCausalLM": "evil/repository--code.Model"}},
    ],
)
def test_a_config_that_names_code_elsewhere_loads_nothing_of_it(
    tmp_path: Path, offline: list[object], changes: dict[str, Any]
) -> None:
    folder = write_config(tmp_path, "llama", **changes)
    try:
        assert "forward" in ModelSource.huggingface(folder).methods
    except EtfarmError as error:
        assert error.reason == "UNSUPPORTED_ARCHITECTURE"
    assert not offline


def test_an_index_beside_the_whole_checkpoint_is_ignored_as_by_transformers(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    index("model-00001-of-00002.safetensors")(folder)
    assert "forward" in ModelSource.huggingface(folder).methods


def test_names_of_weights_cannot_control_the_terminal(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "evil\x1b[31m\n\u202e": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    lines: list[str] = []
    ModelSource.huggingface(folder, say=lines.append)
    assert any("evil" in line for line in lines)
    assert all(line.isprintable() for line in lines)
