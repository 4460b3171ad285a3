"""Resolved recipes, with their canonical JSON and digest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from etfarm.wire import digest
from etfarm.wire.recipes.components import QUANTIZERS
from etfarm.wire.recipes.table import Quantization, Specification
from etfarm.wire.recipes.values import Plain, shown, spoken

_STRENGTH: Final = (Quantization.NONE, Quantization.PT2E_DYNAMIC, Quantization.PT2E_STATIC, Quantization.TORCHAO_SOURCE)
_PT2E: Final = (Quantization.PT2E_STATIC, Quantization.PT2E_DYNAMIC)
_IN_TEXT: Final = re.compile(r"[^,+=\s][^,+=]*(?<!\s)")


@dataclass(frozen=True)
class Part:
    """A named recipe with its arguments."""

    specification: Specification
    arguments: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name: ExecuTorch's, `portable`, or a plug-in's, which has a dot."""
        return self.specification.name

    @property
    def is_plugin(self) -> bool:
        """Whether a plug-in on the server provides it."""
        return "." in self.name

    def canonical(self) -> dict[str, object]:
        """Return `{"recipe": name, "arguments": {...}}` with defaults filled in and tuples as lists."""
        return {"recipe": self.name, "arguments": canonical(self.arguments)}

    @property
    def text(self) -> str | None:
        """The text `name` or `name:key=value,...` with non-default arguments; None if they cannot be written as text."""
        defaults = {argument.name: argument.default for argument in self.specification.arguments}
        arguments = {k: v for k, v in sorted(self.arguments.items()) if k not in defaults or defaults[k] != v}
        if self.is_plugin and not all(
            _IN_TEXT.fullmatch(shown(v)) and type(spoken(shown(v))) is type(v) and spoken(shown(v)) == v
            for v in arguments.values()
        ):
            return None
        return f"{self.name}:{','.join(f'{k}={shown(v)}' for k, v in arguments.items())}" if arguments else self.name


@dataclass(frozen=True)
class Component:
    """A partitioner or quantizer by its name (`components.PARTITIONERS`, `components.QUANTIZERS`), defaults filled in."""

    name: str
    arguments: Mapping[str, Plain] = field(default_factory=dict)

    def canonical(self) -> dict[str, object]:
        """Return `{"name": name, "arguments": {...}}`."""
        return {"name": self.name, "arguments": canonical(self.arguments)}


@dataclass(frozen=True)
class MethodOptions:
    """The options of one method. None inherits from the recipe; an empty tuple means no components."""

    partitioners: tuple[Component, ...] | None = None
    quantizers: tuple[Component, ...] | None = None

    def canonical(self) -> dict[str, object]:
        """Return the options that are set, by name."""
        return _canonical_components(partitioners=self.partitioners, quantizers=self.quantizers)


@dataclass(frozen=True)
class Options:
    """The options of a recipe file besides names and arguments; None or empty if unset.

    Partitioners and quantizers replace those of the named recipes; an empty tuple means no components.
    """

    strict: bool | None = None
    """torch.export's strict mode."""
    stages: tuple[str, ...] | None = None
    partitioners: tuple[Component, ...] | None = None
    quantizers: tuple[Component, ...] | None = None
    methods: Mapping[str, MethodOptions] = field(default_factory=dict)
    edge: Mapping[str, Plain] = field(default_factory=dict)
    executorch: Mapping[str, Plain] = field(default_factory=dict)
    replace: Mapping[str, str] = field(default_factory=dict)
    """Names of plug-ins' stages by the stage that they replace."""
    name: str = ""
    per_op: bool = False
    """Whether all XNNPACK partitioners create a separate delegate for each operator."""
    copy_shared_layers: bool = False
    """Whether each use of a layer gets its own copy of the weights before they are quantized."""
    fuse_activations: bool = False
    """Whether a layer and the activation after it are quantized as one operator, which XNNPACK makes of them."""

    def canonical(self) -> dict[str, object]:
        """Return the options that are set, by name; empty if none is set."""
        result = _canonical_components(partitioners=self.partitioners, quantizers=self.quantizers)
        if self.name:
            result["name"] = self.name
        if self.per_op:
            result["per_op"] = True
        result |= self.before_quantization()
        if self.strict is not None:
            result["strict"] = self.strict
        if self.stages is not None:
            result["stages"] = list(self.stages)
        tables: dict[str, dict[str, object]] = {
            "methods": {name: table for name, method in sorted(self.methods.items()) if (table := method.canonical())},
            "edge": canonical(self.edge),
            "executorch": canonical(self.executorch),
            "replace": dict(sorted(self.replace.items())),
        }
        return result | {key: table for key, table in tables.items() if table}

    def before_quantization(self) -> dict[str, object]:
        """Return the options that change what QUANTIZE quantizes, if they are set."""
        changes = {"copy_shared_layers": self.copy_shared_layers, "fuse_activations": self.fuse_activations}
        return {name: True for name, is_set in changes.items() if is_set}


@dataclass(frozen=True, eq=False)
class Recipe:
    """A recipe whose arguments all have values. Equal recipes have equal digests, regardless of how they were written."""

    parts: tuple[Part, ...]
    """Named recipes, combined in this order; empty if a file names its own partitioners."""
    options: Options = field(default_factory=Options)
    label: str = ""
    """The label for users of a recipe with options but no name, such as a file's stem; not part of its identity."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.json == other.json

    def __hash__(self) -> int:
        return hash(self.json)

    @property
    def name(self) -> str:
        """The name from its file, else the names of its parts joined by +, else those of its partitioners."""
        if self.options.name:
            return self.options.name
        names = [part.name for part in self.parts] or [partitioner.name for partitioner in self.options.partitioners or ()]
        return "+".join(names) or "portable"

    @property
    def text(self) -> str:
        """The recipe as shown to users: its own name, the text for `parse`, or label or name with 8 digits of the digest."""
        if self.options.name:
            return self.options.name
        texts = [part.text for part in self.parts]
        if texts and not self.options.canonical() and None not in texts:
            return "+".join(filter(None, texts))
        return f"{self.label or self.name} [{self.digest[:8]}]"

    def canonical(self) -> dict[str, object]:
        """Return `{"recipe","arguments"}`, `{"combine": [{"recipe","arguments"}, ...]}` or `{}`, with any `"options"`."""
        parts = [part.canonical() for part in self.parts]
        result: dict[str, object] = {"combine": parts} if len(parts) > 1 else parts[0] if parts else {}
        options = self.options.canonical()
        return {**result, "options": options} if options else result

    @property
    def json(self) -> str:
        """The canonical form as canonical JSON, which is hashed, stored and sent to the compiling child."""
        return digest.canonical_json(self.canonical())

    @property
    def digest(self) -> str:
        """The sha256 of `json`, lower-case hex."""
        return digest.of_bytes(self.json.encode())

    @property
    def strict(self) -> bool:
        """torch.export's strict mode; False by default."""
        return bool(self.options.strict)

    @property
    def quantization(self) -> Quantization:
        """The strongest quantization of all parts and methods; NONE for unresolved plug-ins."""
        methods = [method.quantizers for method in self.options.methods.values() if method.quantizers is not None]
        return _strongest([self._everywhere(), *(_of_quantizers(quantizers) for quantizers in methods)])

    def quantization_of(self, method: str) -> Quantization:
        """Return the quantization of one method."""
        own = self.options.methods.get(method, MethodOptions()).quantizers
        return self._everywhere() if own is None else _strongest([self._source(), _of_quantizers(own)])

    def _everywhere(self) -> Quantization:
        quantizers = self.options.quantizers
        if quantizers is None:
            return _strongest(part.specification.quantization for part in self.parts)
        return _strongest([self._source(), _of_quantizers(quantizers)])

    def _source(self) -> Quantization:
        transforms_source = any(part.specification.quantization is Quantization.TORCHAO_SOURCE for part in self.parts)
        return Quantization.TORCHAO_SOURCE if transforms_source else Quantization.NONE

    @property
    def stages(self) -> tuple[str, ...]:
        """The whole pipeline, on the client and on the server."""
        if self.options.stages is not None:
            return self.options.stages
        quantization = self.quantization
        stages = ["SOURCE_TRANSFORM"] if quantization is Quantization.TORCHAO_SOURCE else []
        stages += ["QUANTIZE"] if quantization in _PT2E else []
        stages += ["TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER"]
        stages += ["EDGE_PROGRAM_MANAGER_TRANSFORM"] if "EDGE_PROGRAM_MANAGER_TRANSFORM" in self.options.replace else []
        return (*stages, "TO_EXECUTORCH")

    @property
    def quantization_json(self) -> str:
        """Canonical JSON of all that determines QUANTIZE and the following export; recipes with equal values share results."""
        parts = [
            part.canonical()
            for part in self.parts
            if part.specification.quantization is not Quantization.NONE or not part.specification.resolved
        ]
        quantizers = _canonical_components(quantizers=self.options.quantizers)
        methods = {
            name: _canonical_components(quantizers=method.quantizers) for name, method in sorted(self.options.methods.items())
        }
        quantized = {name: method for name, method in methods.items() if method}
        changes = self.options.before_quantization()
        return digest.canonical_json({"combine": parts, **quantizers, **changes, "methods": quantized, "strict": self.strict})

    @property
    def takes_xnnpack(self) -> bool:
        """Whether an XNNPACK partitioner takes part, or may: a plug-in's recipe can have one regardless of its backend's name."""
        lists = [self.options.partitioners, *(method.partitioners for method in self.options.methods.values())]
        if any(component.name == "xnnpack" for components in lists for component in components or ()):
            return True
        parts = self.parts if self.options.partitioners is None else ()
        return any(part.is_plugin or part.specification.backend == "xnnpack" for part in parts)

    def per_operator(self) -> Recipe:
        """Return the recipe with one XNNPACK delegate per operator instead of one per connected subgraph.

        Return the recipe itself if that is already the case, or if XNNPACK takes no part. Quantization does not change.
        """
        if self.options.per_op or not self.takes_xnnpack:
            return self
        return replace(self, options=replace(self.options, per_op=True))

    @property
    def plugins(self) -> tuple[str, ...]:
        """The sorted names of the required plug-ins: those of its parts and those that replace stages."""
        return tuple(sorted({part.name for part in self.parts if part.is_plugin} | set(self.options.replace.values())))

    @property
    def resolved(self) -> bool:
        """Whether the specifications of all its parts are known; see `with_plugins`."""
        return all(part.specification.resolved for part in self.parts)


def canonical(values: Mapping[str, Plain]) -> dict[str, object]:
    """Return values by sorted name, with tuples as lists."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in sorted(values.items())}


def _canonical_components(**components: tuple[Component, ...] | None) -> dict[str, object]:
    return {key: [item.canonical() for item in items] for key, items in components.items() if items is not None}


def _of_quantizers(quantizers: Iterable[Component]) -> Quantization:
    return _strongest(
        Quantization.PT2E_DYNAMIC if quantizer.arguments.get("dynamic") else QUANTIZERS[quantizer.name].quantization
        for quantizer in quantizers
    )


def _strongest(quantizations: Iterable[Quantization]) -> Quantization:
    return max(quantizations, key=_STRENGTH.index, default=Quantization.NONE)
