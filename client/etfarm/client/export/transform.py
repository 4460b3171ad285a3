"""SOURCE_TRANSFORM: rewriting of copies of modules on the client, before their export.

torchao's 4-bit recipes replace the weights of nn.Linear. An exported program has no nn.Linear left, so that a server could
not do it. The recipe's configuration, created by ExecuTorch's provider, determines which weights change, and how.

Weights that are tensor subclasses, as `torchao.quantization.quantize_` leaves them, become the plain tensors they are made of.
Exported as they are, an archive would have pickles of them, and a backend would take quantized values for real ones.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etfarm.client.export.errors import TRANSFORM_STAGE, source_transform_failed, with_article
from etfarm.client.export.noise import quiet
from etfarm.client.export.remedies import PT2E_INSTEAD
from etfarm.client.export.source import ModelSource
from etfarm.client.export.subclasses import has_subclasses, unwrap
from etfarm.client.export.traces import place_of
from etfarm.client.export.weight_uses import find_other_uses
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.recipes import Quantization, Recipe

if TYPE_CHECKING:
    from torch import nn

    from etfarm.wire.recipes import Part, Plain

_PROVIDERS = {"xnnpack": "executorch.backends.xnnpack.recipes", "coreml": "executorch.backends.apple.coreml.recipes"}
"""Modules that register a backend's recipes on import."""


_XNNPACK_GROUP = 32
_NAMED_LAYERS = 4


def torchao_parts(recipe: Recipe) -> tuple[Part, ...]:
    """Return the parts of a recipe that rewrite eager modules, and thus cannot apply to an exported program."""
    if "SOURCE_TRANSFORM" not in recipe.stages:
        return ()
    return tuple(part for part in recipe.parts if part.specification.quantization is Quantization.TORCHAO_SOURCE)


@dataclass(frozen=True)
class Transform:
    """The changes to each method's module before its export."""

    source: ModelSource
    recipe: Recipe | None
    """Recipe with the torchao configuration that is applied after the source's own transforms; None for no recipe."""
    base: Path
    """Folder that names of source files in errors are relative to."""
    say: Callable[[str], None] = lambda _: None
    """Called with a sentence that names layers which stay in fp32."""
    quantized: set[str] = field(default_factory=set)
    """Gets the methods of which the source's own transforms have quantized weights."""
    _configs: list[Any] = field(default_factory=list, repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether neither the source nor the recipe changes modules."""
        return not self.source.source_transforms and (self.recipe is None or not torchao_parts(self.recipe))

    def must_find_something(self, name: str) -> None:
        """Check that the recipe matches weights to quantize in at least one method.

        Raises:
            NOTHING_TO_TRANSFORM: it matches no weights.
            CLIENT_TOOLS_MISSING: its provider or torchao is not installed.
        """
        if self.recipe is None or not torchao_parts(self.recipe):
            return
        config = self._config()
        there: dict[str, int] = {}
        for module in self.source.methods.values():
            for path, part in module.named_modules():
                if _is_selected(config, part, path) or _is_quantized(part):
                    return
                if any(True for _ in part.parameters(recurse=False)):
                    there[type(part).__name__] = there.get(type(part).__name__, 0) + 1
        if self.source.source_transforms:
            return  # they may add some
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(there.items(), key=lambda item: -item[1])[:4])
        kinds = "nn.Linear or nn.Embedding" if config.filter_fn is not None else "nn.Linear"
        raise error_for(
            "NOTHING_TO_TRANSFORM",
            f"{name} has no {kinds} that {self.recipe.text} could quantize; it has {shown or 'no submodules with weights'}.",
            "Use a pt2e recipe, such as xnnpack_pt2e_int8_static_per_channel, which quantizes convolutions too.",
            stage=TRANSFORM_STAGE,
            model=name,
            recipe=self.recipe.text,
        )

    @property
    def quantizes(self) -> bool:
        """Whether the recipe quantizes weights here."""
        return self.recipe is not None and bool(torchao_parts(self.recipe))

    def apply(self, method: str, left_out: Collection[str] = ()) -> tuple[nn.Module, float | None]:
        """Return the method's module to export and the duration in ms; the user's own module and None if nothing changed.

        Args:
            left_out: paths of layers that the recipe leaves in fp32.

        Raises:
            SOURCE_TRANSFORM_FAILED: a transform raised or did not return a module, or the weights do not fit the recipe.
            CLIENT_TOOLS_MISSING: the recipe's provider or torchao is not installed.
        """
        module = self.source.methods[method]
        if self.is_empty and not has_subclasses(module):
            return module, None
        started = time.monotonic()
        own = self._copied(method)
        if has_subclasses(own) and not has_subclasses(module):
            self.quantized.add(method)
        if self.quantizes:
            self._quantize(method, own, self._config(), left_out)
        with self._refusals(method, "unwrapping the tensor subclasses"), quiet():
            unwrap(own)
        return own, round((time.monotonic() - started) * 1000, 3)

    def used_otherwise(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        """Return the paths of layers whose weights forward gives to operators that quantized ones lack, and name them.

        Raises:
            SOURCE_TRANSFORM_FAILED: no layer would be left to quantize.
        """
        own, config = self._copied(method), self._config()
        layers = [path for path, part in own.named_modules() if _is_selected(config, part, path)]
        used = find_other_uses(own, layers, args, kwargs)
        why = "since forward uses their weights itself, as by transposing them, and torchao's tensors lack that"
        if used and len(used) == len(layers):
            raise source_transform_failed(
                method, f"no layer would be quantized, {why}: {_shown(used)}.", PT2E_INSTEAD, layer=used[0]
            )
        if used:
            self.say(f"{method}: {len(used)} of {len(layers)} layers stay in fp32, {why}: {_shown(used)}.")
        return used

    def _copied(self, method: str) -> nn.Module:
        """Return a copy of the method's module after the source's own transforms."""
        import torch

        original = self.source.methods[method]
        for path, layer in original.named_modules():
            for name, value in vars(layer).items():
                if isinstance(value, torch.Tensor) and not value.is_leaf:  # PyTorch does not copy these
                    raise _not_copied(method, path, name, layer)
        with self._refusals(method, "copying the module"):
            own = copy.deepcopy(original)
        for transform in self.source.source_transforms:
            own = self._transformed(method, own, transform)
        return own

    def _transformed(self, method: str, module: nn.Module, transform: Any) -> nn.Module:
        from torch import nn

        name = getattr(transform, "__name__", type(transform).__name__)
        with self._refusals(method, f"the source transform {name}"):
            returned = transform(method, module)
        if not isinstance(returned, nn.Module):
            raise source_transform_failed(
                method,
                f"the source transform {name} returned {with_article(type(returned).__name__)}, not a module.",
                "Return the module.",
            )
        return returned

    def _quantize(self, method: str, module: nn.Module, config: Any, left_out: Collection[str]) -> None:
        from torchao.quantization import quantize_

        assert self.recipe is not None
        at: list[str] = []

        def wanted(part: Any, path: str) -> bool:
            if path in kept or not _is_selected(config, part, path):
                return False
            at[:] = [path]
            return True

        kept = {*left_out, *self._leave_in_fp32(method, module, config, left_out)}
        try:
            with quiet():
                quantize_(module, config.ao_base_config, wanted)
        except Exception as error:
            raise self._does_not_fit(method, module, at[0] if at else "", error) from error

    def _leave_in_fp32(self, method: str, module: nn.Module, config: Any, left_out: Collection[str]) -> set[str]:
        """Return the paths of layers that keep their weights because XNNPACK refuses them in 4 bits, and name them.

        Those are layers with rows whose length is not a multiple of 32. Groups of other sizes are not among a recipe's values.

        Source: `get_quant_params` of executorch/backends/xnnpack/operators/node_visitor.py 1.5.1.

        Raises:
            SOURCE_TRANSFORM_FAILED: no layer would be left to quantize.
        """
        assert self.recipe is not None
        (part,) = torchao_parts(self.recipe)
        if part.specification.backend != "xnnpack" or self.recipe.options.partitioners is not None:
            return set()
        widths = {
            path: int(layer.weight.shape[-1])
            for path, layer in module.named_modules()
            if path not in left_out and _is_selected(config, layer, path)
        }
        unfit = {path: width for path, width in widths.items() if width % _XNNPACK_GROUP}
        if unfit and len(unfit) == len(widths):
            path, width = next(iter(unfit.items()))
            raise source_transform_failed(
                method,
                f"{repr(path) if path else 'the module'} has {width} inputs, but XNNPACK takes 4-bit weights of a multiple "
                f"of {_XNNPACK_GROUP} inputs only.",
                "Change its in_features, or use a pt2e recipe, such as xnnpack_pt2e_int8_static_per_channel.",
                layer=path,
            )
        if unfit and not left_out:  # else they are named already
            shown = _shown([f"{path} ({width} inputs)" for path, width in unfit.items()])
            self.say(
                f"{method}: {len(unfit)} of {len(widths)} layers stay in fp32, since 4-bit weights of XNNPACK need a multiple of "
                f"{_XNNPACK_GROUP} inputs: {shown}."
            )
        return set(unfit)

    def _does_not_fit(self, method: str, module: nn.Module, path: str, error: Exception) -> EtfarmError:
        """Return the error for torchao's refusal of a weight, with the layer's name and, for a group size, the sizes that fit."""
        from torch.nn.utils import parametrize

        assert self.recipe is not None
        (part,) = torchao_parts(self.recipe)
        weight = getattr(module.get_submodule(path), "weight", None)
        width = int(weight.shape[-1]) if weight is not None and weight.dim() else 0
        layer = f"{path!r}" if path else "the module"
        group = part.arguments.get("group_size")
        if isinstance(group, int) and width and width % group:
            allowed = next((a.choices for a in part.specification.arguments if a.name == "group_size"), ())
            fitting = [str(size) for size in allowed if isinstance(size, int) and width % size == 0]
            remedy = (
                f"Use {part.specification.name}:group_size={fitting[-1]}, or a recipe that quantizes per channel."
                if fitting
                else "Use a recipe that quantizes per channel."
            )
            return source_transform_failed(
                method,
                f"{layer} has {width} inputs, which the group_size {group} of {part.specification.name} does not divide.",
                remedy,
                layer=path,
                group_size=group,
            )
        if parametrize.is_parametrized(module.get_submodule(path), "weight"):
            owner = f'model.get_submodule("{path}")' if path else "model"
            return source_transform_failed(
                method,
                f"{layer} computes its weight by a parametrization; torchao quantizes weights that are stored.",
                f'Store the result, by torch.nn.utils.parametrize.remove_parametrizations({owner}, "weight").',
                layer=path,
            )
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return source_transform_failed(
            method, f"torchao cannot quantize {layer} for {self.recipe.text}: {reason}", PT2E_INSTEAD, layer=path
        )

    def _config(self) -> Any:
        assert self.recipe is not None
        if not self._configs:
            self._configs.append(_torchao_config(self.recipe))
        return self._configs[0]

    @contextmanager
    def _refusals(self, method: str, what: str) -> Iterator[None]:
        try:
            yield
        except EtfarmError:
            raise
        except Exception as error:
            place = place_of(error, self.base)
            at = f", at {place}" if place else ""
            text = (str(error).strip().splitlines() or [""])[0]
            raise source_transform_failed(
                method,
                f"{what} raised {type(error).__name__}: {text}{at}" if text else f"{what} raised {type(error).__name__}{at}.",
            ) from error


def _torchao_config(recipe: Recipe) -> Any:
    """Return the AOQuantizationConfig of ExecuTorch's own recipe.

    Raises:
        CLIENT_TOOLS_MISSING: a package of its provider is not installed here.
        SOURCE_TRANSFORM_FAILED: several parts rewrite the modules.
    """
    parts = torchao_parts(recipe)
    if len(parts) > 1:
        names = " and ".join(part.specification.name for part in parts)
        raise source_transform_failed(recipe.text, f"{names} both rewrite the modules.", "Combine only one of them with others.")
    (part,) = parts
    provider = _PROVIDERS.get(part.specification.backend, "")
    try:
        with quiet():
            from executorch.export import ExportRecipe

            types = vars(importlib.import_module(provider)).values()
            kinds = [kind for kind in types if isinstance(kind, type) and hasattr(kind, "get_backend_name")]
            member_type = next(member for kind in kinds for member in _members(kind) if member.value == part.specification.name)
            export_recipe = ExportRecipe.get_recipe(member_type, **_arguments(part.specification.backend, part.arguments))
    except (ImportError, OSError, StopIteration, ValueError) as error:
        missing = getattr(error, "name", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise error_for(
            "CLIENT_TOOLS_MISSING",
            f"Recipe {part.specification.name} rewrites modules on this machine, and what it needs is missing: {missing}.",
            "Run pip install 'etfarm[export]'" + (" coremltools." if part.specification.backend == "coreml" else "."),
            recipe=part.specification.name,
        ) from error
    return export_recipe.quantization_recipe.ao_quantization_configs[0]


def _members(kind: Any) -> Sequence[Any]:
    try:
        return list(kind)
    except TypeError:  # the base class of all recipe types has no members
        return ()


def _arguments(backend: str, arguments: Mapping[str, Plain]) -> dict[str, object]:
    """Return a part's arguments in the form that its provider takes."""
    if backend != "coreml":
        return dict(arguments)
    ct = importlib.import_module("coremltools")
    converted: dict[str, object] = {}
    for key, value in arguments.items():
        if key == "minimum_deployment_target":
            converted[key] = getattr(ct.target, str(value))
        elif key == "compute_unit":
            converted[key] = getattr(ct.ComputeUnit, str(value))
        else:
            converted[key] = list(value) if isinstance(value, tuple) else value
    return converted


def _shown(layers: Sequence[str]) -> str:
    more = f" and {len(layers) - _NAMED_LAYERS} more" if len(layers) > _NAMED_LAYERS else ""
    return ", ".join(layers[:_NAMED_LAYERS]) + more


def _is_selected(config: Any, part: Any, path: str) -> bool:
    """Return whether torchao would quantize this module and has not done so yet."""
    from torchao.quantization.quant_api import _is_linear

    if _is_quantized(part):
        return False
    return bool(config.filter_fn(part, path) if config.filter_fn is not None else _is_linear(part, path))


def _not_copied(method: str, path: str, name: str, layer: nn.Module) -> EtfarmError:
    """Return the error for a tensor with a gradient's history that a module keeps as an attribute."""
    from torch.nn.utils.weight_norm import WeightNorm

    owner = f'model.get_submodule("{path}")' if path else "model"
    normed = any(isinstance(hook, WeightNorm) and hook.name == name for hook in layer._forward_pre_hooks.values())
    return source_transform_failed(
        method,
        f"{f'{path}.' if path else ''}{name} is the result of a computation with gradients, which PyTorch does not copy.",
        f'Store the result, by torch.nn.utils.remove_weight_norm({owner}, "{name}").'
        if normed
        else f"Store the result without its gradient: {owner}.{name} = {owner}.{name}.detach().",
        layer=path,
    )


def _is_quantized(part: nn.Module) -> bool:
    """Return whether torchao has already quantized the module's own weight."""
    from torch.nn.utils import parametrize
    from torchao.utils import TorchAOBaseTensor

    weight = getattr(part, "_parameters", {}).get("weight")
    return isinstance(weight, TorchAOBaseTensor) or (
        parametrize.is_parametrized(part, "weight") and isinstance(part.weight, TorchAOBaseTensor)
    )
