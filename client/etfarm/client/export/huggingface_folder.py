"""Folders of transformers: checks of config.json and of the checkpoint's files, and the errors about them. Stdlib only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from etfarm.client.export.errors import BadModelArgument, ModelNotFound
from etfarm.wire.errors import UserError

MAX_CONFIG_BYTES: Final = 4 << 20
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


class RemoteCodeRefused(UserError):
    """A folder's model can only be created by Python code in the folder, which is not executed."""

    reason = "REMOTE_CODE_REFUSED"

    def __init__(self, folder: str, model_type: str) -> None:
        super().__init__(
            f"The model {model_type!r} in {folder} needs the folder's own Python code (auto_map in config.json), which etfarm "
            "does not execute.",
            "Update transformers if it has the architecture by now; else create the model in a file.py:factory of your own.",
            folder=folder,
            model_type=model_type,
        )


class UnsupportedArchitecture(UserError):
    """A model of transformers that etfarm cannot make a program of by itself.

    Args:
        why: the rest of a sentence that names the model.
    """

    reason = "UNSUPPORTED_ARCHITECTURE"

    def __init__(self, folder: str, architecture: str, why: str) -> None:
        super().__init__(
            f"{architecture} in {folder} cannot be exported: {why}.",
            "Write a file.py:factory that returns the module with example inputs.",
            folder=folder,
            architecture=architecture,
            why=why,
        )


class BadCheckpoint(UserError):
    """A folder of transformers has a configuration or weights that cannot be used."""

    reason = "BAD_CHECKPOINT"


class TooManyRandomWeights(UserError):
    """A model without a checkpoint that has more parameters than are created at random.

    Args:
        parameters: their number.
        limit: the number that is allowed.
        size_bytes: the memory that they would take.
    """

    reason = "TOO_MANY_RANDOM_WEIGHTS"

    def __init__(self, folder: str, parameters: int, limit: int, size_bytes: int) -> None:
        super().__init__(
            f"{folder} has no checkpoint, and its model has {parameters:,} parameters, {size_bytes / 1e9:.1f} GB: at most "
            f"{limit:,} are created at random.",
            f"Give hf:FOLDER:max_parameters={parameters} if this machine and the server have memory for several copies, reduce "
            "num_hidden_layers in config.json, or add the checkpoint.",
            folder=folder, parameters=parameters, limit=limit,
        )  # fmt: skip


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
        ModelNotFound: there is no such folder, or it has no config.json.
        BadCheckpoint: config.json is not one of transformers, or the weights are not in safetensors files.
    """
    shown = str(path)
    file = path / "config.json"
    if not path.is_dir():
        raise ModelNotFound(
            f"There is no folder {shown}.",
            f"Paths start at the working folder, {Path.cwd()}. A model of the hub must be downloaded first.",
            path=shown,
        )
    if not file.is_file():
        raise ModelNotFound(
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
    tensors = any(path.glob("*.safetensors"))
    others = sorted(each.name for pattern in ("*.bin", "*.pt", "*.pth") for each in path.glob(pattern))
    weights = [name for name in others if name.startswith(("pytorch_model", "model", "consolidated"))]
    if weights and not tensors:
        raise BadCheckpoint(
            f"The weights in {shown} are in {weights[0]}, a pickle, which can execute code when it is loaded.",
            "Save the model again with save_pretrained, which writes safetensors.",
            path=shown,
        )
    return Folder(path, model_type, tuple(architectures), tensors, bool(config.get("auto_map")))


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


def _read_json(file: Path) -> dict[str, Any]:
    shown = str(file)
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise BadCheckpoint(
            f"{shown} cannot be read: {error.strerror or error}.", "Give a folder that you may read.", path=shown
        ) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise BadCheckpoint(
            f"{shown} has more than {MAX_CONFIG_BYTES >> 20} MiB.", "Give a config.json of transformers.", path=shown
        )
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{shown} is not JSON: {error}.", "Copy or download it again.", path=shown) from None
    if not isinstance(config, dict):
        raise BadCheckpoint(f"{shown} is not a JSON object.", "Give a config.json of transformers.", path=shown)
    return config
