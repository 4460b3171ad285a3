"""The JSON documents of commands that list or show: {schema, NAME, error}, with the conventions of etfarm.report/1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TypeVar

from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.wire.errors import EtfarmError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Key:
    """The key of a listing's value in its document, in the annotation of a command's parameter of the type `JsonListing`."""

    name: str
    is_list: bool = True
    """Whether the value is a list, which is empty in the document of a command that failed; null otherwise."""


class JsonListing:
    """The document of `--json`, which is written however the command ends."""

    def __init__(self, outcome: Outcome, file: str | None, name: str, *, is_list: bool = True) -> None:
        """Prepare the document etfarm.NAME/1.

        Args:
            file: FILE of `--json`.
            name: the document's key, such as `jobs`.
            is_list: whether the value is a list, which is empty in a document of a command that failed; null otherwise.

        Raises:
            USAGE, OutputUnwritable: as `Outcome.goes_to`.
        """
        outcome.goes_to(file)
        outcome.document = self._document
        self.is_on_stdout = file == STDOUT
        """Whether the document is all that stdout gets."""
        self._name = name
        self._value: object = [] if is_list else None

    def record(self, value: Value) -> Value:
        """Set what the document contains, and return it."""
        self._value = value
        return value

    def _document(self, error: EtfarmError | None) -> dict[str, Any]:
        return {"schema": f"etfarm.{self._name}/1", self._name: to_json(self._value), "error": to_json(error)}


def to_json(value: object) -> Any:
    """Return a library value as strict JSON: null for an empty text and for what is not a finite number."""
    match value:
        case EtfarmError():
            from etfarm.wire.report import error_json

            return error_json(value)
        case Enum():
            return value.value
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case "":
            return None
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    return value
