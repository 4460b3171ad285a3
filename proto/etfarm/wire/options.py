"""Options as fields of a dataclass: each is declared once, and the command line, files and the environment set it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    import argparse  # the library declares options, and parses none

T = TypeVar("T")

_OPTIONS: Final = "options"
_BUILD: Final = "build"


class Range(NamedTuple):
    """The least and the most that a number may be."""

    min: int
    max: int


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a command."""

    flag: str
    """With its dashes. `--no-NAME` sets a field to False."""
    help: str | Callable[[], str]
    """Its help; a function where that depends on the environment."""
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    """Returns the value of a text; raises ArgumentTypeError, ValueError or an EtfarmError for others. None for texts."""
    default: Any = None
    """The value without the option: a list for an option that can be repeated, False for one without a value. A text is read."""
    choices: Sequence[str] | None = None
    range: Range | None = None
    """For a number. Parsers of argparse leave it to `read`."""
    without: str = ""
    """What holds without it, for people, if that is not `default`."""
    label: str = ""
    """Its name in a form of the page; empty if it is in none."""
    with_generation: bool = False
    """Of a measurement: whether it can be combined with the generation of text."""
    has_twin: bool = False
    """Whether there is `--no-NAME`, too, and the value is None without both."""
    only_on_line: bool = False
    """Whether files and the environment cannot set it."""
    is_secret: bool = False
    """Whether its value may have a secret, so that messages do not show it."""
    is_reread: bool = False
    """Whether a running server reads the file again when it changes."""
    in_unit: bool = True
    """Whether a printed systemd unit has it."""
    group: tuple[str, str] | None = None
    """Title and description of its group in the help."""

    @property
    def name(self) -> str:
        """The flag as an identifier."""
        return self.flag.removeprefix("--").replace("-", "_")

    def add(self, parser: argparse._ActionsContainer) -> None:
        """Add it to a parser."""
        arguments: dict[str, Any] = {"help": self.help if isinstance(self.help, str) else self.help(), "default": self.default}
        if self.has_twin:
            from argparse import BooleanOptionalAction

            arguments["action"] = BooleanOptionalAction
        elif self.default is False:
            arguments["action"] = "store_true"
        else:
            arguments |= {"type": self.read, "metavar": self.metavar, "choices": self.choices}
            if isinstance(self.default, list):
                arguments["action"] = "append"
        vars(parser.add_argument(self.flag, **arguments))["declared"] = self


PRINT_UNIT: Final = Option(
    flag="--print-unit", default=False, only_on_line=True, in_unit=False,
    help="print a systemd unit that runs this command from the machine's start on, and end; its first lines say how to "
    "install it",
)  # fmt: skip


def option(
    flag: str,
    help: str | Callable[[], str],
    *,
    build: Callable[[Any], Any] | None = None,
    absent: Callable[[], Any] | None = None,
    **others: Any,
) -> Any:
    """Return the field of one option.

    Args:
        build: returns the field's value of the option's; it is not called for None.
        absent: returns the field's value without the option, if it is not that of the option's default.
        others: further attributes of `Option`.
    """
    declared = Option(flag=flag, help=help, **others)
    default = declared.default
    if isinstance(default, str) and declared.read is not None:
        default = declared.read(default)
    if build is None:
        build = operator.not_ if flag.startswith("--no-") else tuple if isinstance(default, list) else lambda value: value
    metadata = {_OPTIONS: (declared,), _BUILD: build}
    if absent is not None:
        return field(default_factory=absent, metadata=metadata)
    return field(default=default if default is None else build(default), metadata=metadata)


def options(*declared: Option, build: Callable[..., Any], **others: Any) -> Any:
    """Return the field that several options make together.

    Args:
        build: returns the field's value of the options', in order.
        others: arguments of `dataclasses.field`.
    """
    return field(metadata={_OPTIONS: declared, _BUILD: build}, **others)


def part(kind: type) -> Any:
    """Return the field of a dataclass whose own fields are options."""
    return options(*options_of(kind), build=partial(_build, kind), default_factory=kind)


def declaration_of(action: argparse.Action) -> Option | None:
    """Return the option that an argument of a parser was added for; None for an argument that has none."""
    return vars(action).get("declared")


def options_of(kind: type) -> list[Option]:
    """Return the options of a dataclass in the order of its fields."""
    return [each for known in fields(kind) for each in known.metadata.get(_OPTIONS, ())]


def chosen_of(values: Any) -> list[Option]:
    """Return the options that a dataclass has values of, other than the defaults."""
    return [
        each
        for known in fields(values)
        if getattr(values, known.name) != known.default
        for each in known.metadata.get(_OPTIONS, ())
    ]


def add_options(parser: argparse.ArgumentParser, declared: Iterable[Option]) -> None:
    """Add options to a parser, each to its group."""
    groups: dict[tuple[str, str] | None, argparse._ActionsContainer] = {None: parser}
    for each in declared:
        if each.group is not None and each.group not in groups:
            groups[each.group] = parser.add_argument_group(*each.group)
        each.add(groups[each.group])


def built(kind: type[T], arguments: argparse.Namespace) -> T:
    """Return the dataclass that parsed options make.

    Raises:
        EtfarmError: a value is not valid.
    """
    return _build(kind, *(getattr(arguments, each.name) for each in options_of(kind)))


def _build(kind: type[T], *values: Any) -> T:
    """Return the dataclass that the values of its options make, in order."""
    waiting, built_values = iter(values), {}
    for known in fields(kind):  # type: ignore[arg-type]
        chosen = [next(waiting) for _ in known.metadata.get(_OPTIONS, ())]
        if len(chosen) > 1 or (chosen and chosen[0] is not None):
            built_values[known.name] = known.metadata[_BUILD](*chosen)
    return kind(**built_values)
