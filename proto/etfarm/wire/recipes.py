"""The recipes by name: what each does, takes and needs, and how a user's text becomes one canonical Recipe.

Both ends speak it: the client refuses a typing error before anything is sent, the server resolves the same text to the
same digest. Stdlib only; whether a recipe's tools are installed on a server, that server says (`compile.available`).
Source: the RecipeType enums and `_validate_recipe_kwargs` of executorch.backends.*.recipes 1.5.1, which only log an
argument that they do not know.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from etfarm.wire import digest
from etfarm.wire.errors import UserError

DEFAULT: Final = "xnnpack_fp32"
"""The recipe of whoever names none."""

Plain = str | int | bool | tuple[int, ...]
"""An argument's value; tuples of ints are lists in JSON and TOML, `1x16` in text."""


class Quantization(StrEnum):
    """What a recipe does to numbers, and so what it needs of a model."""

    NONE = "NONE"
    PT2E_STATIC = "PT2E_STATIC"
    """int8 weights and activations from calibration; works on modules and on exported programs."""
    PT2E_DYNAMIC = "PT2E_DYNAMIC"
    """int8 weights, activation scales found at run time."""
    TORCHAO_SOURCE = "TORCHAO_SOURCE"
    """Modules are replaced before the export: only where the eager module is, on the client."""


class UnknownRecipe(UserError):
    """No recipe has this name."""

    reason = "UNKNOWN_RECIPE"

    def __init__(self, name: str) -> None:
        near = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.5)
        remedy = f"Did you mean {_alternatives(near)}?" if near else "`etfarm recipes list` shows those there are."
        super().__init__(f"There is no recipe {name!r}.", remedy, recipe=name, nearest=",".join(near))


class UnknownRecipeArgument(UserError):
    """The recipe takes no argument of this name."""

    reason = "UNKNOWN_RECIPE_ARGUMENT"

    def __init__(self, recipe: str, argument: str, known: Sequence[str]) -> None:
        takes = f"It takes {', '.join(known)}." if known else "It takes none."
        super().__init__(
            f"Recipe {recipe} has no argument {argument!r}.",
            takes,
            recipe=recipe,
            argument=argument,
            known=",".join(known),
        )


class BadRecipeArgument(UserError):
    """An argument's value is missing, of another type, or not among the allowed ones."""

    reason = "BAD_RECIPE_ARGUMENT"

    def __init__(self, recipe: str, argument: str, value: object, allowed: str) -> None:
        what = f"needs the argument {argument!r}" if value is None else f"cannot take {argument}={_shown(value)}"
        super().__init__(
            f"Recipe {recipe} {what}.",
            f"Allowed: {allowed}.",
            recipe=recipe,
            argument=argument,
            value="" if value is None else _shown(value),
            allowed=allowed,
        )


class BadRecipeText(UserError):
    """The text is no recipe: not `name`, not `name:key=value,...`, not the TOML of one."""

    reason = "BAD_RECIPE_TEXT"


@dataclass(frozen=True)
class Argument:
    """One argument of a recipe."""

    name: str
    summary: str
    kind: type[str] | type[int] | type[bool] | type[tuple[int, ...]]
    choices: tuple[Plain, ...] = ()
    """All allowed values; empty where `pattern` or `bounds` say it."""
    pattern: str = ""
    """Regular expression that the whole of a str matches."""
    bounds: tuple[int, int] | None = None
    """Least and greatest int, or of each int of a tuple."""
    default: Plain | None = None
    required: bool = False

    @property
    def allowed(self) -> str:
        """The allowed values, for a sentence."""
        if self.choices:
            return ", ".join(_shown(choice) for choice in self.choices)
        if self.kind is bool:
            return "true, false"
        if self.bounds is not None:
            what = "integers joined by x, each" if self.kind is tuple else "an integer"
            return f"{what} from {self.bounds[0]} to {self.bounds[1]}"
        return f"a text like {self.pattern}"

    def read(self, recipe: str, value: object) -> Plain:
        """The value as this argument has it; a str is read as the command line has it.

        Raises:
            BadRecipeArgument: it cannot be one of the allowed ones.
        """
        found = _converted(self.kind, value)
        if found is None or not self._allows(found):
            raise BadRecipeArgument(recipe, self.name, "" if value is None else value, self.allowed)
        return found

    def _allows(self, value: Plain) -> bool:
        if self.choices:
            return value in self.choices
        if isinstance(value, bool):
            return True
        if isinstance(value, str):
            return re.fullmatch(self.pattern, value) is not None
        numbers = value if isinstance(value, tuple) else (value,)
        low, high = self.bounds or (0, 0)
        return bool(numbers) and all(low <= number <= high for number in numbers)


@dataclass(frozen=True)
class Specification:
    """A recipe as it is known, before its arguments have values."""

    name: str
    backend: str
    """The recipe provider's name: portable, xnnpack, coreml, coreai, arm, qnn."""
    quantization: Quantization
    summary: str
    needs: str = ""
    """What a compile host needs besides the server's own packages; empty for nothing."""
    runs_on: str = ""
    """What a device needs; empty where every runner has it."""
    arguments: tuple[Argument, ...] = ()
    keeps_fp32: str = ""
    """What stays unquantized by design; empty for nothing that is known."""


@dataclass(frozen=True)
class Recipe:
    """A recipe whose arguments all have values. Equal recipes have equal digests, however they were written."""

    specification: Specification
    arguments: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """ExecuTorch's name of it, or `portable`."""
        return self.specification.name

    @property
    def quantization(self) -> Quantization:
        """What it does to numbers."""
        return self.specification.quantization

    def canonical(self) -> dict[str, object]:
        """`{"recipe": name, "arguments": {...}}`, defaults filled in, tuples as lists."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in sorted(self.arguments.items())}
        return {"recipe": self.name, "arguments": plain}

    @property
    def json(self) -> str:
        """The canonical form as canonical JSON: what is hashed, stored and sent to the compiling child."""
        return digest.canonical_json(self.canonical())

    @property
    def digest(self) -> str:
        """sha256 of `json`, lower-case hex."""
        return digest.of_bytes(self.json.encode())

    @property
    def text(self) -> str:
        """`name` or `name:key=value,...` with the arguments that are not their defaults; `parse` gives this back."""
        defaults = {argument.name: argument.default for argument in self.specification.arguments}
        said = [f"{k}={_shown(v)}" for k, v in sorted(self.arguments.items()) if defaults[k] != v]
        return f"{self.name}:{','.join(said)}" if said else self.name


def parse(text: str) -> Recipe:
    """The recipe of `name` or `name:key=value,...`. For the path of a TOML file, read it and call `from_toml`.

    Raises:
        BadRecipeText: the text has another form.
        UnknownRecipe, UnknownRecipeArgument, BadRecipeArgument: as they say.
    """
    name, colon, rest = text.strip().partition(":")
    given: dict[str, object] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or key.strip() in given:
            raise BadRecipeText(
                f"{text!r} is no recipe: {part!r} is not one key=value.", "Write name:key=value,key=value.", text=text
            )
        given[key.strip()] = value.strip()
    if colon and not given:
        raise BadRecipeText(f"{text!r} is no recipe: nothing follows the colon.", "Write name:key=value.", text=text)
    return resolve(name, given)


def from_toml(text: str) -> Recipe:
    """The recipe of a TOML text: `recipe = "name"` and, optionally, a table `[arguments]`.

    Raises:
        BadRecipeText: it is no TOML, or has other keys.
        UnknownRecipe, UnknownRecipeArgument, BadRecipeArgument: as they say.
    """
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadRecipeText(f"The recipe file is no TOML: {error}.") from None
    return _from_mapping(said, "The recipe file")


def from_json(text: str) -> Recipe:
    """The recipe whose `json` this is.

    Raises:
        BadRecipeText: it is no JSON object of that form.
        UnknownRecipe, UnknownRecipeArgument, BadRecipeArgument: as they say.
    """
    try:
        said = json.loads(text)
    except ValueError as error:
        raise BadRecipeText(f"The recipe is no JSON: {error}.") from None
    return _from_mapping(said, "The recipe")


def resolve(name: str, given: Mapping[str, object]) -> Recipe:
    """The recipe `name` with `given` arguments and the defaults of the others.

    Raises:
        UnknownRecipe, UnknownRecipeArgument, BadRecipeArgument: as they say.
    """
    specification = RECIPES.get(name)
    if specification is None:
        raise UnknownRecipe(name)
    known = {argument.name: argument for argument in specification.arguments}
    for key in given:
        if key not in known:
            raise UnknownRecipeArgument(name, key, list(known))
    values: dict[str, Plain] = {}
    for argument in specification.arguments:
        if argument.name in given:
            values[argument.name] = argument.read(name, given[argument.name])
        elif argument.default is not None:
            values[argument.name] = argument.default
        elif argument.required:
            raise BadRecipeArgument(name, argument.name, None, argument.allowed)
    return Recipe(specification, values)


def _from_mapping(said: object, what: str) -> Recipe:
    if not isinstance(said, dict):
        raise BadRecipeText(f"{what} is no table of `recipe` and `arguments`.")
    other = sorted(map(str, set(said) - {"recipe", "arguments"}))
    name, arguments = said.get("recipe"), said.get("arguments", {})
    if other or not isinstance(name, str) or not isinstance(arguments, dict):
        why = f"has the unknown key {other[0]!r}" if other else 'lacks recipe = "name" or its arguments are no table'
        raise BadRecipeText(f"{what} {why}.", 'Write recipe = "name", then [arguments] with key = value.')
    return resolve(name, arguments)


def _converted(kind: type[object], value: object) -> Plain | None:
    if kind is bool:
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value))
    if kind is int:
        return _integer(value)
    if kind is tuple:
        parts: Sequence[object] = value.split("x") if isinstance(value, str) else _list(value)
        numbers = [_integer(part) for part in parts]
        return tuple(n for n in numbers if n is not None) if None not in numbers else None
    return value if isinstance(value, str) else None


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [value]


def _integer(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value) else None


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _alternatives(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _coreml(name: str, quantization: Quantization, summary: str, *more: Argument, target: str = "") -> Specification:
    return Specification(
        name, "coreml", quantization, summary, needs="coremltools", runs_on="an Apple device",
        arguments=(
            Argument("minimum_deployment_target", "oldest system that must run it", str,
                     ("iOS15", "iOS16", "iOS17", "iOS18"), default=target or None),
            Argument("compute_unit", "where Core ML may run it", str, ("ALL", "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE")),
            Argument("lower_full_graph", "fail rather than leave operators outside of Core ML", bool),
            *more,
        ),
    )  # fmt: skip


def _ethos_u(version: int, macs: tuple[int, ...], default: int) -> Specification:
    return Specification(
        f"arm_ethos_u{version}_int8", "arm", Quantization.PT2E_STATIC,
        f"int8 for the Ethos-U{version} NPU, compiled by Vela", needs="executorch[ethos-u]",
        runs_on=f"a Cortex-M with an Ethos-U{version}, or Corstone's simulator",
        arguments=(
            Argument("macs", "multiply-accumulates a cycle of the NPU", int, macs, default=default),
            Argument("system_config", "Vela's system configuration", str, pattern=r"[A-Za-z0-9_]{1,64}"),
            Argument("memory_mode", "Vela's memory mode", str, pattern=r"[A-Za-z0-9_]{1,64}"),
        ),
    )  # fmt: skip


def _vgf(name: str, quantization: Quantization, summary: str) -> Specification:
    return Specification(name, "arm", quantization, summary, needs="Arm's ML SDK for Vulkan", runs_on="a GPU with VGF")


_Q = Quantization
_GROUP = Argument("group_size", "weights that share one scale", int, (16, 32, 64, 128, 256), default=32)
_LINEAR = "Linear layers only; convolutions stay fp32"

RECIPES: Final[Mapping[str, Specification]] = {
    specification.name: specification
    for specification in (
        Specification("portable", "portable", _Q.NONE, "fp32 on ExecuTorch's portable kernels, no delegate"),
        Specification("xnnpack_fp32", "xnnpack", _Q.NONE, "fp32 on XNNPACK: the CPUs' fast path"),
        Specification(
            "xnnpack_pt2e_int8_dynamic_per_channel", "xnnpack", _Q.PT2E_DYNAMIC,
            "int8 weights by channel, activations quantized at run time", keeps_fp32=_LINEAR,
        ),
        Specification(
            "xnnpack_pt2e_int8_static_per_channel", "xnnpack", _Q.PT2E_STATIC,
            "int8 weights by channel and activations, calibrated",
        ),
        Specification(
            "xnnpack_pt2e_int8_static_per_tensor", "xnnpack", _Q.PT2E_STATIC,
            "int8 with one scale a tensor, calibrated",
        ),
        Specification(
            "xnnpack_torchao_int8da_int4w_per_channel", "xnnpack", _Q.TORCHAO_SOURCE,
            "4-bit weights by channel in Linear, int8 activations at run time", keeps_fp32=_LINEAR,
        ),
        Specification(
            "xnnpack_torchao_int8da_int4w_per_tensor", "xnnpack", _Q.TORCHAO_SOURCE,
            "4-bit weights by group in Linear, int8 activations at run time", arguments=(_GROUP,),
            keeps_fp32=_LINEAR,
        ),
        _coreml("coreml_fp32", _Q.NONE, "fp32 on Core ML"),
        _coreml("coreml_fp16", _Q.NONE, "fp16 on Core ML"),
        _coreml("coreml_pt2e_int8_static", _Q.PT2E_STATIC, "int8 on Core ML, calibrated; compiles for a minute or more",
                target="iOS17"),
        _coreml("coreml_pt2e_int8_weight_only", _Q.PT2E_STATIC, "int8 weights on Core ML", target="iOS17"),
        _coreml("coreml_torchao_int4_weight_only_per_channel", _Q.TORCHAO_SOURCE,
                "4-bit weights by channel on Core ML", target="iOS18"),
        _coreml("coreml_torchao_int4_weight_only_per_group", _Q.TORCHAO_SOURCE,
                "4-bit weights by group on Core ML", _GROUP, target="iOS18"),
        _coreml("coreml_torchao_int8_weight_only_per_channel", _Q.TORCHAO_SOURCE,
                "int8 weights by channel on Core ML", target="iOS16"),
        _coreml("coreml_torchao_int8_weight_only_per_group", _Q.TORCHAO_SOURCE,
                "int8 weights by group on Core ML", _GROUP, target="iOS18"),
        _coreml("coreml_codebook_weight_only", _Q.TORCHAO_SOURCE, "weights from a codebook on Core ML",
                Argument("bits", "bits of an index into the codebook", int, bounds=(1, 8), required=True),
                Argument("block_size", "weights that share one codebook, by dim; -1 is the whole dim", tuple,
                         bounds=(-1, 1 << 20), required=True),
                target="iOS18"),
        Specification("coreai_fp32", "coreai", _Q.NONE, "fp32 on Core AI", "Apple's Core AI packages",
                      "an Apple device"),
        Specification("coreai_fp16", "coreai", _Q.NONE, "fp16 on Core AI, inputs and outputs too",
                      "Apple's Core AI packages", "an Apple device"),
        _ethos_u(55, (32, 64, 128, 256), 128),
        _ethos_u(65, (256, 512), 256),
        _ethos_u(85, (128, 256, 512, 1024, 2048), 256),
        Specification("arm_tosa_fp", "arm", _Q.NONE, "floating-point TOSA, for the reference model",
                      "executorch[ethos-u]", "TOSA's reference model"),
        Specification("arm_tosa_int8", "arm", _Q.PT2E_STATIC, "int8 TOSA, for the reference model",
                      "executorch[ethos-u]", "TOSA's reference model"),
        Specification("arm_tosa_a16w8", "arm", _Q.PT2E_STATIC, "TOSA of 16-bit activations and 8-bit weights",
                      "executorch[ethos-u]", "TOSA's reference model"),
        _vgf("arm_vgf_fp", _Q.NONE, "floating point for Arm's neural GPUs"),
        _vgf("arm_vgf_int8", _Q.PT2E_STATIC, "int8 for Arm's neural GPUs"),
        Specification(
            "qnn_fp16", "qnn", _Q.NONE, "fp16 on Qualcomm's Hexagon NPU", needs="Qualcomm's AI Engine Direct SDK",
            runs_on="a Snapdragon with a Hexagon NPU",
            arguments=(
                Argument("soc_model", "the chip, as Qualcomm names it, like SM8650", str,
                         pattern=r"[A-Za-z0-9_]{1,32}", required=True),
                Argument("skip_mutable_buffer", "leave mutable buffers outside of the delegate", bool),
            ),
        ),
    )
}  # fmt: skip
"""Every recipe that etfarm knows, by name, in the order in which `etfarm recipes list` shows them."""
