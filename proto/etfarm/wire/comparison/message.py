"""The comparison as a message of etfarm.v1, and back: both hold the same, and the document is equal byte for byte."""

from __future__ import annotations

from typing import Final

from etfarm.v1 import comparison_pb2
from etfarm.wire.comparison.document import SCHEMA
from etfarm.wire.messages import fill
from etfarm.wire.report_keys import Json, project

_OWN: Final = ("base", "candidate", "pairs", "unpaired", "notes")
"""Keys of a document that a farm's answer has. A gate is judged, and an error reported, where the document is written."""


def to_message(document: Json) -> comparison_pb2.Comparison:
    """Return the message of a comparison of two jobs, without its gate."""
    values = {key: document[key] for key in _OWN}
    for side in ("base", "candidate"):
        values[side] = {key: value for key, value in document[side].items() if key != "file"}
    return fill(comparison_pb2.Comparison(), values)


def from_message(message: comparison_pb2.Comparison) -> Json:
    """Return the document etfarm.comparison/1 of a farm's comparison, without a gate."""
    values = project(message)
    for side in ("base", "candidate"):
        values[side] = {"job": values[side]["job"], "file": None, **values[side]}
    return {"schema": SCHEMA, **values, "gate": None, "error": None}
