"""A recipe that has all its values, its canonical JSON and its digest."""

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
    """A recipe by its name, with arguments."""

    specification: Specification
    arguments: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """ExecuTorch's name of it, `portable`, or a plug-in's with a dot."""
        return self.specification.name

    @property
    def is_plugin(self) -> bool:
        """Whether a plug-in that is installed on the server has it."""
        return "." in self.name

    def canonical(self) -> dict[str, object]:
        """`{"recipe": name, "arguments": {...}}`, defaults filled in, tuples as lists."""
        return {"recipe": self.name, "arguments": canonical(self.arguments)}

    @property
    def text(self) -> str | None:
        """`name` or `name:key=value,...` with the arguments that are not their defaults; None where text cannot say them."""
        defaults = {argument.name: argument.default for argument in self.specification.arguments}
        said = {k: v for k, v in sorted(self.arguments.items()) if k not in defaults or defaults[k] != v}
        if self.is_plugin and not all(
            _IN_TEXT.fullmatch(shown(v)) and type(spoken(shown(v))) is type(v) and spoken(shown(v)) == v for v in said.values()
        ):
            return None
        return f"{self.name}:{','.join(f'{k}={shown(v)}' for k, v in said.items())}" if said else self.name


@dataclass(frozen=True)
class Component:
    """A partitioner or quantizer by its name (`components.PARTITIONERS`, `components.QUANTIZERS`), defaults filled in."""

    name: str
    arguments: Mapping[str, Plain] = field(default_factory=dict)

    def canonical(self) -> dict[str, object]:
        """`{"name": name, "arguments": {...}}`."""
        return {"name": self.name, "arguments": canonical(self.arguments)}


@dataclass(frozen=True)
class MethodOptions:
    """What one method has instead of the recipe's; None where it has the same, empty for none."""

    partitioners: tuple[Component, ...] | None = None
    quantizers: tuple[Component, ...] | None = None

    def canonical(self) -> dict[str, object]:
        """What is said, by name."""
        return _said(partitioners=self.partitioners, quantizers=self.quantizers)


@dataclass(frozen=True)
class Options:
    """What a recipe file says besides names and arguments. None and empty mappings where it says nothing.

    Partitioners and quantizers stand in place of the named recipes' ones; an empty tuple is none.
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
    """A plug-in's stage by the stage that it replaces."""
    name: str = ""
    per_op: bool = False
    """All partitioners of XNNPACK give each operator a delegate of its own."""

    def canonical(self) -> dict[str, object]:
        """What is said, by name; empty where nothing is."""
        result = _said(partitioners=self.partitioners, quantizers=self.quantizers)
        if self.name:
            result["name"] = self.name
        if self.per_op:
            result["per_op"] = True
        if self.strict is not None:
            result["strict"] = self.strict
        if self.stages is not None:
            result["stages"] = list(self.stages)
        tables: dict[str, dict[str, object]] = {
            "methods": {name: said for name, method in sorted(self.methods.items()) if (said := method.canonical())},
            "edge": canonical(self.edge),
            "executorch": canonical(self.executorch),
            "replace": dict(sorted(self.replace.items())),
        }
        return result | {key: table for key, table in tables.items() if table}


@dataclass(frozen=True, eq=False)
class Recipe:
    """A recipe whose arguments all have values. Equal recipes have equal digests, however they were written."""

    parts: tuple[Part, ...]
    """Named recipes, combined in this order; none where a file names its own partitioners."""
    options: Options = field(default_factory=Options)
    label: str = ""
    """What people see of a recipe that has options and no name, like a file's stem. No part of its identity."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.json == other.json

    def __hash__(self) -> int:
        return hash(self.json)

    @property
    def name(self) -> str:
        """The name that its file gives, else its parts' names joined by +, else its partitioners'."""
        if self.options.name:
            return self.options.name
        names = [part.name for part in self.parts] or [one.name for one in self.options.partitioners or ()]
        return "+".join(names) or "portable"

    @property
    def text(self) -> str:
        """What people see of it: what `parse` gives back, else its own name, else label or parts, and 8 digits of the digest."""
        if self.options.name:
            return self.options.name
        said = [part.text for part in self.parts]
        if said and not self.options.canonical() and None not in said:
            return "+".join(filter(None, said))
        return f"{self.label or self.name} [{self.digest[:8]}]"

    def canonical(self) -> dict[str, object]:
        """`{"recipe","arguments"}` or `{"combine": [{"recipe","arguments"}, ...]}` or neither, and `"options"` if any are."""
        parts = [part.canonical() for part in self.parts]
        result: dict[str, object] = {"combine": parts} if len(parts) > 1 else parts[0] if parts else {}
        options = self.options.canonical()
        return {**result, "options": options} if options else result

    @property
    def json(self) -> str:
        """The canonical form as canonical JSON: what is hashed, stored and sent to the compiling child."""
        return digest.canonical_json(self.canonical())

    @property
    def digest(self) -> str:
        """sha256 of `json`, lower-case hex."""
        return digest.of_bytes(self.json.encode())

    @property
    def strict(self) -> bool:
        """torch.export's strict mode; False where nothing is said."""
        return bool(self.options.strict)

    @property
    def quantization(self) -> Quantization:
        """What it does to numbers, the strongest of all that it does; NONE of plug-ins that are not resolved."""
        methods = [one.quantizers for one in self.options.methods.values() if one.quantizers is not None]
        return _strongest([self._everywhere(), *(_of_quantizers(quantizers) for quantizers in methods)])

    def quantization_of(self, method: str) -> Quantization:
        """What it does to the numbers of one method."""
        own = self.options.methods.get(method, MethodOptions()).quantizers
        return self._everywhere() if own is None else _strongest([self._source(), _of_quantizers(own)])

    def _everywhere(self) -> Quantization:
        quantizers = self.options.quantizers
        if quantizers is None:
            return _strongest(part.specification.quantization for part in self.parts)
        return _strongest([self._source(), _of_quantizers(quantizers)])

    def _source(self) -> Quantization:
        found = any(part.specification.quantization is Quantization.TORCHAO_SOURCE for part in self.parts)
        return Quantization.TORCHAO_SOURCE if found else Quantization.NONE

    @property
    def stages(self) -> tuple[str, ...]:
        """The whole pipeline, wherever its stages run."""
        if self.options.stages is not None:
            return self.options.stages
        quantization = self.quantization
        found = ["SOURCE_TRANSFORM"] if quantization is Quantization.TORCHAO_SOURCE else []
        found += ["QUANTIZE"] if quantization in _PT2E else []
        found += ["TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER"]
        found += ["EDGE_PROGRAM_MANAGER_TRANSFORM"] if "EDGE_PROGRAM_MANAGER_TRANSFORM" in self.options.replace else []
        return (*found, "TO_EXECUTORCH")

    @property
    def quantization_json(self) -> str:
        """Canonical JSON of all that QUANTIZE and the export after it depend on; recipes that share it share their results."""
        parts = [
            part.canonical()
            for part in self.parts
            if part.specification.quantization is not Quantization.NONE or not part.specification.resolved
        ]
        quantizers = _said(quantizers=self.options.quantizers)
        methods = {name: _said(quantizers=one.quantizers) for name, one in sorted(self.options.methods.items())}
        said = {name: one for name, one in methods.items() if one}
        return digest.canonical_json({"combine": parts, **quantizers, "methods": said, "strict": self.strict})

    @property
    def takes_xnnpack(self) -> bool:
        """Whether a partitioner of XNNPACK takes part, or may: a plug-in's recipe can have one, whatever its backend's name."""
        lists = [self.options.partitioners, *(method.partitioners for method in self.options.methods.values())]
        if any(one.name == "xnnpack" for components in lists for one in components or ()):
            return True
        parts = self.parts if self.options.partitioners is None else ()
        return any(part.is_plugin or part.specification.backend == "xnnpack" for part in parts)

    def per_operator(self) -> Recipe:
        """The recipe with a delegate of XNNPACK for each operator rather than for each stretch of them; itself where that is
        so, or where XNNPACK takes no part. What is quantized, and how, is the same."""
        if self.options.per_op or not self.takes_xnnpack:
            return self
        return replace(self, options=replace(self.options, per_op=True))

    @property
    def plugins(self) -> tuple[str, ...]:
        """The plug-ins that it needs, by name, sorted: those of its parts and those that replace stages."""
        return tuple(sorted({part.name for part in self.parts if part.is_plugin} | set(self.options.replace.values())))

    @property
    def resolved(self) -> bool:
        """Whether all that it names is known here; see `with_plugins`."""
        return all(part.specification.resolved for part in self.parts)


def canonical(values: Mapping[str, Plain]) -> dict[str, object]:
    """By sorted name, tuples as lists."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in sorted(values.items())}


def _said(**components: tuple[Component, ...] | None) -> dict[str, object]:
    return {key: [one.canonical() for one in ones] for key, ones in components.items() if ones is not None}


def _of_quantizers(quantizers: Iterable[Component]) -> Quantization:
    return _strongest(
        Quantization.PT2E_DYNAMIC if one.arguments.get("dynamic") else QUANTIZERS[one.name].quantization for one in quantizers
    )


def _strongest(found: Iterable[Quantization]) -> Quantization:
    return max(found, key=_STRENGTH.index, default=Quantization.NONE)
