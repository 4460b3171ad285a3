"""Folders of transformers: checks of config.json and of the checkpoint's files, and the errors about them. Stdlib only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from etfarm.client.export.errors import BadModelArgument
from etfarm.wire.errors import EtfarmError, UserError, error_for

MAX_CONFIG_BYTES: Final = 4 << 20
_MAX_INDEX_BYTES: Final = 64 << 20
MAX_MODULES: Final = 200_000
"""Maximum number of modules of a model; the largest mixtures of experts have about 100,000."""
_MAX_COUNT: Final = 1 << 20
_COUNTS: Final = re.compile(r"(?:layer|depth|stage|block|expert|label)s?$")
"""Names of numbers for each of which transformers creates something, already in the configuration, where no size is known yet."""
MAX_TOKENS: Final = 1 << 20
"""Maximum of options that are numbers of tokens."""
MAX_RANDOM_PARAMETERS: Final = 2_000_000_000
"""Maximum number of parameters with random weights, unless the option `max_parameters` is larger: 8 GB in float32."""
MOST_PARAMETERS: Final = 10**12
"""Maximum of the option `max_parameters`."""
DTYPES: Final = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "fp32": "float32", "fp16": "float16",
                 "bf16": "bfloat16"}  # fmt: skip
OPTIONS: Final[dict[str, tuple[str, ...] | None]] = {
    "max_context_tokens": None, "max_prompt_tokens": None, "dtype": tuple(DTYPES), "attention": ("sdpa", "custom"),
    "logits": ("last", "all"), "seed": None, "max_parameters": None,
}  # fmt: skip
"""Options of `hf:FOLDER:NAME=VALUE,...` with their values; None for whole numbers."""


def remote_code_refused(folder: str, model_type: str) -> EtfarmError:
    """Return the error that a folder's model can only be created by Python code in the folder, which is not executed."""
    return error_for(
        "REMOTE_CODE_REFUSED",
        f"The model {model_type!r} in {folder} needs the folder's own Python code (auto_map in config.json), which etfarm "
        "does not execute.",
        "Update transformers if it has the architecture by now; else create the model in a file.py:factory of your own.",
        folder=folder,
        model_type=model_type,
    )


def unsupported_architecture(folder: str, architecture: str, why: str) -> EtfarmError:
    """Return the error of a model of transformers that etfarm cannot make a program of by itself.

    Args:
        why: the rest of a sentence that names the model.
    """
    return error_for(
        "UNSUPPORTED_ARCHITECTURE",
        f"{architecture} in {folder} cannot be exported: {why}.",
        "Write a file.py:factory that returns the module with example inputs.",
        folder=folder,
        architecture=architecture,
        why=why,
    )


class BadCheckpoint(UserError):
    """A folder of transformers has a configuration or weights that cannot be used."""

    reason = "BAD_CHECKPOINT"


@dataclass(frozen=True)
class Folder:
    """What the files of a folder say, before transformers is imported."""

    path: Path
    model_type: str
    architectures: tuple[str, ...]
    has_checkpoint: bool
    has_code: bool
    """Whether it names Python code of its own for its classes, which is never executed."""


def read_folder(path: Path) -> Folder:
    """Read the configuration of a folder.

    Raises:
        MODEL_NOT_FOUND: there is no such folder, or it has no config.json.
        BadCheckpoint: config.json is not one of transformers, or the weights are not in safetensors files.
    """
    shown = str(path)
    file = path / "config.json"
    if not path.is_dir():
        raise error_for(
            "MODEL_NOT_FOUND",
            f"There is no folder {shown}.",
            f"Paths start at the working folder, {Path.cwd()}. A model of the hub must be downloaded first.",
            path=shown,
        )
    if not file.is_file():
        raise error_for(
            "MODEL_NOT_FOUND",
            f"{shown} has no config.json, so it is not a model of transformers.",
            "Give the folder that save_pretrained wrote, or a snapshot of the hub's repository.",
            path=shown,
        )
    config = _read_json(file)
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if (
        not isinstance(model_type, str)
        or not isinstance(architectures, list)
        or not all(isinstance(a, str) for a in architectures)
    ):
        raise BadCheckpoint(
            f"{file} names no model_type, so transformers cannot know the architecture.",
            "Give the config.json that save_pretrained wrote.",
            path=shown,
        )
    if config.get("quantization_config"):
        raise BadCheckpoint(
            f"The checkpoint in {shown} is already quantized ({file.name} has a quantization_config).",
            "Give the original checkpoint, and a recipe that quantizes it for ExecuTorch.",
            path=shown,
        )
    if (path / "adapter_config.json").exists():
        raise BadCheckpoint(
            f"{shown} has an adapter of PEFT (adapter_config.json), whose model is elsewhere.",
            "Merge it into its model with merge_and_unload, and save that with save_pretrained.",
            path=shown,
        )
    if large := next((name for name, value in _numbers(config) if _COUNTS.search(name) and value > _MAX_COUNT), None):
        raise BadCheckpoint(
            f"{large!r} in {file} is more than {_MAX_COUNT:,}.", "Give the config.json that save_pretrained wrote.", path=shown
        )
    tensors = _has_safetensors(path, config.get("transformers_weights"))
    others = sorted(each.name for pattern in ("*.bin", "*.pt", "*.pth") for each in path.glob(pattern))
    weights = [name for name in others if name.startswith(("pytorch_model", "model", "consolidated"))]
    if weights and not tensors:
        raise BadCheckpoint(
            f"The weights in {shown} are in {weights[0]}, a pickle, which can execute code when it is loaded.",
            "Save the model again with save_pretrained, which writes safetensors.",
            path=shown,
        )
    return Folder(path, model_type, tuple(architectures), tensors, bool(config.get("auto_map")))


def _has_safetensors(path: Path, named: object) -> bool:
    """Return whether a folder has weights in safetensors files, which alone may be loaded.

    transformers also opens what an index or config.json names, in other folders and formats.

    Args:
        named: the file that config.json names instead of the usual one.

    Raises:
        BadCheckpoint: one of the files is not regular, or an index names another kind of file.
    """
    shown = str(path)
    files = {each.name for each in path.glob("*.safetensors")}
    index = path / ("model.safetensors.index.json" if named is None else str(named))
    for each in (*(path / name for name in sorted(files)), index, path / "generation_config.json"):
        if each.exists() and not each.is_file():
            raise BadCheckpoint(f"{each} is not a file.", "Copy or download the folder again.", path=shown)
    if named is not None and named not in files and (index.parent != path or not index.name.endswith(".safetensors.index.json")):
        raise BadCheckpoint(
            f"config.json in {shown} names the weights {str(named)[:100]!r}, which are no safetensors file of the folder.",
            "Save the model again with save_pretrained, which writes safetensors.",
            path=shown,
        )
    if named in files or (named is None and "model.safetensors" in files) or not index.exists():
        return bool(files)
    parts = _read_json(index, _MAX_INDEX_BYTES).get("weight_map")
    other = next((part for part in parts.values() if str(part) not in files), "") if isinstance(parts, dict) else None
    if other != "":
        raise BadCheckpoint(
            f"{index} names {str(other)[:100]!r}, which is no safetensors file of the folder.",
            "Copy or download the folder again with all its files, or save the model again with save_pretrained.",
            path=shown,
        )
    return True


def _numbers(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of a configuration with their names, those of a list with its name."""
    left: list[tuple[str, Any]] = [("", config)]
    while left:
        name, value = left.pop()
        if isinstance(value, int):
            yield name, value
        elif isinstance(value, dict):
            left.extend(value.items())
        elif isinstance(value, list):
            left.extend((name, part) for part in value)


def parse_options(model: str, text: str) -> dict[str, str | int]:
    """Return the options of `NAME=VALUE,NAME=VALUE`.

    Raises:
        BadModelArgument: there is no such option, or it does not take the value.
    """
    options: dict[str, str | int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in OPTIONS or name in options:
            what = f"has the option {name!r} twice" if name in options else f"has no option {name[:40]!r}"
            raise BadModelArgument(model, f"hf:FOLDER {what}. Its options are {', '.join(OPTIONS)}.")
        choices = OPTIONS[name]
        if choices is not None:
            if value not in choices:
                raise BadModelArgument(model, f"{name} is one of {', '.join(choices)}, got {value[:40]!r}.")
            options[name] = value
            continue
        most = MOST_PARAMETERS if name == "max_parameters" else MAX_TOKENS
        if not (value.isascii() and value.isdigit() and len(value) <= len(str(MOST_PARAMETERS)) and int(value) <= most):
            raise BadModelArgument(model, f"{name} is a whole number of at most {most:,}, got {value[:40]!r}.")
        options[name] = int(value)
    return options


def _read_json(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    shown = str(file)
    try:
        with file.open("rb") as opened:
            content = opened.read(max_bytes + 1)
    except OSError as error:
        raise BadCheckpoint(
            f"{shown} cannot be read: {error.strerror or error}.", "Give a folder that you may read.", path=shown
        ) from error
    if len(content) > max_bytes:
        raise BadCheckpoint(f"{shown} has more than {max_bytes >> 20} MiB.", "Copy or download it again.", path=shown)
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{shown} is not JSON: {error}.", "Copy or download it again.", path=shown) from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{shown} is not a JSON object.", "Copy or download it again.", path=shown)
    return config
