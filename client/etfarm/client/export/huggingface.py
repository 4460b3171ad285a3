"""Models from local folders of transformers, `hf:FOLDER`: a config.json, and a checkpoint or random weights.

Nothing is downloaded, and no code of the folder is executed: only architectures that transformers itself contains are created.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.errors import extra_missing
from etfarm.client.export.huggingface_folder import (
    DTYPES,
    MAX_MODULES,
    MAX_RANDOM_PARAMETERS,
    OPTIONS,
    BadCheckpoint,
    Folder,
    read_folder,
    remote_code_refused,
    unsupported_architecture,
)
from etfarm.client.export.noise import quiet, quiet_natively
from etfarm.wire.errors import error_for
from etfarm.wire.escapes import in_a_line
from etfarm.wire.generation import draw_tokens

if TYPE_CHECKING:
    from torch import nn

Say = Callable[[str], None]

DEFAULT_CONTEXT_TOKENS: Final = 2048
"""Context of a decoder whose configuration allows more, if none is requested: ExecuTorch reserves memory for all of it."""
_MIN_TRANSFORMERS: Final = 5
"""First major version whose static caches have the interface that `huggingface_modules` extends."""
_EXAMPLE_TOKENS: Final = 128
"""Number of tokens of an encoder's example input, unless its positions are fewer."""
_SAMPLES: Final = 8
_SAMPLE_TOKENS: Final = 32


@dataclass(frozen=True)
class Loaded:
    """A model of a folder."""

    module: nn.Module
    samples: tuple[tuple[Any, ...], ...]
    """Inputs of `forward` for calibration; for a model without a cache, the first is the example input."""
    decoder: Mapping[str, Any] | None = None
    """Arguments of `ModelSource.causal_lm`; None for a model without a cache."""


def load(
    folder: Path,
    *,
    max_context_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
    dtype: str = "float32",
    attention: str = "sdpa",
    logits: str = "last",
    seed: int = 0,
    max_parameters: int | None = None,
    say: Say | None = None,
) -> Loaded:
    """Load the model of a folder; see `ModelSource.huggingface`."""
    for option, choice in (("dtype", dtype), ("attention", attention), ("logits", logits)):
        if choice not in (choices := OPTIONS[option] or ()):
            raise error_for(
                "BAD_MODEL_SOURCE",
                f"{option} must be one of {', '.join(choices)}, got {choice!r}.",
                "Give one of them.",
                part=option,
            )
    checked, tell = read_folder(folder), say or (lambda _: None)
    with _importing(folder):
        transformers = _import_transformers(f"hf:{folder}")
        with _no_hub(), _few_modules(checked):
            config = _config(transformers, checked, tell)
            kind = _architecture(transformers, checked, config)
            _require_few_parameters(transformers, checked, kind, config, DTYPES[dtype], max_parameters or MAX_RANDOM_PARAMETERS)
            model = _create(transformers, checked, kind, config, DTYPES[dtype], seed, tell)
    name = type(model).__name__
    if kind == _CAUSAL:
        return _decoder(checked, model, max_context_tokens, max_prompt_tokens, attention, logits)
    for option, value, default in (
        ("max_context_tokens", max_context_tokens, None), ("max_prompt_tokens", max_prompt_tokens, None),
        ("attention", attention, "sdpa"), ("logits", logits, "last"),
    ):  # fmt: skip
        if value != default:
            raise error_for(
                "BAD_MODEL_SOURCE", f"{option} is an option of decoders, and {name} is not one.", "Leave it out.", part=option
            )
    return _plain(checked, model)


_CAUSAL: Final = "a causal language model"


@contextmanager
def _importing(folder: Path) -> Iterator[None]:
    """Hide a torchvision that cannot be imported from transformers, whose language models do without it.

    transformers imports it if it is installed, and one built for another torch raises.

    Raises:
        EXTRA_MISSING: transformers is not installed, or too old.
    """
    _require_transformers(f"hf:{folder}")
    hidden = False
    if "torchvision" not in sys.modules and importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError, OSError, AttributeError):
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            sys.modules["torchvision"] = None  # type: ignore[assignment]  # find_spec and import both say that there is none
            hidden = True
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torchvision"]


def _require_transformers(model: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise extra_missing(model, "huggingface", "transformers", model=model)
    installed = importlib.metadata.version("transformers")
    if int(installed.partition(".")[0]) < _MIN_TRANSFORMERS:
        why = f"transformers {_MIN_TRANSFORMERS}.0 or later; {installed} is installed"
        raise extra_missing(model, "huggingface", "transformers", why=why, model=model)


def _import_transformers(model: str) -> Any:
    """Return the package transformers with what models are created by.

    Raises:
        EXTRA_MISSING: the libraries that it needs are missing, or are there in other versions.
    """
    try:
        with quiet():
            transformers = importlib.import_module("transformers")
            importlib.import_module("transformers.modeling_utils")
    except ImportError as error:
        why = f"transformers cannot be imported: {_line(error)}"
        raise extra_missing(model, "huggingface", "transformers", why=why, model=model) from error
    return transformers


@contextmanager
def _no_hub() -> Iterator[None]:
    """Keep transformers from looking anything up on the hub, and from showing progress bars and warnings."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    logging: Any = importlib.import_module("transformers.utils.logging")
    was_offline, verbosity, environment = constants.HF_HUB_OFFLINE, logging.get_verbosity(), os.environ.get("HF_HUB_OFFLINE")
    bars = logging.is_progress_bar_enabled()
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if environment is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = environment


@contextmanager
def _few_modules(folder: Folder) -> Iterator[None]:
    """Limit the modules that are created: without their weights they still take memory and time.

    Raises:
        BadCheckpoint: within, for one more than `MAX_MODULES`.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    created = 0

    def count(*_: object) -> None:
        nonlocal created
        created += 1
        if created > 2 * MAX_MODULES:  # the model is created twice, first without memory for its weights
            raise BadCheckpoint(
                f"The model of config.json in {folder.path} has more than {MAX_MODULES:,} modules.",
                "Give the config.json that save_pretrained wrote.",
                path=str(folder.path),
            )

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _config(transformers: Any, folder: Folder, say: Say) -> Any:
    if folder.has_code:
        if folder.model_type not in importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES:
            raise remote_code_refused(str(folder.path), folder.model_type)
        say(
            f"{folder.path} brings Python code of its own (auto_map), which is not executed: transformers has "
            f"{folder.model_type!r}."
        )
    try:
        with quiet():
            return transformers.AutoConfig.from_pretrained(str(folder.path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise unsupported_architecture(
            str(folder.path),
            folder.model_type,
            f"transformers {transformers.__version__} cannot read its configuration: {_line(error)}",
        ) from error


def _architecture(transformers: Any, folder: Folder, config: Any) -> str:
    """Return the class to create: `_CAUSAL`, or the name of one without a cache."""
    mapping = importlib.import_module("transformers.models.auto.modeling_auto")
    causal = mapping.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    named = folder.architectures[0] if folder.architectures else ""
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported_architecture(
            str(folder.path), named or folder.model_type, "it has an encoder and a decoder, which are two methods of a program"
        )
    if folder.model_type in causal and (named in causal.values() or (not named and not _is_masked(mapping, folder))):
        return _CAUSAL
    if not named:
        named = mapping.MODEL_MAPPING_NAMES.get(folder.model_type, "")
    if not isinstance(named, str) or not _is_model_of(transformers, named, config):
        why = f"transformers {transformers.__version__} has no such class of {folder.model_type!r} models"
        raise unsupported_architecture(str(folder.path), str(named), why)
    return named


def _is_model_of(transformers: Any, name: str, config: Any) -> bool:
    """Return whether a name is that of a model's own class for this configuration.

    AutoModel and others that choose a class are not: if transformers has none, they choose one in the folder's code.
    """
    cls = getattr(transformers, name, None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        return False
    expected = getattr(cls, "config_class", None)
    return isinstance(expected, type) and isinstance(config, expected)


def _is_masked(mapping: Any, folder: Folder) -> bool:
    return folder.model_type in mapping.MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _create(transformers: Any, folder: Folder, kind: str, config: Any, dtype: str, seed: int, say: Say) -> Any:
    import torch

    cls = transformers.AutoModelForCausalLM if kind == _CAUSAL else getattr(transformers, kind)
    checkpoint = folder.has_checkpoint
    say(
        f"Loading the checkpoint in {folder.path}."
        if checkpoint
        else f"Creating the model of {folder.path} with random weights, seed {seed}."
    )

    def create(attention: str) -> tuple[Any, Any]:
        options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
        if kind == _CAUSAL:
            options["trust_remote_code"] = False  # by default the user is asked, and may confirm
        if not checkpoint:
            return (cls.from_config if kind == _CAUSAL else cls._from_config)(config, **options), None
        created: tuple[Any, Any] = cls.from_pretrained(
            str(folder.path), config=config, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
        )
        return created

    try:
        with quiet(), torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            try:
                model, loaded = create("sdpa")
            except ValueError:  # some models have no choice of attentions
                model, loaded = create("eager")
    except BadCheckpoint:
        raise
    except Exception as error:
        what = "its checkpoint cannot be loaded" if checkpoint else "it cannot be created"
        raise unsupported_architecture(str(folder.path), folder.model_type, f"{what}: {_line(error)}") from error
    if loaded is not None:
        _must_be_whole(folder, loaded)
        if unused := sorted(loaded["unexpected_keys"]):
            more = f" and {len(unused) - 3:,} more" if len(unused) > 3 else ""
            names = in_a_line(", ".join(name[:100] for name in unused[:3]))
            say(f"{type(model).__name__} does not use these weights of the checkpoint: {names}{more}.")
    if hasattr(model, "set_experts_implementation") and getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("batched_mm")  # grouped matrix multiplications have no kernel in ExecuTorch
    return model.eval().requires_grad_(False)


def _require_few_parameters(transformers: Any, folder: Folder, kind: str, config: Any, dtype: str, limit: int) -> None:
    """Refuse a model with too many parameters for random weights or for its checkpoint, without memory for any.

    Raises:
        TOO_MANY_RANDOM_WEIGHTS: it has no checkpoint, and more than `limit` parameters.
        BadCheckpoint: it has more than that, and more parameters than the checkpoint has bytes.
    """
    import torch

    cls = transformers.AutoModelForCausalLM if kind == _CAUSAL else getattr(transformers, kind)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if kind == _CAUSAL:
        options["trust_remote_code"] = False
    try:
        with quiet(), torch.device("meta"):
            # The same configuration creates the model itself, and creating a model may change it.
            model = (cls.from_config if kind == _CAUSAL else cls._from_config)(copy.deepcopy(config), **options)
    except BadCheckpoint:
        raise
    except Exception:  # noqa: BLE001 - a class that cannot be created without values; creating it says what is wrong
        return
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    if folder.has_checkpoint:
        held_bytes = sum(file.stat().st_size for file in folder.path.glob("*.safetensors"))
        if count > max(held_bytes, limit):
            raise BadCheckpoint(
                f"The model of config.json in {folder.path} has {count:,} parameters, and the checkpoint {held_bytes:,} bytes.",
                "Copy or download the folder again: its config.json is of another model, or files are missing.",
                path=str(folder.path),
            )
    elif count > limit:
        size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        raise error_for(
            "TOO_MANY_RANDOM_WEIGHTS",
            f"{folder.path!s} has no checkpoint, and its model has {count:,} parameters, {size_bytes / 1e9:.1f} GB: at most "
            f"{limit:,} are created at random.",
            f"Give hf:FOLDER:max_parameters={count} if this machine and the server have memory for several copies, reduce "
            "num_hidden_layers in config.json, or add the checkpoint.",
            folder=str(folder.path),
            parameters=count,
            limit=limit,
        )


def _must_be_whole(folder: Folder, loaded: Any) -> None:
    """Refuse a checkpoint that lacks weights, which transformers would initialize at random.

    Raises:
        BadCheckpoint: weights are missing or have other shapes.
    """
    missing = sorted(loaded["missing_keys"])
    mismatched = sorted(str(each[0]) for each in loaded["mismatched_keys"])
    if missing or mismatched:
        wrong = missing or mismatched
        more = f" and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
        what = "lacks" if missing else "has other shapes than config.json says for"
        raise BadCheckpoint(
            f"The checkpoint in {folder.path} {what} {', '.join(wrong[:3])}{more}.",
            "Save the whole model with save_pretrained, with its own config.json.",
            path=str(folder.path),
            weights=",".join(wrong[:20]),
        )


def _decoder(
    folder: Folder, model: Any, context: int | None, max_prompt_tokens: int | None, attention: str, logits: str
) -> Loaded:
    import torch

    from etfarm.client.export.huggingface_modules import Decoder, UnsupportedCache

    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT_TOKENS
    if not isinstance(positions, int):  # transformers 5.0 takes anything
        why = f"'max_position_embeddings' in config.json must be a number, got {positions!r:.40}"
        raise unsupported_architecture(str(folder.path), type(model).__name__, why)
    if context is not None and not 8 <= context <= positions:
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"max_context_tokens must be 8 to {positions:,}, which config.json allows, got {context:,}.",
            f"Give for example max_context_tokens={min(positions, DEFAULT_CONTEXT_TOKENS)}.",
            part="max_context_tokens",
        )
    context = context or min(positions, DEFAULT_CONTEXT_TOKENS)
    try:
        with quiet_natively() if attention == "custom" else quiet():
            module: nn.Module = Decoder(
                model, max_context_tokens=context, all_logits=logits == "all", custom_operators=attention == "custom"
            ).eval()
    except UnsupportedCache as error:
        raise unsupported_architecture(str(folder.path), type(model).__name__, f"it {error}") from error
    except Exception as error:
        raise unsupported_architecture(
            str(folder.path), type(model).__name__, f"it cannot run with a static cache: {_line(error)}"
        ) from error
    longest = context - 1 if max_prompt_tokens is None else max_prompt_tokens
    length = min(_SAMPLE_TOKENS, longest)
    texts = [draw_tokens(seed, config.vocab_size, length) for seed in range(_SAMPLES)]
    metadata: dict[str, Any] = {
        "get_n_layers": config.num_hidden_layers,
        "use_sdpa_with_kv_cache": attention == "custom",
    }
    for name, value in (("get_bos_id", config.bos_token_id), ("get_eos_ids", config.eos_token_id)):
        if isinstance(value, int) or (isinstance(value, list) and value and name == "get_eos_ids"):
            metadata[name] = value
    samples = tuple((torch.tensor([list(text)]), torch.arange(length)) for text in texts)
    sizes = {"max_context_tokens": context, "max_prompt_tokens": max_prompt_tokens, "vocab_size": config.vocab_size}
    return Loaded(module, samples, decoder={**sizes, "constant_methods": metadata})


def _plain(folder: Folder, model: Any) -> Loaded:
    """Return a model without a cache, with example inputs of the sizes in its configuration."""
    import torch

    from etfarm.client.export.huggingface_modules import OneInput

    config, main = model.config, getattr(model, "main_input_name", "")
    generator = torch.Generator().manual_seed(0)
    samples: list[Any] = []
    if main == "input_ids" and isinstance(getattr(config, "vocab_size", None), int):
        positions = getattr(config, "max_position_embeddings", None) or _EXAMPLE_TOKENS
        # Models of the RoBERTa family begin to count positions behind the padding's token.
        length = max(1, min(_EXAMPLE_TOKENS, positions - 1 - (getattr(config, "pad_token_id", None) or 0)))
        samples = [torch.tensor([list(draw_tokens(seed, config.vocab_size, length))]) for seed in range(_SAMPLES)]
    elif main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (1, getattr(config, "num_channels", 3), height, width)
        samples = [torch.randn(shape, generator=generator).to(model.dtype) for _ in range(_SAMPLES)]
    if not samples:
        raise unsupported_architecture(
            str(folder.path),
            type(model).__name__,
            f"its input {main!r} cannot be made up from the configuration",
        )
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return Loaded(OneInput(model, main).eval(), tuple((sample,) for sample in samples))


def _line(error: BaseException) -> str:
    """Return the beginning of an error's message, on one line."""
    if isinstance(error, KeyError):
        return f"transformers does not know {str(error)[:300]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text[:300].rstrip(".:")
