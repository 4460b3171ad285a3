"""The return value of a factory: an eager model with everything that its export needs.

This module does not import torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from etfarm.client.export.errors import example_inputs_not_a_tuple, with_article
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.model_limits import MAX_CALLS

if TYPE_CHECKING:
    from torch import nn

    from etfarm.client.export.usercode import ModuleScope

    SourceTransform: TypeAlias = Callable[[str, nn.Module], nn.Module]
    """Takes a method's name and a copy of its module, and gives the module to export: the copy, changed, or another."""

Samples: TypeAlias = "Sequence[tuple[Any, ...]] | Callable[[], Iterable[tuple[Any, ...]]]"
"""Calibration samples of a method, or a function that returns an iterable of them, which need not keep them in memory."""


@dataclass(frozen=True)
class ModelSource:
    """An eager model: its methods, with inputs to export and to calibrate them.

    A model of one method is shorter as `ModelSource.of(module, (x,))`. Two methods:

        ModelSource(
            methods={"encode": encoder, "decode": decoder},
            example_inputs={"encode": (image,), "decode": (tokens, state)},
            dynamic_shapes={"decode": {"tokens": {1: Dim("length", max=128)}, "state": None}},
        )

    Raises:
        BAD_MODEL_SOURCE: a part names a method that `methods` lacks, or a method has no example inputs.
        DYNAMIC_SHAPES_FORM: `dynamic_shapes` is not keyed by method.
        EXAMPLE_INPUTS_NOT_A_TUPLE: example or calibration inputs are not tuples.
    """

    methods: Mapping[str, nn.Module]
    """A module per method name, in eval mode and on the CPU; the method is the module's `forward`."""
    example_inputs: Mapping[str, tuple[Any, ...]]
    """Positional arguments of `forward` per method; they determine the program's shapes and dtypes. Allowed are tensors,
    numbers, None, and tuples, lists and dicts of these; a number is baked in, and the program must be called with the same
    number.
    """
    example_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keyword arguments of `forward` per method. They follow the positional ones in the flattened order of inputs."""
    calibration_inputs: Mapping[str, Samples] = field(default_factory=dict)
    """Samples from which static quantization takes its ranges: tuples like `example_inputs`, with `example_kwargs` added to
    each. Eight were enough where one was not. The example inputs are the only sample of a method without any. A function
    that returns an iterator is called for each export that needs the samples, and only one sample is in memory at a time.
    """
    dynamic_shapes: Mapping[str, Any] = field(default_factory=dict)
    """Dynamic shapes per method in torch.export's form: `{argument: {dim index: Dim(name, max=...)}}` or a tuple in the order
    of the arguments. An argument that is left out of the dictionary is static. Every Dim needs a finite maximum.
    """
    constant_methods: Mapping[str, Any] = field(default_factory=dict)
    """Extra methods that only return a constant: a bool, int, float or tensor, or a list or tuple of these."""
    source_transforms: Sequence[SourceTransform] = ()
    """Functions `(method, module) -> module` that rewrite a copy of each method's module before it is exported, one after the
    other; reports show them as the stage SOURCE_TRANSFORM.
    """
    calls: Sequence[tuple[str, tuple[Any, ...]]] = ()
    """Calls of methods, each with its positional arguments, on which the program is compared with the model, in order: for
    methods that share state, or that keep it. Keyword arguments are those of `example_kwargs`. When empty, methods that share
    state are called once each, in order.
    """
    keep_mutations: bool = False
    """Whether inputs that a method writes to are returned, too: after its own outputs, named as the inputs. Programs work on
    copies of them in any case.
    """
    scope: ModuleScope | None = field(default=None, repr=False, compare=False, kw_only=True)
    """The modules of the factory that made it, which its export may import; `load_source` sets it."""

    def __post_init__(self) -> None:
        if not isinstance(self.methods, Mapping) or not self.methods:
            raise error_for(
                "BAD_MODEL_SOURCE",
                "A ModelSource needs at least one method.",
                'Give methods={"forward": module}, or use ModelSource.of.',
            )
        if isinstance(self.dynamic_shapes, Mapping):
            foreign = [str(key) for key in self.dynamic_shapes if key not in self.methods]
            if foreign:
                raise _not_by_method(self.methods, f"{foreign[0]!r} is not a method")
        else:
            raise _not_by_method(self.methods, f"it is {with_article(type(self.dynamic_shapes).__name__)}")
        for part in ("example_inputs", "example_kwargs", "calibration_inputs"):
            value = getattr(self, part)
            if not isinstance(value, Mapping):
                raise error_for(
                    "BAD_MODEL_SOURCE",
                    f"{part} is {with_article(type(value).__name__)}, not a dictionary by method.",
                    f'Give {part}={{"{next(iter(self.methods))}": ...}}, or use ModelSource.of.',
                    part=part,
                )
            for name in value:
                if name not in self.methods:
                    raise error_for(
                        "BAD_MODEL_SOURCE",
                        f"{part} names the method {name!r}, which is not in methods.",
                        f"The methods are {', '.join(self.methods)}.",
                        part=part,
                        method=name,
                    )
        for name in self.methods:
            if name not in self.example_inputs:
                raise error_for(
                    "BAD_MODEL_SOURCE",
                    f"The method {name!r} has no example inputs.",
                    f'Give example_inputs={{"{name}": (x,)}}.',
                    part="example_inputs",
                    method=name,
                )
            must_be_tuple(name, self.example_inputs[name])
            samples = self.calibration_inputs.get(name, ())
            for sample in () if callable(samples) else samples:
                must_be_tuple(name, sample)
        for call in self.calls:
            if not isinstance(call, tuple | list) or len(call) != 2:
                raise error_for(
                    "BAD_MODEL_SOURCE",
                    f"calls has {with_article(type(call).__name__)} that is not a pair of a method and its arguments.",
                    f'Write ("{next(iter(self.methods))}", (x,)).',
                    part="calls",
                )
            name, inputs = call
            if name not in self.methods:
                raise error_for(
                    "BAD_MODEL_SOURCE",
                    f"calls has the method {name!r}, which is not in methods.",
                    f"The methods are {', '.join(self.methods)}.",
                    part="calls",
                    method=name,
                )
            must_be_tuple(name, inputs)
        if len(self.calls) > MAX_CALLS:
            raise error_for(
                "BAD_MODEL_SOURCE",
                f"calls must have at most {MAX_CALLS} calls, got {len(self.calls)}.",
                "Leave some out.",
                part="calls",
            )
        for transform in self.source_transforms:
            if not callable(transform):
                raise error_for(
                    "BAD_MODEL_SOURCE",
                    f"A source transform is {with_article(type(transform).__name__)}, not a function.",
                    "Give functions of a method's name and its module that return a module.",
                    part="source_transforms",
                )
        for name in self.constant_methods:
            if name in self.methods:
                raise error_for(
                    "BAD_MODEL_SOURCE", f"{name!r} is both a method and a constant method.", "Rename one of them.", method=name
                )

    @classmethod
    def of(
        cls,
        module: nn.Module,
        example_inputs: tuple[Any, ...],
        *,
        method: str = "forward",
        example_kwargs: Mapping[str, Any] | None = None,
        calibration_inputs: Samples = (),
        dynamic_shapes: Any = None,
        constant_methods: Mapping[str, Any] | None = None,
        source_transforms: Sequence[SourceTransform] = (),
        keep_mutations: bool = False,
    ) -> ModelSource:
        """Return a model of one method.

        The arguments are those of that method: `dynamic_shapes={"x": {0: Dim("n", max=64)}}`.

        Raises:
            EXAMPLE_INPUTS_NOT_A_TUPLE: `example_inputs` or a calibration sample is not a tuple.
        """
        return cls(
            methods={method: module},
            example_inputs={method: example_inputs},
            example_kwargs={method: example_kwargs} if example_kwargs else {},
            calibration_inputs={method: calibration_inputs} if calibration_inputs else {},
            dynamic_shapes={} if dynamic_shapes is None else {method: dynamic_shapes},
            constant_methods=constant_methods or {},
            source_transforms=source_transforms,
            keep_mutations=keep_mutations,
        )

    @classmethod
    def causal_lm(
        cls,
        module: nn.Module,
        *,
        max_context_tokens: int,
        vocab_size: int,
        max_prompt_tokens: int | None = None,
        position_vector: bool = False,
        constant_methods: Mapping[str, Any] | None = None,
        calibration_inputs: Samples = (),
        source_transforms: Sequence[SourceTransform] = (),
    ) -> ModelSource:
        """Return a language model whose generation of text can be measured (`etfarm bench --generate`).

        It gets one method, `forward`, of any number of tokens, and the metadata methods that ExecuTorch's runner reads.

        Args:
            module: a decoder with a KV cache in its buffers. `forward(tokens, position)` takes token ids, int64[1, n], and the
                position of the first of them, int64[1], writes their keys and values there, and returns logits: those of the
                last token, or of each.
            max_context_tokens: number of tokens that the cache has room for.
            vocab_size: number of different tokens.
            max_prompt_tokens: maximum number of tokens of one execution, `max_context_tokens - 1` when None; with 1, prompts are
                processed token by token.
            position_vector: whether `forward` takes the position of each token, int64[n], instead of that of the first one.
            constant_methods: further metadata.
            calibration_inputs, source_transforms: as in `of`.

        Raises:
            BAD_MODEL_SOURCE: `forward` does not take two arguments, or a size is impossible.
        """
        longest = max_context_tokens - 1 if max_prompt_tokens is None else max_prompt_tokens
        metadata = _language_metadata(max_context_tokens, vocab_size, longest)
        example_inputs, dynamic_shapes = _causal_lm_parts(module, longest, position_vector)
        return cls.of(
            module,
            example_inputs,
            calibration_inputs=calibration_inputs,
            dynamic_shapes=dynamic_shapes,
            constant_methods={**metadata, **(constant_methods or {})},
            source_transforms=source_transforms,
        )

    @classmethod
    def flow(
        cls,
        text_decoder: nn.Module,
        *,
        token_embedding: nn.Module,
        encoders: Mapping[str, tuple[nn.Module, tuple[Any, ...]]] | None = None,
        max_context_tokens: int,
        vocab_size: int,
        max_prompt_tokens: int | None = None,
        constant_methods: Mapping[str, Any] | None = None,
        calibration_inputs: Mapping[str, Samples] | None = None,
        source_transforms: Sequence[SourceTransform] = (),
    ) -> ModelSource:
        """Return a vision-language model whose generation of text can be measured (`etfarm bench --generate`).

        Its methods have the names of ExecuTorch's multimodal runner, and feed each other: a prompt begins with the outputs of the
        encoders and continues with the embeddings of its tokens; the decoder takes both and returns logits.

        Args:
            text_decoder: a decoder with a KV cache in its buffers. `forward(embeddings, position)` takes float[1, n, width] and
                the position of the first of them, int64[1], and returns logits: those of the last position, or of each.
            token_embedding: `forward(tokens)` takes token ids, int64[1, n], and returns float[1, n, width].
            encoders: `vision_encoder` and `audio_encoder`, each with its example inputs, whose shapes are static. Their output is
                float[..., width], with a row for each position of the context.
            max_context_tokens: number of positions that the cache has room for.
            vocab_size: number of different tokens.
            max_prompt_tokens: maximum number of tokens of one execution, `max_context_tokens - 1` when None.
            constant_methods: further metadata.
            calibration_inputs: samples by method.
            source_transforms: as in `of`.

        Raises:
            BAD_MODEL_SOURCE: an encoder's name is unknown, a size is impossible, or the output of a module does not fit the next.
        """
        from etfarm.client.export.flow import flow_parts

        longest = max_context_tokens - 1 if max_prompt_tokens is None else max_prompt_tokens
        metadata = _language_metadata(max_context_tokens, vocab_size, longest)
        parts = flow_parts(
            text_decoder, token_embedding, encoders or {}, max_context_tokens=max_context_tokens, vocab_size=vocab_size,
            max_prompt_tokens=longest,
        )  # fmt: skip
        return cls(
            methods=parts.methods,
            example_inputs=parts.example_inputs,
            calibration_inputs=calibration_inputs or {},
            dynamic_shapes=parts.dynamic_shapes,
            constant_methods={**metadata, **(constant_methods or {})},
            source_transforms=source_transforms,
        )

    @classmethod
    def huggingface(
        cls,
        folder: str | Path,
        *,
        max_context_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
        dtype: str = "float32",
        attention: str = "sdpa",
        logits: str = "last",
        seed: int = 0,
        max_parameters: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> ModelSource:
        """Return the model of a local folder of transformers, like the MODEL argument `hf:FOLDER`.

        A causal language model gets a static KV cache, any number of tokens up to `max_prompt_tokens`, and the metadata of
        `causal_lm`; its inputs are `input_ids`, int64[1, n], and `cache_position`, int64[n]. Other models, such as encoders and
        classifiers of texts or images, get their plain `forward` with example inputs of the sizes in their configuration. Nothing
        is downloaded, and no code of the folder is executed.

        Args:
            folder: folder with a config.json and safetensors files; without these, the weights are random.
            max_context_tokens: number of tokens that the cache has room for; 2048 when None, or what config.json allows.
            max_prompt_tokens: as in `causal_lm`.
            dtype: `float32`, `float16` or `bfloat16`.
            attention: `sdpa`, PyTorch's over the whole cache, or `custom`, ExecuTorch's `llama::custom_sdpa`, whose work grows
                with the text.
            logits: `last` for those of the last token, `all` for those of each.
            seed: selects random weights.
            max_parameters: maximum number of parameters that get random weights; 2,000,000,000 when None.
            say: called with a sentence about random weights and code that is not executed.

        Raises:
            EXTRA_MISSING: transformers is not installed.
            MODEL_NOT_FOUND: there is no such folder, or it has no config.json.
            REMOTE_CODE_REFUSED: only Python code in the folder could create the model.
            UnsupportedArchitecture: transformers does not have it, or it has inputs or a cache that etfarm cannot make up.
            BadCheckpoint: the configuration or the weights cannot be used.
            TOO_MANY_RANDOM_WEIGHTS: without a checkpoint, the model has more parameters than `max_parameters`.
            BAD_MODEL_SOURCE: an option has an unsupported value.
        """
        from etfarm.client.export.huggingface import load

        loaded = load(
            Path(folder), max_context_tokens=max_context_tokens, max_prompt_tokens=max_prompt_tokens, dtype=dtype,
            attention=attention, logits=logits, seed=seed, max_parameters=max_parameters, say=say,
        )  # fmt: skip
        samples = loaded.samples
        if loaded.decoder is None:
            return cls.of(loaded.module, samples[0], calibration_inputs=samples)
        return cls.causal_lm(loaded.module, position_vector=True, calibration_inputs=samples, **loaded.decoder)


def _language_metadata(max_context_tokens: int, vocab_size: int, max_prompt_tokens: int) -> dict[str, Any]:
    """Return the metadata methods of a language model.

    Raises:
        BAD_MODEL_SOURCE: a size is impossible.
    """
    if not (max_context_tokens >= 2 and vocab_size >= 1 and 1 <= max_prompt_tokens <= max_context_tokens):
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"A language model needs 2 or more tokens of context, a vocabulary, and prompts of 1 to {max_context_tokens} "
            f"tokens, got {max_context_tokens}, {vocab_size} and {max_prompt_tokens}.",
            "Give max_context_tokens=, vocab_size= and max_prompt_tokens= of the model.", part="max_prompt_tokens",
        )  # fmt: skip
    return {
        "get_max_seq_len": max_context_tokens, "get_max_context_len": max_context_tokens, "get_vocab_size": vocab_size,
        "use_kv_cache": True, "enable_dynamic_shape": max_prompt_tokens > 1,
    }  # fmt: skip


def _causal_lm_parts(module: nn.Module, max_prompt_tokens: int, position_vector: bool) -> tuple[tuple[Any, ...], Any]:
    """Return the example inputs of a decoder and their dynamic shapes.

    Args:
        max_prompt_tokens: maximum number of tokens of one execution; with 1, the length is static.

    Raises:
        BAD_MODEL_SOURCE: `forward` does not take exactly two arguments.
    """
    import torch

    parameters = [parameter.name for parameter in inspect.signature(module.forward).parameters.values()]
    if len(parameters) != 2:
        raise error_for(
            "BAD_MODEL_SOURCE",
            f"The forward of a language model must take tokens and positions, and takes {', '.join(parameters) or 'nothing'}.",
            "Wrap it: `forward(tokens, position)` with tokens int64[1, n] and the position of the first one, int64[1].",
        )
    # A length of 1 in the example would make the dim static.
    count = min(3, max_prompt_tokens)
    positions = torch.arange(count) if position_vector else torch.zeros(1, dtype=torch.int64)
    example = torch.arange(1, count + 1).reshape(1, count), positions
    if max_prompt_tokens == 1:
        return example, None
    length = torch.export.Dim("tokens", max=max_prompt_tokens)
    return example, ({1: length}, {0: length} if position_vector else None)


def must_be_tuple(method: str, inputs: object) -> None:
    """Check that example inputs, or a calibration sample, are positional arguments.

    Raises:
        EXAMPLE_INPUTS_NOT_A_TUPLE: they are not.
    """
    if not isinstance(inputs, tuple):
        raise example_inputs_not_a_tuple(method, type(inputs).__name__)


def _not_by_method(methods: Mapping[str, object], what: str) -> EtfarmError:
    first = next(iter(methods))
    return error_for(
        "DYNAMIC_SHAPES_FORM",
        f"dynamic_shapes must be a dictionary by method, and {what}.",
        f'Write {{"{first}": {{"x": {{0: Dim("n", max=64)}}}}}}.',
        methods=",".join(methods),
    )
